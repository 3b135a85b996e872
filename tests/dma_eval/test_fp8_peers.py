"""FP8 peers of ``dma-hf bench prefill``: the fused quantizer, and what cuDNN is called with."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from dma_eval.bench import peers
from dma_eval.bench.fp8_quantizer import dequantize_fp8, quantize_fp8
from dma_eval.bench.inputs import Inputs
from dma_eval.bench.peers import CUDNN_MODULE, PREQUANTIZED, PROBABILITY_SCALE, cudnn_fp8
from torch import Tensor
from torch.nn import functional as F


def _tensors(tokens: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token-major queries, keys and values with magnitudes of their own."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, tokens, heads, head_dim, generator=generator) for heads in (4, 2, 2))
    return query.bfloat16(), (8.0 * key).bfloat16(), (0.1 * value).bfloat16()


class TestQuantizer:
    @pytest.mark.parametrize("per_head", [True, False])
    @pytest.mark.parametrize(("tokens", "head_dim"), [(1, 16), (64, 32), (130, 24)])
    def test_scales_the_largest_magnitude_to_448_and_rounds_to_nearest(
        self, tokens: int, head_dim: int, per_head: bool
    ) -> None:
        given = _tensors(tokens, head_dim)
        made = quantize_fp8(*given, per_head=per_head)
        for index, (x, codes) in enumerate(zip(given, (made.query, made.key, made.value), strict=True)):
            by_head = x.float().unflatten(2, (2, -1))
            largest = by_head.abs().amax((1, 3, 4) if per_head else None, keepdim=True)
            scaled = (by_head * (448.0 / largest)).flatten(2, 3)
            half_step = torch.ldexp(torch.tensor(1.0), scaled.abs().log2().floor().clamp_min(-6) - 4)
            assert ((codes.float() - scaled).abs() <= half_step * (1 + 1e-5)).all()
            assert codes.float().abs().max() == 448.0
            descale = (largest / 448.0).flatten()
            torch.testing.assert_close(made.descales[index].flatten(), descale)
            torch.testing.assert_close(made.scales[index].flatten(), 1.0 / descale)

    def test_zeros_stay_zeros(self) -> None:
        zeros = torch.zeros(1, 3, 1, 16, dtype=torch.bfloat16)
        made = quantize_fp8(zeros, zeros, zeros, per_head=True)
        assert made.value.float().abs().max() == 0.0
        assert made.descales.isfinite().all()

    def test_needs_as_many_queries_as_keys(self) -> None:
        query, key, value = _tensors(8, 16)
        with pytest.raises(ValueError, match="query and key must have as many tokens, got 7 and 8"):
            quantize_fp8(query[:, :7], key, value, per_head=True)

    def test_dequantizes(self) -> None:
        codes = torch.randn(3, 1700).to(torch.float8_e4m3fn)
        out = dequantize_fp8(codes, torch.tensor([[0.5]]), torch.bfloat16)
        assert torch.equal(out, (0.5 * codes.float()).bfloat16())


class _Tensor:
    """A tensor of the graph, which remembers what it was declared as."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self


class _Graph:
    """Computes on the CPU what cuDNN says that ``sdpa_fp8`` does."""

    def __init__(self, **_: object) -> None:
        self.given: dict[str, Any] = {}

    def tensor(self, name: str, **declared: Any) -> _Tensor:
        assert len(declared["dim"]) == len(declared["stride"]) == 4
        return _Tensor()

    def sdpa_fp8(self, **given: Any) -> tuple[_Tensor, None, _Tensor, _Tensor]:
        self.given = given
        self.outputs = (_Tensor(), _Tensor(), _Tensor())
        return self.outputs[0], None, *self.outputs[1:]

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 1

    def execute(self, pack: dict[_Tensor, Tensor], workspace: Tensor, handle: object) -> None:
        def operand(name: str) -> Tensor:
            codes, descale = pack[self.given[name]], pack[self.given[f"descale_{name}"]]
            assert codes.dtype == torch.float8_e4m3fn
            return codes.float().transpose(1, 2) * descale

        assert pack[self.given["scale_s"]] * pack[self.given["descale_s"]] == 1.0
        assert pack[self.given["scale_s"]] == PROBABILITY_SCALE
        out = F.scaled_dot_product_attention(
            *map(operand, "qkv"),
            is_causal=self.given["use_causal_mask"],
            scale=self.given["attn_scale"],
            enable_gqa=True,
        )
        scaled = out * pack[self.given["scale_o"]]
        assert scaled.abs().max() <= 448.0
        pack[self.outputs[0]].copy_(scaled.transpose(1, 2).to(torch.float8_e4m3fn))


class _NotSupported(Exception):
    pass


@pytest.fixture
def fake_cudnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake: Any = ModuleType(CUDNN_MODULE)
    fake.pygraph, fake.cudnnGraphNotSupportedError = _Graph, _NotSupported
    fake.data_type = SimpleNamespace(FP8_E4M3=0, FLOAT=1)
    fake.heur_mode = SimpleNamespace(A=0)
    fake.set_stream = lambda **_: None
    monkeypatch.setitem(sys.modules, CUDNN_MODULE, fake)
    monkeypatch.setattr(peers, "_cudnn_handle", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    peers._cudnn_plan.cache_clear()
    return fake


class TestCuDNN:
    @pytest.mark.usefixtures("fake_cudnn")
    @pytest.mark.parametrize("is_causal", [True, False])
    @pytest.mark.parametrize("name", ["cudnn:fp8", f"cudnn:fp8{PREQUANTIZED}"])
    def test_is_attention_to_the_precision_of_e4m3(self, name: str, is_causal: bool) -> None:
        query, key, value = (x.transpose(1, 2) for x in _tensors(50, 32))
        inputs = Inputs(query, key / 8, value, 0.1, is_causal)
        call = cudnn_fp8(name, inputs)
        out = call.read(call.run())
        exact = F.scaled_dot_product_attention(
            *(x.float() for x in inputs.tensors), is_causal=is_causal, scale=0.1, enable_gqa=True
        )
        assert out.shape == query.shape
        assert out.dtype == torch.bfloat16
        assert (out.float() - exact).norm() / exact.norm() < 0.05
        assert (call.quantize is None) == name.endswith(PREQUANTIZED)

    @pytest.mark.usefixtures("fake_cudnn")
    def test_what_cudnn_does_not_support_is_a_failure_of_the_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuses(*_: object) -> None:
            raise _NotSupported("no kernel")

        monkeypatch.setattr(_Graph, "check_support", refuses, raising=False)
        query, key, value = (x.transpose(1, 2) for x in _tensors(8, 32))
        with pytest.raises(RuntimeError, match="cuDNN has no FP8 attention for this: no kernel"):
            cudnn_fp8("cudnn:fp8", Inputs(query, key, value, 0.1))

"""FlashAttention-3 in benchmarks, seen through a module that stands for it, and the quantizer for its FP8."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from kernel_bench import peers
from kernel_bench.fp8_quantizer import dequantize_fp8, quantize_fp8
from kernel_bench.inputs import Inputs
from kernel_bench.peers import FLASH_3, PREQUANTIZED
from torch import Tensor
from torch.nn import functional as F


def tensors(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, h, t, 32, generator=generator) for h, t in ((4, queries), (2, keys), (2, keys)))


def exact(inputs: Inputs) -> Tensor:
    wide = (x.float() for x in inputs.tensors)
    return F.scaled_dot_product_attention(*wide, is_causal=inputs.is_causal, scale=inputs.scale, enable_gqa=True)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = False,
    cache_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    **scales: Tensor,
) -> Tensor:
    """Do what FlashAttention-3 says that it does, on token-major tensors."""
    assert query.dtype == key.dtype == value.dtype
    assert cache_seqlens is None or cache_seqlens.tolist() == [key.shape[1]] * len(key)
    wide = [x.transpose(1, 2).float() for x in (query, key, value)]
    for i, name in enumerate(("q_descale", "k_descale", "v_descale")):
        if scales:
            wide[i] *= scales[name].repeat_interleave(wide[i].shape[1] // key.shape[2], 1)[:, :, None, None]
    out = F.scaled_dot_product_attention(*wide, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module that computes on the CPU in the place of FlashAttention-3."""
    module = SimpleNamespace(flash_attn_func=attend, flash_attn_with_kvcache=attend)
    monkeypatch.setitem(sys.modules, peers.MODULE, module)


@pytest.mark.parametrize(("name", "limit"), [("fa3", 1e-6), ("fa3:fp8", 0.2), (f"fa3:fp8{PREQUANTIZED}", 0.2)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_prefill_is_attention_to_the_precision_of_the_numbers(name: str, limit: float, is_causal: bool) -> None:
    query, key, value = tensors(50, 50)
    inputs = Inputs(query, 8.0 * key, value, 0.1, is_causal)
    prepared = peers.flash_attention_3(name, inputs)
    out, expected = prepared.read(prepared.run()), exact(inputs)
    assert out.shape == query.shape
    assert (out - expected).norm() / expected.norm() < limit


@pytest.mark.parametrize("name", FLASH_3)
def test_a_step_is_attention_and_reads_what_is_stored(name: str) -> None:
    query, key, value = tensors(1, 70)
    run, stored = peers.flash_attention_3_step(name, query, key, 8.0 * value)
    expected = F.scaled_dot_product_attention(query, key, 8.0 * value, enable_gqa=True)
    assert (run() - expected).norm() / expected.norm() < (0.1 if FLASH_3[name] else 1e-6)
    assert stored == (1 if FLASH_3[name] else 4) * (key.numel() + value.numel())


class TestQuantizer:
    @pytest.mark.parametrize("per_head", [True, False])
    @pytest.mark.parametrize("tokens", [1, 64, 130])
    def test_scales_the_largest_magnitude_to_448_and_rounds_to_nearest(self, tokens: int, per_head: bool) -> None:
        given = [x.transpose(1, 2).bfloat16().contiguous() for x in tensors(tokens, tokens)]
        made = quantize_fp8(*given, per_head=per_head)
        for index, (x, codes) in enumerate(zip(given, (made.query, made.key, made.value), strict=True)):
            by_head = x.float().unflatten(2, (2, -1))
            largest = by_head.abs().amax((1, 3, 4) if per_head else None, keepdim=True)
            scaled = (by_head * (448.0 / largest)).flatten(2, 3)
            half_step = torch.ldexp(torch.tensor(1.0), scaled.abs().log2().floor().clamp_min(-6) - 4)
            assert ((codes.float() - scaled).abs() <= half_step * (1 + 1e-5)).all()
            assert codes.float().abs().max() == 448.0
            torch.testing.assert_close(made.descales[index].flatten(), (largest / 448.0).flatten())
            torch.testing.assert_close(made.scales[index].flatten(), (448.0 / largest).flatten())

    def test_keeps_zeros(self) -> None:
        zeros = torch.zeros(1, 3, 1, 16, dtype=torch.bfloat16)
        made = quantize_fp8(zeros, zeros, zeros, per_head=True)
        assert made.value.float().abs().max() == 0.0
        assert made.descales.isfinite().all()

    def test_needs_as_many_queries_as_keys(self) -> None:
        query, key, value = (x.transpose(1, 2).bfloat16() for x in tensors(7, 8))
        with pytest.raises(ValueError, match="query and key must have as many tokens, got 7 and 8"):
            quantize_fp8(query, key, value, per_head=True)

    def test_has_an_inverse(self) -> None:
        codes = torch.randn(3, 1700).to(torch.float8_e4m3fn)
        out = dequantize_fp8(codes, torch.tensor([[0.5]]), torch.bfloat16)
        assert torch.equal(out, (0.5 * codes.float()).bfloat16())

"""Other packages' attention in benchmarks: what they are called with, seen through a module that stands for theirs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from dma_eval.bench.inputs import Inputs
from dma_eval.bench.peers import (
    FLASH_3,
    FLASH_4_MODULE,
    FLASHINFER_MODULE,
    MODULE,
    PREQUANTIZED,
    SAGE_MODULE,
    flash_attention_3,
    flash_attention_3_step,
    flash_attention_4,
    flashinfer,
    sage_attention,
)
from torch import Tensor
from torch.nn import functional as F

Run = Callable[..., Any]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = False,
    cache_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    **scales: Tensor,
) -> Tensor:
    """Do what FlashAttention-3 says that it does."""
    assert query.dtype == key.dtype == value.dtype
    assert all(x.is_contiguous() for x in (key, value))
    assert cache_seqlens is None or cache_seqlens.tolist() == [key.shape[1]] * len(key)
    wide = [x.transpose(1, 2).float() for x in (query, key, value)]
    for i, name in enumerate(("q_descale", "k_descale", "v_descale")):
        if scales:
            assert scales[name].shape == (len(key), key.shape[2])
            wide[i] *= scales[name].repeat_interleave(wide[i].shape[1] // key.shape[2], 1)[:, :, None, None]
    out = F.scaled_dot_product_attention(*wide, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(MODULE)
    module.flash_attn_func = module.flash_attn_with_kvcache = _attend
    monkeypatch.setitem(sys.modules, MODULE, module)


def _tensors(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, heads, length, 32) for heads, length in ((4, queries), (2, keys), (2, keys)))  # type: ignore[return-value]


def _exact(inputs: Inputs) -> Tensor:
    return F.scaled_dot_product_attention(
        *inputs.tensors, is_causal=inputs.is_causal, scale=inputs.scale, enable_gqa=True
    )


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", [*FLASH_3, f"fa3:fp8{PREQUANTIZED}"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_prefill_is_attention_to_the_precision_of_the_numbers(name: str, is_causal: bool) -> None:
    query, key, value = _tensors(50, 50)
    inputs = Inputs(query, 8.0 * key, value, 0.1, is_causal)
    call = flash_attention_3(name, inputs)
    out = call.read(call.run())
    assert (call.quantize is not None) == (name == "fa3:fp8")
    exact = _exact(inputs)
    assert out.shape == query.shape
    assert (out - exact).norm() / exact.norm() < (1e-6 if name == "fa3" else 0.2)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", FLASH_3)
def test_a_step_is_attention_and_reads_what_is_stored(name: str) -> None:
    query, key, value = _tensors(1, 70)
    run, stored = flash_attention_3_step(name, query, key, 8.0 * value)
    exact = F.scaled_dot_product_attention(query, key, 8.0 * value, enable_gqa=True)
    out = run()
    assert (out - exact).norm() / exact.norm() < (0.1 if FLASH_3[name] else 1e-6)
    assert stored == (1 if FLASH_3[name] else 4) * (key.numel() + value.numel())


def test_a_bench_without_the_package_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    done = run(
        "bench", "decode", "--device", "cpu", "--size", "1x40", "--head-dim", 32, "--heads", "2/1", "--seconds", 0.0,
        "--cache", "sdpa", "fa3",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "pip install fa3-fwd" in " ".join(done.stderr.split())


def test_sage_attention_gets_the_tensors_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(SAGE_MODULE)
    module.sageattn = lambda q, k, v, is_causal, sm_scale: F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=sm_scale, enable_gqa=True
    )
    monkeypatch.setitem(sys.modules, SAGE_MODULE, module)
    inputs = Inputs(*_tensors(50, 50), 0.1)
    assert torch.equal(sage_attention(inputs).run(), _exact(inputs))


class _DslError(Exception):
    pass


@pytest.fixture
def flash_4(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType(FLASH_4_MODULE)
    module.flash_attn_func = lambda *tensors, **options: (_attend(*tensors, **options), None)
    common: Any = ModuleType("cutlass.base_dsl.common")
    common.DSLBaseError = _DslError
    monkeypatch.setitem(sys.modules, FLASH_4_MODULE, module)
    monkeypatch.setitem(sys.modules, "cutlass.base_dsl.common", common)
    return module


@pytest.mark.usefixtures("flash_4")
@pytest.mark.parametrize("is_causal", [True, False])
def test_flash_attention_4_is_attention(is_causal: bool) -> None:
    inputs = Inputs(*_tensors(50, 50), 0.1, is_causal)
    torch.testing.assert_close(flash_attention_4(inputs).run(), _exact(inputs))


def test_what_flash_attention_4_cannot_compile_is_a_failure_of_the_call(flash_4: Any) -> None:
    def fails(*_: object, **__: object) -> None:
        raise _DslError("no such tile")

    flash_4.flash_attn_func = fails
    with pytest.raises(RuntimeError, match="no such tile"):
        flash_attention_4(Inputs(*_tensors(50, 50), 0.1)).run()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("threshold", [None, 6.0])
def test_flashinfer_takes_the_threshold_as_a_factor_over_the_length(
    threshold: float | None, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prefill(
        qkv: tuple[Tensor, ...], layout: str, workspace: Tensor, seq_lens: Tensor, *positional: Any, **options: Any
    ) -> Tensor:
        max_q_len, max_kv_len, bmm1_scale, bmm2_scale, batch, q_ends, kv_ends = positional
        assert layout == "SEPARATE_Q_K_V"
        assert seq_lens.tolist() == [max_q_len, max_kv_len] == [50, 50]
        assert q_ends.tolist() == kv_ends.tolist() == [0, 50, 100]
        factor = options["skip_softmax_threshold_scale_factor"]
        assert factor == (0.0 if threshold is None else pytest.approx(50 * math.exp(-6.0)))
        query, key, value = (x.unflatten(0, (batch, max_q_len)) for x in qkv)
        out = _attend(query, key, value, causal=options["mask_mode"] == "causal", softmax_scale=bmm1_scale)
        return bmm2_scale * out.flatten(0, 1)

    module: Any = ModuleType(FLASHINFER_MODULE)
    module.trtllm_fmha_v2_prefill = prefill
    monkeypatch.setitem(sys.modules, FLASHINFER_MODULE, module)
    inputs = Inputs(*_tensors(50, 50), 0.1, is_causal)
    torch.testing.assert_close(flashinfer(threshold, inputs).run(), _exact(inputs))

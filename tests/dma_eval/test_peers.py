"""Other packages' attention in benchmarks: what they are called with, seen through a module that stands for theirs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from dma_eval.bench.peers import FLASH_3, MODULE, SAGE_MODULE, flash_attention_3, flash_attention_3_step, sage_attention
from torch import Tensor
from torch.nn import functional as F

Run = Callable[..., Any]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = False,
    cache_seqlens: Tensor | None = None,
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
    return F.scaled_dot_product_attention(*wide, is_causal=causal, enable_gqa=True).transpose(1, 2)


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(MODULE)
    module.flash_attn_func = module.flash_attn_with_kvcache = _attend
    monkeypatch.setitem(sys.modules, MODULE, module)


def _tensors(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, heads, length, 32) for heads, length in ((4, queries), (2, keys), (2, keys)))  # type: ignore[return-value]


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", FLASH_3)
@pytest.mark.parametrize("is_causal", [True, False])
def test_prefill_is_attention_to_the_precision_of_the_numbers(name: str, is_causal: bool) -> None:
    query, key, value = _tensors(50, 50)
    run, part = flash_attention_3(name, query, 8.0 * key, value, is_causal=is_causal)
    out = run()
    assert (part is not None) == FLASH_3[name]
    exact = F.scaled_dot_product_attention(query, 8.0 * key, value, is_causal=is_causal, enable_gqa=True)
    assert out.shape == query.shape
    assert (out - exact).norm() / exact.norm() < (0.2 if FLASH_3[name] else 1e-6)


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
    module.sageattn = lambda q, k, v, is_causal: F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, enable_gqa=True
    )
    monkeypatch.setitem(sys.modules, SAGE_MODULE, module)
    tensors = _tensors(50, 50)
    exact = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    assert torch.equal(sage_attention(*tensors, is_causal=True)(), exact)

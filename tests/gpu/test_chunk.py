"""Chunks of queries over a cache on the device: its body dequantised to the bit, and the attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import RECIPES, Case
from dequantize_cases import CASES, DTYPES, assert_dequantized, random_body
from dma_kernels.cache.api import cached_attention
from dma_kernels.cache.chunk import prefill_over_cache
from dma_kernels.cache.storage import LayerStorage
from torch import Tensor

pytestmark = pytest.mark.gpu

STORED = 643
CHUNKS = {
    "plain": Case(kv_len=900, head_dim=128, q_heads=8, kv_heads=2),
    "ragged": Case(kv_len=900, head_dim=128, padding=(0, 200, 640)),
    "head-dim-80-96": Case(kv_len=900, head_dim=80, value_dim=96),
    "head-dim-256": Case(kv_len=900, head_dim=256, kv_heads=1),
    "softcap": Case(kv_len=900, softcap=5.0),
    "sinks": Case(kv_len=900, sinks=(0.5, 3.0, -2.0, 0.0)),
    "narrow-window": Case(kv_len=900, head_dim=128, padding=(0, 30)),
    "short": Case(kv_len=700),
}
WINDOW = 300


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_codec_is_dequantised_to_the_bit(recipe: str, dtype: torch.dtype) -> None:
    assert_dequantized(CASES["ragged"].storage(RECIPES[recipe], dtype, "cuda"), dtype)


@pytest.mark.parametrize("recipe", ["kv4", "kv8", "kv4-q8", "blocks", "e4m3-q16"])
@pytest.mark.parametrize("case", [name for name in CASES if name != "ragged"])
def test_every_shape_is_dequantised_to_the_bit(case: str, recipe: str) -> None:
    assert_dequantized(CASES[case].storage(RECIPES[recipe], torch.bfloat16, "cuda"), torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_byte_is_dequantised_to_the_bit(recipe: str) -> None:
    assert_dequantized(random_body(recipe, torch.bfloat16, "cuda"), torch.bfloat16)


def _filled(case: Case, recipe: str, dtype: torch.dtype) -> tuple[LayerStorage, list[Tensor]]:
    """Return a cache of the first tokens of a case, and the chunk of the others."""
    _, key, value = case.inputs(dtype, "cuda")
    query, _, _ = replace(case, q_len=case.kv_len - STORED).inputs(dtype, "cuda")
    storage = case.storage(RECIPES[recipe], dtype, "cuda", is_filled=False)
    storage.append(key[:, :, :STORED], value[:, :, :STORED])
    return storage, [query, *(x[:, :, STORED:] for x in (key, value))]


@pytest.mark.parametrize(
    ("case", "recipe", "dtype"),
    [
        *(("plain", name, torch.float16) for name, recipe in RECIPES.items() if recipe.high == "bf16"),
        *((case, recipe, torch.bfloat16) for case in CHUNKS for recipe in ("kv4", "kv8")),
    ],
)
def test_chunks_match_the_reference(case: str, recipe: str, dtype: torch.dtype) -> None:
    """Three times: the first compiles, the second is recorded, the third repeated."""
    made = CHUNKS[case]
    options = made.options("cuda")
    if case == "narrow-window":
        options["window"] = WINDOW
    storage, chunk = _filled(made, recipe, dtype)
    expected = cached_attention(*chunk, storage, backend="reference", **options)  # type: ignore[arg-type]
    outputs = []
    for _ in range(3):
        ours, _ = _filled(made, recipe, dtype)
        outputs.append(cached_attention(*chunk, ours, backend="triton", **options))  # type: ignore[arg-type]
        for (name, actual), wanted in zip(ours.tensors().items(), storage.tensors().values(), strict=True):
            assert torch.equal(actual.view(torch.uint8), wanted.view(torch.uint8)), name
    # Smoothed and rotated queries in 16 bits move a logit by its magnitude times their rounding.
    tolerance = 4e-2 if dtype is torch.bfloat16 else 2e-2 if storage.recipe.pv == "fp8" else 5e-3
    error = (outputs[0].float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < tolerance
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("recipe", ["kv4", "kv8"])
def test_a_chunk_does_not_wait_for_the_host(recipe: str) -> None:
    options = {"window": None, "scale": 0.1, "softcap": None, "sinks": None}
    for mode in ("default", "default", "error"):
        storage, chunk = _filled(CHUNKS["plain"], recipe, torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            prefill_over_cache(*chunk, storage, **options)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_that_was_not_written_is_not_seen() -> None:
    storage, chunk = _filled(CHUNKS["ragged"], "kv4", torch.bfloat16)
    poison = torch.full((64, 1024, 1024), float("nan"), device="cuda")
    del poison  # the allocator hands this memory to the body in 16 bits
    out = cached_attention(*chunk, storage, backend="triton")
    assert out.isfinite().all()

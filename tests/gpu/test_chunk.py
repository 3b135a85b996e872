"""Chunked prefill over a cache on a GPU: restored bits and attention."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from decode_cases import DTYPES, STORED_FORMATS, Case, assert_storages_equal
from dma_kernels.cache.api import cached_attention
from dma_kernels.cache.chunked_prefill import chunk_attention
from dma_kernels.cache.reference import CacheOptions
from dma_kernels.cache.storage import LayerStorage
from restore_cases import CASES, assert_dense, assert_restored, random_pages
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


formats = pytest.mark.parametrize("format", STORED_FORMATS)


@formats
@pytest.mark.parametrize(("case", "dtype"), [*product(CASES, ["bf16"]), ("ragged", "fp16")])
def test_every_shape_is_restored_bit_for_bit(case: str, dtype: str, format: str) -> None:
    storage = CASES[case].storage(format, DTYPES[dtype], "cuda")
    assert_restored(storage, DTYPES[dtype])
    assert_dense(storage, CASES[case])


@formats
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_byte_is_restored_bit_for_bit(dtype: torch.dtype, format: str) -> None:
    assert_restored(random_pages(format, dtype, "cuda"), dtype)


def _filled(case: Case, format: str, dtype: torch.dtype) -> tuple[LayerStorage, list[Tensor]]:
    """Return a cache of a case's first tokens, and the rest as a chunk."""
    _, key, value = case.inputs(dtype, "cuda")
    query, _, _ = replace(case, q_len=case.kv_len - STORED).inputs(dtype, "cuda")
    storage = case.storage(format, dtype, "cuda", is_filled=False)
    storage.append(key[:, :, :STORED], value[:, :, :STORED])
    return storage, [query, *(x[:, :, STORED:] for x in (key, value))]


@formats
@pytest.mark.parametrize(("case", "dtype"), [*product(CHUNKS, ["bf16"]), ("plain", "fp16")])
def test_chunks_match_the_reference(case: str, dtype: str, format: str) -> None:
    """Run three times: the first call compiles, later ones launch the compiled kernels."""
    made = CHUNKS[case]
    options = made.options("cuda")
    if case == "narrow-window":
        options["window"] = WINDOW
    storage, chunk = _filled(made, format, DTYPES[dtype])
    expected = cached_attention(*chunk, storage, backend="reference", **options)  # type: ignore[arg-type]
    outputs = []
    for _ in range(3):
        ours, _ = _filled(made, format, DTYPES[dtype])
        outputs.append(cached_attention(*chunk, ours, backend="triton", **options))  # type: ignore[arg-type]
        assert_storages_equal(ours, storage)
    error = (outputs[0].float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < 4.0 * torch.finfo(DTYPES[dtype]).eps
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@formats
def test_a_chunk_does_not_synchronize_with_the_host(format: str) -> None:
    for mode in ("default", "default", "error"):
        storage, chunk = _filled(CHUNKS["plain"], format, torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            chunk_attention(*chunk, storage, CacheOptions(scale=0.1))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_unwritten_memory_is_not_read() -> None:
    storage, chunk = _filled(CHUNKS["ragged"], "int4", torch.bfloat16)
    poison = torch.full((64, 1024, 1024), float("nan"), device="cuda")
    del poison  # the allocator reuses this memory for the restored KV
    out = cached_attention(*chunk, storage, backend="triton")
    assert out.isfinite().all()


@formats
@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
def test_masks_match_the_reference_without_synchronization(is_causal: bool, q_len: int, format: str) -> None:
    case = Case(kv_len=900, q_len=q_len, head_dim=128, padding=(0, 200))
    query, key, value = case.inputs(torch.bfloat16, "cuda")
    mask = torch.rand(2, 1, q_len, 900, device="cuda") < 0.7
    options = {"mask": mask, "mask_position": torch.tensor([0, -200], device="cuda"), "is_causal": is_causal}
    results = []
    for backend, mode in (("reference", "default"), ("auto", "default"), ("auto", "default"), ("auto", "error")):
        storage = case.storage(format, torch.bfloat16, "cuda", is_filled=False)
        storage.append(key[:, :, :-q_len], value[:, :, :-q_len])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            new = query, key[:, :, -q_len:], value[:, :, -q_len:]
            results.append(cached_attention(*new, storage, **options, backend=backend))  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    expected = results[0].float()
    for out in results[1:]:
        assert (out.float() - expected).abs().max() / expected.abs().max() < 4.0 * torch.finfo(torch.bfloat16).eps

"""Cases of decoding over a cache, for the interpreter and for a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from dma_kernels.cache.append import append_tokens
from dma_kernels.cache.decode import decode_attention, decode_step
from dma_kernels.cache.formats import CACHE_FORMATS, EQUALIZED_FORMATS
from dma_kernels.cache.reference import CacheOptions, cached_attention_reference
from dma_kernels.cache.storage import UNQUANTIZED, LayerStorage
from dma_kernels.testing import assert_bits_equal, random_qkv, relative_error
from torch import Tensor

FORMATS = tuple(CACHE_FORMATS)
ROTATED_KEYS = EQUALIZED_FORMATS["int4"].name
STORED_FORMATS = (*FORMATS, ROTATED_KEYS)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """A cache of ``kv_len`` keys per row, padding included, and queries at the last positions."""

    kv_len: int = 700
    q_len: int = 1
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    padding: tuple[int, ...] = (0,)
    window: int | None = None
    softcap: float | None = None
    sinks: tuple[float, ...] | None = None
    diagonal_tiles: int = 1
    sink_tiles: int = 1

    def inputs(self, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as Transformers passes them: transposed views."""
        made = random_qkv(
            batch=len(self.padding), q_heads=self.q_heads, kv_heads=self.kv_heads, q_len=self.q_len,
            kv_len=self.kv_len, head_dim=self.head_dim, value_dim=self.value_dim, dtype=dtype, device=device,
        )  # fmt: skip
        query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in made)
        return query, key, value

    def storage(self, format: str, dtype: torch.dtype, device: str, *, is_filled: bool = True) -> LayerStorage:
        """Return a cache filled by torch."""
        storage = LayerStorage.allocate(
            format, batch=len(self.padding), kv_heads=self.kv_heads, head_dim=self.head_dim,
            value_dim=self.value_dim or self.head_dim, dtype=dtype, device=torch.device(device),
            tiles=self.kv_len // 128 + 1, window=self.window,
            diagonal_tiles=self.diagonal_tiles, sink_tiles=self.sink_tiles,
        )  # fmt: skip
        storage.lengths -= torch.tensor(self.padding, device=device, dtype=torch.int32)
        if is_filled:
            storage.append(*self.inputs(dtype, device)[1:])
        return storage

    def options(self, device: str) -> dict[str, Any]:
        """Return the options of the decode kernel and of the reference."""
        sinks = None if self.sinks is None else torch.tensor(self.sinks, device=device)
        return {"scale": self.head_dim**-0.5, "window": self.window, "softcap": self.softcap, "sinks": sinks}


def exact_attention(query: Tensor, storage: LayerStorage, options: CacheOptions) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of the reference over a filled cache, in fp32."""
    return cached_attention_reference(query.float(), *storage.empty_kv(), storage, options)


CASES = {
    "one-query": Case(),
    "mha": Case(q_heads=2),
    "group-of-3": Case(q_heads=3, kv_heads=1),
    "many-columns": Case(q_heads=8, kv_heads=1, q_len=9),
    "across-a-boundary": Case(kv_len=645, q_len=16),
    "at-a-boundary": Case(kv_len=640),
    "after-a-boundary": Case(kv_len=641),
    "first-tile": Case(kv_len=37, q_len=5),
    "one-key": Case(kv_len=1),
    "after-the-sinks": Case(kv_len=130),
    "ragged": Case(padding=(0, 300, 690)),
    "nothing-visible": Case(kv_len=40, q_len=3, padding=(0, 40, 38)),
    "window": Case(window=200),
    "window-within-the-band": Case(window=100),
    "window-across-a-boundary": Case(kv_len=645, q_len=16, window=260),
    "softcap": Case(softcap=15.0),
    "softcap-above-all-logits": Case(softcap=1e7),
    "sinks": Case(sinks=(0.5, 3.0, -2.0, 0.0)),
    "sinks-of-nothing": Case(kv_len=40, q_len=3, padding=(0, 40, 38), sinks=(0.5, float("-inf"), -2.0, float("-inf"))),
    "sinks-of-many": Case(kv_len=645, q_len=9, sinks=(0.5, 3.0, -2.0, 0.0)),
    "softcap-and-sinks-of-many": Case(kv_len=645, q_len=9, softcap=5.0, sinks=(0.5, 3.0, -2.0, 0.0)),
    "no-band": Case(diagonal_tiles=0, sink_tiles=0),
    "no-band-across-a-boundary": Case(kv_len=645, q_len=16, diagonal_tiles=0, sink_tiles=0),
    "no-band-across-the-end-of-the-sinks": Case(kv_len=261, q_len=9, diagonal_tiles=0),
    "wide-band-across-a-boundary": Case(kv_len=645, q_len=9, diagonal_tiles=2, sink_tiles=2),
    "ragged-across-boundaries": Case(kv_len=645, q_len=9, padding=(0, 300, 130)),
    "wide-band": Case(diagonal_tiles=2, sink_tiles=2),
    "head-dim-80-96": Case(head_dim=80, value_dim=96),
    "head-dim-96-40": Case(head_dim=96, value_dim=40),
    "head-dim-128": Case(head_dim=128, kv_heads=1),
    "head-dim-256": Case(head_dim=256, kv_heads=1, kv_len=500),
    "head-dim-8": Case(head_dim=8),
}


SEVERAL_HEADS = (
    "one-query", "mha", "across-a-boundary", "ragged", "window", "window-across-a-boundary", "window-within-the-band",
)  # fmt: skip
"""Cases in which an interpreter takes several KV heads, each as long again: a single key must show in one of them."""


def interpreted(name: str) -> Case:
    """Return a case for an interpreter, with one KV head if that suffices."""
    case = CASES[name]
    if name in SEVERAL_HEADS or case.sinks is not None:
        return case
    return replace(case, q_heads=case.q_heads // case.kv_heads, kv_heads=1)


def scattered(storage: LayerStorage) -> LayerStorage:
    """Return the same cache with pages and unquantized rows reordered and interleaved with unused ones."""
    batch = len(storage.lengths)

    def apart(tensor: Tensor, order: Tensor) -> Tensor:
        room = tensor.new_full((len(order) + 2, 3, *tensor.shape[1:]), 77)
        room[order + 1, 1] = tensor
        return room[:, 1]

    rows, pages = torch.arange(batch).flip(0), torch.arange(len(storage.kv_pages)).flip(0)
    raw = {name: apart(tensor, rows) for name, tensor in storage.tensors().items() if name in UNQUANTIZED}
    return replace(
        storage, **raw, kv_pages=apart(storage.kv_pages, pages),
        page_table=(pages.to(torch.int32) + 1).view(storage.page_table.shape),
        unquantized_rows=rows.to(torch.int32) + 1, lengths=storage.lengths.clone(),
    )  # fmt: skip


def gathered(storage: LayerStorage) -> LayerStorage:
    """Return a scattered cache in its original order."""
    body = storage.kv_pages[storage.page_table.long().flatten()]
    table = torch.arange(len(body)).view(storage.page_table.shape).int()
    return replace(storage.rows(slice(None)), kv_pages=body, page_table=table)


def assert_storages_equal(actual: LayerStorage, expected: LayerStorage) -> None:
    """Assert that two caches hold the same bits."""
    for name, tensor in expected.tensors().items():
        try:
            assert_bits_equal(actual.tensors()[name], tensor)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def assert_decode_matches(case: Case, format: str, dtype: torch.dtype, device: str) -> None:
    """Compare the decode kernel with exact attention over the same cache."""
    query, _, _ = case.inputs(dtype, device)
    storage, options = case.storage(format, dtype, device), CacheOptions(**case.options(device))
    out, lse = decode_attention(query, storage, options)
    if torch.device(device).type == "cuda":  # later calls launch the compiled kernels
        for _ in range(2):
            again, again_lse = decode_attention(query, storage, options)
            assert torch.equal(again, out)
            assert torch.equal(again_lse, lse)
    exact, expected_lse = exact_attention(query, storage, options)
    assert out.dtype == dtype
    assert_as_exact(out, exact)
    rounding = torch.finfo(dtype).eps
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    seen = ~expected_lse.isneginf()
    magnitude = float(expected_lse[seen].abs().max())
    torch.testing.assert_close(lse[seen], expected_lse[seen], atol=2.0 * rounding * magnitude, rtol=0.0)


def assert_as_exact(out: Tensor, exact: Tensor) -> None:
    """Compare with exact attention, within the rounding of queries, probabilities and outputs to 16 bits."""
    assert out.transpose(1, 2).is_contiguous()
    assert not out.isnan().any()
    rounding = torch.finfo(out.dtype).eps
    error = relative_error(out, exact)
    assert error <= 2.5 * rounding, f"{error:.2g} is over {2.5 * rounding:.2g}"


def assert_small_value_channels_are_exact(ratio: float, q_len: int, dtype: torch.dtype, device: str) -> None:
    """Compare the channels of two groups, of which one is ``ratio`` times as large as the other, with exact attention.

    Each on its own: beside the large channels, an error of the small ones would not show.
    """
    case = Case(kv_len=900, q_len=q_len, head_dim=128, kv_heads=1)
    query, key, value = case.inputs(dtype, device)
    storage = case.storage("int8", dtype, device, is_filled=False)
    storage.append(key, torch.cat((value[..., :64], value[..., 64:] / ratio), -1))
    out, _ = decode_attention(query, storage, CacheOptions(0.125))
    exact, _ = exact_attention(query, storage, CacheOptions(0.125))
    rounding = torch.finfo(dtype).eps
    for group in (slice(64), slice(64, 128)):
        assert relative_error(out[..., group], exact[..., group]) <= 2.5 * rounding


def assert_steps_match(case: Case, format: str, dtype: torch.dtype, device: str) -> None:
    """Compare the last two steps with the reference: outputs within rounding, stored bits exactly."""
    query, key, value = case.inputs(dtype, device)
    ours, expected = (case.storage(format, dtype, device, is_filled=False) for _ in range(2))
    start, options = max(0, case.kv_len - 2 * case.q_len), CacheOptions(**case.options(device))
    for storage in (ours, expected):
        storage.append(key[:, :, :start], value[:, :, :start])
    while start < case.kv_len:
        new = slice(start, start + case.q_len)
        out = decode_step(query, key[:, :, new], value[:, :, new], ours, options)
        append_tokens(expected, key[:, :, new], value[:, :, new])
        assert out.dtype == dtype
        assert_as_exact(out, exact_attention(query, expected, options)[0])
        assert_storages_equal(ours, expected)
        start += case.q_len

"""Attention of documents of unequal lengths that are packed into one sequence, which FlashAttention calls "varlen".

:func:`~dma_kernels.attention` computes the documents in batches, and alone describes the numerics. Documents of one
length share a batch. Shorter ones join it with padding if the padding costs less than another call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .api import attention, check_settings
from .numerics.call import AttentionCall, check_call, check_kind, is_int, is_integer
from .numerics.formats import TILE
from .numerics.geometry import SKIP_BLOCK
from .numerics.recipe import Recipe
from .operators import needs_operator, register
from .reference.attention import EXACT, attention_gradient
from .runtime.chip import resolve_backend

CALL_COST = 4096
"""Pairs of query tile and key tile, over all heads, in whose place a call may be launched. Estimated, not timed: an
H100 computes so many in 50 us (700 TFLOP/s, head_dim 128)."""
GRADIENT_CALL_COST = 128
"""The same for the gradient in PyTorch: 200 us for its launches, 1.3 us for a pair in fp32."""
_BLOCK_COST = 2
"""Key tiles that take as long as the rest of a query block."""


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    recipe: Recipe,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tile_counts: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute the attention of packed documents, each as :func:`attention` computes it alone.

    Tiles, sink tiles, the band, smoothing and scales start anew in each document. Layout and order of the arguments are
    those of FlashAttention's ``flash_attn_varlen_func``. So is causality: the queries of a document are at its last
    positions.

    The host reads the lengths. If they are on the device, each call waits for it.

    Args:
        query: ``[Tq, Hq, D]``, the queries of all documents, any strides. Dtypes are those of :func:`attention`.
        key: ``[Tk, Hkv, D]``.
        value: ``[Tk, Hkv, Dv]``.
        cu_seqlens_q: Where documents begin in ``query``, and ``Tq``: integer ``[documents + 1]``, on the CPU or the
            device of ``query``. A document may be empty.
        cu_seqlens_k: The same for ``key``, with ``Tk``.
        max_seqlen_q: Upper bound of the queries of a document.
        max_seqlen_k: Upper bound of the keys of a document.
        recipe: The precision of every tile.
        is_causal: Whether a query sees no key after its own position.
        scale: Scale of the scores; ``D ** -0.5`` by default.
        window: Sliding window, see :func:`attention`.
        softcap: Caps scores, see :func:`attention`.
        sinks: One logit per query head, ``[Hq]``.
        tile_counts: int64 ``[Hq, 2]``, to which the tiles skipped and examined are added, see :func:`attention`.
        backend: See :func:`attention`.

    Returns:
        ``[Tq, Hq, Dv]`` in the dtype of ``query``, contiguous.

    Raises:
        ValueError: The lengths are inconsistent, or an argument is invalid as in :func:`attention`.
        TypeError: An argument has the wrong type.
        RuntimeError: The backend cannot run on this device, or a CUDA graph is captured with lengths on the device.
        NotImplementedError: A forward-mode derivative or ``torch.func.vmap`` is requested.
    """
    call = AttentionCall(
        query, key, value, recipe, is_causal, scale, window=window, softcap=softcap, sinks=sinks,
        tile_counts=tile_counts, backend=backend,
    )  # fmt: skip
    check_settings(call)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_kind(name, tensor, query)
        if tensor.ndim != 3:
            raise ValueError(f"{name} must be [tokens, heads, head_dim], got shape {list(tensor.shape)}")
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    call = call._replace(query=q, key=k, value=v)
    check_call(call)
    _check_lengths(query, (cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k))
    packed = query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sinks
    if needs_operator([x for x in (*packed, tile_counts) if isinstance(x, Tensor)]):
        return _attention_varlen(call, *packed)[0]
    return _run(*packed, is_causal, window, scale, softcap, recipe, backend, tile_counts)[0]


class _Spans(NamedTuple):
    """Where the documents of a batch lie among the packed tokens."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def is_padded(self) -> bool:
        return min(self.lengths) < self.longest

    @property
    def tokens(self) -> slice | None:
        """The tokens, if documents of one length follow each other."""
        if self.is_padded or any(b - a != self.longest for a, b in pairwise(self.starts)):
            return None
        return slice(self.starts[0], self.starts[-1] + self.longest)

    def indices(self, packed: Tensor) -> Tensor:
        """Return the index of every token, ``[documents, longest]``. Padding repeats a document's last token."""
        starts, lengths = _on_device((self.starts, self.lengths), packed.device).unsqueeze(-1).unbind()
        offsets = torch.arange(self.longest, device=packed.device).minimum((lengths - 1).clamp(min=0))
        return (starts + offsets).clamp(max=packed.shape[0] - 1)  # an empty document may begin at the end

    def take(self, packed: Tensor) -> Tensor:
        """Return the documents of ``[T, H, D]`` as a batch ``[documents, H, longest, D]``: a view if possible."""
        rows = packed[self.indices(packed)].flatten(0, 1) if self.tokens is None else packed[self.tokens]
        return rows.view(len(self.starts), self.longest, *rows.shape[1:]).transpose(1, 2)

    def put(self, packed: Tensor, batch: Tensor) -> None:
        """Write a batch ``[documents, H, longest, D]`` to its tokens of ``[T, H, D]``, without its padding."""
        rows = batch.transpose(1, 2).flatten(0, 1)
        if self.tokens is not None:
            packed[self.tokens] = rows
            return
        indices = self.indices(packed).flatten()
        if self.is_padded:
            lengths = torch.tensor(self.lengths, device="cpu")
            is_token = torch.arange(self.longest, device="cpu") < lengths[:, None]
            kept = _on_device(is_token.flatten().nonzero().squeeze(1), packed.device)
            rows, indices = rows[kept], indices[kept]
        packed.index_copy_(0, indices, rows)


def _on_device(numbers: Any, device: torch.device) -> Tensor:
    """Copy integers on the host to a device, without waiting for it."""
    return torch.as_tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


@functools.lru_cache(maxsize=64)
def _batches(
    q_ends: tuple[int, ...], k_ends: tuple[int, ...], heads: int, call_cost: int
) -> tuple[tuple[_Spans, _Spans], ...]:
    """Group documents with queries into batches: pairs of their spans among queries and keys.

    Without a ``call_cost``, documents of one length share a batch. With one, so do those of as many tiles. Shorter ones
    join a batch as long as its padded query blocks cost less than another call, see :data:`CALL_COST`. Documents of
    fewer queries than a skip block stay apart from longer ones, because kernels treat short calls differently.
    """
    kinds: dict[tuple[bool, int, int], list[int]] = {}
    for i, (q, k) in enumerate(zip(_differences(q_ends), _differences(k_ends), strict=True)):
        if q > 0:
            size = (-(-q // TILE), -(-k // TILE)) if call_cost else (q, k)
            kinds.setdefault((q >= SKIP_BLOCK, *size), []).append(i)
    batches: list[list[int]] = []
    first, padding = (False, 0, 0), 0  # of the last batch: kind of the longest documents, cost of the padding
    for kind, documents in sorted(kinds.items(), reverse=True):
        if call_cost and batches and kind[0] == first[0]:
            padding += len(documents) * heads * (first[1] - kind[1]) * (kind[2] + _BLOCK_COST)
            if padding < call_cost:
                batches[-1] += documents
                continue
        batches.append(documents)
        first, padding = kind, 0
    return tuple((_spans(q_ends, documents), _spans(k_ends, documents)) for documents in batches)


def _spans(ends: tuple[int, ...], documents: list[int]) -> _Spans:
    return _Spans(tuple(ends[i] for i in documents), tuple(ends[i + 1] - ends[i] for i in documents))


def _differences(ends: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise(ends)]


def _check_lengths(query: Tensor, *sides: tuple[Any, Any]) -> None:
    """Check what is known of the lengths without reading them."""
    for name, (cu_seqlens, longest) in zip("qk", sides, strict=True):
        name_of_ends = f"cu_seqlens_{name}"
        if not isinstance(cu_seqlens, Tensor):
            raise TypeError(f"{name_of_ends} must be a torch.Tensor, got {type(cu_seqlens).__name__}")
        if not is_integer(cu_seqlens) or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
            raise ValueError(
                f"{name_of_ends} must be integer [documents + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            )
        if cu_seqlens.device not in (query.device, torch.device("cpu")):
            raise ValueError(f"{name_of_ends} must be on the CPU or on {query.device}, got {cu_seqlens.device}")
        if not is_int(longest):
            raise TypeError(f"max_seqlen_{name} must be an int, got {longest!r}")
    (q, _), (k, _) = sides
    if q.shape != k.shape:
        raise ValueError(f"cu_seqlens_k must have the {q.shape[0]} entries of cu_seqlens_q, got {k.shape[0]}")


def _read_ends(name: str, cu_seqlens: Tensor, tokens: int, longest: int) -> tuple[int, ...]:
    """Return ``cu_seqlens`` on the host. Waits for its device."""
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the host reads cu_seqlens_{name}, which a CUDA graph does not allow; pass the lengths on the CPU"
        )
    ends = tuple(cu_seqlens.tolist())
    lengths = _differences(ends)
    if ends[0] != 0 or ends[-1] != tokens or min(lengths, default=0) < 0:
        shown = f"[{', '.join(map(str, ends[:8]))}{', ...' if len(ends) > 8 else ''}]"
        raise ValueError(f"cu_seqlens_{name} must rise from 0 to the {tokens} tokens packed, got {shown}")
    if max(lengths, default=0) > longest:
        raise ValueError(
            f"max_seqlen_{name} must be at least the length of the longest document, {max(lengths)}, got {longest}"
        )
    return ends


def _calls(
    tensors: Sequence[Tensor], batches: tuple[tuple[_Spans, _Spans], ...], **options: Any
) -> Iterator[tuple[_Spans, _Spans, dict[str, Any]]]:
    """Yield the spans and the arguments of the call for each batch."""
    query, key, value = tensors
    for q, k in batches:
        made = {"query": q.take(query), "key": k.take(key), "value": k.take(value), **options}
        if k.is_padded:
            made["kv_range"] = _on_device([(0, length) for length in k.lengths], query.device)
        if options["is_causal"] and (q.is_padded or k.is_padded):
            offsets = [keys - queries for queries, keys in zip(q.lengths, k.lengths, strict=True)]
            made["q_offset"] = _on_device(offsets, query.device)
        yield q, k, made


def _run(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, sinks: Tensor | None, is_causal: bool, window: int | None, scale: float | None,
    softcap: float | None, recipe: Recipe, backend: str, tile_counts: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    q_ends = _read_ends("q", cu_seqlens_q, query.shape[0], max_seqlen_q)
    k_ends = _read_ends("k", cu_seqlens_k, key.shape[0], max_seqlen_k)
    # Padding would complete blocks of queries, which may then skip tiles. The reference computes padding at full cost.
    pads = recipe.skip_threshold is None and resolve_backend(backend, query.device, query.dtype) != "reference"
    batches = _batches(q_ends, k_ends, query.shape[1], CALL_COST if pads else 0)
    calls = _calls(
        (query, key, value), batches, recipe=recipe, is_causal=is_causal, window=window, scale=scale, softcap=softcap,
        sinks=sinks, tile_counts=tile_counts, backend=backend,
    )  # fmt: skip
    out = query.new_empty((*query.shape[:2], value.shape[2]))
    with torch.no_grad():
        for q, _, call in calls:
            q.put(out, attention(**call))
    return (out,)


def _run_fake(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return (query.new_empty((*query.shape[:2], value.shape[2])),)


def _run_gradient(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, sinks: Tensor | None, is_causal: bool, window: int | None, scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of query, key, value and sinks; ``None`` without sinks."""
    q_ends = _read_ends("q", cu_seqlens_q, query.shape[0], max_seqlen_q)
    k_ends = _read_ends("k", cu_seqlens_k, key.shape[0], max_seqlen_k)
    batches = _batches(q_ends, k_ends, query.shape[1], 0 if query.device.type == "cpu" else GRADIENT_CALL_COST)
    sinks = None if sinks is None else sinks.contiguous()
    calls = _calls(
        (query, key, value), batches, recipe=EXACT, is_causal=is_causal, window=window, scale=scale, softcap=softcap,
        sinks=sinks, backend="reference",
    )  # fmt: skip
    grad_q, grad_k, grad_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    dtype = torch.promote_types(query.dtype, torch.float32)
    grad_sinks = grad_out.new_zeros(0 if sinks is None else sinks.shape, dtype=dtype)
    for q, k, call in calls:
        grad = q.take(grad_out)
        if q.is_padded:
            lengths = _on_device(q.lengths, grad.device)
            is_token = torch.arange(q.longest, device=grad.device) < lengths[:, None]
            grad = grad.masked_fill(~is_token[:, None, :, None], 0.0)
        *found, found_sinks = attention_gradient(grad, AttentionCall(**call))
        for spans, whole, part in zip((q, k, k), (grad_q, grad_k, grad_v), found, strict=True):
            spans.put(whole, part)
        if found_sinks is not None:
            grad_sinks += found_sinks
    return grad_q, grad_k, grad_v, None if sinks is None else grad_sinks.to(sinks.dtype)


_attention_varlen = register(
    "dma_kernels::attention_varlen",
    "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, Tensor? sinks",
    _run, _run_fake, _run_gradient, results=1, has_vmap=False,
)  # fmt: skip

"""Packed pages: the paged cache of continuous batching in the formats of :class:`~dma_hf.DMACache`.

Transformers' scheduler and pool allocate blocks of one flat tensor of bytes. There are two kinds:

* **pages**: a block has a tile of 128 tokens of one request, for each layer and kv head
  (:mod:`dma_kernels.cache.page_layout`). A request has one for every complete tile that is not a sink tile.
* **slots**: a block has the tokens that a request keeps in 16 bits, for all layers: its sink tiles, and a ring of its
  last tiles (:mod:`dma_kernels.cache.storage`). A request has one slot.

Both come from the same sectors, so long requests and many requests share one budget of packed bytes. Transformers
evicts, restores, forks and cancels slots like pages. Positions, pages and slots of a step are inputs of the step. There
is no other state.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from dma_kernels import attention
from dma_kernels.cache.api import append, cached_attention
from dma_kernels.cache.page_layout import PageLayout
from dma_kernels.cache.storage import UNQUANTIZED, LayerStorage
from dma_kernels.numerics.formats import TILE
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache, PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.cache_allocators import CachePool, FullAttentionCacheAllocator
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads

from ..config import cache_format_of, settings_of
from ..logit_check import check_first_prompt
from ..support import Call, refuse_packed_cache, shares_keys

Batch = tuple[Tensor | None, Tensor, Tensor]
"""Transformers' block table or ``None``, offsets of the requests among the queries, and position ids."""

PAGES, SLOTS = "full_attention", "sliding_attention"
"""Names of the two allocators. Transformers has no other names. A sliding one has a bounded size, like slots."""

DEFAULT_BLOCKS = 256
"""Default maximum of pages per request for which decoding steps are CUDA graphs."""

ROUNDED_PAGES = 32
"""Page tables of mixed batches have a multiple of this many columns, to limit the number of shapes."""

JOINED_BELOW = 2048
"""Prompts of fewer tokens are computed together if the longest is at most twice as long: for one alone, the host takes
longer than the GPU (H200, 1.5B parameters)."""

_MEMORY_PARAMETERS = inspect.signature(PagedAttentionMemoryHandler.__init__).parameters

SLACK_TILES = 1
"""Tiles of the ring in addition to the band: the query's own."""


class _Allocator(FullAttentionCacheAllocator):  # type: ignore[misc]
    """Allocates blocks of bytes.

    Each of ``layers`` layers has ``bytes_per_page`` bytes of a block. A request gets a block for every
    ``tokens_per_block`` complete tokens, except for the first ``blocks_spared`` ones. If ``tokens_per_block`` is
    ``None``, it gets a single block.
    """

    def __init__(
        self, index: int, layers: int, bytes_per_page: int, tokens_per_block: int | None, blocks_spared: int = 0
    ) -> None:
        self.layer_type = (PAGES, SLOTS)[index]
        self.blocks_spared = blocks_spared
        self.has_one = tokens_per_block is None
        self._before_cache_tensor_init(
            index=index,
            layer_indices=list(range(layers)),
            tokens_per_page=tokens_per_block or 1,
            bytes_per_page=bytes_per_page,
            allow_block_sharing=False,
        )

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: CachePool
    ) -> None:
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)

    def _compute_blocks_needed(self, allocated_blocks: int, past_length: int, query_length: int) -> int:
        if self.has_one:
            return 1 - allocated_blocks
        complete: int = (past_length + query_length) // self.tokens_per_page
        return max(0, complete - self.blocks_spared - allocated_blocks)

    def table_of(self, request_id: str) -> list[int]:
        """Return the block indices of a request, in the order of its tokens.

        Spared blocks are replaced by a dummy, the first block of Transformers' second sector.
        """
        blocks: list[int] = self.block_table[request_id]
        return [self.blocks_per_sector] * self.blocks_spared + blocks

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        blocks = self.table_of(request_id)[: block_table.shape[0]]
        if block_table.device.type == "cpu":
            block_table.numpy()[: len(blocks)] = blocks  # a fifth of the time, for each request of a step
        else:
            block_table[: len(blocks)] = torch.tensor(blocks, dtype=block_table.dtype)


class _Memory(PagedAttentionMemoryHandler):  # type: ignore[misc]
    """Sizes the cache as Transformers does, except that a step reads the keys of one request, not the whole cache."""

    restored_bytes = 0

    @property
    def bytes_per_cache_token(self) -> int:
        """Bytes for each token of the cache, in addition to the cache."""
        index_bytes: int = self.io_multiplier * self.num_groups * 8
        return index_bytes

    @property
    def fixed_overhead_bytes(self) -> int:
        """Bytes that do not depend on the batch or the cache."""
        overhead: int = super().fixed_overhead_bytes
        return overhead + self.restored_bytes


class _Request(NamedTuple):
    """A request of a batch with prompts."""

    past: int  # tokens in the cache
    length: int  # new tokens
    start: int  # index of the first of them in the batch
    pages: list[int]
    slot: int


def _alike(requests: list[_Request]) -> Iterable[list[_Request]]:
    """Return groups of requests that can be computed in one call, the most new tokens first.

    Decoding requests form one group for all past lengths, which are read on the device. So do prompts of similar
    lengths, see :data:`JOINED_BELOW`, and requests of equal past and new lengths.
    """
    found: dict[tuple[int, int], list[_Request]] = {}
    longest = 0
    for request in sorted(requests, key=lambda request: -request.length):
        past, length = request.past, request.length
        if length == 1:
            past = 1
        elif past == 0 and length < JOINED_BELOW:
            longest = longest if 0 < longest <= 2 * length else length
            length = longest
        found.setdefault((past, length), []).append(request)
    return found.values()


@dataclass(frozen=True, eq=False)
class _Group:
    """Requests of a batch that are computed in one call. Their new tokens are padded on the left to one number.

    Attributes:
        tokens: Indices of their tokens in the batch, and of any tokens for padding: a slice if they are contiguous,
            else integer ``[count * length]``.
        is_first: Whether the tokens are the start of prompts.
        padding: Arguments of :func:`dma_kernels.attention` that describe the padding of prompts.
        positions: Positions of the first new tokens, int32 ``[count]``; those of padding are negative.
        pages: Page table, int32 ``[count, columns]``.
        slots: Slot of each request, int32 ``[count]``.
    """

    tokens: slice | Tensor
    is_first: bool
    padding: dict[str, Any]
    positions: Tensor
    pages: Tensor
    slots: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Return the part of ``[1, H, tokens, D]`` for these requests, as a batch ``[count, H, length, D]``."""
        if len(self.slots) == 1 and isinstance(self.tokens, slice):
            # A view, whose strides do not depend on other requests, so that it finds its plans again.
            return x[0, :, self.tokens][None]
        return x[:, :, self.tokens].reshape(x.shape[1], len(self.slots), -1, x.shape[3]).transpose(0, 1)


class PackedPagedCache(PagedAttentionCache):  # type: ignore[misc]
    """The packed cache of all requests of a model, and attention over it.

    Layers with a sliding window keep all tokens of a request, and attend to those in their window.

    Args:
        model: A model that passed :func:`check_layers`.
        batching: The resolved configuration of continuous batching.
        distributed: Transformers' helper for tensor parallelism.

    Raises:
        ValueError: There is not enough memory for two sectors.
        MemoryError: There is not enough memory for Transformers' minimum.
    """

    def __init__(self, model: PreTrainedModel, batching: ContinuousBatchingConfig, distributed: Any) -> None:
        # Without super().__init__(), which would allocate 16-bit pages.
        config = model.config.get_text_config(decoder=True)
        settings = settings_of(config)
        assert settings.config.cache is not None
        dtype: torch.dtype = model.dtype
        self.config, self.device, self.dtype = config, model.device, dtype
        self.max_blocks_per_request = batching.max_blocks_per_request
        self.allow_block_sharing = self.use_prefix_sharing = False
        layers, heads, head_dim = config.num_hidden_layers, find_num_key_value_heads(config), find_head_dim(config)
        shards = distributed.tp_size if distributed.tp_size > 1 and distributed.are_kv_heads_tp_ed() else 1
        heads //= shards
        self.record = PageLayout(cache_format_of(config, settings.config.cache), head_dim, head_dim)
        self.heads = heads
        sinks = settings.recipe.sink_tiles
        ring, sink = ((n * TILE) for n in (settings.recipe.diagonal_tiles + SLACK_TILES, sinks))
        self.raw_tokens = ring, ring, sink, sink
        page = layers * heads * self.record.nbytes
        # A sector is a slot or several pages, so the size of a slot is a multiple of the page size.
        slot = math.ceil(2 * (ring + sink) * heads * head_dim * dtype.itemsize * layers / page) * page
        pages = _Allocator(0, layers, heads * self.record.nbytes, TILE, sinks)
        slots = _Allocator(1, 1, slot, None)
        self.cache_allocators = {PAGES: pages, SLOTS: slots}
        self.layer_to_allocator = dict.fromkeys(range(layers), pages)
        self.bytes_per_sector = slot
        self.tokens_per_sector = slot // page * TILE
        # `num_blocks` is the memory of this many 16-bit blocks.
        whole = 2 * layers * heads * head_dim * dtype.itemsize * batching.page_size
        slices_logits = getattr(model, "_supports_logits_to_keep", None)
        memory = _Memory(
            config=config,
            cb_config=batching,
            dtype=dtype,
            bytes_per_sector=self.bytes_per_sector,
            tokens_per_sector=self.tokens_per_sector,
            bytes_per_block=whole,
            attn_types=list(self.cache_allocators),
            model_supports_logits_to_keep=callable(slices_logits) and slices_logits(),
            **({"kv_tp_size": shards} if "kv_tp_size" in _MEMORY_PARAMETERS else {}),  # Transformers 5.24
        )
        memory.restored_bytes = 2 * heads * head_dim * dtype.itemsize * getattr(config, "max_position_embeddings", 0)
        sizes = torch.tensor(memory.infer_max_batch_tokens_and_num_sectors(), device=self.device)
        if distributed.tp_size > 1:
            distributed.tp_all_reduce_min(sizes)
        self.max_batch_tokens, self.num_sectors = sizes.tolist()
        if self.num_sectors < 2:
            raise ValueError(
                f"the cache has room for {self.num_sectors} sectors of {slot} bytes, but a request needs two, one for "
                "its 16-bit tokens and one for pages; raise num_blocks or max_memory_percent"
            )
        size = self.num_sectors * slot
        self.cache_tensor = torch.zeros(size + 2 * slot, dtype=torch.uint8, device=self.device)
        self.pool = CachePool(self.num_sectors, len(self.cache_allocators))
        for allocator in self.cache_allocators.values():
            allocator.register_cache_tensor(slot, size, self.cache_tensor, self.pool)
        self.num_blocks = size // whole
        self.read_cache_limit = None
        self.max_decode_fast_path_length = TILE * self.max_blocks_per_request
        self.max_tokens_read = TILE * pages.num_blocks
        none = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        self._storages = [
            LayerStorage(
                format=self.record.format.name,
                window=None,
                kv_pages=kv_pages,
                page_table=none,
                lengths=none[0],
                unquantized_rows=none[0],
                slack_tiles=SLACK_TILES,
                **self._raw_views(layer, slot // dtype.itemsize),  # type: ignore[arg-type]
            )
            for layer, kv_pages in enumerate(self.cache_tensor.view(-1, layers, heads, self.record.nbytes).unbind(1))
        ]
        self._batch: list[_Request] = []
        self._updates: dict[int, tuple[Tensor, Tensor]] = {}
        self._groups: tuple[Any, list[_Group], Tensor | None] = None, [], None

    def _raw_views(self, layer: int, stride: int) -> dict[str, Tensor]:
        """Return views of a layer's sinks and rings in all slots, which are ``stride`` elements apart."""
        numbers = self.cache_tensor.view(self.dtype)
        head_dim = self.record.head_dim
        offset = layer * sum(self.raw_tokens) * self.heads * head_dim
        views = {}
        for name, tokens in zip(UNQUANTIZED, self.raw_tokens, strict=True):
            shape = len(numbers) // stride, self.heads, tokens, head_dim
            views[name] = numbers.as_strided(shape, (stride, tokens * head_dim, head_dim, 1), offset)
            offset += self.heads * tokens * head_dim
        return views

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: list[list[int]]
    ) -> None:
        """Record a request of the next batch. Transformers calls it for each request."""
        if not write_index[0]:
            self._batch = []
        write_index[0].append(0)  # a mark that the batch has begun
        pages, (slot,) = (allocator.table_of(request_id) for allocator in self.cache_allocators.values())
        start = self._batch[-1].start + self._batch[-1].length if self._batch else 0
        self._batch.append(_Request(past_length, query_length, start, pages, slot))

    def update(self, key: Tensor, value: Tensor, layer_idx: int, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Keep the new keys and values of a layer for :meth:`attend`, which stores them, and return them unchanged."""
        self._updates[layer_idx] = key, value
        return key, value

    def attend(
        self, module: nn.Module, call: Call, states: tuple[Tensor, Tensor, Tensor], batch: Batch, **options: Any
    ) -> Tensor:
        """Compute the attention of the new tokens of a batch, and store their keys and values.

        ``states`` are queries, keys and values, ``[1, H, tokens, D]``, the latter two as :meth:`update` returned them.
        The result is ``[1, tokens, Hq, D]``.

        Raises:
            ValueError: The layer did not update the cache, has attended to it before, or has changed keys or values.
        """
        layer: int = module.layer_idx  # type: ignore[assignment]
        query, key, value = states
        updated = self._updates.pop(layer, (None, None))
        if key is not updated[0] or value is not updated[1]:
            raise ValueError(
                f"packed pages need attention to keys and values as the cache returned them, once a layer and step, "
                f"but {type(module).__name__} changes or shares them; call dma_hf.configure(model, cache=None) for "
                "16-bit pages"
            )
        groups, order = self._groups_of(*batch, query.shape[2])
        parts = []
        for group in groups:
            own = group.of(query), group.of(key), group.of(value)
            storage = self._storage_of(layer, group)
            if group.is_first:
                check_first_prompt(module, call, *own[:2])
                part = attention(*own, call.settings.recipe, **options | group.padding)
                append(storage, *own[1:])
            else:
                part = cached_attention(*own, storage, **options)
            parts.append(part.transpose(1, 2).flatten(0, 1))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (out if order is None else out[order])[None]

    def _storage_of(self, layer: int, group: _Group) -> LayerStorage:
        """Return the storage of a layer, for the requests of a group."""
        storage = self._storages[layer]
        storage.page_table, storage.unquantized_rows = group.pages, group.slots
        storage.lengths = group.positions.clone()  # every layer advances its own copy
        storage.appended, storage.repeated_step = 0, None
        return storage

    def _groups_of(
        self, table: Tensor | None, lengths: Tensor, position_ids: Tensor, tokens: int
    ) -> tuple[list[_Group], Tensor | None]:
        """Return the groups of a batch, and the rows of their results that belong to its tokens, unless all do in turn.

        The first layer of a step computes them for all layers. They are computed again while a CUDA graph is captured,
        because they are part of the graph.
        """
        is_captured = lengths.is_cuda and torch.cuda.is_current_stream_capturing()
        known = self._groups[0]
        if known is None or known[0] is not lengths or known[1] != is_captured:
            if table is None:
                groups, order = self._mixed_groups(tokens)
            else:  # padding rows of a CUDA graph have no block; they write to the unused slot 0
                slots, order = table[1, :, 0].clamp(min=0), None
                first = position_ids.reshape(-1)
                groups = [_Group(slice(len(slots)), False, {}, first, table[0].contiguous(), slots)]
            self._groups = (lengths, is_captured), groups, order
        return self._groups[1:]

    def _mixed_groups(self, tokens: int) -> tuple[list[_Group], Tensor | None]:
        """Return what :meth:`_groups_of` does for a batch of so many tokens that has prompts."""
        groups, order, rows = [], torch.zeros(tokens, dtype=torch.int64), 0
        for requests in _alike(self._batch):
            longest = requests[0].length
            for request in requests:
                rows += longest
                order[request.start : request.start + request.length] = torch.arange(rows - request.length, rows)
            groups.append(self._group_of(requests))
        is_in_turn = rows == tokens and bool((order == torch.arange(tokens)).all())
        return groups, None if is_in_turn else self._on_device(order)

    def _group_of(self, requests: list[_Request]) -> _Group:
        """Return a group of requests, the first of which has most new tokens."""
        longest = requests[0].length
        columns = math.ceil(max(len(request.pages) for request in requests) / ROUNDED_PAGES) * ROUNDED_PAGES
        table, indices = [], []
        for past, length, start, pages, slot in requests:
            padding = longest - length
            table.append([slot, past - padding, padding, longest, *pages, *[-1] * (columns - len(pages))])
            indices.append(torch.arange(start - padding, start + length).clamp(min=start))
        chosen, numbers = torch.cat(indices), self._on_device(torch.tensor(table, dtype=torch.int32))
        is_run = bool((chosen.diff() == 1).all())
        positions = numbers[:, 1].contiguous()
        is_padded = requests[-1].length < longest
        return _Group(
            tokens=slice(int(chosen[0]), int(chosen[-1]) + 1) if is_run else self._on_device(chosen),
            is_first=requests[0].past == 0 and longest > 1,
            padding={"kv_offset": positions, "kv_range": numbers[:, 2:4].contiguous()} if is_padded else {},
            positions=positions,
            pages=numbers[:, 4:].contiguous(),
            slots=numbers[:, 0].contiguous(),
        )

    def _on_device(self, tensor: Tensor) -> Tensor:
        """Copy a tensor from the host, without a synchronization."""
        return (tensor.pin_memory() if self.device.type == "cuda" else tensor).to(self.device, non_blocking=True)


def check_layers(config: PreTrainedConfig) -> None:
    """Raise if packed pages do not support a model with this configuration of its decoder."""
    refuse_packed_cache(config)
    kinds = set(getattr(config, "layer_types", None) or [PAGES]) - {PAGES, SLOTS}
    if kinds:
        raise ValueError(
            f"packed pages support full and sliding attention, but this model has {', '.join(sorted(kinds))}; use "
            "generate, which supports all kinds of layers"
        )
    if shares_keys(config):
        raise ValueError(
            f"packed pages do not support layers that share keys and values, as {config.model_type} has; use generate, "
            "or call dma_hf.configure(model, cache=None) for 16-bit pages"
        )

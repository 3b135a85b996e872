"""The layers of a :class:`~dma_hf.DMACache`.

Transformers counts tokens from the start of the batch, padding included. The storage counts positions from the first
visible key of a row. The difference, a row's padding, is known only from the mask, and only the attention function gets
the mask. So ``update`` keeps new keys and values as a :class:`~dma_hf.cached_states.Step`. The attention function
stores them without the padding. Any other use stores them with the padding as keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from dma_kernels.cache.api import append, check_fits, restore
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.numerics.formats import TILE
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from .cached_states import CachedStates, RepeatedUpdate, Step, kind_of_update
from .config import cache_format_of, is_dma
from .integrations.internals import attention_name
from .masks.geometry import PLAIN_STEP, MaskGeometry
from .support import WITHOUT_PACKED_CACHE, autocast_dtype

DECODED_AT_ONCE = 16
"""Calls with more queries than this, such as prompts, may wait for the device to check their arguments."""

STORED_LATER = 2048
"""Tokens of a prompt, of all rows together, that are stored after its forward pass, so that the first token waits less.
Until then they take the memory of a 16-bit cache."""

ROOM_AHEAD = 4096
"""Tokens that a cache makes room for at once if ``generate`` expects them. Each growth costs a copy and a capture."""


def lasting() -> AbstractContextManager[object]:
    """Return a context whose tensors can be written in any mode later, even if inference mode is on."""
    if torch.compiler.is_dynamo_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)


def holds_states(layer: Any) -> bool:
    """Return whether a layer of a cache holds states now. A placeholder, where keys are shared, never does."""
    return getattr(layer, "keys", None) is not None or hasattr(layer, "conv_states")


@dataclass(frozen=True, eq=False)
class Capture:
    """State of a cache while a decoding step is captured as a CUDA graph.

    Attributes:
        position: Number of cached tokens, int64 ``[]`` on the device. It has the attribute :data:`PLAIN_STEP`.
        room: Tokens that the storage has room for.
    """

    position: Tensor
    room: int

    def __post_init__(self) -> None:
        setattr(self.position, PLAIN_STEP, True)


@dataclass(eq=False)
class Owner:
    """State that the layers of a cache share. Copies of the cache share it too.

    Attributes:
        config: The decoder's configuration.
        cache: The format as users call it, ``int8`` or ``int4``, or one for each layer.
        diagonal_tiles: Tiles before that of a query that are kept in 16 bits.
        sink_tiles: Tiles at the start that are kept in 16 bits.
        plain: The last range of visible keys, or pattern, that was checked, and whether it hid only padding.
        prompt_length: Tokens of the prompt during speculative decoding, else ``None``. The first call may also have
            candidates, which are decoding steps.
        expected_tokens: Tokens that ``generate`` may store, or ``None`` if it is not known.
        capture: State of a capture, or ``None`` outside of one.
        repeated: The last update of the first layer, if it was a decoding step or a later chunk.
    """

    config: PreTrainedConfig
    cache: str | tuple[str, ...]
    diagonal_tiles: int
    sink_tiles: int
    plain: tuple[Tensor | None, bool] | None = None
    prompt_length: int | None = None
    expected_tokens: int | None = None
    capture: Capture | None = None
    repeated: RepeatedUpdate | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Owner:
        return replace(self, **_OF_A_STEP)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | _OF_A_STEP

    def matches(self, other: Owner) -> bool:
        """Return whether two caches have the same configuration, formats and tiles in 16 bits."""
        names = ("cache", "diagonal_tiles", "sink_tiles")
        return self.config is other.config and all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def reads_packed(self) -> bool:
        """Whether the model's attention function recognizes :class:`~dma_hf.cached_states.CachedStates`."""
        return is_dma(attention_name(self.config))


_OF_A_STEP: dict[str, Any] = dict.fromkeys(("plain", "prompt_length", "capture", "repeated"))
"""Fields of an :class:`Owner` that copies of the cache start without."""


_READ_ONLY = (
    "a layer of a DMACache stores packed keys and values, so code that replaces them (KV cache compression) cannot use "
    f"it; {WITHOUT_PACKED_CACHE}"
)


class DMALayer(CacheLayerMixin):  # type: ignore[misc]
    """A growing layer. A sliding window bounds its memory. Methods without a docstring are Transformers' interface.

    Args:
        owner: State that all layers share.
        cache: The format as users call it, ``int8`` or ``int4``.
        window: Tokens that a query sees, its own included, or ``None`` for all. Chunks fit in one too.

    Attributes:
        format: The name of the storage format. It depends on whether the model is equalized.
        storage: Keys and values. ``None`` until the first update sets ``is_initialized``.
        tokens: Number of tokens seen, padding included: an int, or a tensor on the device in a static layer.
        checks_steps: Whether the layer checks decoding steps on the device. One layer of a cache does.
        is_padded: Whether a later mask may cover padding, because the first mask hid keys.
        max_cache_len: Tokens that fit into a static layer.
    """

    is_compileable = False
    is_croppable = True
    checks_steps = True
    max_cache_len: int | None = None

    def __init__(self, owner: Owner, cache: str, window: int | None = None) -> None:
        # Without super().__init__(), which would set `keys` and `values`.
        self.owner = owner
        self.cache = cache
        self.format = cache_format_of(owner.config, cache).name
        self.window = window
        self.is_sliding = window is not None
        self.storage: LayerStorage = None  # type: ignore[assignment]
        self.pending: Step | None = None
        self.tokens: Any = 0
        self.is_initialized = self.is_settled = self.is_padded = self.is_offloading = False
        self.is_empty = True
        self.device: torch.device | None = None

    @property
    def batch_size(self) -> int:
        """Batch rows. Before the first update it raises ``AttributeError``, as Transformers' layers do."""
        return len(self.storage.lengths)

    @property
    def keys(self) -> Tensor | None:
        """All keys that the layer still holds, dequantized, ``[B, Hkv, T, D]``: a copy, which cannot be replaced."""
        return self._dequantized(0)

    @keys.setter
    def keys(self, states: Tensor) -> None:
        raise AttributeError(_READ_ONLY)

    @property
    def values(self) -> Tensor | None:
        """All values that the layer still holds, dequantized, ``[B, Hkv, T, Dv]``: a copy, which cannot be replaced."""
        return self._dequantized(1)

    @values.setter
    def values(self, states: Tensor) -> None:
        raise AttributeError(_READ_ONLY)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device, self.is_initialized = key_states.device, True
        self.storage = LayerStorage.allocate(
            self.format,
            diagonal_tiles=self.owner.diagonal_tiles,
            sink_tiles=self.owner.sink_tiles,
            batch=key_states.shape[0],
            kv_heads=key_states.shape[1],
            head_dim=key_states.shape[3],
            value_dim=value_states.shape[3],
            dtype=key_states.dtype,
            device=key_states.device,
            window=self.window,
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add new keys, ``[B, Hkv, T, D]``, and values, ``[B, Hkv, T, Dv]``. If it fails, the cache does not change.

        Returns:
            All keys and values that the mask of the step covers: for ``dma_mxfp`` as
            :class:`~dma_hf.cached_states.CachedStates`, otherwise dequantized, where the new ones are not quantized.

        Raises:
            TypeError: Their dtype differs from that of the first update, and autocast does not change it.
            ValueError: Their shape or device differs from the first update, or the static cache is full.
        """
        if self.pending is not None:
            self.flush()
        repeated = None if self.checks_steps or not self.is_initialized else self.owner.repeated
        if repeated is not None and kind_of_update(self, key_states, value_states) == repeated.kind:
            new = Step(key_states, value_states, repeated.kv_len, repeated.kv_offset, self.is_empty)
            self.pending = new
            return CachedStates.of(self, new, *repeated.states)
        dtype = autocast_dtype(key_states)
        if dtype is not None:
            dtype = self.storage.key_residual.dtype if self.is_initialized else dtype
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if not self.is_initialized:
            with lasting():
                self.lazy_initialization(key_states, value_states)
        if key_states.device == self.device:
            self.prefetch()
        check_fits(self.storage, key_states, value_states)
        self.check_room(key_states.shape[2])
        new = Step(key_states, value_states, *self.get_mask_sizes(key_states.shape[2]), self.is_empty)
        # Under modes with other tensor types (fake tensors, functorch) the result is dense.
        is_plain = torch.compiler.is_dynamo_compiling() or type(key_states) in (Tensor, torch.nn.Parameter)
        if not (self.owner.reads_packed and is_plain):
            return self.dense(new)
        self.pending = new
        states = CachedStates.like(key_states, new.kv_len), CachedStates.like(value_states, new.kv_len)
        if self.checks_steps and not isinstance(self.tokens, Tensor):
            kind = kind_of_update(self, key_states, value_states)
            self.owner.repeated = RepeatedUpdate(kind, new.kv_len, new.kv_offset, states) if dtype is None else None
        return CachedStates.of(self, new, *states)

    def dense(self, new: Step) -> tuple[Tensor, Tensor]:
        """Return all keys and values that the mask of an update covers, dequantized, and store the new ones.

        New keys and values that are not stored yet are returned unquantized.
        """
        if new.dense is None:
            keys, values = restore(self.storage, self.position_of(new), new.kv_len)
            if not new.is_stored:
                index = self.tokens - new.kv_offset + torch.arange(new.key.shape[2], device=new.key.device)
                keys = keys.index_copy(2, index, new.key.detach())
                values = values.index_copy(2, index, new.value.detach())
                self.store(new)
            new.dense = keys, values
        return new.dense

    def check_room(self, count: int) -> None:
        """Raise if ``count`` more tokens do not fit. In a growing layer they always do."""

    def flush(self) -> None:
        """Store new keys and values that no attention function has stored."""
        if self.pending is not None:
            self.store(self.pending)

    def settle(self, new: Step, geometry: MaskGeometry) -> None:
        """Read from the mask how much padding each row has, until every row has a visible key."""
        if self.is_settled:
            return
        storage, offset = self.storage, geometry.kv_offset
        # A mask that another function made has no range, but its first visible key tells.
        may_be_padded = geometry.kv_range is not None or isinstance(offset, Tensor) or offset != new.kv_offset
        self.is_padded = may_be_padded or (self.is_padded and not new.is_first)
        if not may_be_padded:
            self.is_settled = True
            return
        count = new.key.shape[2]
        before = (offset - new.kv_offset) + self.tokens  # position of the first new token
        length = torch.as_tensor(before, device=storage.lengths.device).expand(len(storage.lengths))
        if geometry.kv_range is not None:  # so far a row without visible keys is all padding
            sees = geometry.kv_range[:, 0] < geometry.kv_range[:, 1]
            length = torch.where(sees, length, -count)
        length = length.clamp(max=0).to(torch.int32)
        storage.lengths.copy_(torch.where(storage.lengths > 0, storage.lengths, length))
        if not torch.compiler.is_compiling():
            self.is_settled = bool((storage.lengths + count > 0).all())

    def store(self, new: Step) -> None:
        """Store new keys and values."""
        self.make_room(new.key.shape[2])
        append(self.storage, new.key.detach(), new.value.detach())
        self.count(new)

    def store_later(self, new: Step) -> None:
        """Store a prompt, whose padding is settled: now if it is long, or else before the next use of the layer."""
        tokens = new.key.shape[0] * new.key.shape[2]
        if tokens > STORED_LATER or self.is_offloading or not self.is_settled or torch.is_grad_enabled():
            self.store(new)
        else:
            self.pending = new

    def make_room(self, count: int) -> None:
        """Grow the storage for ``count`` more tokens, and for those that ``generate`` expects after them."""
        tokens = self.tokens + count
        if tokens // TILE <= self.storage.max_pages:
            return
        expected = self.owner.expected_tokens
        if expected is not None:
            tokens = max(tokens, min(expected, tokens + ROOM_AHEAD))
        with lasting():
            self.storage.reserve(tokens // TILE)

    def count(self, new: Step) -> None:
        """Update the counters after new keys and values were stored."""
        if isinstance(self.tokens, Tensor):
            self.tokens.add_(new.key.shape[2])
        elif self.owner.capture is None:
            self.tokens += new.key.shape[2]
        new.is_stored = True
        self.pending = None
        self.is_empty = False
        if self.is_offloading:
            self.is_offloading = False
            self.offload()

    def position_of(self, new: Step) -> Tensor:
        """Return the position of the first token that the mask of a step covers, int32 ``[B]``."""
        position: Tensor = self.storage.lengths - (self.tokens - new.kv_offset)
        return position

    def get_seq_length(self) -> Any:
        """Return how many tokens the layer has seen, with the type of :attr:`tokens`; a tensor during a capture."""
        if self.owner.capture is not None:
            return self.owner.capture.position
        return self.tokens if self.pending is None else self.tokens + self.pending.key.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens a mask must cover, and the index of the first."""
        if self.owner.capture is not None:
            return self.owner.capture.room, 0
        length = self.get_seq_length()
        first = 0 if self.window is None else max(length - self.window + 1, 0)
        return length - first + query_length, first

    def get_max_length(self) -> int:
        """Return the maximum number of visible tokens, or -1 for no limit."""
        return -1 if self.window is None else self.window

    def check_crop(self, count: int) -> None:
        """Raise if the last ``count`` tokens cannot be removed."""
        if self.is_initialized:
            if count > self.tokens:
                raise ValueError(f"crop({-count}) removes {count} tokens, but the cache has {int(self.tokens)}")
            self.storage.check_crop(count)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, after :meth:`check_crop`."""
        if tokens_to_remove and self.is_initialized:
            self.storage.crop(-tokens_to_remove)
            self.tokens += tokens_to_remove
            if self.tokens == 0:
                self.clear()
                self.storage.lengths.zero_()

    def reset(self) -> None:
        """Remove all tokens, and forget the batch size."""
        self.clear()
        self.storage = None  # type: ignore[assignment]
        self.is_initialized = False

    def clear(self) -> None:
        """Remove all tokens and keep the storage, whose lengths the caller sets to 0."""
        self.pending = None
        self.is_empty, self.is_settled = True, False
        if isinstance(self.tokens, Tensor):
            self.tokens.zero_()
        else:
            self.tokens = 0
        if self.is_initialized:
            self.storage.appended = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        self._map(lambda tensor: tensor[torch.as_tensor(indices, device=tensor.device)])

    def offload(self) -> None:
        """Move the storage to the CPU, after the layer's attention."""
        if self.pending is not None:
            self.is_offloading = True
            return
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the storage back to the device of the keys."""
        if self.is_initialized and self.storage.lengths.device != self.device:
            self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def hold(self, storage: LayerStorage) -> None:
        """Replace the storage."""
        self.storage = storage

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        self.flush()
        if self.is_initialized:
            with lasting():
                self.hold(self.storage.mapped(function))

    def _dequantized(self, which: int) -> Tensor | None:
        self.flush()
        if not self.is_initialized:
            return None
        length, first = self.get_mask_sizes(0)
        return restore(self.storage, self.storage.lengths - (self.tokens - first), length)[which]


class DMAStaticLayer(DMALayer):
    """A layer of fixed size for ``torch.compile`` and CUDA graphs. Its decoding steps do not wait for the host.

    A sliding window bounds its memory, but not its masks, which cover all ``max_cache_len`` tokens.
    """

    is_compileable = True

    def __init__(self, owner: Owner, cache: str, max_cache_len: int, window: int | None = None) -> None:
        super().__init__(owner, cache, window)
        self.max_cache_len: int = max_cache_len

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the storage for tensors like these, at a fixed address."""
        super().lazy_initialization(key_states, value_states)
        self.storage.reserve(-(-self.max_cache_len // TILE))
        self.tokens = torch.zeros((), dtype=torch.int64, device=key_states.device)
        if not torch.compiler.is_dynamo_compiling():
            for tensor in (self.tokens, *self.storage.tensors().values()):
                torch._dynamo.mark_static_address(tensor)

    def check_room(self, count: int) -> None:
        """Raise if ``count`` more tokens do not fit.

        A decoding step on a CUDA device does not wait for the check. It asserts on the device.
        """
        room = f"the static cache has room for {self.max_cache_len} tokens, so {count} more do not fit"
        if torch.compiler.is_compiling() or (self.tokens.is_cuda and count <= DECODED_AT_ONCE):
            if self.checks_steps:
                torch._assert_async(self.tokens + count <= self.max_cache_len, room)
        elif int(self.tokens) + count > self.max_cache_len:
            raise ValueError(f"{room} after {int(self.tokens)}; make it larger: DMACache(config, max_cache_len=...)")

    def store_later(self, new: Step) -> None:
        """Store a prompt at once. Compiled steps do not look for one that is not stored."""
        self.store(new)

    def make_room(self, count: int) -> None:
        """Do nothing, because the storage has its full size."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    def reset(self) -> None:
        """Remove all tokens, and keep the tensors."""
        self.clear()
        if self.is_initialized:
            self.storage.lengths.zero_()

    def hold(self, storage: LayerStorage) -> None:
        """Replace the storage, at the same address if shapes and devices match, because compiled steps use it."""
        pairs = list(zip(self.storage.tensors().values(), storage.tensors().values(), strict=True))
        if all(old.shape == new.shape and old.device == new.device for old, new in pairs):
            for old, new in pairs:
                old.copy_(new)
        else:
            self.storage = storage

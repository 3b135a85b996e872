"""Attention of continuous batching: ``dma_mxfp`` over Transformers' paged cache, in 16 bits or packed.

Transformers takes an implementation for continuous batching by its name: ``sdpa``, ``paged|eager``, and what has
``flash`` in it, which promises to keep packed requests apart by their lengths, without a mask. (Up to 5.17 it was the
prefix ``paged|``.) :data:`PAGED_NAME` is such a name. It is set for as long as a model batches continuously, and at no
other time, because elsewhere Transformers takes those names for FlashAttention.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from dma_kernels import Recipe, attention
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ..arguments import Call, find_unsupported
from ..config import NAME, PAGED_NAME, is_dma
from ..stats import counted
from .attention_name import attention_name, rename, restore_names

_OF_THE_BATCH = frozenset(
    {"read_index", "write_index", "block_table", "logits_indices", "logits_processor_args", "is_causal"}
    | {"max_seqlen_q", "max_seqlen_k", "cu_seq_lens_k"}
)
"""Arguments that describe the batch; what attention needs of them is read before the others are checked."""


def name_for_batching(name: Any) -> Any:
    """Return the name that Transformers takes for batching, registered, for an implementation that is this one."""
    if is_dma(str(name)) and not name.startswith(PAGED_NAME):
        # With the preset that it may name; a Hub kernel's names none.
        name = PAGED_NAME + (name.removeprefix(NAME) if name.startswith(NAME) else "")
        AttentionInterface.register(name, dma_paged_attention_forward)
    return name


@dataclass
class _Batched:
    """A model that is batched: by how many at once, and the names of its parts' attention before that."""

    count: int = 0
    names: list[tuple[PreTrainedConfig, Any]] = field(default_factory=list)


_batched: weakref.WeakKeyDictionary[PreTrainedModel, _Batched] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def enter_batching(model: PreTrainedModel) -> None:
    """Give a model the name that Transformers takes for continuous batching, until as many :func:`leave_batching`."""
    with _lock:
        state = _batched.setdefault(model, _Batched())
        if state.count == 0:
            state.names = rename(model, name_for_batching)
        state.count += 1


def leave_batching(model: PreTrainedModel) -> None:
    """Take back :func:`enter_batching`; a name that was set since then stays."""
    with _lock:
        state = _batched[model]
        state.count -= 1
        if state.count == 0:
            del _batched[model]
            restore_names([each for each in state.names if str(attention_name(each[0])).startswith(PAGED_NAME)])


def dma_paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer for requests that are packed into one row.

    Args:
        module: The layer; ``config`` and ``layer_idx`` are read.
        query: ``[1, Hq, tokens, D]``, the new tokens of all requests and padding behind them.
        key: ``[1, Hkv, tokens, D]``, likewise; the cache adds those of earlier steps.
        value: ``[1, Hkv, tokens, Dv]``.
        attention_mask: Not used; the lengths say what it would.
        sliding_window: Window of the layer.
        cache: The paged cache; ``None`` if the layer has updated it, with ``key`` and ``value`` read from it.
        cu_seq_lens_q: Where requests begin among the queries, int32 ``[requests + 1]``.
        position_ids: ``[1, tokens]``, of every query in its request.
        kwargs: What else continuous batching and the model pass, see :meth:`dma_hf.arguments.Call.of`.

    Returns:
        ``[1, tokens, Hq, Dv]``, and ``None`` in place of attention weights.

    Raises:
        RuntimeError: It is called outside continuous batching, or while a CUDA graph is captured.
        ValueError: As :func:`~dma_hf.dma_attention_forward`.
    """
    if cu_seq_lens_q is None or position_ids is None or "read_index" not in kwargs:
        raise RuntimeError(
            f"attn_implementation={PAGED_NAME!r} is for generate_batch; call generate and forward outside of "
            "dma_hf.continuous_batching(model)"
        )
    call = Call.of(module, **{name: each for name, each in kwargs.items() if name not in _OF_THE_BATCH})
    refusal = find_unsupported(call, query, value, is_packed_elsewhere=True)
    if refusal is not None:
        raise refusal.error(may_fall_back=False)
    options = {"window": sliding_window, "is_causal": True, **call.options}
    recipe = call.settings.recipe
    if hasattr(cache, "attend"):  # packed pages
        batch = kwargs["block_table"], cu_seq_lens_q, position_ids
        packed = (module.layer_idx, query, key, value, batch, recipe)
        format = str(call.settings.config.cache)
        return counted(module, call.settings.name, format, lambda: cache.attend(*packed, **options)), None
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "dma_mxfp attention needs the lengths of the requests on the host, which a CUDA graph cannot give; pass "
            "continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=False)"
        )
    key, value, key_starts = _update(cache, module, key, value, sliding_window, kwargs)
    requests = (query, key, value, key_starts, cu_seq_lens_q, position_ids)
    return counted(module, call.settings.name, "pages", _attend_requests, *requests, recipe, options), None


def _attend_requests(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_starts: Tensor,
    cu_seq_lens_q: Tensor,
    position_ids: Tensor,
    recipe: Recipe,
    options: dict[str, Any],
) -> Tensor:
    """Compute the attention of every request, ``[1, tokens, Hq, Dv]``, to keys whose starts are known."""
    out = query.new_zeros((1, query.shape[2], query.shape[1], value.shape[-1]))
    last = cu_seq_lens_q[1:].long() - 1
    ends = position_ids.reshape(-1)[last.clamp(min=0)] + 1  # of the requests: tokens until now
    requests = torch.stack((cu_seq_lens_q[:-1], cu_seq_lens_q[1:], key_starts[:-1], key_starts[1:], ends)).T.tolist()
    decoding = [request for request in requests if request[1] - request[0] == 1]
    for start, stop, key_start, key_stop, end in requests:
        if stop - start > 1:
            out[:, start:stop] = attention(
                query[:, :, start:stop],
                key[:, :, key_start:key_stop],
                value[:, :, key_start:key_stop],
                recipe,
                q_offset=end - (stop - start),
                kv_offset=end - (key_stop - key_start),
                **options,
            ).transpose(1, 2)
    if decoding:
        rows = [start for start, *_ in decoding]
        out[0, rows] = _decode(query, key, value, torch.tensor(decoding, device=query.device), recipe, options)
    return out


def _update(
    cache: Any, module: nn.Module, key: Tensor, value: Tensor, sliding_window: int | None, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Store keys and values, and return those of all requests, with where each request begins among them."""
    starts = kwargs["cu_seq_lens_k"]
    if cache is None:  # the layer has updated it: Transformers 5.24 and newer
        return key, value, starts
    if "read_index" in inspect.signature(cache.update).parameters:  # up to Transformers 5.17
        indices = {name: kwargs[name] for name in ("read_index", "write_index")}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **indices)
        key, value = (states.transpose(0, 1)[None] for states in (key, value))
        if isinstance(starts, dict):
            starts = starts["sliding_attention" if sliding_window else "full_attention"]
        return key, value, starts
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    return key, value, kwargs["cu_seq_lens_k"]  # that of the layer's kind, since the update


def _decode(
    query: Tensor, key: Tensor, value: Tensor, requests: Tensor, recipe: Recipe, options: dict[str, Any]
) -> Tensor:
    """Compute all requests with one query as a batch, ``[requests, Hq, Dv]``.

    ``requests``, integer ``[requests, 5]``, holds bounds of the query, bounds of the keys, and tokens until now.
    """
    start, _, key_start, key_stop, end = requests.unbind(-1)
    lengths = key_stop - key_start
    index = torch.arange(int(lengths.max()), device=query.device)
    chosen = (key_start[:, None] + index).clamp(max=key.shape[2] - 1)  # [requests, keys]; beyond the range: any
    out: Tensor = attention(
        query[0, :, start].transpose(0, 1)[:, :, None],
        key[0, :, chosen].transpose(0, 1),
        value[0, :, chosen].transpose(0, 1),
        recipe,
        q_offset=end - 1,
        kv_offset=end - lengths,
        kv_range=torch.stack((torch.zeros_like(lengths), lengths), dim=-1),
        **options,
    )
    return out[:, :, 0]

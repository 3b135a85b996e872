"""Attention of continuous batching: ``dma_mxfp`` over Transformers' paged cache, in 16 bits or packed.

Continuous batching accepts an attention implementation by its name: ``sdpa``, ``paged|eager``, or a name with ``flash``
in it. A ``flash`` implementation separates requests by their lengths,
without a mask. :data:`~dma_hf.config.PAGED_NAME` is such a name. A model has it only while it batches continuously,
because elsewhere Transformers treats these names as FlashAttention.

Not every layer passes the description of the batch on to its attention function (GPTBigCode, Persimmon), because SDPA
needs only the mask. So a hook on the model notes it before each forward pass.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from dma_kernels import attention
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ..config import NAME, PAGED_NAME, is_dma
from ..logit_check import check_first_prompt
from ..stats import counted
from ..support import WAY_OUT, Call, Refusal, find_unsupported
from .internals import attention_name, decoder_attention, rename, restore_names

_OF_THE_BATCH = frozenset(
    {"read_index", "write_index", "block_table", "logits_indices", "logits_processor_args", "is_causal"}
    | {"max_seqlen_q", "max_seqlen_k", "cu_seq_lens_q", "cu_seq_lens_k", "position_ids"}
)
"""Arguments that describe the batch. They are read from the forward pass of the model."""


_running = threading.local()
"""Its ``batch`` has the arguments of the forward pass that this thread computes, ``requests`` those read from them."""


def _note_batch(model: PreTrainedModel, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Note the batch of a forward pass. Raise if the attention for which it was prepared has been changed."""
    name = decoder_attention(model)
    if "read_index" in options and not str(name).startswith(PAGED_NAME):
        raise RuntimeError(
            f"the attention of {type(model).__name__} was changed to {name!r} while a manager of {NAME} runs it; stop "
            "the manager first"
        )
    _running.batch, _running.requests = options, {}


def name_for_batching(name: Any) -> Any:
    """Return the registered name for continuous batching if ``name`` is this implementation, else ``name``."""
    if is_dma(name) and not name.startswith(PAGED_NAME):
        # With the preset and cache of the name. The name of a Hub kernel has none.
        name = PAGED_NAME + (name.removeprefix(NAME) if name.startswith(NAME) else "")
        AttentionInterface.register(name, dma_paged_attention_forward)
    return name


@dataclass
class _Batched:
    """A model in continuous batching: the number of users, the attention names of its parts before, and the hook."""

    count: int = 0
    names: list[tuple[PreTrainedConfig, Any]] = field(default_factory=list)
    hook: Any = None


_batched: weakref.WeakKeyDictionary[PreTrainedModel, _Batched] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # a garbage collection within the lock may drop a manager, which leaves batching


def enter_batching(model: PreTrainedModel) -> None:
    """Rename a model's attention for continuous batching, until :func:`leave_batching` is called as often."""
    with _lock:
        state = _batched.setdefault(model, _Batched())
        if state.count == 0:
            state.names = rename(model, name_for_batching)
            state.hook = model.register_forward_pre_hook(_note_batch, with_kwargs=True)
        state.count += 1


def leave_batching(reference: weakref.ref[PreTrainedModel]) -> None:
    """Undo :func:`enter_batching`, if the model still exists. A name that was set in between stays."""
    model = reference()
    if model is None:
        return
    with _lock:
        state = _batched[model]
        state.count -= 1
        if state.count == 0:
            del _batched[model]
            state.hook.remove()
            restore_names([each for each in state.names if str(attention_name(each[0])).startswith(PAGED_NAME)])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def dma_paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer for requests that are packed into one row, ``[1, tokens, Hq, Dv]``.

    Arguments and errors are those of :func:`~dma_hf.attention.dma_attention_forward`, except:

    - ``query``, ``key`` and ``value`` are ``[1, H, tokens, D]``: new tokens of all requests, then padding.
    - ``attention_mask`` is ``None``. The batch of the model's forward pass has the lengths.
    - ``cache`` is the paged cache, or ``None`` if ``key`` and ``value`` come from it.

    Raises:
        RuntimeError: It is called outside continuous batching, or a CUDA graph is being captured over 16-bit pages.
    """
    batch = getattr(_running, "batch", {})
    if "read_index" not in batch:
        raise RuntimeError(
            f"attn_implementation={PAGED_NAME!r} is for generate_batch only; call generate and forward after the "
            "manager has stopped"
        )
    call = Call.of(module, **{name: each for name, each in kwargs.items() if name not in _OF_THE_BATCH})
    refusal = find_unsupported(call, query, value)
    if attention_mask is not None and refusal is None:
        asked = f"{type(module).__name__} passed one of shape {list(attention_mask.shape)}"
        refusal = Refusal("an attention_mask of its own in generate_batch", asked, "call generate, or " + WAY_OUT)
    if refusal is not None:
        raise refusal.error(may_fall_back=False)
    pages = batch["cache"]
    if sliding_window is None:  # Moshi leaves the window to the mask
        sliding_window = _window_of(module, pages.config)
    options = {"window": sliding_window, "is_causal": True, **call.options}
    if cache is not None:
        key, value = _update(cache, module, key, value, kwargs)
    requests: Any
    if hasattr(pages, "attend"):  # packed pages
        attend, format = pages.attend, str(call.settings.config.cache)
        requests = batch["block_table"], batch["cu_seq_lens_q"], batch["position_ids"]
    elif query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "dma_mxfp attention over 16-bit pages reads the lengths of the requests on the host, which a CUDA graph "
            "does not allow; pass continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=False)"
        )
    else:
        attend, format, requests = _attend_requests, "pages", _requests_of(module, batch)
    states = query, key, value
    return counted(module, call.settings.name, format, attend, module, call, states, requests, **options)[0], None


def _window_of(module: nn.Module, config: PreTrainedConfig) -> int | None:
    """Return the window of a layer, by the rule with which Transformers groups layers for paged caches."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return window if window is None or kinds is None or kinds[module.layer_idx] == "sliding_attention" else None


class _Requests(NamedTuple):
    """The requests of a forward pass over 16-bit pages.

    Attributes:
        keys: Number of keys of all requests.
        groups: Requests that are computed in one call: their new tokens, their keys, and the arguments of
            :func:`dma_kernels.attention` that say which keys they see. Tokens and keys are a slice of one request, or
            integer ``[requests, tokens]``.
    """

    keys: int
    groups: list[tuple[slice | Tensor, slice | Tensor, dict[str, Any]]]


def _requests_of(module: nn.Module, batch: dict[str, Any]) -> _Requests:
    """Return the requests as a layer sees them. The first layer of its kind reads them from the device.

    Layers that share the keys of another one (Gemma 3n) have a kind too, although they do not update the cache.
    """
    starts, kind = batch["cu_seq_lens_k"], ""
    if isinstance(starts, dict):
        kinds = list(starts)
        kind = kinds[0] if len(kinds) == 1 else batch["cache"].config.layer_types[module.layer_idx]
        starts = starts[kind]
    known: dict[str, _Requests] = _running.requests
    if kind not in known:
        known[kind] = _read_requests(batch["cu_seq_lens_q"], starts, batch["position_ids"])
    return known[kind]


def _read_requests(query_starts: Tensor, key_starts: Tensor, position_ids: Tensor) -> _Requests:
    """Read the requests from the offsets of their tokens and keys, and the positions of all tokens."""
    ends = position_ids.reshape(-1)[(query_starts[1:].long() - 1).clamp(min=0)] + 1  # tokens of each request so far
    table = torch.stack((query_starts[:-1], query_starts[1:], key_starts[:-1], key_starts[1:], ends)).T.tolist()
    decoding = [request for request in table if request[1] - request[0] == 1]
    fewest = 1 if len(decoding) == 1 else 2  # new tokens of a request that is computed alone; padding has none
    groups: list[Any] = []
    for start, stop, key_start, key_stop, end in table:
        if stop - start >= fewest:
            seen = {"q_offset": end - (stop - start), "kv_offset": end - (key_stop - key_start)}
            groups.append((slice(start, stop), slice(key_start, key_stop), seen))
    total = table[-1][3]
    if len(decoding) > 1:
        rows, _, key_starts, key_stops, ends = torch.tensor(decoding, device=query_starts.device).unbind(-1)
        lengths = key_stops - key_starts
        index = torch.arange(max(stop - start for _, _, start, stop, _ in decoding), device=rows.device)
        chosen = (key_starts[:, None] + index).clamp(max=total - 1)  # any key, where a request has no more
        kv_range = torch.stack((torch.zeros_like(lengths), lengths), dim=-1)
        offsets = {"q_offset": ends - 1, "kv_offset": ends - lengths, "kv_range": kv_range}
        groups.append((rows[:, None], chosen, offsets))
    return _Requests(total, groups)


def _attend_requests(
    module: nn.Module, call: Call, states: tuple[Tensor, Tensor, Tensor], requests: _Requests, **options: Any
) -> Tensor:
    """Compute the attention of every request, ``[1, tokens, Hq, Dv]``, over unpacked keys."""
    query, key, value = states
    if key.shape[2] < requests.keys:
        raise ValueError(
            f"the requests have {requests.keys} keys, but attention got {key.shape[2]}; this layer does not attend "
            "to what the paged cache returned, so generate_batch cannot run this model"
        )
    out = query.new_zeros((1, query.shape[2], query.shape[1], value.shape[-1]))
    for tokens, keys, seen in requests.groups:
        group = _of_group(query, tokens), _of_group(key, keys), _of_group(value, keys)
        if isinstance(tokens, slice) and seen["kv_offset"] == 0:
            check_first_prompt(module, call, *group[:2])
        out[0, tokens] = attention(*group, call.settings.recipe, **seen | options).transpose(1, 2)
    return out


def _of_group(x: Tensor, tokens: slice | Tensor) -> Tensor:
    """Return the tokens of a group in ``[1, H, tokens, D]``, as ``[requests, H, tokens, D]``."""
    return x[:, :, tokens] if isinstance(tokens, slice) else x[0, :, tokens].transpose(0, 1)


@functools.cache
def _takes_indices(update: Callable[..., Any]) -> bool:
    return "read_index" in inspect.signature(update).parameters


def _update(cache: Any, module: nn.Module, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Store keys and values, and return those of all requests. Layers of Transformers 5.24 do so themselves."""
    if _takes_indices(type(cache).update):  # older ones return them without a batch axis
        indices = kwargs["read_index"], kwargs["write_index"]
        return tuple(states.transpose(0, 1)[None] for states in cache.update(key, value, module.layer_idx, *indices))
    updated: tuple[Tensor, Tensor] = cache.update(key, value, module.layer_idx, kwargs)
    return updated

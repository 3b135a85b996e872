"""A step of decoding on the Triton backend: new keys and values stored, and up to 16 queries answered.

The new keys are stored by a kernel of their own, beside which the one that attends may already run; the parts of a head
are combined by the program that is done last.
"""

from __future__ import annotations

from torch import Tensor

from ..runtime import replay
from ..runtime.chip import starts_early
from .append import append_tokens, launch_append, storage_kind
from .decode import decode_attention, launch_decode
from .storage import LayerStorage


def decode_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    storage: LayerStorage,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store the keys and values of the queries, and attend; no host synchronisation.

    It does what :func:`~dma_kernels.cache.append.append_tokens` and :func:`~dma_kernels.cache.decode.decode_attention`
    do one after the other, to the bit.

    Args:
        query: bf16 or fp16 ``[B, Hq, T, D]``, ``T <= 16``, any strides, in the dtype of the cache.
        key: Raw ``[B, Hkv, T, D]``, any strides.
        value: Raw ``[B, Hkv, T, Dv]``.
        storage: The cache; its body must have room for the tiles that are completed.
        scale: Factor of the scores.
        window: Sliding window; at most that of the storage, if that has one.
        softcap: Caps scores: ``softcap * tanh(score / softcap)``, after ``scale``.
        sinks: One logit per query head, ``[Hq]``.

    Returns:
        Output ``[B, Hq, T, Dv]`` in the dtype of ``query``.
    """
    new_len = key.shape[2]
    if query.numel() == 0 or key.numel() == 0:
        append_tokens(storage, key, value)
        return decode_attention(query, storage, scale=scale, window=window, softcap=softcap, sinks=sinks)[0]
    kinds = (replay.tensor_kind(query), replay.tensor_kind(key), replay.tensor_kind(value), replay.tensor_kind(sinks))
    call = replay.call_of("step", *kinds, *storage_kind(storage), scale, window, softcap)
    # What is read of low tiles was stored before this step, if all that is new are the keys of its queries.
    is_early = starts_early(query.device) and query.shape[2] == new_len

    def run() -> tuple[Tensor]:
        launch_append(storage, key, value, lets_start=is_early)
        out, _ = launch_decode(
            query, storage, scale=scale, window=window, softcap=softcap, sinks=sinks, new_len=new_len,
            is_early=is_early,
        )  # fmt: skip
        return (out,)

    (out,) = call.run((query, key, value, sinks, storage.raw_rows, *storage.tensors().values()), run)
    storage.replace_taken_back(new_len)
    return out

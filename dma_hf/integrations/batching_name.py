"""The name that a model's attention has while the model batches continuously; several may batch it at once."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..settings import PAGED_NAME, rename, restore_names
from .attention_name import attention_name
from .paged_attention import name_for_batching


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

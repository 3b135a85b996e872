"""Which kernels computed a call, for whoever asks.

Host code names the kernel that it launches: ``warp-specialized``, ``multi-CTA`` or ``portable`` for prompts and later
chunks over a cache, ``decode`` for steps over a cache, ``reference`` for torch. Without a listener that costs one
look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]

_listener: ContextVar[Listener | None] = ContextVar("kernel_listener", default=None)


def report(kernel: str) -> None:
    """Say that a kernel is launched, by name."""
    listener = _listener.get()
    if listener is not None:
        listener(kernel)


@contextmanager
def kernel_reports(listener: Listener) -> Iterator[None]:
    """Have the kernels named that this thread launches within a ``with`` block; of nested ones the innermost hears."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)

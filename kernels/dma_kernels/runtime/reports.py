"""Reports of the kernels that computed a call.

Host code reports the kernel that it launches by name:

* ``warp-specialized``, ``one-warpgroup`` or ``portable`` for prefill and chunked prefill;
* ``split-KV``, or PyTorch's ``sdpa``, for short calls over unquantized keys and values;
* ``decode`` for decode steps over a packed cache;
* ``reference`` for torch.

Without a listener that costs one lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

Listener = Callable[[str], None]

_listener: ContextVar[Listener | None] = ContextVar("kernel_listener", default=None)


def report(kernel: str) -> None:
    """Report the launch of a kernel by name."""
    listener = _listener.get()
    if listener is not None:
        listener(kernel)


class kernel_reports:
    """Report the kernels that this thread launches in a ``with`` block to ``listener``; the innermost block wins."""

    __slots__ = ("_listener", "_token")

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __enter__(self) -> None:
        self._token = _listener.set(self._listener)

    def __exit__(self, *error: object) -> None:
        _listener.reset(self._token)

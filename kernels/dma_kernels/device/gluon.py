"""Gluon, or a substitute on Triton's interpreter, so that Gluon kernels also run on a CPU.

Triton has no interpreter for Gluon. But layouts change no values: if ``TRITON_INTERPRET=1`` is set at import, ``gl``
has the functions of :mod:`triton.language` without layouts, and ``jit`` is Triton's. A module that uses it must also
import :mod:`triton.language`, which the interpreter looks for.
"""

from __future__ import annotations

from typing import Any, TypeVar, dataclass_transform

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as _gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy as _async_copy
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)


def _mma(a: Any, b: Any, acc: Any) -> Any:
    """Return ``acc + a @ b``; accumulates in 32 bits like tensor cores, the interpreter's product does not."""
    return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee").to(acc.dtype)


class _Buffer:
    """Shared memory."""

    def __init__(self, shape: Any, contents: Any) -> None:
        self.shape = shape
        self._contents = contents

    def load(self, layout: Any) -> Any:
        return self._contents

    def copy(self, pointers: Any) -> None:
        self._contents = tl.load(pointers)


def _nothing(*arguments: Any) -> None:
    """Replace waits and barriers: the interpreter has one warp, and copies synchronously."""


class _Interpreted:
    """The functions of :mod:`triton.language`, looked up at each call, because the interpreter replaces them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_gl if name.endswith("Layout") else tl, name)

    @staticmethod
    def arange(start: Any, end: Any, layout: Any = None) -> Any:
        return tl.arange(start, end)

    @staticmethod
    def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
        return tl.full(shape, value, dtype)

    @staticmethod
    def convert_layout(value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return value

    @staticmethod
    def allocate_shared_memory(dtype: Any, shape: Any, layout: Any, value: Any = None) -> _Buffer:
        return _Buffer(shape, value)


def _view(buffer: _Buffer, dtype: Any, shape: Any, layout: Any) -> _Buffer:
    """Return a new buffer: two views of a buffer are never in use at once."""
    return _Buffer(shape, None)


gl: Any = _Interpreted() if IS_INTERPRETED else _gl
jit: Any = triton.jit if IS_INTERPRETED else gluon.jit
constexpr_function: Any = gluon.constexpr_function
mma: Any = _mma if IS_INTERPRETED else mma_v2
# Renamed in Triton 3.9.
_load: Any = getattr(_async_copy, "async_load", None) or _async_copy.async_copy_global_to_shared
# Public from Triton 3.9.
reinterpret: Any = getattr(_gl.shared_memory_descriptor, "reinterpret", None) or (
    _gl.shared_memory_descriptor._reinterpret
)
_barrier: Any = _gl.thread_barrier if hasattr(_gl, "thread_barrier") else _gl.barrier
barrier: Any = _nothing if IS_INTERPRETED else _barrier
async_load: Any = _Buffer.copy if IS_INTERPRETED else _load
commit_group: Any = _nothing if IS_INTERPRETED else _async_copy.commit_group
wait_group: Any = _nothing if IS_INTERPRETED else _async_copy.wait_group
view: Any = _view if IS_INTERPRETED else reinterpret
# Public from Triton 3.9.
_aggregate: Any = getattr(triton, "aggregate", None) or tl.core._aggregate
_Class = TypeVar("_Class", bound=type)


@dataclass_transform(kw_only_default=True)
def aggregate(cls: _Class) -> _Class:
    """Make a class of annotated fields a value that Gluon functions pass around and carry through loops.

    Fields hold tensors, shared memory, descriptors, constexprs, ``None`` or other aggregates. Methods are ``gluon.jit``
    functions. Aggregates are immutable: a method returns a new one.
    """
    fields = tuple(cls.__annotations__)
    # Triton before 3.9 cannot read string annotations, and generates no ``__init__``.
    cls.__annotations__ = dict.fromkeys(fields, tl.core.base_value)

    def __init__(self: Any, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value if isinstance(value, tl.core.base_value) else tl.constexpr(value))

    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    made: Any = _aggregate(cls)
    made.fields = fields
    return made  # type: ignore[no-any-return]

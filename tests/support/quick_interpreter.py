"""Remove redundant work from Triton's interpreter, which takes most of its tests' time.

At each call of a device function the interpreter patches all members of the language's modules again, although the
calling kernel has patched them. It also repeats integer arithmetic in 64 bits to find overflows that it reports only in
debug mode, and checks the size of each result's elements once more. Each operation builds its result's type and shape
anew, although a kernel has a few dozen of them. Each operation on two operands derives the types that both are cast to
and copies the smaller one to the shape of the other, although NumPy broadcasts.
Checked with Triton 3.6 and 3.9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

from triton import language
from triton.runtime import interpreter


def make_quick() -> None:
    """Patch the language once per kernel, disable overflow checks, and build each type and promotion once."""
    _share_types()
    _share_promotions()
    interpreter.TensorHandle.__post_init__ = lambda self: None
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    patch = interpreter._patch_lang
    replaced: set[ModuleType] = set()

    class Scope:
        """Restores the language at the end of a kernel."""

        def __init__(self, function: Callable[..., Any]) -> None:
            self._scope = patch(function)

        def restore(self) -> None:
            replaced.clear()
            self._scope.restore()

    def patch_once(function: Callable[..., Any]) -> Scope | None:
        """Patch the language for a kernel and return its scope; return ``None`` for a device function."""
        modules = _languages(function)
        if modules and modules <= replaced:
            return None
        scope = Scope(function)
        replaced.update(modules)
        return scope

    interpreter._patch_lang = patch_once


@cache
def _languages(function: Callable[..., Any]) -> frozenset[ModuleType]:
    """Return the language modules in a function's scope, as the interpreter finds them."""
    return frozenset(value for value in function.__globals__.values() if value is language or value is language.core)


def _share_types() -> None:
    """Return the same object for equal block types, and share what a tensor derives from its type."""
    core = language.core
    block_type, tensor = core.block_type, core.tensor
    init_type, init_tensor, numpy_dtype = block_type.__init__, tensor.__init__, interpreter._get_np_dtype
    types: dict[Any, Any] = {}

    def new_type(cls: type, element_ty: Any, shape: Any, *others: Any) -> Any:
        if cls is not block_type:  # Gluon's have a layout
            return object.__new__(cls)
        key = (id(element_ty), *(size.value if isinstance(size, core.constexpr) else size for size in shape))
        return types.get(key) or types.setdefault(key, object.__new__(cls))

    def init_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        if not hasattr(self, "numel"):
            init_type(self, element_ty, shape)

    def init_tensor_from_type(self: Any, handle: Any, type: Any) -> None:
        derived = type.__dict__.get("of_tensors")
        if derived is None:
            init_tensor(self, handle, type)
            type.of_tensors = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            self.handle = handle
            self.__dict__.update(derived)

    dtypes: dict[str, Any] = {}

    def numpy_dtype_once(type: Any) -> Any:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(type)
        return dtypes[name]

    block_type.__new__, block_type.__init__ = new_type, init_type_once
    tensor.__init__ = init_tensor_from_type
    interpreter._get_np_dtype = numpy_dtype_once


def _share_promotions() -> None:
    """Derive the types of a binary operation's operands once, keep constants, and leave broadcasting to NumPy."""
    core, semantic = language.core, interpreter.TritonSemantic
    tensor, handle = core.tensor, interpreter.TensorHandle
    promote = semantic.binary_op_type_checking_impl
    promoted: dict[Any, Any] = {}

    def key_of(operand: Any) -> Any:
        """Return what decides an operand's promotion; ``None`` for zeros, whose sign a key would lose, and for NaN."""
        if isinstance(operand, tensor):
            return id(operand.type)
        if isinstance(operand, float):
            return ("float", operand) if operand and operand == operand else None
        return (type(operand), operand) if isinstance(operand, int) else None

    def result(operand: Any, outcome: Any) -> Any:
        """Return a tensor with the operand's values, and the type or the constant that ``outcome`` is."""
        if isinstance(outcome, tensor):
            return outcome
        if operand.type is outcome:
            return operand
        if operand.dtype is not outcome.scalar:
            operand = interpreter_semantic.cast(operand, outcome.scalar)
        return tensor(operand.handle, outcome)

    def outcome_of(operand: Any, full: Any) -> Any:
        """Return the type of a promoted tensor, and for a number the promoted tensor itself, with a single element."""
        if isinstance(operand, tensor):
            return full.type
        return tensor(handle(full.handle.data.reshape(-1)[:1].copy(), full.handle.dtype), full.type)

    def promote_once(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> tuple[Any, Any]:
        keys = key_of(lhs), key_of(rhs)
        if None in keys:
            return promote(self, lhs, rhs, *options, **named)
        key = (*keys, options, *named.items())
        if key not in promoted:
            outcomes = map(outcome_of, (lhs, rhs), promote(self, lhs, rhs, *options, **named))
            types = [getattr(operand, "type", None) for operand in (lhs, rhs)]  # which so keep their identity
            promoted[key] = (*outcomes, types)
        left, right, _ = promoted[key]
        return result(lhs, left), result(rhs, right)

    interpreter_semantic = semantic(interpreter.interpreter_builder)
    semantic.binary_op_type_checking_impl = promote_once

"""Run Hopper's Gluon kernels on the CPU: Triton's interpreter has no Gluon.

:func:`run` executes a kernel's Python code with :mod:`torch` in place of the language. CTAs run one after another, and
each warp partition runs in its own thread. Layouts are ignored, because they do not change values. The emulator models
what a kernel can get wrong: shared memory holds bytes that views reinterpret, barriers count arrivals and bytes in
phases, copies may overwrite any released stage, and an MMA reads its operands at the wait, not at the issue. A barrier
that never completes is an error.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from dma_kernels.prefill.hopper import (
    attend,
    hadamard,
    mask,
    mma,
    one_warpgroup,
    pipeline,
    skipping,
    softmax,
    tile_range,
    warp_specialized,
)
from torch import Tensor
from triton.experimental.gluon import language as gl

PATIENCE = 30.0
"""Seconds until a wait at a barrier times out."""


class Tile(Tensor):
    """A tensor with the language's methods that torch lacks."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what torch's own does to a function that returns a tensor, in a third of the time."""
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result.as_subclass(cls) if type(result) is Tensor else result

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tile:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)


def tile(value: Any) -> Tile:
    return torch.as_tensor(value).as_subclass(Tile)


class Pointer:
    """An address in a tensor, or a tensor of addresses, in units of elements."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def __sub__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset - offset)

    def storage(self) -> Tensor:
        """Return the tensor's whole storage as a flat tensor."""
        return torch.as_strided(self.memory, (self.memory.untyped_storage().nbytes() // self.memory.itemsize,), (1,), 0)

    def index(self) -> Tensor:
        return torch.as_tensor(self.offset + self.memory.storage_offset()).as_subclass(Tensor)


def load(pointer: Pointer, mask: Any = True, other: Any = 0.0) -> Tile:
    index, mask = torch.broadcast_tensors(pointer.index(), torch.as_tensor(mask).as_subclass(Tensor))
    assert bool(((index >= 0) | ~mask).all()), "a load before the memory"
    found = pointer.storage()[torch.where(mask, index, 0)]
    return tile(torch.where(mask, found, torch.as_tensor(other, dtype=found.dtype)))


def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    index, value, mask = torch.broadcast_tensors(pointer.index(), value.as_subclass(Tensor), mask.as_subclass(Tensor))
    pointer.storage()[index[mask]] = value[mask]


def atomic_add(pointer: Pointer, value: Any, sem: str) -> None:
    with Barrier.turned:
        pointer.storage()[pointer.index()] += value


def any_row_keeps(s: Tile, scale: Tile, bound: Tile, *names: Any) -> bool:
    """Decide for all warps of a warpgroup, because one thread computes for them."""
    row_max = (s.to(torch.float32) * scale[:, None]).amax(1)
    return not bool((row_max < bound).all())


class Shared:
    """A shared memory descriptor."""

    layout = None

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.dtype, self.shape = memory, memory.dtype, list(memory.shape)

    def index(self, i: int) -> Shared:
        return Shared(self.memory[int(i)])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.memory.permute(*order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.memory.narrow(dim, start, length))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.memory.view(*shape))

    def load(self, layout: None) -> Tile:
        return tile(self.memory.clone())

    def store(self, value: Tensor) -> None:
        self.memory.copy_(value.as_subclass(Tensor))

    def view_as(self, dtype: torch.dtype, shape: Sequence[int], layout: None) -> Shared:
        data = self.memory.view(-1).view(torch.uint8)
        assert data.numel() == math.prod(shape) * dtype.itemsize, "a view is as large as what it views"
        return Shared(data.view(dtype).view(*shape))


class Barrier:
    """One or more mbarriers: a phase completes after all arrivals and all expected bytes."""

    turned = threading.Condition()

    def __init__(self, shape: Sequence[int]) -> None:
        self.parts = [Barrier(shape[1:]) for _ in range(shape[0])] if len(shape) > 1 else []
        self.count = self.pending = self.bytes = self.phase = 0
        self.copies: list[Callable[[], None]] = []  # that nobody has waited for

    def index(self, i: int) -> Barrier:
        return self.parts[int(i)]

    def advance(self, arrivals: int, copied: int) -> None:
        with self.turned:
            self.pending -= arrivals
            self.bytes += copied
            assert self.pending >= 0, "more arrive than the barrier was made for"
            if self.pending == 0 and self.bytes == 0:
                self.pending, self.phase = self.count, self.phase + 1
                self.turned.notify_all()

    def has_completed(self, phase: int) -> bool:
        """Finish the copies, and return whether a phase of this parity is complete."""
        while self.copies:
            self.copies.pop(0)()
        return self.phase % 2 != int(phase) % 2


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def wait(barrier: Barrier, phase: int, pred: Any = True) -> None:
    if not pred:
        return
    with Barrier.turned:
        if not Barrier.turned.wait_for(lambda: barrier.has_completed(phase), PATIENCE):
            raise TimeoutError("a barrier that nobody completes")


def expect(barrier: Barrier, size: int, pred: Any = True) -> None:
    if pred:
        barrier.advance(1, size)


def block_of(descriptor: Any, position: Sequence[Any]) -> tuple[Tensor, tuple[slice, ...], tuple[slice, ...]]:
    """Return a descriptor's tensor, the slices of it that a block covers, and the slices of the block."""
    source = torch.as_strided(descriptor.base, list(descriptor.shape), list(descriptor.strides))
    taken, put = [], []
    for start, size, length in zip(map(int, position), descriptor.block_shape, descriptor.shape, strict=True):
        low, high = max(start, 0), max(min(start + size, length), 0)
        taken.append(slice(low, max(high, low)))
        put.append(slice(low - start, max(high, low) - start))
    return source, tuple(taken), tuple(put)


def copy(descriptor: Any, position: Sequence[Any], barrier: Barrier, target: Shared, pred: Any = True) -> None:
    """Copy a block as TMA does: zeros outside the tensor. It happens as late as it may, when somebody waits for it."""
    if not pred:
        return
    source, taken, put = block_of(descriptor, position)
    assert target.memory.dtype == source.dtype

    def finish() -> None:
        block = torch.zeros(list(descriptor.block_shape), dtype=source.dtype)
        block[put] = source[taken]
        target.memory.copy_(block.view(target.memory.shape))
        barrier.advance(0, -block.nbytes)

    with Barrier.turned:
        barrier.copies.append(finish)
        Barrier.turned.notify_all()


def product(a: Any, b: Shared, acc: Tile, use_acc: bool = True, is_async: bool = False) -> Callable[[], Tile]:
    """Issue an MMA; calling the result computes it."""

    def compute() -> Tile:
        left, right = (x.memory if isinstance(x, Shared) else x.as_subclass(Tensor) for x in (a, b))
        is_whole = acc.dtype == torch.int32
        assert left.dtype == right.dtype or {left.dtype, right.dtype} <= {torch.float8_e4m3fn, torch.float8_e5m2}
        wide = torch.float64 if is_whole else torch.float32
        result = (left.to(wide) @ right.to(wide)).to(acc.dtype)
        return tile(result + acc if use_acc else result)

    return compute


def reduce(function: Callable[..., Tensor]) -> Callable[[Tile, int], Tile]:
    return lambda x, axis: tile(function(x, dim=axis))


def elementwise(function: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda *arguments: tile(function(*map(torch.as_tensor, arguments)))


def where(condition: Any, a: Any, b: Any) -> Any:
    if not any(isinstance(x, Tensor) for x in (condition, a, b)):
        return a if condition else b
    return tile(torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b)))


def specialize(partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *resources: Any) -> None:
    """Run every partition in a thread, and raise the first error."""
    errors: list[BaseException] = []

    def run_partition(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            with Barrier.turned:
                function(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run_partition, args=partition, daemon=True) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, TimeoutError))


def allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Shared | Barrier:
    if dtype == torch.int64:
        return Barrier(shape)
    # Unwritten memory holds NaN, or -1 for integers.
    return Shared(torch.full((math.prod(shape) * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype).view(*shape))


def language() -> SimpleNamespace:
    """The language as kernels see it; :func:`run` sets the CTA."""
    none = lambda *arguments, **options: None  # noqa: E731
    return SimpleNamespace(
        int32=torch.int32, int64=torch.int64, int16=torch.int16, int8=torch.int8, float32=torch.float32,
        uint8=torch.uint8, bfloat16=torch.bfloat16, float16=torch.float16,
        float8e4nv=torch.float8_e4m3fn, constexpr=gl.constexpr,
        arange=lambda start, end, layout=None: tile(torch.arange(start, end, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout=None: tile(torch.zeros(list(shape), dtype=dtype)),
        zeros_like=elementwise(torch.zeros_like),
        full=lambda shape, value, dtype, layout=None: tile(torch.full(list(shape), value, dtype=dtype)),
        maximum=elementwise(torch.fmax), minimum=elementwise(torch.fmin), abs=elementwise(torch.abs),
        exp2=elementwise(torch.exp2), log2=elementwise(torch.log2), max=reduce(torch.amax), sum=reduce(torch.sum),
        to_tensor=tile, where=where, load=load, store=store, atomic_add=atomic_add,
        reshape=lambda x, shape: tile(x.reshape(shape)),
        permute=lambda x, order: tile(x.permute(*order)), split=lambda x: tuple(map(tile, x.unbind(-1))),
        expand_dims=lambda x, axis: tile(x.unsqueeze(axis)), join=lambda a, b: tile(torch.stack((a, b), -1)),
        convert_layout=lambda x, *options, **more: x,
        static_range=range, static_assert=none, allocate_shared_memory=allocate, warp_specialize=specialize,
        BlockedLayout=none, NVMMASharedLayout=none, SwizzledSharedLayout=none, NVMMADistributedLayout=none,
        SliceLayout=none, DotOperandLayout=none,
    )  # fmt: skip


class NamedBarriers:
    """The named barriers of a CTA: each completes when the given number of threads has arrived."""

    def __init__(self) -> None:
        self.arrived, self.completed = [0] * 16, [0] * 16

    def arrive(self, barrier: int, threads: int) -> None:
        self._come(int(barrier), int(threads), 128)

    def sync(self, barrier: int, threads: int) -> None:
        """Wait as the producer warp."""
        with Barrier.turned:
            before = self.completed[int(barrier)]
            self._come(int(barrier), int(threads), 32)
            if not Barrier.turned.wait_for(lambda: self.completed[int(barrier)] != before, PATIENCE):
                raise TimeoutError("a barrier that nobody completes")

    def _come(self, barrier: int, threads: int, count: int) -> None:
        assert 0 <= barrier < 16, "there is no such barrier"
        with Barrier.turned:
            self.arrived[barrier] += count
            assert self.arrived[barrier] <= threads, "more arrive than the barrier was made for"
            if self.arrived[barrier] == threads:
                self.arrived[barrier] = 0
                self.completed[barrier] += 1
                Barrier.turned.notify_all()


MODULES = (
    attend, hadamard, mask, mma, one_warpgroup, pipeline, skipping, softmax, tile_range,
    warp_specialized,
)  # fmt: skip


@cache
def emulated() -> tuple[SimpleNamespace, dict[str, dict[str, Any]]]:
    """Return the language, and the namespace of each kernel module, with functions as plain Python."""
    fake = language()
    scopes: dict[str, dict[str, Any]] = {module.__name__: {} for module in MODULES}
    for module in MODULES:
        scope = scopes[module.__name__]
        for name, value in vars(module).items():
            function = getattr(value, "fn", None)
            scope[name] = value.value if isinstance(value, gl.constexpr) else value
            if isinstance(function, FunctionType):
                own = scopes.get(function.__module__)
                scope[name] = as_python(function, triton_scope(function, fake) if own is None else own)
            elif hasattr(value, "__triton_aggregate__"):
                scope[name] = as_class(value, scopes[value.__module__])
        scope |= {
            "gl": fake, "copy": copy, "reinterpret": Shared.view_as, "fence_async_shared": lambda: None,
            "mbarrier": SimpleNamespace(init=init, wait=wait, MBarrierLayout=lambda: None, expect=expect),
            "_barrier": lambda: None,
            "init_votes": lambda: None, "_any_row_keeps": any_row_keeps, "_announce_keep": lambda *names: None,
            "warpgroup_mma": product, "warpgroup_mma_wait": wait_for_products,
            "is_16bit": lambda dtype: dtype.itemsize == 2,
            "wait_for_operands": lambda: None,
        }  # fmt: skip
    return fake, scopes


def as_python(function: FunctionType, scope: dict[str, Any]) -> FunctionType:
    return FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)


def as_class(aggregate: Any, scope: dict[str, Any]) -> type:
    """Return a plain Python class for an aggregate."""

    def init(self: Any, **values: Any) -> None:
        assert set(values) == set(aggregate.fields)
        vars(self).update(values)

    functions = {name: getattr(method, "fn", None) for name, method in vars(aggregate).items()}
    methods = {name: as_python(fn, scope) for name, fn in functions.items() if isinstance(fn, FunctionType)}
    return type(aggregate.__name__, (), {"__init__": init, **methods})


def triton_scope(function: FunctionType, fake: SimpleNamespace) -> dict[str, Any]:
    """Return the namespace of a Triton function's module, in this language."""
    scope: dict[str, Any] = {"tl": fake}
    for name, value in function.__globals__.items():
        if name == "tl":
            continue
        inner = getattr(value, "fn", None)
        scope[name] = value.value if isinstance(value, gl.constexpr) else value
        if isinstance(inner, FunctionType):
            scope[name] = as_python(
                inner, scope if inner.__module__ == function.__module__ else triton_scope(inner, fake)
            )
    return scope


def wait_for_products(count: int, deps: Sequence[Any]) -> Any:
    """Return the results of MMAs, and other dependencies unchanged."""
    found = tuple(x() if callable(x) and not isinstance(x, Tensor) else x for x in deps)
    return found[0] if len(found) == 1 else found


def run(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: dict[str, Any]) -> None:
    """Launch a kernel of :data:`MODULES` with tensors, ``None``, numbers and tensor descriptors, and constexprs."""

    def given(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return Pointer(argument)
        if isinstance(argument, int):
            return tile(argument)
        if hasattr(argument, "base"):
            fields = {name: getattr(argument, name) for name in ("base", "shape", "strides", "block_shape")}
            return SimpleNamespace(**fields, dtype=argument.base.dtype, layout=None)
        return argument

    fake, scopes = emulated()
    for program in itertools.product(*map(range, grid)):
        barriers = NamedBarriers()
        scopes[pipeline.__name__] |= {"bar_arrive": barriers.arrive, "bar_sync": barriers.sync}
        fake.program_id = lambda axis, i=program: tile(i[axis])
        scopes[kernel.fn.__module__][kernel.fn.__name__](*map(given, arguments), **constants)

"""Launch plans: the allocations and launches of a call, computed once per set of tensor layouts.

A model calls attention with the same tensor layouts in every layer and step. Kernels, grids and integer arguments are
then the same each time; only addresses change. A :class:`LaunchPlan` runs the host code once, on
:class:`PlannedTensor`, and records its allocations and launches. A run allocates, fills in the addresses and launches:
the first time through Triton, which compiles, later by the compiled kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..numerics.layout import TensorLayout, layout_of
from .launch import (
    DirectLaunch,
    KernelLaunch,
    compile_together,
    current_stream,
    direct_launch,
    launch_by_triton,
    launches_directly,
    launching,
    on_device,
    rebased,
    settings,
)

_WORKSPACE_ALIGNMENT = 256
"""Alignment of tensors in the workspace, in bytes: that of PyTorch's own allocations."""


class PlannedTensor(TensorLayout):
    """A layout that stands for a tensor while a plan is made, with the part of its interface that host code needs."""

    plan: LaunchPlan
    slot: int  # index of the tensor in the plan

    @classmethod
    def in_slot(cls, plan: LaunchPlan, slot: int, layout: TensorLayout) -> PlannedTensor:
        """Return the tensor with a slot of the plan, in a layout."""
        made: PlannedTensor = tuple.__new__(cls, layout)
        made.plan, made.slot = plan, slot
        return made

    def view(self, dtype: torch.dtype) -> PlannedTensor:
        """Return the same bytes in another dtype of the same size."""
        assert dtype.itemsize == self.dtype.itemsize, "a planned tensor is viewed in a dtype of the same size"
        return self.in_slot(self.plan, self.slot, self._replace(dtype=dtype))

    def as_strided(self, size: Sequence[int], stride: Sequence[int]) -> PlannedTensor:
        """Return a view that begins at the same element."""
        return self.in_slot(self.plan, self.slot, self._replace(shape=torch.Size(size), strides=tuple(stride)))

    def transpose(self, first: int, second: int) -> PlannedTensor:
        """Return a view with two dimensions exchanged."""
        shape, strides = list(self.shape), list(self.strides)
        for sizes in (shape, strides):
            sizes[first], sizes[second] = sizes[second], sizes[first]
        return self.as_strided(shape, strides)

    def new_empty(self, size: Sequence[int], *, dtype: torch.dtype | None = None) -> PlannedTensor:
        """Plan an allocation on the same device."""
        made: PlannedTensor = self.plan.add(TensorLayout.dense(tuple(size), dtype or self.dtype, self.device))
        return made

    def new_zeros(self, size: Sequence[int], *, dtype: torch.dtype | None = None) -> PlannedTensor:
        """Plan an allocation that is filled with zeros before the first launch."""
        made = self.new_empty(size, dtype=dtype)
        self.plan.zeroed.add(made.slot)
        return made


class PlannedNumber:
    """Stands for an integer that calls of a plan do not share. Host code can only pass it to a launch."""

    __slots__ = ("slot",)

    def __init__(self, slot: int) -> None:
        self.slot = slot


NUMBER = "number"
"""In place of the layout of an input that is an integer."""


def _with_tensors(argument: Any, inputs: Mapping[int, Any]) -> Any:
    """Return an argument of a launch with the inputs of a call, by slot, in place of what stands for them."""
    if isinstance(argument, PlannedTensor):
        tensor = inputs[argument.slot]
        return tensor if tensor.dtype == argument.dtype else tensor.view(argument.dtype)
    if isinstance(argument, PlannedNumber):
        return inputs[argument.slot]
    if isinstance(argument, tuple):
        items = [_with_tensors(each, inputs) for each in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    base = getattr(argument, "base", None)
    return rebased(argument, _with_tensors(base, inputs)) if isinstance(base, PlannedTensor) else argument


def _filler(
    arguments: Sequence[Any], index: Mapping[int, int], direct: DirectLaunch
) -> Callable[[Sequence[int]], Sequence[Any]]:
    """Return a function that fills the inputs of a call into the arguments of a launch.

    It takes addresses and numbers; ``index`` is that of a slot. They, constants and then tuples form one list, of which
    arguments and tuples are items: no step of a call depends on the number of arguments.
    """
    first_constant = max(index.values(), default=-1) + 1
    constants: list[Any] = []
    tuples: list[list[int]] = []
    descriptors: list[tuple[int, Callable[[int], Sequence[Any]]]] = []

    def place(argument: Any) -> int:
        """Return the index of an argument in the list; tuples count from -1 down until all constants are known."""
        if isinstance(argument, (PlannedTensor, PlannedNumber)):
            return index[argument.slot]
        if isinstance(argument, tuple) and argument:
            tuples.append([place(each) for each in argument])
            return -len(tuples)
        constants.append(argument.data_ptr() if isinstance(argument, Tensor) else argument)
        return first_constant + len(constants) - 1

    places: list[int] = []
    for argument in arguments:
        base = getattr(argument, "base", None)
        if isinstance(base, PlannedTensor):
            describe = direct.descriptor(len(descriptors), argument)
            descriptors.insert(0, (len(places), describe))  # the last one first, so that others keep their indices
            argument = base
        places.append(place(argument))
    first_tuple = first_constant + len(constants)
    *pick_tuples, pick = (
        _picker([first_tuple - 1 - i if i < 0 else i for i in indices]) for indices in (*tuples, places)
    )

    def fill(numbers: Sequence[int]) -> Sequence[Any]:
        items = [*numbers, *constants]
        for pick_tuple in pick_tuples:
            items.append(pick_tuple(items))
        filled = pick(items)
        if descriptors:
            parts = list(filled)
            for i, describe in descriptors:
                parts[i : i + 1] = describe(parts[i])
            return tuple(parts)
        return filled

    return fill


def _picker(indices: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function from a list to the tuple of its items at some indices."""
    if len(indices) == 1:  # itemgetter would not return a tuple
        return lambda items: (items[indices[0]],)
    return itemgetter(*indices)


class LaunchPlan:
    """The allocations and launches of a function, which runs once, when the plan is made. Threads may share a plan.

    The first run launches through Triton, which compiles; later ones launch the compiled kernels. Everything that a
    call allocates except its results is one workspace.

    Args:
        function: Takes the planned inputs in order. It may look at layouts, allocate with ``new_empty`` and
            ``new_zeros``, and launch with :func:`~dma_kernels.runtime.launch.launch_kernel`. It returns some of its
            allocations.
        inputs: Layouts of the inputs; ``None`` for one that is missing, and ``NUMBER`` for an integer.
        device: Device of all tensors.
    """

    def __init__(
        self, function: Callable[..., Sequence[PlannedTensor]], inputs: Sequence[Any], device: torch.device
    ) -> None:
        self.device = device
        self.launches: list[KernelLaunch] = []
        self.zeroed: set[int] = set()  # slots of the allocations that are zeroed
        self._planned = planned = list[Any]()  # inputs and allocations in order of creation, by slot
        with launching(self._add_launch):
            results = function(*map(self.add, inputs))
        self._results = [(x.shape, x.strides, x.dtype) for x in results]
        of_results = [x.slot for x in results]
        assert len(set(of_results)) == len(results), "every result has memory of its own"
        assert not self.zeroed & set(of_results), "results are not zeroed"
        assert all(slot >= len(inputs) for slot in of_results), "results are allocated by the call"
        allocated = [slot for slot in range(len(inputs), len(planned)) if slot not in of_results]
        allocated.sort(key=lambda slot: slot not in self.zeroed)  # so that one fill zeroes all of them
        self._offsets, self._zeroed_bytes, self._workspace_bytes = [], 0, 0
        for slot in allocated:
            self._offsets.append(self._workspace_bytes)
            self._workspace_bytes += -(-planned[slot].nbytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
            if slot in self.zeroed:
                self._zeroed_bytes = self._workspace_bytes
        self._allocated = [planned[slot] for slot in allocated]
        self._slots = [*range(len(inputs)), *of_results, *allocated]  # of the numbers that launches take
        self._kernels = [launch.kernel for launch in self.launches]
        # For each compiled kernel, a function that returns all its arguments, given all numbers, and its launch.
        self._direct: list[tuple[Callable[[Sequence[int]], Sequence[Any]], Callable[..., None]]] = []
        self._settings: tuple[Any, ...] | None = None  # Triton's settings when the kernels were compiled

    def add(self, kind: Any) -> Any:
        """Add a slot for a tensor in a layout, for a ``NUMBER``, or for ``None``; return what stands for it."""
        slot = len(self._planned)
        made: Any = kind
        if kind is not None:
            made = PlannedNumber(slot) if kind is NUMBER else PlannedTensor.in_slot(self, slot, kind)
        self._planned.append(made)
        return made

    def _add_launch(self, launch: KernelLaunch) -> None:
        """Add a launch. Real tensors among its arguments are the same in every call."""
        if not self.launches and launch.keywords.get("launch_pdl"):
            raise RuntimeError(
                f"{launch.kernel.fn.__name__} starts before the previous launch ends, and may read the call's "
                "inputs at once; the call must first launch a kernel that starts after all earlier work"
            )
        self.launches.append(launch)

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels, in the order of their launches."""
        return [kernel.fn.__name__ for kernel in self._kernels]

    def run(self, inputs: Sequence[Any], numbers: Sequence[int] | None = None) -> list[Tensor]:
        """Allocate and launch.

        Args:
            inputs: Tensors with the layouts that the plan was made for, and integers.
            numbers: What :func:`numbers_of` returns for them, if the caller knows it.
        """
        device = self.device
        with on_device(device):
            results = []
            for shape, strides, dtype in self._results:
                results.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
            workspace = None
            if self._allocated:
                workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=device)
                if self._zeroed_bytes:
                    workspace[: self._zeroed_bytes].zero_()
            if self._settings != settings() or not launches_directly(self._kernels):
                self._launch_by_triton(inputs, results, workspace)
                return results
            filled = numbers_of(inputs) if numbers is None else [*numbers]
            for result in results:
                filled.append(result.data_ptr())
            if workspace is not None:
                start = workspace.data_ptr()
                for offset in self._offsets:
                    filled.append(start + offset)
            stream = current_stream()
            for fill, launch in self._direct:
                launch(fill(filled), stream)
        return results

    def _launch_by_triton(self, inputs: Sequence[Any], results: Sequence[Tensor], workspace: Tensor | None) -> None:
        """Launch through Triton, and keep the direct launches of the compiled kernels for later calls."""
        given = [*inputs, *results]
        for planned, offset in zip(self._allocated, self._offsets, strict=True):
            assert workspace is not None
            given.append(workspace[offset : offset + planned.nbytes].view(planned.dtype))
        by_slot, compiled_under = dict(zip(self._slots, given, strict=True)), settings()
        index = {slot: i for i, slot in enumerate(self._slots)}
        launches = [(launch, _with_tensors(launch.arguments, by_slot)) for launch in self.launches]
        compile_together(launches)
        found = []
        for launch, arguments in launches:
            direct = direct_launch(launch, launch_by_triton(launch, arguments))
            if direct is not None:
                found.append((_filler((*launch.arguments, *launch.constants), index, direct), direct.run))
        self._settings = None  # another thread must not launch some of them
        if found and len(found) == len(self.launches):  # an empty call has no launch, nor the interpreter a stream
            self._direct, self._settings = found, compiled_under


def numbers_of(inputs: Sequence[Any]) -> list[int]:
    """Return the addresses of tensors, 0 for ``None``, and integers unchanged."""
    numbers = []
    for given in inputs:
        numbers.append(0 if given is None else given if isinstance(given, int) else given.data_ptr())
    return numbers


class Planned:
    """Decorates host code, so that each call runs a plan, made once per set of tensor layouts and options.

    The function is one for :class:`LaunchPlan`. Its inputs are positional arguments, the first of them a tensor; its
    options are hashable keyword arguments.
    """

    def __init__(self, function: Callable[..., Sequence[Any]]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.plan = functools.lru_cache(maxsize=1024)(self._plan)

    def __call__(self, *inputs: Tensor | None, **options: Any) -> list[Tensor]:
        return self.plan_of(inputs, **options).run(inputs)

    def plan_of(self, inputs: Sequence[Tensor | None], **options: Any) -> LaunchPlan:
        """Return the plan of a call."""
        return self.plan(tuple(map(layout_of, inputs)), **options)

    def _plan(self, layouts: tuple[TensorLayout | None, ...], **options: Any) -> LaunchPlan:
        assert layouts[0] is not None
        return LaunchPlan(functools.partial(self._function, **options), layouts, layouts[0].device)

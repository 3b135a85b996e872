"""Launch plans: the allocations and launches of a call, computed once per set of tensor layouts.

A model calls attention with the same tensor layouts in every layer and step. Kernels, grids and integer arguments are
then the same each time; only addresses change. :func:`make_plan` runs the host code on :class:`PlannedTensor`, which
has a layout but no memory, and records the launches. The first run of a plan calls the host code on real tensors, and
Triton compiles the kernels. Later runs allocate, fill in addresses, and launch the compiled kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ..numerics.layout import TensorLayout, layout_of
from .launch import (
    DirectLaunch,
    KernelLaunch,
    current_stream,
    direct_launch,
    launch_by_triton,
    launches_directly,
    launching,
    leaves,
    on_device,
    settings,
)

_WORKSPACE_ALIGNMENT = 256
"""Alignment of tensors in the workspace, in bytes: that of PyTorch's own allocations."""


class PlannedTensor:
    """Placeholder for a tensor while a plan is made: a layout and the slot of an address.

    Together with its layout's attributes, it has the part of a tensor's interface that host code needs.
    """

    __slots__ = ("layout", "plan", "slot")

    def __init__(self, plan: PlanBuilder, slot: int, layout: TensorLayout) -> None:
        self.plan, self.slot, self.layout = plan, slot, layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layout, name)

    def view(self, dtype: torch.dtype) -> PlannedTensor:
        """Return the same bytes in another dtype of the same size."""
        assert dtype.itemsize == self.dtype.itemsize, "a planned tensor is viewed in a dtype of the same size"
        return PlannedTensor(self.plan, self.slot, self.layout._replace(dtype=dtype))

    def as_strided(self, size: Sequence[int], stride: Sequence[int]) -> PlannedTensor:
        """Return a view that begins at the same element."""
        layout = self.layout._replace(shape=torch.Size(size), strides=tuple(stride))
        return PlannedTensor(self.plan, self.slot, layout)

    def transpose(self, first: int, second: int) -> PlannedTensor:
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        return self.as_strided([self.shape[i] for i in order], [self.stride(i) for i in order])

    def new_empty(self, size: Sequence[int], *, dtype: torch.dtype | None = None) -> PlannedTensor:
        """Plan an allocation on the same device."""
        return self.plan.allocate(size, dtype or self.dtype, self.device, is_zeroed=False)

    def new_zeros(self, size: Sequence[int], *, dtype: torch.dtype | None = None) -> PlannedTensor:
        """Plan an allocation that is filled with zeros before the first launch."""
        return self.plan.allocate(size, dtype or self.dtype, self.device, is_zeroed=True)


@dataclass
class PlanBuilder:
    """Records the allocations and launches of host code."""

    # inputs and allocations in order of creation, by slot; ``None`` for a missing input
    tensors: list[PlannedTensor | None] = field(default_factory=list)
    zeroed: set[int] = field(default_factory=set)  # slots of the allocations that are zeroed
    launches: list[KernelLaunch] = field(default_factory=list)  # in order

    def add_input(self, layout: TensorLayout | None) -> PlannedTensor | None:
        """Add the next input of the call."""
        tensor = None if layout is None else PlannedTensor(self, len(self.tensors), layout)
        self.tensors.append(tensor)
        return tensor

    def allocate(
        self, size: Sequence[int], dtype: torch.dtype, device: torch.device, *, is_zeroed: bool
    ) -> PlannedTensor:
        """Add a tensor that each call allocates."""
        tensor = PlannedTensor(self, len(self.tensors), TensorLayout.dense(tuple(size), dtype, device))
        self.tensors.append(tensor)
        if is_zeroed:
            self.zeroed.add(tensor.slot)
        return tensor

    def launch(self, launch: KernelLaunch) -> None:
        """Add a launch. Real tensors among its arguments are the same in every call.

        Raises:
            RuntimeError: The first launch may start early (``launch_pdl``).
        """
        if not self.launches and launch.keywords.get("launch_pdl"):
            raise RuntimeError(
                f"{launch.kernel.fn.__name__} starts before the previous launch ends, and may read the call's "
                "inputs at once; the call must first launch a kernel that starts after all earlier work"
            )
        self.launches.append(launch)


class _Address:
    """Placeholder for the tensor of a descriptor: a launch reads only its address."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def _filler(
    arguments: tuple[Any, ...], index: Mapping[int, int], direct: DirectLaunch
) -> Callable[[Sequence[int]], tuple[Any, ...]]:
    """Return a function that fills addresses into arguments with planned tensors and descriptors of them.

    ``index`` is that of an address, by the slot of its tensor. The function is one compiled expression, because a
    launch has up to a hundred arguments, some in tuples.
    """
    constants: dict[str, Any] = {}
    descriptors = 0

    def constant(value: Any) -> str:
        name = f"c{len(constants)}"
        constants[name] = value
        return name

    def expression(argument: Any) -> str:
        if isinstance(argument, Tensor):
            return constant(argument.data_ptr())
        base = getattr(argument, "base", argument)
        if isinstance(base, PlannedTensor):
            address = f"addresses[{index[base.slot]}]"
            if base is argument:
                return address
            nonlocal descriptors
            describe = direct.descriptor(descriptors, _descriptor_maker(argument))
            descriptors += 1
            return f"*{constant(describe)}({address})"
        if isinstance(argument, tuple) and any(map(_has_address, leaves(argument))):
            items = "".join(f"{expression(each)}, " for each in argument)
            return f"{constant(type(argument))}({items})" if hasattr(argument, "_fields") else f"({items})"
        return constant(argument)

    source = f"lambda addresses: ({''.join(f'{expression(each)}, ' for each in arguments)})"
    function: Callable[[Sequence[int]], tuple[Any, ...]] = eval(_code(source), constants)
    return function


@functools.lru_cache(maxsize=256)
def _code(source: str) -> CodeType:
    """Compile an expression; cached, because calls that differ only in length share it."""
    return compile(source, "<arguments of a launch>", "eval")


def _has_address(argument: Any) -> bool:
    return isinstance(getattr(argument, "base", argument), (PlannedTensor, Tensor))


def _descriptor_maker(descriptor: Any) -> Callable[[int], Any]:
    """Return a function that makes the same descriptor for another address, without repeating its checks."""
    kind = type(descriptor)
    attributes = {name: value for name, value in vars(descriptor).items() if name != "base"}

    def make(address: int) -> Any:
        made: Any = object.__new__(kind)
        made.__dict__.update(attributes, base=_Address(address))
        return made

    return make


class LaunchPlan:
    """The allocations and launches of a call. Safe to share between threads.

    The first run goes through Triton's own launch, which compiles. Later ones launch the compiled kernels, and allocate
    everything except the results as one workspace.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Any]],
        builder: PlanBuilder,
        inputs: int,
        results: Sequence[PlannedTensor],
        device: torch.device,
    ) -> None:
        self.device = device
        self._function = function
        self._results = [(x.slot, x.shape, x.stride(), x.dtype) for x in results]
        slots = {slot for slot, *_ in self._results}
        assert len(slots) == len(results), "every result has memory of its own"
        assert not slots & (builder.zeroed | set(range(inputs))), "results are allocated by the call and not zeroed"
        allocated = [slot for slot in range(inputs, len(builder.tensors)) if slot not in slots]
        allocated.sort(key=lambda slot: slot not in builder.zeroed)  # so that one fill zeroes all of them
        self._offsets, self._zeroed_bytes, size = [], 0, 0
        for slot in allocated:
            tensor = builder.tensors[slot]
            assert tensor is not None
            self._offsets.append(size)
            size += -(-tensor.nbytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
            if slot in builder.zeroed:
                self._zeroed_bytes = size
        self._workspace_bytes = size
        order = [*range(inputs), *(slot for slot, *_ in self._results), *allocated]
        self._index = {slot: i for i, slot in enumerate(order)}  # index of an address
        self.launches = tuple(builder.launches)
        self._kernels = [launch.kernel for launch in self.launches]
        # For each compiled kernel, a function that returns all its arguments, given all addresses, and its launch.
        self._direct: list[tuple[Callable[[Sequence[int]], tuple[Any, ...]], Callable[..., None]]] = []
        self._settings: tuple[Any, ...] | None = None  # Triton's settings when the kernels were compiled

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels, in the order of their launches."""
        return [kernel.fn.__name__ for kernel in self._kernels]

    def run(self, inputs: Sequence[Tensor | None], addresses: Sequence[int] | None = None) -> list[Tensor]:
        """Allocate and launch.

        Args:
            inputs: Tensors with the layouts that the plan was made for.
            addresses: Their addresses, 0 for ``None``, if the caller knows them.
        """
        device = self.device
        with on_device(device):
            if self._settings != settings() or not launches_directly(self._kernels):
                return self._run_by_triton(inputs)
            results = [
                torch.empty_strided(shape, strides, dtype=dtype, device=device)
                for _, shape, strides, dtype in self._results
            ]
            if addresses is None:
                addresses = addresses_of(inputs)
            addresses = [*addresses, *(result.data_ptr() for result in results)]
            if self._workspace_bytes:
                workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=device)
                if self._zeroed_bytes:
                    workspace[: self._zeroed_bytes].zero_()
                start = workspace.data_ptr()
                addresses += [start + offset for offset in self._offsets]
            stream = current_stream()
            for fill, launch in self._direct:
                launch(fill(addresses), stream)
        return results

    def _run_by_triton(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Run the host code on real tensors, and keep the direct launches of its kernels for later calls."""
        compiled_under, compiled = settings(), []
        with launching(lambda launch: compiled.append(launch_by_triton(launch))):
            results = self._function(*inputs)
        launched = [(each, direct_launch(each, kernel)) for each, kernel in zip(self.launches, compiled, strict=True)]
        self._direct = [
            (_filler((*each.arguments, *each.constants), self._index, direct), direct.run)
            for each, direct in launched
            if direct is not None
        ]
        self._settings = compiled_under if len(self._direct) == len(self.launches) else None
        return list(results)


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the addresses of tensors, 0 for ``None``."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def make_plan(
    function: Callable[..., Sequence[PlannedTensor]], inputs: Sequence[TensorLayout | None], device: torch.device
) -> LaunchPlan:
    """Plan the allocations and launches of a function.

    Args:
        function: Takes the inputs in order, planned or real ones. It may look at layouts, allocate with ``new_empty``
            and ``new_zeros``, and launch with :func:`~dma_kernels.runtime.launch.launch_kernel`. It returns some of its
            allocations.
        inputs: Layouts of the inputs; ``None`` for one that is missing.
        device: Device of all tensors.
    """
    builder = PlanBuilder()
    with launching(builder.launch):
        results = function(*map(builder.add_input, inputs))
    return LaunchPlan(function, builder, len(inputs), results, device)


class Planned:
    """Decorates host code, so that each call runs a plan, made once per set of tensor layouts and options.

    The function is one for :func:`make_plan`. Its inputs are positional arguments, the first of them a tensor; its
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
        return make_plan(functools.partial(self._function, **options), layouts, layouts[0].device)

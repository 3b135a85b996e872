"""Properties of the device or the interpreter, and the choice of a backend."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import torch

BACKENDS = ("auto", "reference", "triton")
DTYPES = (torch.bfloat16, torch.float16)
MIN_ARCH = 80
BLOCK_SCALED_ARCHS = frozenset({100, 103, 110, 120, 121})
"""Architectures with block-scaled tensor cores."""
TENSOR_MEMORY_ARCHS = frozenset({100, 103, 110})
"""Architectures with tensor memory. Their block-scaled MMAs have 128 rows, which do not fit with over 128 channels."""
MAX_CTAS = 65_535
"""Maximum number of CTAs along the second and the third axis of a grid."""


@dataclass(frozen=True)
class Chip:
    """What kernels and their configurations depend on in a device."""

    arch: int  # compute capability, major times ten plus minor
    sms: int  # number of SMs
    is_interpreted: bool = False  # whether it is the Triton interpreter, which runs no Gluon and has no PDL

    @property
    def supports_pdl(self) -> bool:
        """Whether a kernel may start before the previous one has ended (programmatic dependent launch, PDL)."""
        return self.arch >= 90 and not self.is_interpreted


INTERPRETER = Chip(arch=90, sms=2, is_interpreted=True)
"""Hopper, so that a CPU runs its code; few SMs, so that work is split unevenly."""


def of(device: torch.device) -> Chip:
    """Return the chip of a device that runs Triton's kernels; on the CPU, the interpreter runs them."""
    if device.type == "cpu":
        return INTERPRETER
    return _cuda_chip(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _cuda_chip(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    return Chip(10 * properties.major + properties.minor, properties.multi_processor_count)


def is_interpreted() -> bool:
    """Whether Triton runs kernels on the CPU (``TRITON_INTERPRET=1``)."""
    import triton  # the reference does not need it

    return bool(triton.knobs.runtime.interpret)


def triton_version() -> tuple[int, ...]:
    """Return the installed Triton's version, major and minor."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2]))


def has_block_scaled_mma(arch: int, channels: int) -> bool:
    """Whether block-scaled tensor cores can multiply queries and keys with this many channels.

    Chips with tensor memory need Triton 3.9 or later: 3.6 to 3.8 fail to compile the MMA.
    """
    if arch not in TENSOR_MEMORY_ARCHS:
        return arch in BLOCK_SCALED_ARCHS
    return channels <= 128 and triton_version() >= (3, 9)


def unsupported_reason(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the Triton backend cannot run on tensors of this dtype and device; ``None`` if it can."""
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreted()):
        return f"it needs a CUDA device, got {device}"
    if device.type == "cuda" and torch.version.hip is not None:
        return "it needs an NVIDIA GPU, and this PyTorch is for ROCm"
    if dtype not in DTYPES:
        return f"it takes bf16 and fp16, got {dtype}"
    arch = of(device).arch
    if arch < MIN_ARCH:
        return f"it needs compute capability 8.0 or later, {device} has {arch // 10}.{arch % 10}"
    return None


def check_backend(backend: str) -> None:
    """Raise a ``ValueError`` if there is no backend of that name."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")


def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the backend that computes on tensors of this device and dtype: ``reference`` or ``triton``.

    ``auto`` selects Triton on CUDA and the reference elsewhere. If Triton cannot run on CUDA, it selects the reference
    and warns.

    Raises:
        ValueError: There is no backend of that name.
        RuntimeError: ``triton`` is requested and cannot run on such tensors.
    """
    check_backend(backend)
    if backend == "reference" or (backend == "auto" and device.type != "cuda"):
        return "reference"
    reason = unsupported_reason(dtype, device)
    if backend == "triton":
        if reason is not None:
            raise RuntimeError(f"backend='triton' cannot run: {reason}; use backend='reference' or 'auto'")
        return backend
    if reason is None:
        return "triton"
    _warn_of_reference(reason)
    return "reference"


@functools.cache
def _warn_of_reference(reason: str) -> None:
    """Warn, once per reason, that ``auto`` runs the reference on CUDA."""
    warnings.warn(
        f"attention runs in torch on a CUDA device, slowly: backend='auto' cannot use Triton, {reason}", stacklevel=3
    )

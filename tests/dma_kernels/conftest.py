"""Fixtures of the kernels' tests, and the oracle of the block formats in numpy, fp64 and ml_dtypes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from compiled_calls import CompiledCalls
from dma_kernels.prefill.plan import forget_plans
from dma_kernels.runtime import chip

# Largest exponent and magnitude of the element formats, from the specification.
ELEMENTS = {"mxfp4": (2, 6.0), "mxfp8": (8, 448.0), "mxint8": (0, 127 / 64)}


class OracleTensor(NamedTuple):
    """A quantized ``[N, T, D]``."""

    codes: np.ndarray  # of elements, ``[N, T, D']``
    scales: np.ndarray  # ``[N, T, blocks]``
    values: np.ndarray


class Oracle:
    """Quantizes one block at a time. Scales are found by search, not derived from bits."""

    def scale_exponent(self, amax: float, format: str, rounding: str) -> int:
        """Return the exponent of the E8M0 scale by its definition."""
        emax, largest = ELEMENTS[format]
        if amax == 0.0:
            return -127
        exponent = math.frexp(amax)[1] - 1 - emax  # floor(log2(amax)) - emax
        if rounding == "ceil" and amax > math.ldexp(largest, exponent):
            exponent += 1
        return min(max(exponent, -127), 127)

    def elements(self, scaled: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the codes and values of scaled numbers."""
        if format == "mxint8":
            codes = np.clip(np.rint(scaled * 64.0), -127, 127).astype(np.int8)
            return codes, codes / 64.0
        dtype, largest = (ml_dtypes.float8_e4m3fn, 448.0) if format == "mxfp8" else (ml_dtypes.float4_e2m1fn, 6.0)
        cast = np.clip(scaled, -largest, largest).astype(np.float32).astype(dtype)
        return cast.view(np.uint8), cast.astype(np.float64)

    def quantize(
        self, x: torch.Tensor, format: str, *, rounding: str = "ceil", shared: str = "block", offset: int = 0
    ) -> OracleTensor:
        """Quantize ``[N, T, D]``; ``offset`` is the position of row 0."""
        size = 16 if format == "nvfp4" else 32
        array = x.float().numpy()
        batch, length, head_dim = array.shape
        array = np.pad(array, ((0, 0), (0, 0), (0, -head_dim % size))).reshape(batch, length, -1, size)
        amax = np.abs(array).max(-1)  # [N, T, blocks]
        codes = np.zeros(array.shape, np.int8 if format == "mxint8" else np.uint8)
        values = np.zeros(array.shape, np.float64)
        scales = np.zeros(amax.shape, np.float64)
        for n, t, b in np.ndindex(*amax.shape):
            if shared == "block":
                largest = amax[n, t, b]
            elif shared == "row":
                largest = amax[n, t].max()
            else:
                tile = [row for row in range(length) if (row + offset) // 128 == (t + offset) // 128]
                largest = amax[n, tile].max()
            if not np.isfinite(largest):
                scales[n, t, b], values[n, t, b] = np.nan, np.nan
                continue
            head_scale = self.nvfp4_head_scale(amax[n], rounding) if format == "nvfp4" else 1.0
            best = math.inf
            for scale in self.candidates(float(largest), format, rounding, head_scale):
                total = np.float32(scale) * np.float32(head_scale) if format == "nvfp4" else np.float64(scale)
                tried_codes, elements = self.elements(array[n, t, b] / total, format)
                tried = elements * np.float64(total)
                loss = np.abs(array[n, t, b].astype(np.float64) - tried).sum()
                if loss < best * (1 - 2.0**-10):
                    best = loss
                    scales[n, t, b], codes[n, t, b], values[n, t, b] = scale, tried_codes, tried
        flat = (batch, length, array.shape[2] * size)
        return OracleTensor(codes.reshape(flat), scales, values.reshape(flat)[..., :head_dim])

    def candidates(self, amax: float, format: str, rounding: str, head_scale: float) -> list[float]:
        """Return the candidate scales; the first one wins a tie."""
        if format == "nvfp4":
            # fp32 arithmetic, one rounding at each step.
            tops = (6.0, 4.0) if rounding == "search" else (6.0,)
            exact = [np.float32(amax) / np.float32(top) / np.float32(head_scale) for top in tops]
            limited = [np.clip(scale, 2.0**-9, 448.0).astype(np.float32) for scale in exact]
            return [float(scale.astype(ml_dtypes.float8_e4m3fn)) for scale in limited]
        roundings = ("ceil", "floor") if rounding == "search" else (rounding,)
        return [2.0 ** self.scale_exponent(amax, format, each) for each in roundings]

    def nvfp4_head_scale(self, amax: np.ndarray, rounding: str) -> float:
        """Return the smallest power of two, at least ``2 ** -126``, that keeps block scales within 448."""
        top = 4.0 if rounding == "search" else 6.0
        largest = float(amax[np.isfinite(amax)].max(initial=0.0))
        exponent = -126
        while largest > math.ldexp(top * 448.0, exponent):
            exponent += 1
        return math.ldexp(1.0, exponent)


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """The independent quantizer."""
    return Oracle()


@pytest.fixture(scope="session")
def compiled_by(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], CompiledCalls]]:
    """Compile calls with a program in ``tests/support``, once for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made: dict[str, CompiledCalls] = {}

    def make(program: str) -> CompiledCalls:
        folder = shared / f"compiled-{program}"
        folder.mkdir(exist_ok=True)
        return made.setdefault(program, CompiledCalls(Path(__file__).parents[1] / "support" / program, folder))

    yield make
    for calls in made.values():
        calls.close()


@pytest.fixture
def on_chip(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter emulate the chip that a test is parametrized with."""
    monkeypatch.setattr(chip, "INTERPRETER", replace(chip.INTERPRETER, arch=arch))


@pytest.fixture(autouse=True)
def no_plans() -> None:
    """Clear plans before each test, because tests change the chip that the interpreter emulates."""
    forget_plans()

"""Fixtures of the kernels' tests, and the oracle of the block formats: numpy, fp64 and ml_dtypes, block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import settings

# The same examples in every run: a failure is a failure of the change at hand.
settings.register_profile("dma_kernels", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("dma_kernels")

# Largest exponent and magnitude of the element formats, from the specification.
ELEMENTS = {"mxfp4": (2, 6.0), "mxfp8": (8, 448.0), "mxint8": (0, 127 / 64)}


@dataclass(frozen=True)
class OracleTensor:
    """What the oracle makes of ``[N, T, D]``: element codes ``[N, T, D']``, scales ``[N, T, blocks]``, values."""

    codes: np.ndarray
    scales: np.ndarray
    values: np.ndarray


class Oracle:
    """Quantises one block at a time with the scale searched for, not derived from bits."""

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
        """Return the codes and values of already scaled numbers."""
        if format == "mxint8":
            codes = np.clip(np.rint(scaled * 64.0), -127, 127).astype(np.int8)
            return codes, codes / 64.0
        dtype, largest = (ml_dtypes.float8_e4m3fn, 448.0) if format == "mxfp8" else (ml_dtypes.float4_e2m1fn, 6.0)
        cast = np.clip(scaled, -largest, largest).astype(np.float32).astype(dtype)
        return cast.view(np.uint8), cast.astype(np.float64)

    def quantize(
        self, x: torch.Tensor, format: str, *, rounding: str = "ceil", shared: str = "block", offset: int = 0
    ) -> OracleTensor:
        """Quantise ``[N, T, D]``; ``offset`` is the position of row 0."""
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
            if format == "nvfp4":
                head_scale = self.nvfp4_head_scale(amax[n])
                # fp32 arithmetic, one rounding at each step.
                scale = np.float32(largest) / np.float32(6.0) / np.float32(head_scale)
                scale = np.clip(scale, 2.0**-9, 448.0).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
                scales[n, t, b] = np.float64(scale)
                total = np.float32(scale) * np.float32(head_scale)
            else:
                total = np.float64(2.0) ** self.scale_exponent(float(largest), format, rounding)
                scales[n, t, b] = total
            codes[n, t, b], elements = self.elements(array[n, t, b] / total, format)
            values[n, t, b] = elements * np.float64(total)
        flat = (batch, length, array.shape[2] * size)
        return OracleTensor(codes.reshape(flat), scales, values.reshape(flat)[..., :head_dim])

    def nvfp4_head_scale(self, amax: np.ndarray) -> float:
        """Return the smallest power of two, at least ``2 ** -126``, that keeps finite blocks within 6 * 448."""
        largest = float(amax[np.isfinite(amax)].max(initial=0.0))
        exponent = -126
        while largest > math.ldexp(6.0 * 448.0, exponent):
            exponent += 1
        return math.ldexp(1.0, exponent)


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """The independent quantiser."""
    return Oracle()

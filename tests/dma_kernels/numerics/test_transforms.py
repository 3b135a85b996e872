"""The rotation against an explicit matrix, the mean key against plain sums, and what both leave unchanged."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from dma_kernels import hadamard_rotate, key_mean
from dma_kernels.testing import assert_bits_equal, mixed_magnitudes, random_qkv

# Head dimension, and order of its Hadamard blocks.
SIZES = {8: 8, 64: 64, 80: 16, 96: 32, 128: 128, 192: 64, 256: 256, 33: 1}


def hadamard_matrix(head_dim: int) -> torch.Tensor:
    """The orthonormal block-diagonal Sylvester matrix, fp64: entry ``(i, j)`` is ``(-1) ** popcount(i & j)``."""
    size = SIZES[head_dim]
    block = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]) / math.sqrt(size)
    return torch.from_numpy(np.kron(np.eye(head_dim // size), block))


class TestRotation:
    @pytest.mark.parametrize("head_dim", SIZES, ids=lambda d: f"D{d}")
    @pytest.mark.parametrize(
        ("dtype", "tolerance"),
        [(torch.bfloat16, 1e-6), (torch.float32, 1e-6), (torch.float64, 1e-14)],
        ids=["bf16", "fp32", "fp64"],
    )
    def test_rotation_is_the_product_with_the_matrix(self, head_dim: int, dtype: torch.dtype, tolerance: float) -> None:
        x = mixed_magnitudes(2, 3, 5, head_dim, seed=1, binades=0, dtype=dtype)
        rotated = hadamard_rotate(x)
        assert rotated.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        expected = x.double() @ hadamard_matrix(head_dim)
        torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=tolerance * float(x.abs().max()) * 4)

    def test_butterflies_run_from_the_smallest_stride(self) -> None:
        # Exact in fp32: the order of additions is part of the definition.
        x = mixed_magnitudes(50, 16, seed=3, binades=0).numpy()
        y = x.copy()
        for stride in (1, 2, 4, 8):
            for i in range(16):
                if not i & stride:
                    y[:, i], y[:, i + stride] = y[:, i] + y[:, i + stride], y[:, i] - y[:, i + stride]
        assert_bits_equal(hadamard_rotate(torch.from_numpy(x)), torch.from_numpy(y * np.float32(0.25)))

    @pytest.mark.parametrize(
        ("x", "error", "message"),
        [
            ([1.0], TypeError, "x must be a torch.Tensor, got list"),
            (torch.ones(8).int(), TypeError, "x must be floating point, got torch.int32"),
            *((torch.ones(shape), ValueError, r"x must be \[\.\.\., head_dim\], got shape") for shape in ((), (3, 0))),
        ],
    )
    def test_an_invalid_argument_is_rejected(self, x: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=f"^{message}"):
            hadamard_rotate(x)


KEY = torch.zeros(2, 1, 9, 8)


class TestKeyMean:
    """``test_rule.py`` compares smoothing with its definition."""

    def test_it_is_the_mean_of_the_first_128_visible_keys_in_bfloat16(self) -> None:
        _, key, _ = random_qkv(batch=3, kv_heads=2, q_len=1, kv_len=300)
        visible = torch.ones(3, 300, dtype=torch.bool)
        visible[0, :50] = visible[2] = False
        mean = key_mean(key.masked_fill(~visible[:, None, :, None], math.nan), visible)
        for row, first in enumerate((key[:1, :, 50:178], key[1:2, :, :128])):
            assert_bits_equal(mean[row], first[0].double().mean(-2, keepdim=True).bfloat16().float())
        assert_bits_equal(mean[2], torch.zeros(2, 1, 64))
        assert_bits_equal(key_mean(key), key_mean(key[:, :, :128]))
        assert_bits_equal(key_mean(torch.zeros(1, 2, 0, 8)), torch.zeros(1, 2, 1, 8))

    @pytest.mark.parametrize(
        ("key", "visible", "error", "message"),
        [
            (torch.zeros(2, 300, 8), None, ValueError, r"key must be \[batch, heads, tokens, head_dim\], got shape"),
            ([1.0], None, TypeError, "key must be a torch.Tensor, got list"),
            (KEY.int(), None, TypeError, "key must be floating point, got torch.int32"),
            (KEY, [True], TypeError, "visible must be a torch.Tensor, got list"),
            (KEY, torch.ones(2, 9), ValueError, r"visible must be boolean \[2, 9\], got torch.float32 \[2, 9\]"),
            (KEY, torch.ones(1, 9).bool(), ValueError, r"visible must be boolean \[2, 9\], got torch.bool \[1, 9\]"),
            (KEY, torch.ones(2, 9, device="meta").bool(), ValueError, "visible must be on the device of key, cpu"),
        ],
    )
    def test_an_invalid_argument_is_rejected(
        self, key: Any, visible: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=f"^{message}"):
            key_mean(key, visible)

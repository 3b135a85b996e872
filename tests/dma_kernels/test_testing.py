"""The comparison helpers reject what they must."""

from __future__ import annotations

import math

import pytest
import torch
from dma_kernels.testing import (
    assert_as_accurate,
    assert_bits_equal,
    relative_error,
)


def test_assert_bits_equal_accepts_equal_bits_and_any_nan() -> None:
    assert_bits_equal(torch.tensor([1.0, math.nan]), torch.tensor([1.0, -math.nan]))
    assert_bits_equal(torch.zeros(0, 3), torch.zeros(0, 3))
    assert_bits_equal(torch.ones(2, 3).T, torch.ones(3, 2))


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (
            torch.tensor([0.0]),
            torch.tensor([-0.0]),
            r"1 of 1 elements differ; the first at \[0\]: 0\.0, expected -0\.0",
        ),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]), r"1 of 2 elements differ; the first at \[1\]: nan"),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), "1 of 1 elements differ"),
        (torch.tensor([1.0]), torch.tensor([1]), r"dtype torch\.float32, expected torch\.int64"),
        (torch.zeros(2, 1), torch.zeros(2), r"shape \[2, 1\], expected \[2\]"),
    ],
    ids=["zero-sign", "nan", "one-ulp", "dtype", "shape"],
)
def test_assert_bits_equal_rejects_differences(actual: torch.Tensor, expected: torch.Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_bits_equal(actual, expected)


def test_relative_error_is_relative_to_the_expected_norm() -> None:
    assert relative_error(torch.tensor([1.0, 3.5]), torch.tensor([1.0, 4.0])) == 0.125
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.tensor([1.0])))
    with pytest.raises(AssertionError, match=r"shape \[1\], expected \[2\]"):
        relative_error(torch.zeros(1), torch.zeros(2))


def test_as_accurate_rejects_a_larger_error() -> None:
    exact = torch.zeros(4, dtype=torch.float64)
    baseline = torch.tensor([0.1, 0.0, 0.0, 0.0])
    assert_as_accurate(torch.tensor([0.0, 0.15, 0.0, 0.0]), baseline, exact)
    with pytest.raises(AssertionError, match=r"maximum error 0\.25 is over 2\.0 x 0\.1 of the baseline"):
        assert_as_accurate(torch.tensor([0.25, 0.0, 0.0, 0.0]), baseline, exact)
    with pytest.raises(AssertionError, match=r"mean error 0\.1 is over 2\.0 x 0\.025 of the baseline"):
        assert_as_accurate(torch.full((4,), 0.1), baseline, exact)
    with pytest.raises(AssertionError, match="NaN where the exact result has none"):
        assert_as_accurate(torch.tensor([math.nan, 0.0, 0.0, 0.0]), baseline, exact)

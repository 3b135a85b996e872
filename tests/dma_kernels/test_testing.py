"""The comparison helpers reject what they must."""

from __future__ import annotations

import math

import pytest
import torch
from dma_kernels.testing import assert_as_accurate, assert_bits_equal, relative_error


def test_bits_differ_in_the_sign_of_zero_one_ulp_dtype_and_shape_but_not_in_those_of_nan() -> None:
    one, nan = torch.tensor([1.0, 0.0]), torch.tensor([1.0, math.nan])
    assert_bits_equal(nan, torch.tensor([1.0, -math.nan]))
    assert_bits_equal(torch.ones(2, 3).T, torch.ones(3, 2))
    for other in (torch.tensor([1.0, -0.0]), nan, torch.tensor([1.0 + 2**-23, 0.0]), one.double(), one[None]):
        with pytest.raises(AssertionError):
            assert_bits_equal(one, other)


def test_relative_error_is_relative_to_the_largest_expected_number() -> None:
    assert relative_error(torch.tensor([1.0, 3.5]), torch.tensor([1.0, 4.0])) == 0.125
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.tensor([1.0])))
    with pytest.raises(AssertionError, match=r"shape \[1\], expected \[2\]"):
        relative_error(torch.zeros(1), torch.zeros(2))


def test_as_accurate_rejects_a_larger_error() -> None:
    exact = torch.zeros(4, dtype=torch.float64)
    baseline = torch.tensor([0.1, 0.0, 0.0, 0.0])
    assert_as_accurate(torch.tensor([0.0, 0.15, 0.0, 0.0]), baseline, exact)
    for actual, message in (
        ([0.25, 0.0, 0.0, 0.0], "maximum"),
        ([0.1] * 4, "mean"),
        ([math.nan, 0.0, 0.0, 0.0], "NaN"),
    ):
        with pytest.raises(AssertionError, match=f"^{message}"):
            assert_as_accurate(torch.tensor(actual), baseline, exact)
    for changes in ({"actual": baseline[:1]}, {"baseline": baseline[None]}, {"exact": exact[:1]}):
        with pytest.raises(AssertionError, match=r"^actual, baseline and exact differ in shape"):
            assert_as_accurate(**{"actual": baseline, "baseline": baseline, "exact": exact} | changes)

"""Restoring a cache in Triton gives the same bits as in torch.

In fp16, because Triton's interpreter does not round to bfloat16 as a GPU does.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from decode_cases import STORED_FORMATS, Case
from dma_kernels.cache import restore
from dma_kernels.cache.restore import restore_dense
from dma_kernels.testing import assert_bits_equal
from restore_cases import CASES, assert_dense, assert_restored, random_pages

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device")


@pytest.mark.parametrize(
    ("format", "case"),
    [*product(["int4"], CASES), ("int8", "ragged"), ("int8", "head-dim-80-96")],
)
def test_every_shape_restores_the_same_bits(case: str, format: str) -> None:
    storage = CASES[case].storage(format, torch.float16, "cpu")
    assert_restored(storage, torch.float16)
    assert_dense(storage, CASES[case])


@pytest.mark.parametrize("format", STORED_FORMATS)
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_every_byte_restores_the_same_bits(format: str) -> None:
    assert_restored(random_pages(format, torch.float16, "cpu"), torch.float16)


@pytest.mark.parametrize(
    "first", [torch.tensor([5, 0, 77, 0])[::2], torch.tensor(9).expand(2)], ids=["step", "expanded"]
)
def test_positions_may_have_any_stride(first: torch.Tensor) -> None:
    storage = Case(kv_len=300, padding=(0, 30)).storage("int8", torch.float16, "cpu")
    for actual, expected in zip(restore_dense(storage, first, 20), storage.restore(first, 20), strict=True):
        assert_bits_equal(actual, expected)


def test_positions_beyond_32_bits_hold_nothing() -> None:
    storage = Case(kv_len=300).storage("int8", torch.float16, "cpu")
    for position in (2**32 + 5, -(2**32) - 5):
        for x in restore_dense(storage, torch.tensor([position]), 20):
            assert (x == 0.0).all()


def test_unaligned_positions_have_their_own_plan() -> None:
    """The caller may pass any tensor of positions."""
    storage = Case(kv_len=300).storage("int8", torch.float16, "cpu")
    positions = torch.zeros(8, dtype=torch.int32)
    restore.launch_restore.plan.cache_clear()
    for first, plans in ((positions[:1], 1), (positions[4:5], 1), (positions[1:2], 2)):
        restore_dense(storage, first, 20)
        assert restore.launch_restore.plan.cache_info().misses == plans


def test_a_cropped_cache_restores_the_same_bits() -> None:
    case = Case(kv_len=700, padding=(0, 30))
    storage = case.storage("int4", torch.float16, "cpu")
    storage.crop(100)
    assert storage.rolled_back == 100
    assert_restored(storage, torch.float16)

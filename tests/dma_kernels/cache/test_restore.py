"""What the device makes of a cache in 16 bits is what torch makes of it, to the bit.

In fp16: Triton's interpreter does not round to bfloat16 as a chip does.
"""

from __future__ import annotations

import pytest
import torch
from decode_cases import FORMATS, Case
from restore_cases import CASES, assert_dense, assert_restored, random_body

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device")
formats = pytest.mark.parametrize("format", FORMATS)


@formats
@pytest.mark.parametrize("case", CASES)
def test_every_shape(case: str, format: str) -> None:
    storage = CASES[case].storage(format, torch.float16, "cpu")
    assert_restored(storage, torch.float16)
    assert_dense(storage, CASES[case])


@formats
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_every_byte(format: str) -> None:
    assert_restored(random_body(format, torch.float16, "cpu"), torch.float16)


def test_tokens_taken_back() -> None:
    case = Case(kv_len=700, padding=(0, 30))
    storage = case.storage("int4", torch.float16, "cpu")
    storage.crop(100)
    assert storage.taken_back == 100
    assert_restored(storage, torch.float16)

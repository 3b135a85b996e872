"""The split-KV kernels of short calls on a GPU: the interpreter's cases, and long rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import no_synchronization
from dma_kernels import attention
from dma_kernels.testing import random_qkv
from prefill_cases import RECIPES, SHORT, Case, assert_matches_reference

pytestmark = pytest.mark.gpu
BALANCED = RECIPES["balanced"]
LONG_ROWS = {
    f"{q_len}-queries-of-{head_dim}-channels": Case(
        q_len=q_len, kv_len=20_000, q_heads=8, kv_heads=2, batch=3, head_dim=head_dim,
        tensors={"q_offset": [19_000, 77, 12_345]},
    )
    for q_len in (1, 5, 63) for head_dim in (64, 96, 128, 256)
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", [*SHORT, *LONG_ROWS])
def test_a_short_call_matches_the_reference(case: str, dtype: torch.dtype) -> None:
    assert_matches_reference((SHORT | LONG_ROWS)[case], BALANCED, dtype, "cuda")


def test_nothing_waits_for_the_device() -> None:
    qkv = random_qkv(q_heads=32, kv_heads=8, q_len=1, kv_len=1500, head_dim=128, dtype=torch.bfloat16, device="cuda")
    tensors: dict[str, Any] = {
        "q_offset": torch.tensor([700], device="cuda"),
        "kv_offset": torch.tensor([-9], device="cuda"),
        "kv_range": torch.tensor([[9, 1400]], device="cuda"),
    }
    attention(*qkv, BALANCED, **tensors)
    with no_synchronization():
        attention(*qkv, BALANCED, **tensors)

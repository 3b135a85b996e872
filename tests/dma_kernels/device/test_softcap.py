"""The softcap that all kernels share, against fp64."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from dma_kernels.device.arithmetic import apply_softcap
from torch import Tensor

SOFTCAPS = (1.0, 15.0, 50.0, 1e3, 1e5, 1e6, 1e8)
BLOCK = 4096


@triton.jit
def _softcap_kernel(x_ptr, out_ptr, softcap, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offset, apply_softcap(tl.load(x_ptr + offset), softcap))


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs it")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def capped(x: Tensor, softcap: float) -> Tensor:
    out = torch.empty_like(x)
    _softcap_kernel[(len(x) // BLOCK,)](x, out, softcap, BLOCK=BLOCK)
    return out


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_the_relative_error_is_a_small_multiple_of_that_of_fp32_tanh(softcap: float, device: str) -> None:
    """For logits far below the softcap as well, where the result is the logit itself."""
    magnitudes = torch.cat((torch.logspace(-6, 3, 3 * BLOCK), softcap * torch.logspace(-3, 1.5, 5 * BLOCK)))
    x = torch.cat((magnitudes, -magnitudes)).to(device)
    exact = softcap * torch.tanh(x.double() / softcap)
    error, error_of_tanh = (
        float(((each.double() - exact) / exact).abs().max())
        for each in (capped(x, softcap), softcap * torch.tanh(x / softcap))
    )
    assert error < 6 * max(error_of_tanh, torch.finfo(torch.float32).eps)


def test_special_values_follow_tanh(device: str) -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-30], device=device)
    for softcap in SOFTCAPS:
        expected = softcap * torch.tanh(x.double() / softcap)
        actual = capped(x.repeat(BLOCK // 8), softcap)[:8]
        torch.testing.assert_close(actual, expected.float(), rtol=1e-6, atol=0.0, equal_nan=True)

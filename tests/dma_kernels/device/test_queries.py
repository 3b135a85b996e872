"""The query prologue of the attention kernel in Triton's interpreter, against the torch quantizer."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from dma_kernels.device.operands import prepare_queries
from dma_kernels.numerics.formats import MXINT8_UNIT
from dma_kernels.numerics.quantize import QuantizedTensor, e8m0_to_float, nvfp4_global_scale, quantize
from dma_kernels.prefill.operands import DEQUANTIZED, E4M3, E5M2, INT8, PACKED, OperandFormat
from dma_kernels.testing import assert_bits_equal, mixed_magnitudes
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs these")

ROWS, COLUMNS = 32, 128


@triton.jit
def _prepare_kernel(
    x_ptr, q_ptr, scale_ptr, descale_ptr, global_scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr, FORM: tl.constexpr, FORMAT: tl.constexpr, SHARED: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    x = tl.load(x_ptr + rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    q, scale, descale = prepare_queries(x, global_scale, FORM, FORMAT, SHARED, ROUNDING, tl.bfloat16)
    tl.store(q_ptr + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], q)
    tl.store(descale_ptr + rows, descale)
    if BLOCKS > 0:
        tl.store(scale_ptr + rows[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :], scale)


def queries() -> Tensor:
    """Return fp32 ``[ROWS, COLUMNS]`` of mixed magnitudes, with a row and a block of zeros."""
    x = mixed_magnitudes(ROWS, COLUMNS, seed=3)
    x[5] = 0.0
    x[7, 32:64] = 0.0
    return x


def prepare(
    x: Tensor,
    form: OperandFormat,
    format: str,
    *,
    shared: str = "block",
    rounding: str = "ceil",
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return queries, block scales if ``scale`` gives their shape and dtype, and descales."""
    width = form.stored_channels(COLUMNS)
    q = torch.empty(ROWS, width, dtype=form.dtype or torch.bfloat16)
    descale = torch.full((ROWS,), torch.nan)
    made_scale = None if scale is None else torch.empty_like(scale)
    global_scale = float(nvfp4_global_scale(x.abs().amax())) if format == "nvfp4" else 1.0
    arguments: dict[str, Any] = {"FORM": form.name, "FORMAT": format, "SHARED": shared, "ROUNDING": rounding}
    _prepare_kernel[(1,)](
        x, q, made_scale, descale, global_scale, ROWS=ROWS, COLUMNS=COLUMNS, WIDTH=width,
        BLOCKS=0 if scale is None else scale.shape[1], **arguments,
    )  # fmt: skip
    return q, made_scale, descale


def row_descale(x: Tensor, quantized: QuantizedTensor) -> Tensor:
    return e8m0_to_float(quantized.scale[:, 0]).masked_fill(x.abs().amax(1) == 0.0, 1.0)


@pytest.mark.parametrize("rounding", ["ceil", "floor"])
@pytest.mark.parametrize(("form", "format", "unit"), [(INT8, "mxint8", MXINT8_UNIT), (E4M3, "mxfp8", 1.0)])
def test_8_bit_queries_equal_the_specification_bit_for_bit(
    form: OperandFormat, format: str, unit: float, rounding: str
) -> None:
    x = queries()
    expected = quantize(x, format, shared_scale="row", scale_rounding=rounding)
    q, _, descale = prepare(x, form, format, shared="row", rounding=rounding)
    assert_bits_equal(q, expected.data)
    assert_bits_equal(descale, row_descale(x, expected) * unit)


@pytest.mark.parametrize(
    ("shared", "rounding"),
    [("block", "ceil"), ("block", "floor"), ("block", "search"), ("row", "ceil"), ("row", "floor")],
)
def test_mxfp4_queries_are_exact_in_e5m2(shared: str, rounding: str) -> None:
    x = queries()
    expected = quantize(x, "mxfp4", shared_scale=shared, scale_rounding=rounding)
    q, _, descale = prepare(x, E5M2, "mxfp4", shared=shared, rounding=rounding)
    assert torch.equal(q.float() * descale[:, None], expected.dequantize())


def test_e5m2_covers_28_binades_of_block_scales_and_keeps_the_nan_of_a_block() -> None:
    x = torch.zeros(ROWS, COLUMNS)
    x[:, 0], x[:, 32], x[:, 64], x[3, 100] = 1.0, 2.0**-28, 2.0**-40, torch.inf
    q, _, descale = prepare(x, E5M2, "mxfp4")
    values = q.float() * descale[:, None]
    assert torch.equal(values[:, :64], x[:, :64])
    assert (values[:, 64:96].abs() <= 2.0**-28).all()
    assert values[3, 96:].isnan().all()
    assert not values[:3].isnan().any()


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "nvfp4"])
def test_packed_queries_equal_the_specification_bit_for_bit(format: str) -> None:
    x = queries()
    expected = quantize(x, format)
    q, scale, descale = prepare(x, PACKED[format], format, scale=expected.scale)
    assert scale is not None
    assert_bits_equal(q, expected.data)
    assert_bits_equal(scale, expected.scale)
    global_scale = torch.ones(()) if expected.global_scale is None else expected.global_scale
    assert torch.equal(descale, global_scale.flatten().expand(ROWS))


@pytest.mark.parametrize(
    ("format", "shared"), [*product(("mxfp4", "mxfp8", "mxint8"), ("block", "row")), ("nvfp4", "block")]
)
def test_dequantized_queries_equal_the_specification(format: str, shared: str) -> None:
    x = queries()
    q, _, descale = prepare(x, DEQUANTIZED, format, shared=shared)
    assert torch.equal(q.float(), quantize(x, format, shared_scale=shared).dequantize())
    assert torch.equal(descale, torch.ones(ROWS))

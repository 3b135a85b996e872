"""Test data, recipes and comparisons for tests and benchmarks.

Quantized bits must match exactly (:func:`assert_bits_equal`). The error of attention against fp64 may be a small
multiple of the error of plain low-precision torch on the same inputs (:func:`assert_as_accurate`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .numerics.recipe import Recipe

RECIPES = {
    "identity": Recipe(low="bf16", high="bf16", pv="bf16"),
    "paper": Recipe(low="mxfp4", high="mxfp8", sink_tiles=0, scale_rounding="floor"),
    "mxfp8-row": Recipe(low="mxfp8", high="bf16", shared_scale="row", smooth_k=True, pv="fp8"),
    "mxint8-tile": Recipe(low="mxint8", high="bf16", shared_scale="tile", smooth_k=True, rotate=True, pv="fp8"),
    "nvfp4-mxfp8": Recipe(low="nvfp4", high="mxfp8", smooth_k=True, rotate=True, pv="fp8"),
    "mxfp4-keys": Recipe(low_q="bf16", low_k="mxfp4", high="bf16", rotate=True),
    "nvfp4-keys": Recipe(low_q="mxfp8", low_k="nvfp4", high="bf16"),
    "nvfp4-keys-search": Recipe(low_q="bf16", low_k="nvfp4", scale_rounding="search", smooth_k=True, rotate=True),
    "mxfp4-search": Recipe(low="mxfp4", high="mxfp8", scale_rounding="search"),
    "mxfp8-uniform": Recipe(low="mxfp8", high="mxfp8"),
    "mxint8-block-floor": Recipe(low="mxint8", high="mxfp4", scale_rounding="floor", diagonal_tiles=2),
    "mxfp4-no-band": Recipe(low="mxfp4", high="mxint8", diagonal_tiles=0, sink_tiles=0),
    "mxfp8-wide-sink": Recipe(low="mxfp8", high="nvfp4", shared_scale="tile", diagonal_tiles=0, sink_tiles=2),
    "mxint8-exact-start": Recipe(low="mxint8", shared_scale="tile", diagonal_tiles=0, exact_until=256, pv="fp8"),
}
"""Named recipes that together cover every format, scale sharing, rounding, transform, band width and kind of start."""


def mixed_magnitudes(*shape: int, seed: int, binades: int = 20, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normally distributed numbers, with rows and elements scaled by random powers of two.

    Args:
        shape: Shape of the result; the last dimension is the row.
        seed: Seed of the generator.
        binades: The rows' exponents span ``-binades .. binades``.
        dtype: Dtype of the result.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    rows = torch.randint(-binades, binades + 1, (*shape[:-1], 1), generator=generator)
    elements = torch.randint(-6, 3, shape, generator=generator)
    return torch.ldexp(x, rows + elements).to(dtype)


def random_qkv(
    *,
    batch: int = 1,
    q_heads: int = 2,
    kv_heads: int = 1,
    q_len: int,
    kv_len: int,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a query, key and value ``[B, H, T, D]`` that resemble those of a model.

    Keys share a mean and have outlier channels. Runs of 100 keys are larger or smaller than the others, so it matters
    which keys share a scale. All numbers are exact in bfloat16, so runs in several dtypes have the same inputs.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query = normal(batch, q_heads, q_len, head_dim)
    key = normal(batch, kv_heads, kv_len, head_dim) + 2.0 * normal(batch, kv_heads, 1, head_dim)
    key[..., ::17] *= 4.0
    stretches = torch.arange(kv_len) // 100
    key *= torch.tensor([1.0, 0.25, 2.0, 0.5])[stretches % 4, None]
    value = normal(batch, kv_heads, kv_len, head_dim if value_dim is None else value_dim)
    rounded = (x.to(torch.bfloat16).to(dtype=dtype, device=device) for x in (query, key, value))
    query, key, value = rounded
    return query, key, value


def assert_bits_equal(actual: Tensor, expected: Tensor) -> None:
    """Assert that two tensors have the same shape, dtype and bits; all NaNs are equal, 0 and -0 are not."""
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    differ = _bits(actual) != _bits(expected)
    if actual.is_floating_point():
        differ &= ~(actual.isnan() & expected.isnan())
    if bool(differ.any()):
        where = differ.nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{len(where)} of {differ.numel()} elements differ; the first at {list(first)}: "
            f"{actual[first].item()!r}, expected {expected[first].item()!r}"
        )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference divided by the largest expected magnitude, in fp64; 0 for empty tensors."""
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    if actual.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().amax()
    return float(difference / expected.double().abs().amax().clamp(min=1e-300))


def assert_as_accurate(actual: Tensor, baseline: Tensor, exact: Tensor, *, factor: float = 2.0) -> None:
    """Assert that the maximum and the mean error of ``actual`` are at most ``factor`` times those of ``baseline``.

    Args:
        actual: The tensor under test.
        baseline: Plain torch in the same low precision, on the same inputs.
        exact: The fp64 result on the same inputs.
        factor: Largest accepted ratio of the errors.
    """
    shapes = [list(x.shape) for x in (actual, baseline, exact)]
    assert shapes[0] == shapes[1] == shapes[2], f"actual, baseline and exact differ in shape: {shapes}"
    assert not actual.isnan().any(), "NaN where the exact result has none"
    errors, allowed = (actual.double() - exact).abs(), (baseline.double() - exact).abs()
    for name, error, limit in (("maximum", errors.max(), allowed.max()), ("mean", errors.mean(), allowed.mean())):
        assert error <= factor * limit, f"{name} error {error:.3g} is over {factor} x {limit:.3g} of the baseline"


def _bits(x: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()])

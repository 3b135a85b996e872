"""The recipe: defaults, derived properties and invalid fields."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from dma_kernels import Recipe
from dma_kernels.testing import RECIPES

FORMATS = "bf16, mxfp4, mxfp8, mxint8, nvfp4"


def test_low_sets_both_operands_unless_overridden() -> None:
    assert (Recipe(low="mxfp4").query_low, Recipe(low="mxfp4").key_low) == ("mxfp4", "mxfp4")
    mixed = Recipe(low="mxfp4", low_q="bf16")
    assert (mixed.query_low, mixed.key_low) == ("bf16", "mxfp4")
    mixed = Recipe(low="mxfp4", low_k="nvfp4")
    assert (mixed.query_low, mixed.key_low) == ("mxfp4", "nvfp4")


@pytest.mark.parametrize(
    ("fields", "is_uniform"),
    [
        ({"low": "bf16", "high": "bf16"}, True),
        ({"low": "bf16", "high": "bf16", "shared_scale": "row"}, True),
        ({"low": "mxfp8", "high": "bf16"}, False),
        ({"low": "mxfp8", "high": "mxfp8"}, True),
        ({"low": "mxfp8", "high": "mxfp8", "shared_scale": "row"}, False),
        ({"low": "mxfp8", "high": "mxfp8", "shared_scale": "tile"}, False),
        ({"low": "nvfp4", "high": "nvfp4"}, True),
        ({"low": "bf16", "high": "bf16", "pv": "fp8"}, False),
        ({"low": "mxfp8", "low_q": "bf16", "high": "mxfp8"}, False),
        ({"low": "mxfp8", "low_k": "mxfp4", "high": "mxfp8"}, False),
        ({"low": "mxfp4", "low_q": "bf16", "low_k": "bf16", "high": "bf16"}, True),
    ],
    ids=str,
)
def test_a_recipe_is_uniform_if_low_and_high_formats_are_equal(fields: dict[str, Any], is_uniform: bool) -> None:
    assert Recipe(**fields).is_uniform is is_uniform


def test_the_exact_start_counts_in_causal_calls_alone() -> None:
    recipe = Recipe(exact_until=1024)
    assert (recipe.exact_tiles(is_causal=True), recipe.exact_tiles(is_causal=False)) == (8, 0)


COUNT = "an integer of at least 0"
MOST = "at most 2**20 = 1048576"
BLOCK_ALONE = "applies to E8M0 scales; nvfp4 needs 'block'"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"low": x}, f"low must be one of {FORMATS}; got {x!r}") for x in ("fp4", None)),
        ({"low_q": "int8"}, f"low_q must be one of {FORMATS}; got 'int8'"),
        ({"low_k": 8}, f"low_k must be one of {FORMATS}; got 8"),
        ({"high": None}, f"high must be one of {FORMATS}; got None"),
        ({"scale_rounding": "even"}, "scale_rounding must be one of floor, ceil, search; got 'even'"),
        ({"shared_scale": "head"}, "shared_scale must be one of block, row, tile; got 'head'"),
        ({"pv": "fp4"}, "pv must be one of bf16, fp8; got 'fp4'"),
        *(({"diagonal_tiles": x}, f"diagonal_tiles must be {COUNT}") for x in (-1, 1.0)),
        *(({"sink_tiles": x}, f"sink_tiles must be {COUNT}") for x in (True, "1")),
        ({"diagonal_tiles": 10**30}, f"diagonal_tiles must be {MOST}"),
        ({"sink_tiles": 2**20 + 1}, f"sink_tiles must be {MOST}"),
        ({"exact_until": 64}, "exact_until must be a multiple of 128"),
        ({"exact_until": -128}, f"exact_until must be {COUNT}"),
        ({"exact_until": 2**27 + 128}, "exact_until must be at most 2**27 = 134217728"),
        ({"smooth_k": 1}, "smooth_k must be true or false, got 1"),
        ({"rotate": "yes"}, "rotate must be true or false, got 'yes'"),
        *(({"skip_threshold": x}, "skip_threshold must be a number above 0") for x in (0, -1.0, math.nan, True, "6")),
        ({"low": "nvfp4", "shared_scale": "row"}, f"shared_scale='row' {BLOCK_ALONE}"),
        ({"low_q": "nvfp4", "shared_scale": "tile"}, f"shared_scale='tile' {BLOCK_ALONE}"),
        ({"low_k": "nvfp4", "shared_scale": "row"}, f"shared_scale='row' {BLOCK_ALONE}"),
        ({"scale_rounding": "search", "shared_scale": "tile"}, "scale_rounding='search' needs shared_scale='block'"),
    ],
    ids=str,
)
def test_an_invalid_field_is_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Recipe(**fields)


def test_shared_recipes_cover_every_choice() -> None:
    recipes = RECIPES.values()
    formats = {name for r in recipes for name in (r.query_low, r.key_low, r.high)}
    assert formats == set(FORMATS.split(", "))
    assert {r.shared_scale for r in recipes} == {"block", "row", "tile"}
    assert {r.scale_rounding for r in recipes} == {"floor", "ceil", "search"}
    assert {r.pv for r in recipes} == {"bf16", "fp8"}
    assert {r.diagonal_tiles for r in recipes} == {r.sink_tiles for r in recipes} == {0, 1, 2}
    assert {r.exact_until for r in recipes} == {0, 256}
    assert {r.smooth_k for r in recipes} == {r.rotate for r in recipes} == {False, True}

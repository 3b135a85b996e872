"""Attention calls to test every compute path with, in the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from dma_kernels import Recipe, attention_with_lse
from dma_kernels.numerics.call import AttentionCall
from dma_kernels.numerics.formats import TILE
from dma_kernels.testing import assert_as_accurate, assert_bits_equal, random_qkv, relative_error
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RECIPES = {
    "identity": Recipe(low="bf16", high="bf16"),
    "balanced": Recipe(low="mxint8", shared_scale="tile", smooth_k=True, rotate=True, pv="fp8"),
    "int8": Recipe(low="mxint8", shared_scale="tile", smooth_k=True, pv="fp8"),
    "int8-pv16": Recipe(low="mxint8", shared_scale="tile"),
    "e4m3-rotated": Recipe(low="mxfp8", shared_scale="tile", smooth_k=True, rotate=True, pv="fp8"),
    "fp4": Recipe(low="nvfp4", scale_rounding="search", smooth_k=True, rotate=True, pv="fp8"),
    "nvfp4": Recipe(low="nvfp4", high="mxfp8", smooth_k=True, rotate=True, pv="fp8"),
    "paper": Recipe(low="mxfp4", high="mxfp8", scale_rounding="floor", sink_tiles=0),
    "mxfp4-row": Recipe(low="mxfp4", shared_scale="row", smooth_k=True, rotate=True, pv="fp8"),
    "mixed": Recipe(low_q="mxfp8", low_k="mxfp4", high="nvfp4", rotate=True),
    "nvfp4-keys": Recipe(low_q="bf16", low_k="nvfp4", smooth_k=True, rotate=True),
    "int8-mxfp8": Recipe(low="mxint8", high="mxfp8", shared_scale="tile", pv="fp8"),
    "mxfp8-uniform": Recipe(low="mxfp8", high="mxfp8"),
}


@dataclass(frozen=True)
class Case:
    """Shapes and options of a call; its last queries attend to a low tile. Tensors are on the call's device."""

    q_len: int = 200
    kv_len: int = 430
    batch: int = 1
    q_heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    value_dim: int | None = None
    is_sparse: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)

    def inputs(self, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value as Transformers passes them: transposed, non-contiguous views."""
        made = random_qkv(
            batch=self.batch, q_heads=self.q_heads, kv_heads=self.kv_heads, q_len=self.q_len, kv_len=self.kv_len,
            head_dim=self.head_dim, value_dim=self.value_dim, dtype=dtype, device=device,
        )  # fmt: skip
        query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in made)
        if self.is_sparse:
            make_sparse(query, key)
        return query, key, value

    def all_options(self, device: str) -> dict[str, Any]:
        """Return the options of ``attention``, tensors included."""
        return self.options | {name: torch.as_tensor(value, device=device) for name, value in self.tensors.items()}

    def problem(self, recipe: Recipe, dtype: torch.dtype, device: str) -> AttentionCall:
        """Return the key of the plan of a Triton backend call."""
        options: dict[str, Any] = dict.fromkeys(
            ("scale", "q_offset", "kv_range", "window", "softcap", "sinks", "mask", "tile_counts")
        )
        options |= {"is_causal": True, "kv_offset": 0, "backend": "triton"} | self.all_options(device)
        return AttentionCall(*self.inputs(dtype, device), recipe, **options).layouts()

    def call(
        self, recipe: Recipe, backend: str, dtype: torch.dtype, device: str, tile_counts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp; add to ``tile_counts`` (int64 ``[Hq, 2]``) the tiles skipped and examined."""
        inputs, options = self.inputs(dtype, device), self.all_options(device)
        return attention_with_lse(*inputs, recipe, backend=backend, tile_counts=tile_counts, **options)

    def zero_counts(self, device: str) -> Tensor:
        """Return counts of tiles for ``call`` to add to."""
        return torch.zeros((self.q_heads, 2), dtype=torch.int64, device=device)


def make_sparse(query: Tensor, key: Tensor) -> None:
    """Fill with normal numbers in place, and lower the logits of half of the runs of 128 keys by 12.

    Each KV head has its own runs. Other logits differ by far less than 6, so rounding does not change which tiles a
    kernel and the reference skip.
    """
    head_dim = key.shape[3]
    generator = torch.Generator().manual_seed(7)
    direction = torch.randn(head_dim, generator=generator)
    direction *= (12.0 * head_dim**0.5) ** 0.5 / direction.norm()
    is_lowered = torch.rand((key.shape[0], key.shape[1], -(-key.shape[2] // TILE)), generator=generator) < 0.5
    is_lowered[..., 0] = False
    lowered = is_lowered.repeat_interleave(TILE, 2)[..., : key.shape[2], None]
    # Bfloat16 numbers, which are exact in every dtype.
    query.copy_((0.7 * torch.randn(query.shape, generator=generator) + direction).bfloat16())
    key.copy_((torch.randn(key.shape, generator=generator) - lowered * direction).bfloat16())


def _pattern(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.6


def _packed(length: int, *ends: int) -> Tensor:
    """A mask of packed sequences with the given ends."""
    number = torch.bucketize(torch.arange(length), torch.tensor(ends), right=True)
    return (number[:, None] == number)[None, None]


def _left_padded(length: int) -> dict[str, Any]:
    """The tensors of a batch of two prompts, of which the first has 145 tokens of padding."""
    return {"kv_range": [[145, length], [0, length]], "kv_offset": [-145, 0], "q_offset": [-145, 0]}


def pairs(cases: Iterable[str], main: Iterable[str], few_cases: Iterable[str], others: Iterable[str]) -> list[Any]:
    """Return all cases with the main recipes, and a few cases with the others."""
    return [*product(cases, main), *product(few_cases, others)]


def similar_cases(of_all: dict[str, Any], changes: dict[str, dict[str, Any]]) -> dict[str, Case]:
    """Return cases that have most fields in common."""
    return {name: Case(**of_all | each) for name, each in changes.items()}


CASES = {
    "causal": Case(),
    "one-tile": Case(q_len=37, kv_len=37),
    "one-query": Case(q_len=1, kv_len=391),
    "one-key": Case(q_len=1, kv_len=1),
    "chunk": Case(q_len=70, kv_len=391),
    "offset": Case(q_len=70, kv_len=391, options={"q_offset": 500, "kv_offset": 141}),
    "negative-positions": Case(options={"q_offset": 185, "kv_offset": -45}),
    "bidirectional": Case(q_len=391, kv_len=391, options={"is_causal": False}),
    "cross": Case(q_len=70, kv_len=391, options={"is_causal": False}),
    "gqa": Case(q_heads=6, kv_heads=2, batch=2),
    "left-padded": Case(
        batch=2, tensors={"kv_range": [[45, 430], [0, 430]], "kv_offset": [-45, 0], "q_offset": [185, 230]}
    ),
    "right-padded": Case(batch=2, tensors={"kv_range": [[0, 141], [0, 430]]}),
    "nothing-visible": Case(batch=2, tensors={"kv_range": [[0, 0], [0, 430]]}),
    "window": Case(q_len=400, kv_len=400, options={"window": 150}),
    "window-chunk": Case(q_len=70, kv_len=850, options={"window": 300}),
    "window-chunk-bidirectional": Case(
        q_len=70, kv_len=900, options={"window": 200, "is_causal": False, "q_offset": 420}
    ),
    "window-bidirectional": Case(options={"window": 70, "is_causal": False}),
    "window-cache": Case(q_len=1, kv_len=150, options={"window": 150, "q_offset": 449, "kv_offset": 300}),
    "softcap": Case(options={"softcap": 15.0}),
    "softcap-above-all-logits": Case(options={"softcap": 1e7}),
    "sinks": Case(tensors={"sinks": [0.5, 3.0]}),
    "sinks-that-dominate": Case(tensors={"sinks": [12.0, 60.0]}),
    "sinks-of-nothing": Case(options={"window": 20}, tensors={"sinks": [float("-inf"), 3.0]}),
    "softcap-and-sinks": Case(q_len=70, kv_len=391, options={"softcap": 5.0}, tensors={"sinks": [0.5, 3.0]}),
    "mask": Case(tensors={"mask": _pattern(1, 1, 200, 430)}),
    "mask-keys": Case(tensors={"mask": _pattern(1, 1, 1, 430)}),
    "scale": Case(options={"scale": 0.02}),
    "head-dim-80-96": Case(head_dim=80, value_dim=96),
    "head-dim-128": Case(head_dim=128, q_heads=1),
    "head-dim-4": Case(head_dim=4),
    "head-dim-8": Case(head_dim=8),
    "head-dim-20": Case(head_dim=20),
}

MAIN_RECIPES = ("balanced", "int8-pv16", "fp4", "nvfp4-keys", "paper", "identity")
"""Those with compute paths of their own."""
MAIN_CASES = (
    "causal", "offset", "one-query", "bidirectional", "gqa", "left-padded", "nothing-visible", "window",
    "softcap-and-sinks", "mask", "head-dim-80-96", "head-dim-4",
)  # fmt: skip
"""A case for each feature, to run with recipes whose compute paths are those of others."""

MASKED = similar_cases({"q_len": 500, "kv_len": 500, "head_dim": 128}, {
    "causal": {"tensors": {"mask": _pattern(1, 1, 500, 500)}},
    "heads": {"q_len": 430, "kv_len": 430, "batch": 2, "tensors": {"mask": _pattern(2, 2, 430, 430)}},
    "of-keys": {"batch": 2, "tensors": {"mask": _pattern(2, 1, 1, 500)}},
    "of-queries": {"tensors": {"mask": _pattern(1, 1, 500, 1)}},
    "bidirectional": {"options": {"is_causal": False}, "tensors": {"mask": _pattern(1, 2, 500, 500)}},
    "inside-a-tile": {
        "q_len": 300, "kv_len": 450, "options": {"q_offset": 291, "kv_offset": 141},
        "tensors": {"mask": _pattern(1, 1, 300, 450)},
    },
    "negative-positions": {
        "q_len": 200, "kv_len": 430, "options": {"q_offset": 185, "kv_offset": -45},
        "tensors": {"mask": _pattern(1, 1, 200, 430)},
    },
    "left-padded": {
        "q_len": 430, "kv_len": 430, "batch": 2, "tensors": _left_padded(430) | {"mask": _pattern(1, 1, 430, 430)},
    },
    "packed": {"q_len": 900, "kv_len": 900, "tensors": {"mask": _packed(900, 130, 520, 523)}},
    "packed-left-padded": {
        "q_len": 600, "kv_len": 600, "batch": 2, "options": {"is_causal": False},
        "tensors": _left_padded(600) | {"mask": _packed(600, 200, 410)},
    },
    "nothing-for-a-block": {"tensors": {"mask": [[[[not 100 <= i < 300] for i in range(500)]]]}},
    "window-softcap-sinks": {
        "q_len": 600, "kv_len": 600, "options": {"window": 350, "softcap": 5.0},
        "tensors": {"sinks": [0.5, 3.0], "mask": _pattern(1, 1, 600, 600)},
    },
})  # fmt: skip
"""Calls with masks beyond causality and windows."""

EXACT_STARTS = similar_cases({"q_len": 600, "kv_len": 600, "head_dim": 128}, {
    "prompt": {"q_heads": 4, "kv_heads": 2},
    "chunk": {"q_len": 300, "kv_len": 500, "options": {"q_offset": 200}},
    "inside-a-tile": {"q_len": 300, "kv_len": 470, "options": {"q_offset": 183, "kv_offset": 13}},
    "below": {"q_len": 200, "kv_len": 380},
    "above": {"q_len": 200, "kv_len": 700},
    "window": {"options": {"window": 300}},
    "left-padded": {"batch": 2, "tensors": _left_padded(600)},
    "mask": {"tensors": {"mask": _pattern(1, 2, 600, 600)}},
    "bidirectional": {"options": {"is_causal": False}},
})  # fmt: skip
"""Calls on both sides of position 384, from which :func:`with_exact_start` has low tiles."""


def with_exact_start(recipe: Recipe) -> Recipe:
    """Return a recipe without low tiles below position 384, and with many from there on."""
    return replace(recipe, exact_until=384, diagonal_tiles=0)


def assert_matches_reference(
    case: Case, recipe: Recipe, dtype: torch.dtype, device: str, counts: Tensor | None = None,
    expected_counts: Tensor | None = None,
) -> None:  # fmt: skip
    """Compare the Triton backend with the reference on the same inputs; both count tiles if requested.

    The kernel's error against fp64 with unrounded probabilities may be at most twice that of the fp32 reference. Both
    round probabilities to E4M3 (``pv = "fp8"``) relative to different maxima, so they differ from each other.
    """
    out, lse = case.call(recipe, "triton", dtype, device, counts)
    if torch.device(device).type == "cuda":
        for _ in range(2):  # the second call launches the compiled kernels directly
            again_counts = None if counts is None else torch.zeros_like(counts)
            again, again_lse = case.call(recipe, "triton", dtype, device, again_counts)
            assert torch.equal(again, out)
            assert torch.equal(again_lse, lse)
    reference, expected_lse = case.call(recipe, "reference", torch.float32, device, expected_counts)
    exact_recipe = Recipe(**{**vars(recipe), "pv": "bf16"})
    exact, _ = case.call(exact_recipe, "reference", torch.float64, device)
    assert out.dtype == dtype
    assert out.transpose(1, 2).is_contiguous()
    assert not out.isnan().any()
    rounding = torch.finfo(dtype).eps
    allowed = 2.0 * relative_error(reference, exact) + 2.0 * rounding
    assert relative_error(out, exact) <= allowed, f"{relative_error(out, exact):.2g} is over {allowed:.2g}"
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    seen = ~expected_lse.isneginf()
    # Rounding smoothed and rotated operands to 16 bits changes a logit by its magnitude times eps. fp32 rounding moves
    # the difference q . k - q . mean, however small it is.
    magnitude = float(expected_lse[seen].abs().max())
    torch.testing.assert_close(lse[seen], expected_lse[seen], atol=2.0 * rounding * magnitude + 1e-5, rtol=0.0)


def assert_largest_fp16_values_stay_finite(backend: str, device: str) -> None:
    """Attend to the largest fp16 number, which FP8 values round up beyond the range of fp16."""
    query, key, value = Case(q_len=430, kv_len=430).inputs(torch.float16, device)
    value.fill_(torch.finfo(torch.float16).max)
    out = attention_with_lse(query, key, value, Recipe(low="mxint8", pv="fp8", shared_scale="tile"), backend=backend)[0]
    assert (out > 6e4).all()
    assert out.isfinite().all()


def _assert_an_infinite_value_spreads(recipe: Recipe, backend: str, device: str) -> None:
    """Check that rows below position 384 get the infinity, as in 16 bits, and those from there on NaN, as in FP8."""
    query, key, value = Case(q_len=500, kv_len=500).inputs(torch.float16, device)
    value[:, :, 130, 3] = torch.inf
    out = attention_with_lse(query, key, value, recipe, backend=backend)[0]
    assert out[:, :, :128, 3].isfinite().all()
    assert (out[:, :, 130:384, 3] == torch.inf).all()
    assert out[:, :, 384:, 3].isnan().all()
    out[..., 3] = 0.0
    assert out.isfinite().all()


def assert_an_infinite_value_spreads_by_tile(backend: str, device: str) -> None:
    """Rows for which its tile is in the band, and so high, get the infinity."""
    _assert_an_infinite_value_spreads(Recipe(low="mxint8", pv="fp8", shared_scale="tile"), backend, device)


def assert_an_infinite_value_shows_where_the_exact_start_ends(backend: str, device: str) -> None:
    """Rows of the exact start, whose tiles are high, get the infinity."""
    recipe = Recipe(low="mxint8", pv="fp8", shared_scale="tile", diagonal_tiles=0, exact_until=384)
    _assert_an_infinite_value_spreads(recipe, backend, device)


def assert_an_exact_start_has_no_low_tile(case: Case, recipe: Recipe, dtype: torch.dtype, device: str) -> None:
    """Run a call of :data:`EXACT_STARTS`: rows below position 384 are exact to rounding."""
    recipe = with_exact_start(recipe)
    assert_matches_reference(case, recipe, dtype, device)
    if not case.options.get("is_causal", True) or recipe.high != "bf16":
        return
    out, _ = case.call(recipe, "triton", dtype, device)
    rounded, _ = case.call(RECIPES["identity"], "reference", dtype, device)
    exact, _ = case.call(RECIPES["identity"], "reference", torch.float64, device)
    first = case.options.get("q_offset", case.tensors.get("q_offset", case.kv_len - case.q_len))
    position = torch.as_tensor(first, device=device).view(-1, 1) + torch.arange(case.q_len, device=device)
    starts = (position < 384).expand(case.batch, -1)
    if not starts.any():
        return
    ours, plain, exact = (x.transpose(1, 2)[starts] for x in (out, rounded, exact))
    assert_as_accurate(ours, plain, exact)


SPARSE = similar_cases({"q_len": 900, "kv_len": 900, "head_dim": 128, "is_sparse": True}, {
    "causal": {},
    "gqa": {"q_heads": 4, "kv_heads": 2, "batch": 2},
    "chunk": {"q_len": 300, "options": {"q_offset": 600}},
    "inside-a-block": {"q_len": 300, "options": {"q_offset": 571}},
    "inside-a-tile": {"q_len": 500, "options": {"q_offset": 441, "kv_offset": 41}},
    "bidirectional": {"options": {"is_causal": False}},
    "window": {"options": {"window": 500}},
    "softcap": {"options": {"softcap": 15.0}},
    "sinks": {"tensors": {"sinks": [0.5, 12.0]}},
    "left-padded": {"batch": 2, "tensors": _left_padded(900)},
    "right-padded": {"batch": 2, "tensors": {"kv_range": [[0, 641], [0, 900]]}},
    "mask": {"tensors": {"mask": _pattern(1, 2, 900, 900)}},
})  # fmt: skip
"""Calls in which a threshold of 6 nats skips tiles."""


def with_one_head(case: Case) -> Case:
    """Return a call with one query head unless it has options by head, for which an interpreter takes half the time."""
    by_head = {"sinks", "mask"} & case.tensors.keys()
    return case if by_head or case.kv_heads > 1 else replace(case, q_heads=1)


def assert_counting_changes_no_bit(dtype: torch.dtype, head_dim: int) -> None:
    """Hold a call of the Triton backend that counts skipped tiles against one that does not."""
    case = with_one_head(replace(SPARSE["causal"], head_dim=head_dim))
    recipe = that_skips(RECIPES["balanced"])
    counted = case.call(recipe, "triton", dtype, "cpu", case.zero_counts("cpu"))
    for ours, expected in zip(counted, case.call(recipe, "triton", dtype, "cpu"), strict=True):
        assert_bits_equal(ours, expected)


def that_skips(recipe: Recipe) -> Recipe:
    """Return a recipe that skips tiles of the calls in :data:`SPARSE`."""
    return replace(recipe, skip_threshold=6.0)


COUNTED = pairs(SPARSE, ["balanced"], ["gqa", "left-padded", "mask"], ["fp4", "int8-pv16", "paper", "identity"])
"""Calls and recipes to skip tiles with."""
UNCOUNTED = pairs(SPARSE, ["balanced"], ["gqa"], ["fp4", "int8-pv16", "identity"])
"""The same without counting tiles, in other kernels."""


def assert_skips_as_the_reference(case: Case, recipe: Recipe, dtype: torch.dtype, device: str) -> None:
    """Compare output and number of skipped tiles of the Triton backend with the reference."""
    recipe = that_skips(recipe)
    counts, expected = case.zero_counts(device), case.zero_counts(device)
    assert_matches_reference(case, recipe, dtype, device, counts, expected)
    skipped, examined = counts.sum(0).tolist()
    assert 0 < skipped < examined
    assert torch.equal(counts, expected), f"{counts.tolist()} against {expected.tolist()}"


SHORT = similar_cases({"q_len": 1, "kv_len": 300, "q_heads": 4, "kv_heads": 2}, {
    "one-query": {},
    "two-keys": {"kv_len": 2},
    "63-queries-of-8-heads": {"q_len": 63, "q_heads": 8, "kv_heads": 1},
    "group-of-1": {"q_len": 3, "q_heads": 2, "kv_heads": 2},
    "group-of-7": {"q_len": 5, "q_heads": 7, "kv_heads": 1},
    "group-of-8": {"q_len": 2, "q_heads": 16, "kv_heads": 2, "batch": 2},
    "offset": {"q_len": 9, "options": {"q_offset": 200}},
    "past-the-keys": {"options": {"q_offset": 1000}},
    "later-part": {"q_len": 9, "options": {"q_offset": 500, "kv_offset": 251}},
    "static-cache": {"q_len": 3, "tensors": {"q_offset": 170}},
    "static-cache-first-token": {"tensors": {"q_offset": 0}},
    "static-cache-rows": {"batch": 3, "tensors": {"q_offset": [170, 0, 299]}},
    "before-the-keys": {"q_len": 4, "batch": 3, "tensors": {"q_offset": [-9, -2, 299]}},
    "left-padded": {
        "batch": 2, "tensors": {"kv_range": [[45, 300], [0, 300]], "kv_offset": [-45, 0], "q_offset": [254, 299]},
    },
    "left-padded-at-the-end": {
        "batch": 2, "q_len": 5, "tensors": {"kv_range": [[45, 300], [0, 300]], "kv_offset": [-45, 0]},
    },
    "rows-of-uneven-length": {
        "batch": 70, "q_heads": 2, "kv_len": 130, "head_dim": 16,
        "tensors": {"kv_range": [[0, i * 13 // 7] for i in range(70)]},
    },
    "nothing-visible": {
        "q_len": 2, "batch": 2, "tensors": {"kv_range": [[7, 7], [0, 0]], "sinks": [0.5, float("-inf"), 3.0, -1.0]},
    },
    "window": {"q_len": 9, "options": {"window": 70}},
    "window-of-1": {"q_len": 9, "options": {"window": 1}},
    "huge-window": {"q_len": 9, "options": {"window": 2**40}},
    "window-static-cache": {"q_len": 3, "options": {"window": 70}, "tensors": {"q_offset": 170}},
    "softcap": {"options": {"softcap": 5.0}},
    "sinks": {"tensors": {"sinks": [0.5, 3.0, float("-inf"), 60.0]}},
    "mask": {"q_len": 9, "batch": 2, "tensors": {"mask": _pattern(2, 4, 9, 300)}},
    "mask-of-keys": {"q_len": 9, "batch": 2, "tensors": {"mask": _pattern(2, 1, 1, 300)}},
    "mask-2d": {"q_len": 9, "tensors": {"mask": _pattern(9, 300)}},
    "all": {
        "q_len": 9, "batch": 2, "options": {"window": 120, "softcap": 5.0},
        "tensors": {
            "q_offset": [150, 220], "kv_offset": [-40, 0], "kv_range": [[40, 300], [0, 280]],
            "sinks": [0.5, 3.0, 1.0, -2.0], "mask": _pattern(1, 4, 9, 300),
        },
    },
    "head-dim-4": {"head_dim": 4},
    "head-dim-80-96": {"head_dim": 80, "value_dim": 96},
    "head-dim-128": {"q_len": 17, "head_dim": 128},
    "head-dim-256": {"head_dim": 256},
})  # fmt: skip
"""Short calls, which have no low tiles."""

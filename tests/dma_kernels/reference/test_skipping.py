"""Tile skipping: which low tiles the reference skips, against the rule tile by tile in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from dma_kernels import Recipe, attention, attention_with_lse
from dma_kernels.reference.operands import prepare_operands
from dma_kernels.testing import RECIPES, assert_bits_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import visible_cells
from torch import Tensor

EXACT = Recipe(low="bf16", high="bf16", skip_threshold=1.0)
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
SCALE = 0.3


def sparse_qkv(batch: int, q_len: int, kv_len: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return bf16 numbers in fp64 with small keys in some runs of 128, so that some tiles are skipped."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn((batch, heads, length, 16), generator=generator)
        for heads, length in ((4, q_len), (2, kv_len), (2, kv_len))
    )
    for x, size, factors in ((query, 64, [0.5, 1.0, 3.0]), (key, 128, [2.0, 0.1, 0.02])):
        stretches = torch.randint(0, 3, (*x.shape[:2], x.shape[2] // size + 1), generator=generator)
        stretches[..., 0] = 0
        x *= torch.tensor(factors)[stretches.repeat_interleave(size, 2)[..., : x.shape[2], None]]
    query, key, value = (x.bfloat16().double() for x in (query, key, value))
    return query, key, value


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call; ``padding`` is the left padding of each row, ``extra`` the keys before the first query."""

    padding: tuple[int, ...] = (0,)
    q_len: int = 320
    extra: int = 0
    is_causal: bool = True
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_mask: bool = False
    seed: int = 0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return sparse_qkv(len(self.padding), self.q_len, self.q_len + self.extra, self.seed)

    def options(self) -> dict[str, Any]:
        kv_len, padding = self.q_len + self.extra, torch.tensor(self.padding)
        options: dict[str, Any] = {"is_causal": self.is_causal, "window": self.window, "softcap": self.softcap}
        options |= {"q_offset": self.extra - padding, "kv_offset": -padding, "scale": SCALE}
        options["kv_range"] = torch.stack((padding, torch.full_like(padding, kv_len)), 1)
        generator = torch.Generator().manual_seed(self.seed)
        if self.has_sinks:
            options["sinks"] = torch.tensor([-3.0, 0.0, 9.0, 30.0], dtype=torch.float64)
        if self.has_mask:
            mask = torch.rand((1, 4, self.q_len, kv_len), generator=generator) < 0.8
            mask[:, :, : self.q_len // 3, 128:256] = False
            mask[:, 1, 70:80] = False
            options["mask"] = mask
        return options


def logits_of(case: Case, recipe: Recipe, row: int) -> tuple[Tensor, Tensor]:
    """Return masked logits ``[Hq, Tq, Tk]`` of a batch row, and the high pairs ``[Tq, Tk]``."""
    options, tensors = case.options(), case.tensors()
    visible = visible_cells(*tensors[:2], options)[row]
    p = int(options["q_offset"][row]) + torch.arange(case.q_len)[:, None]
    j = int(options["kv_offset"][row]) + torch.arange(case.q_len + case.extra)[None]
    tiles = p // 128 - j // 128
    high = (tiles.abs() <= recipe.diagonal_tiles) & ((tiles >= 0) | (not case.is_causal)) | (
        j // 128 < recipe.sink_tiles
    )
    if case.is_causal:
        high |= (p < recipe.exact_until) & (tiles >= 0)
    query, key, value = (x[row : row + 1] for x in tensors)
    first = options["kv_offset"][row : row + 1]
    operands = prepare_operands(query, key, value, recipe, kv_position=first, visible=(j >= 0))
    low_scores, high_scores = (
        q[0] @ k[0].repeat_interleave(2, 0).mT
        for q, k in ((operands.q_low, operands.k_low), (operands.q_high, operands.k_high))
    )
    scores = torch.where(high, high_scores, low_scores)
    if operands.qk_bias is not None:
        scores = scores + operands.qk_bias[0, :, :, None]
    scores = scores * SCALE
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    return scores.masked_fill(~visible, -math.inf), high


def skipped_pairs(case: Case, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return which query-key pairs the rule skips, ``[B, Hq, Tq, Tk]``, and the counts."""
    threshold = recipe.skip_threshold
    assert threshold is not None
    options = case.options()
    q_len, kv_len = case.q_len, case.q_len + case.extra
    skipped, counts = torch.zeros((len(case.padding), 4, q_len, kv_len), dtype=torch.bool), torch.zeros(4, 2).long()
    logits_of_rows = [logits_of(case, recipe, row) for row in range(len(case.padding))]
    for row, head in product(range(len(case.padding)), range(4)):
        all_logits, high = logits_of_rows[row]
        logits = all_logits[head]
        q_offset, kv_offset = (int(options[name][row]) for name in ("q_offset", "kv_offset"))
        for block in range(q_offset // 64, (q_offset + q_len) // 64 + 1):
            start = block * 64 - q_offset
            if start < 0 or start + 64 > q_len:
                continue
            rows = slice(start, start + 64)
            for tile in range(kv_offset // 128, (kv_offset + kv_len) // 128 + 1):
                columns = slice(max(tile * 128 - kv_offset, 0), max(min((tile + 1) * 128 - kv_offset, kv_len), 0))
                part = logits[rows, columns]
                if part.numel() == 0 or bool(high[rows, columns].any()) or bool((part == -math.inf).all()):
                    continue
                largest = part.amax(1)
                largest_high = logits[rows].masked_fill(~high[rows], -math.inf).amax(1)
                is_small = (largest == -math.inf) | (largest_high - largest > threshold)
                counts[head] += torch.tensor([int(is_small.all()), 1])
                skipped[row, head, rows, columns] = bool(is_small.all())
    return skipped, counts


CASES = {
    "causal": Case(q_len=450),
    "bidirectional": Case(q_len=450, is_causal=False),
    "chunk": Case(q_len=200, extra=301),
    "window-bidirectional": Case(q_len=500, window=200, is_causal=False),
    "left-padding": Case(q_len=520, padding=(0, 130, 70, 519, 0, 64)),
    "mask": Case(q_len=450, has_mask=True),
    "all": Case(q_len=300, extra=260, padding=(5, 77), window=400, softcap=6.0, has_sinks=True, has_mask=True),
}


def check(case: Case, recipe: Recipe) -> Tensor:
    """Check a call against the rule; return the counts."""
    tensors, options = case.tensors(), case.options()
    counts = torch.zeros(4, 2, dtype=torch.int64)
    out, lse = attention_with_lse(*tensors, recipe, **options, tile_counts=counts)
    skipped, expected_counts = skipped_pairs(case, recipe)
    assert counts.tolist() == expected_counts.tolist()
    mask = options.pop("mask", torch.tensor(True)) & ~skipped
    expected, expected_lse = attention_with_lse(*tensors, replace(recipe, skip_threshold=None), **options, mask=mask)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-10, atol=1e-11)
    return counts


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("score_bytes", [64 << 20, 1], ids=["one-block", "blocks-of-64"])
def test_skipping_follows_the_rule(case: Case, score_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dma_kernels.reference.attention.SCORE_BYTES", score_bytes)
    counts = check(case, EXACT)
    assert 0 < int(counts[:, 0].sum()) < int(counts[:, 1].sum())


@recipes
def test_skipping_follows_the_rule_under_every_recipe(recipe: Recipe) -> None:
    counts = check(Case(q_len=700, padding=(0, 130)), replace(recipe, skip_threshold=0.5))
    assert 0 < int(counts[:, 0].sum()) < int(counts[:, 1].sum())


@settings(max_examples=40)
@given(
    case=st.builds(
        Case,
        padding=st.lists(st.integers(0, 200), min_size=1, max_size=3).map(tuple),
        q_len=st.integers(1, 400),
        extra=st.integers(0, 300),
        is_causal=st.booleans(),
        window=st.none() | st.integers(1, 600),
        softcap=st.none() | st.floats(1.0, 20.0),
        has_sinks=st.booleans(),
        has_mask=st.booleans(),
        seed=st.integers(0, 100),
    ),
    recipe=st.builds(
        Recipe,
        low=st.sampled_from(["bf16", "mxint8"]),
        diagonal_tiles=st.integers(0, 2),
        sink_tiles=st.integers(0, 2),
        exact_until=st.sampled_from([0, 128, 384]),
        smooth_k=st.booleans(),
        skip_threshold=st.sampled_from([0.05, 0.5, 2.0]),
    ),
)
def test_skipping_follows_the_rule_in_any_call(case: Case, recipe: Recipe) -> None:
    check(case, recipe)


@recipes
def test_an_infinite_threshold_equals_none_bit_for_bit(recipe: Recipe) -> None:
    tensors, options = CASES["all"].tensors(), CASES["all"].options()
    infinite, off = (attention(*tensors, replace(recipe, skip_threshold=each), **options) for each in (math.inf, None))
    assert_bits_equal(infinite, off)


def test_a_row_without_a_visible_high_key_keeps_its_tiles_unskipped() -> None:
    case = Case(q_len=512)
    mask = torch.ones(512, 512, dtype=torch.bool)
    mask[450, :128] = mask[450, 256:] = False  # in the block from 448, whose only low tile is tile 1
    recipe = replace(EXACT, skip_threshold=1e-6)
    counts = torch.zeros(4, 2, dtype=torch.int64)
    out = attention(*case.tensors(), recipe, scale=SCALE, mask=mask, tile_counts=counts)
    plain = attention(*case.tensors(), replace(recipe, skip_threshold=None), scale=SCALE, mask=mask)
    torch.testing.assert_close(out[:, :, 448:], plain[:, :, 448:])


def test_a_tile_with_a_nan_is_not_skipped() -> None:
    query, key, value = Case(q_len=512).tensors()
    key[0, :, 130, 3] = math.nan
    assert attention(query, key, value, EXACT, scale=1e-9)[:, :, 384:].isnan().all()


class TestCounts:
    def test_counts_accumulate_and_are_the_same_under_autograd_and_torch_compile(self) -> None:
        tensors = CASES["causal"].tensors()
        once, twice, by_autograd, by_compiler = (torch.zeros(4, 2, dtype=torch.int64) for _ in range(4))
        attention(*tensors, EXACT, tile_counts=once)
        for _ in range(2):
            attention(*tensors, EXACT, tile_counts=twice)
        query = tensors[0].clone().requires_grad_()
        attention(query, *tensors[1:], EXACT, tile_counts=by_autograd).sum().backward()
        compiled = torch.compile(
            lambda *qkv, counts: attention(*qkv, EXACT, tile_counts=counts), fullgraph=True, backend="aot_eager"
        )
        compiled(*tensors, counts=by_compiler)
        assert once.tolist() == by_autograd.tolist() == by_compiler.tolist()
        assert twice.tolist() == (2 * once).tolist()
        assert once[:, 0].gt(0).any()

    def test_invalid_counts_are_rejected(self) -> None:
        right = torch.zeros(4, 2).long()
        for counts in (right.float(), right[:2], torch.zeros(2, 4).long().T):
            with pytest.raises(ValueError, match=r"tile_counts must be int64 \[4, 2\], contiguous"):
                attention(*Case().tensors(), EXACT, tile_counts=counts)
        with pytest.raises(TypeError, match=r"tile_counts must be a torch\.Tensor, got list"):
            attention(*Case().tensors(), EXACT, tile_counts=[[0, 0]] * 4)
        with pytest.raises(ValueError, match="its skip_threshold is None"):
            attention(*Case().tensors(), RECIPES["identity"], tile_counts=right)


def test_the_gradient_is_that_of_attention_without_skipping() -> None:
    gradients = []
    for threshold in (0.1, None):
        tensors = [x.requires_grad_() for x in CASES["causal"].tensors()]
        out = attention(*tensors, replace(EXACT, skip_threshold=threshold))
        gradients.append(torch.autograd.grad(out, tensors, torch.ones_like(out)))
    for skipping, plain in zip(*gradients, strict=True):
        assert_bits_equal(skipping, plain)

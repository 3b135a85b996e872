"""The quantization rule: the precision of each query-key pair, and the resulting output.

The oracle is deliberately naive: one query and one key at a time, fp64, with the block quantizer of ``conftest.py``.
Inputs are bfloat16 numbers: their sums are exact in fp64, so both sides quantize the same numbers.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import textwrap
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from dma_kernels import Recipe, attention, attention_with_lse, quantize
from dma_kernels.testing import RECIPES, assert_as_accurate, assert_bits_equal, random_qkv, relative_error
from plain_attention import plain_attention
from torch import Tensor

recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
SCALE = 0.11
# Tile 3 starts at 384, so that a low tile remains with two diagonal tiles.
EDGES = [0, 1, 127, 128, 129, 255, 256, 257, 383, 384, 385]


def in_band(p: int, j: int, recipe: Recipe, is_causal: bool) -> bool:
    """Whether the pair of positions is high."""
    tile, key_tile = p // 128, j // 128
    if key_tile < recipe.sink_tiles:
        return True
    if is_causal and p < recipe.exact_until:
        return key_tile <= tile
    if is_causal:
        return tile - recipe.diagonal_tiles <= key_tile <= tile
    return abs(tile - key_tile) <= recipe.diagonal_tiles


def naive_rule(
    oracle: Any, query: Tensor, key: Tensor, value: Tensor, recipe: Recipe, *, positions: list[int],
    is_causal: bool = True, window: int | None = None, softcap: float | None = None, sinks: list[float] | None = None,
) -> np.ndarray:  # fmt: skip
    """Return ``[Hq, len(positions), Dv]`` for a query ``[Hq, Tq, D]`` that ends at the last key."""
    q, k, v = (x.double().numpy() for x in (query, key, value))
    kv_len, group = k.shape[1], len(q) // len(k)
    first = kv_len - q.shape[1]
    if is_causal and q.shape[1] < 64 and q.shape[1] < kv_len and recipe.high == "bf16":
        recipe = RECIPES["identity"]  # a short call has no low tiles
    shift = np.zeros(q.shape[:2])
    if recipe.smooth_k:
        mean = k[:, :128].mean(1, keepdims=True).astype(ml_dtypes.bfloat16).astype(np.float64)
        shift = np.einsum("htd,htd->ht", q, np.broadcast_to(np.repeat(mean, group, 0), q.shape))
        k = k - mean
    if recipe.rotate:
        size = q.shape[-1] & -q.shape[-1]
        signs = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)])
        matrix = np.kron(np.eye(q.shape[-1] // size), signs)
        q, k = (q @ matrix) * size**-0.5, (k @ matrix) * size**-0.5

    def cast(x: np.ndarray, format: str, shared: str) -> np.ndarray:
        if format == "bf16":
            return x
        return oracle.quantize(torch.from_numpy(x), format, rounding=recipe.scale_rounding, shared=shared).values

    q_shared = "row" if recipe.shared_scale == "tile" else recipe.shared_scale
    q_low, q_high = cast(q, recipe.low_q or recipe.low, q_shared), cast(q, recipe.high, "block")
    k_low, k_high = cast(k, recipe.low_k or recipe.low, recipe.shared_scale), cast(k, recipe.high, "block")
    v_low = v
    if recipe.pv == "fp8":
        v_scale = np.exp2(np.floor(np.log2(np.abs(v[:, :128]).max(1, keepdims=True))) - 3)
        v_low = (v / v_scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * v_scale
    out = np.zeros((len(q), len(positions), v.shape[-1]))
    for h in range(len(q)):
        for row, p in enumerate(positions):
            scores, values, are_high = [], [], []
            for j in range(kv_len):
                distance = p - j
                if is_causal and (distance < 0 or (window is not None and distance >= window)):
                    continue
                if not is_causal and window is not None and abs(distance) > window:
                    continue
                is_high = in_band(p, j, recipe, is_causal)
                q_row = (q_high if is_high else q_low)[h, p - first]
                k_row = (k_high if is_high else k_low)[h // group, j]
                score = (float(np.dot(q_row, k_row)) + shift[h, p - first]) * SCALE
                if softcap is not None:
                    score = softcap * math.tanh(score / softcap)
                values.append((v if is_high else v_low)[h // group, j])
                scores.append(score)
                are_high.append(is_high)
            sink = [] if sinks is None else [sinks[h]]
            largest = max(scores)  # a sink logit does not affect rounding
            weights = np.exp(np.array(scores) - largest)
            denominator = weights.sum() + sum(math.exp(s - largest) for s in sink)
            if recipe.pv == "fp8":
                rounded = (weights * 256.0).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / 256.0
                weights = np.where(are_high, weights, rounded)
            for weight, row_value in zip(weights, values, strict=True):
                out[h, row] += weight * row_value
            out[h, row] /= denominator
    return out


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompt": ({"q_len": 400, "kv_len": 400}, {}),
    "bidirectional": ({"q_len": 400, "kv_len": 400}, {"is_causal": False}),
    "chunk": ({"q_heads": 4, "kv_heads": 2, "q_len": 150, "kv_len": 390}, {}),
    "short": ({"q_heads": 4, "kv_heads": 2, "q_len": 63, "kv_len": 390}, {}),
    "short-window-softcap-sinks": ({"q_len": 7, "kv_len": 390}, {"window": 300, "softcap": 4.0, "sinks": [0.5, 3.0]}),
    "short-bidirectional": ({"q_len": 7, "kv_len": 390}, {"is_causal": False}),
    "head-dim-8": ({"q_len": 64, "kv_len": 389, "head_dim": 8, "value_dim": 24}, {}),
    "head-dim-80": ({"q_len": 64, "kv_len": 389, "head_dim": 80, "value_dim": 24}, {}),
    "window-softcap-sinks": ({"q_len": 260, "kv_len": 390}, {"window": 200, "softcap": 4.0, "sinks": [0.5, 3.0]}),
    "bidirectional-window": ({"q_len": 400, "kv_len": 400}, {"window": 190, "is_causal": False}),
}


@recipes
@pytest.mark.parametrize("call", CALLS)
def test_a_call_equals_the_oracle(oracle: Any, recipe: Recipe, call: str) -> None:
    shapes, options = CALLS[call]
    query, key, value = random_qkv(**shapes, dtype=torch.float64)
    first = shapes["kv_len"] - shapes["q_len"]
    positions = [p for p in [*EDGES, shapes["kv_len"] - 1] if first <= p < shapes["kv_len"]]
    expected = naive_rule(oracle, query[0], key[0], value[0], recipe, positions=positions, **options)
    tensors = {"sinks": torch.tensor(options["sinks"], dtype=torch.float64)} if "sinks" in options else {}
    out = attention(query, key, value, recipe, scale=SCALE, q_offset=first, **(options | tensors))
    assert relative_error(out[0][:, [p - first for p in positions]], torch.from_numpy(expected)) < 1e-11


class TestShortCalls:
    """A few queries that continue a sequence attend exactly, whatever the low tiles of the recipe are."""

    @staticmethod
    def inputs(q_len: int) -> tuple[Tensor, Tensor, Tensor]:
        return random_qkv(batch=2, q_heads=6, kv_heads=2, q_len=q_len, kv_len=700, dtype=torch.float64)

    def test_a_prompt_of_a_few_tokens_in_a_static_cache_is_exact(self) -> None:
        query, key, value = self.inputs(10)
        key[:, :, 10:] = value[:, :, 10:] = math.nan
        kv_range = torch.tensor([[0, 10], [0, 10]])
        out = attention(query, key, value, RECIPES["mxint8-tile"], q_offset=torch.tensor(0), kv_range=kv_range)
        expected = plain_attention(query, key[:, :, :10], value[:, :, :10], {})[0]
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)

    def test_positions_may_be_on_the_device_and_tile_counts_stay_zero(self) -> None:
        counts = torch.zeros(6, 2, dtype=torch.int64)
        inputs, options = self.inputs(63), {"q_offset": torch.tensor([637, 400])}
        out = attention(*inputs, Recipe(low="mxint8", skip_threshold=1e-9), **options, tile_counts=counts)
        assert counts.eq(0).all()
        assert relative_error(out, plain_attention(*inputs, options)[0]) < 1e-12


class TestBand:
    """Check pairs one by one: with a single visible key, the log-sum-exp is that pair's score."""

    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
    @pytest.mark.parametrize("exact_until", [0, 128, 256], ids=lambda n: f"exact{n}")
    @pytest.mark.parametrize("sink_tiles", [0, 1, 2], ids=lambda n: f"sink{n}")
    @pytest.mark.parametrize("diagonal_tiles", [0, 1, 2], ids=lambda n: f"diag{n}")
    def test_high_precision_boundaries_follow_the_rule(
        self, diagonal_tiles: int, sink_tiles: int, exact_until: int, is_causal: bool
    ) -> None:
        recipe = Recipe(
            low="mxfp4", high="mxint8", diagonal_tiles=diagonal_tiles, sink_tiles=sink_tiles, exact_until=exact_until
        )
        pairs = [(p, j) for p in EDGES for j in EDGES if not (is_causal and j > p)]
        query, key, value = random_qkv(q_heads=1, q_len=len(pairs), kv_len=386)
        query = query.transpose(0, 2)  # a batch of pairs
        p, j = torch.tensor(pairs).T
        key, value = (x.expand(len(pairs), -1, -1, -1) for x in (key, value))
        options: dict[str, Any] = {"q_offset": p, "kv_range": torch.stack([j, j + 1], dim=1), "is_causal": is_causal}
        _, score = attention_with_lse(query, key, value, recipe, scale=1.0, **options)
        low, high = (
            (quantize(query, f).dequantize() * quantize(key[0, 0, j], f).dequantize()[:, None, None]).sum(-1)
            for f in ("mxfp4", "mxint8")
        )
        assert (low - high).abs().min() > 1e-2
        expected = torch.tensor([in_band(*pair, recipe, is_causal) for pair in pairs])
        torch.testing.assert_close(score, torch.where(expected[:, None, None], high, low), rtol=1e-4, atol=1e-4)


class TestPositions:
    """The rule depends only on positions: not on the batch, padding or how calls are split."""

    @recipes
    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
    def test_padding_on_either_side_of_a_batch_changes_nothing(self, recipe: Recipe, is_causal: bool) -> None:
        # Keys far from 0, so that a masked key that smoothing does not zero would enlarge a shared scale.
        # fp64: other columns of a product change only the last bits of a sum.
        query, key, value = random_qkv(batch=3, kv_heads=2, q_len=530, kv_len=530, dtype=torch.float64)
        key += 30.0
        spans = [(75, 530), (0, 530), (0, 410)]
        starts = torch.tensor([start for start, _ in spans])
        positions: dict[str, Any] = {"kv_range": torch.tensor(spans), "kv_offset": -starts, "q_offset": -starts}
        out = attention(query, key, value, recipe, is_causal=is_causal, **positions)
        for row, (start, end) in enumerate(spans):
            alone = (x[row : row + 1, :, start:end] for x in (query, key, value))
            expected = attention(*alone, recipe, is_causal=is_causal)
            assert relative_error(out[row : row + 1, :, start:end], expected) < 1e-12

    @recipes
    def test_shifting_all_positions_by_whole_tiles_changes_nothing(self, recipe: Recipe) -> None:
        recipe = dataclasses.replace(recipe, sink_tiles=0, exact_until=0)
        qkv = random_qkv(q_len=430, kv_len=430)
        moved = attention(*qkv, recipe, q_offset=1280, kv_offset=1280)
        assert_bits_equal(moved, attention(*qkv, recipe))

    @recipes
    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
    def test_the_query_block_size_does_not_matter(
        self, recipe: Recipe, is_causal: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        qkv = random_qkv(q_len=430, kv_len=430, dtype=torch.float64)
        whole = attention(*qkv, recipe, is_causal=is_causal)
        monkeypatch.setattr("dma_kernels.reference.attention.SCORE_BYTES", 430 * 4 * 2 * 50)  # blocks of 50 rows
        assert relative_error(attention(*qkv, recipe, is_causal=is_causal), whole) < 1e-12

    @recipes
    def test_chunked_prefill_equals_prefill(self, recipe: Recipe) -> None:
        query, key, value = random_qkv(q_len=400, kv_len=400, dtype=torch.float64)
        whole = attention(query, key, value, recipe)
        for start, end in ((0, 130), (130, 131), (131, 300), (300, 400)):
            chunk = attention(query[:, :, start:end], key[:, :, :end], value[:, :, :end], recipe)
            assert relative_error(chunk, whole[:, :, start:end]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "mxint8", "nvfp4"])
def test_the_error_is_that_of_the_dtype_if_quantization_changes_nothing(format: str, dtype: torch.dtype) -> None:
    query, key, value = random_qkv(q_heads=4, kv_heads=2, q_len=400, kv_len=400)
    query, key = (quantize(x, format).dequantize() for x in (query, key))
    qkv = [x.to(dtype) for x in (query, key, value)]  # exact: at most 7 significant bits
    recipe = Recipe(low=format, high="bf16")
    exact = attention(*(x.double() for x in qkv), recipe)
    assert relative_error(exact, attention(*(x.double() for x in qkv), RECIPES["identity"])) < 1e-12
    if dtype == torch.float32:
        assert relative_error(attention(*qkv, recipe), exact) < 2e-6
    else:
        eager = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
        assert_as_accurate(attention(*qkv, recipe), eager, exact, factor=1.5)


@recipes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_recipe_follows_the_same_rule_in_every_dtype(recipe: Recipe, dtype: torch.dtype) -> None:
    # The tolerance allows ties of probabilities and rotated operands to round the other way.
    qkv = random_qkv(q_len=300, kv_len=300, dtype=dtype)
    exact = attention(*(x.double() for x in qkv), recipe)
    assert relative_error(attention(*qkv, recipe), exact) < (1e-3 if dtype == torch.float32 else 3e-2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory as Linux reports it")
def test_memory_is_linear_in_the_prompt_length(python: Any) -> None:
    """A causal prompt of 16K tokens and one head takes less than 512 MiB; its scores would take 1 GiB."""
    script = """
        import re, torch
        from pathlib import Path
        from dma_kernels import attention
        from dma_kernels.testing import RECIPES, random_qkv

        def memory(field):
            return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

        torch.set_num_threads(1)
        qkv = random_qkv(q_heads=1, q_len=16384, kv_len=16384)
        before = memory("VmRSS")
        assert attention(*qkv, RECIPES["mxfp8-row"]).isfinite().all()
        print(memory("VmHWM") - before)
    """
    result = python("-c", textwrap.dedent(script))
    assert result.returncode == 0, result.stderr
    assert 0 < int(result.stdout) < 1 << 19  # kB

"""Which calls the Hopper kernels support, and the queries quantized for them.

The interpreter has no Gluon, so the kernels run in an emulator here, and on a GPU in
``tests/gpu/test_prefill_hopper.py``; ``test_compiled.py`` compiles them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import gluon_emulator
import pytest
import torch
from dma_kernels import Recipe, api, attention, key_mean
from dma_kernels.numerics.call import AttentionCall
from dma_kernels.numerics.formats import TILE
from dma_kernels.numerics.geometry import LOG2_E, AttentionGeometry
from dma_kernels.numerics.layout import TensorLayout
from dma_kernels.numerics.quantize import e8m0_to_float, quantize
from dma_kernels.numerics.transforms import hadamard_rotate
from dma_kernels.prefill import config as configs
from dma_kernels.prefill.config import (
    ROWS,
    ComputePath,
    MultiCTAConfig,
    PortableConfig,
    PrefillShape,
    WarpSpecializedConfig,
    configure_multi_cta,
    configure_warp_specialized,
    multi_cta_config,
    select_compute_path,
    select_config,
    warp_specialized_config,
)
from dma_kernels.prefill.hopper import host as hopper
from dma_kernels.prefill.hopper import quantize_q as query_quantizer
from dma_kernels.prefill.hopper.quantize_q import quantize_q
from dma_kernels.prefill.operands import DEQUANTIZED, E4M3, E5M2, INT8, RAW, OperandFormat, Operands
from dma_kernels.prefill.plan import launch_attention, new_results, plan
from dma_kernels.prefill.quantizer import query_global_scale
from dma_kernels.runtime import chip
from dma_kernels.testing import assert_bits_equal, random_qkv
from prefill_cases import (
    EXACT_STARTS,
    MASKED,
    RECIPES,
    SPARSE,
    Case,
    assert_an_exact_start_has_no_low_tile,
    assert_counting_changes_no_bit,
    assert_matches_reference,
    assert_skips_as_the_reference,
    with_one_head,
)
from quantized_operands import expected_operands
from sampling import sampled
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs these")

LENGTH = 300
MASK = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
RECIPES_TAKEN = (
    "int8",
    "int8-pv16",
    "e4m3-rotated",
    "paper",
    "mxfp4-row",
    "int8-mxfp8",
    "fp4",
    "nvfp4",
    "mixed",
    "nvfp4-keys",
)


def inputs(head_dim: int = 128, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    return random_qkv(q_len=length, kv_len=length, head_dim=head_dim, dtype=torch.bfloat16)


def misaligned(tensor: Tensor) -> Tensor:
    """Return a copy at an address that is not aligned for TMA."""
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


def shape_of(
    head_dim: int = 128,
    *,
    softcap: bool = False,
    change: Callable[[Tensor], Tensor] = lambda key: key,
    length: int = LENGTH,
    **changes: Any,
) -> PrefillShape:
    query, key, value = inputs(head_dim, length)
    geometry = AttentionGeometry(length, 0, 0, None, is_causal=True, window=None, mask=None)
    layouts = map(TensorLayout.of, (query, change(key), value))
    return PrefillShape(*layouts, replace(geometry, **changes), 90, has_softcap=softcap)


def is_taken(**call: Any) -> bool:
    """Whether the warp-specialized kernel can compute a call."""
    return configure_warp_specialized(shape_of(**call), select_compute_path(RECIPES["int8"], 90)) is not None


def test_four_consumer_warpgroups_take_no_window_and_no_mask() -> None:
    assert is_taken(head_dim=64)
    assert not is_taken(head_dim=64, window=200)
    assert not is_taken(head_dim=64, mask=MASK)


def test_the_interpreter_always_selects_the_portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    path = select_compute_path(RECIPES["int8"], 90)
    assert isinstance(select_config(shape_of(), path), PortableConfig)
    monkeypatch.setattr(chip, "is_interpreted", lambda: False)
    assert isinstance(select_config(shape_of(), path), MultiCTAConfig)


@pytest.mark.parametrize(("max_mean_keys", "min_rows", "call", "kernel"), [
    (LENGTH, 0, {}, MultiCTAConfig),
    (0, 0, {}, WarpSpecializedConfig),
    (0, 0, {"softcap": True}, MultiCTAConfig),
    (0, 0, {"mask": MASK}, MultiCTAConfig),
    (0, 2 * LENGTH, {}, WarpSpecializedConfig),
    (0, 2 * LENGTH + 1, {}, MultiCTAConfig),
    (LENGTH // 2, 0, {}, MultiCTAConfig),
    (LENGTH // 2 - 1, 0, {}, WarpSpecializedConfig),
    (LENGTH - 1, 0, {"is_causal": False}, WarpSpecializedConfig),
    (200, 0, {"window": 200}, MultiCTAConfig),
    (199, 0, {"window": 200}, WarpSpecializedConfig),
    (200, 0, {"window": 100, "is_causal": False}, MultiCTAConfig),
    (199, 0, {"window": 100, "is_causal": False}, WarpSpecializedConfig),
    (0, 0, {"head_dim": 80}, PortableConfig),
    (0, 0, {"change": misaligned}, PortableConfig),
])  # fmt: skip
def test_the_fastest_kernel_that_supports_a_call_is_selected(
    max_mean_keys: int, min_rows: int, call: dict[str, Any], kernel: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chip, "is_interpreted", lambda: False)
    for name, changes in (
        ("multi_cta_config", {"max_mean_keys": max_mean_keys}),
        ("warp_specialized_config", {"min_keys": 0, "min_rows": min_rows}),
    ):
        configure = getattr(configs, name)
        monkeypatch.setattr(configs, name, lambda *a, f=configure, c=changes: (found := f(*a)) and replace(found, **c))
    assert isinstance(select_config(shape_of(**call), select_compute_path(RECIPES["balanced"], 90)), kernel)


@pytest.mark.parametrize(("min_keys", "call", "kernel"), [
    (LENGTH, {}, WarpSpecializedConfig),
    (LENGTH + 1, {}, MultiCTAConfig),
    (200, {"window": 200}, WarpSpecializedConfig),
    (201, {"window": 200}, MultiCTAConfig),
])  # fmt: skip
def test_the_warp_specialized_kernel_is_selected_from_min_keys_on(
    min_keys: int, call: dict[str, Any], kernel: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chip, "is_interpreted", lambda: False)
    config = WarpSpecializedConfig(3, stages=4, registers=160, min_keys=min_keys, min_rows=0)
    monkeypatch.setattr(configs, "warp_specialized_config", lambda *_: config)
    monkeypatch.setattr(configs, "multi_cta_config", lambda *_: MultiCTAConfig(2, 1, 168, max_mean_keys=0))
    assert isinstance(select_config(shape_of(**call), select_compute_path(RECIPES["balanced"], 90)), kernel)


@pytest.mark.parametrize(("arch", "head_dim", "recipe", "is_there"), [
    (90, 128, "int8", True),
    (90, 128, "paper", True),
    (90, 96, "int8", True),
    (90, 64, "int8", True),
    (90, 256, "int8", True),
    (90, 256, "paper", False),
    (90, 256, "fp4", False),
    (90, 256, "nvfp4-keys", False),
    (90, 128, "fp4", True),
    (90, 128, "nvfp4-keys", True),
    (90, 64, "nvfp4-keys", True),
    (90, 64, "int8-pv16", False),
    (90, 64, "paper", False),
    (90, 32, "int8", False),
    (90, 128, "identity", False),
    (100, 128, "int8", False),
    (89, 128, "int8", False),
])  # fmt: skip
def test_only_hopper_has_a_warp_specialized_config(arch: int, head_dim: int, recipe: str, is_there: bool) -> None:
    config = warp_specialized_config(arch, select_compute_path(RECIPES[recipe], arch), head_dim)
    assert (config is not None) == is_there


@pytest.mark.parametrize(("arch", "head_dim", "recipe", "is_there"), [
    (90, 128, "balanced", True),
    (90, 64, "e4m3-rotated", True),
    (90, 256, "int8", False),
    (90, 128, "int8-pv16", True),
    (90, 128, "paper", True),
    (90, 128, "fp4", True),
    (90, 64, "nvfp4-keys", True),
    (90, 32, "nvfp4-keys", False),
    (90, 256, "paper", False),
    (90, 128, "identity", False),
    (100, 128, "int8", False),
])  # fmt: skip
def test_only_hopper_has_a_multi_cta_config(arch: int, head_dim: int, recipe: str, is_there: bool) -> None:
    config = multi_cta_config(arch, select_compute_path(RECIPES[recipe], arch), head_dim)
    assert (config is not None) == is_there


def test_multi_cta_kernel_rejects_more_blocks_than_a_grid_has(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for most in (-(-LENGTH // ROWS), -(-LENGTH // ROWS) - 1):
        monkeypatch.setattr(configs, "MAX_CTAS", most)
        taken.append(configure_multi_cta(shape_of(), select_compute_path(RECIPES["balanced"], 90)) is not None)
    assert taken == [True, False]


@pytest.mark.parametrize(("form", "format"), [(INT8, "mxint8"), (E4M3, "mxfp8")])
def test_quantized_queries_equal_the_specification_bit_for_bit(form: OperandFormat, format: str) -> None:
    query, _, _ = inputs(length=70)
    recipe = Recipe(low=format, shared_scale="tile", pv="fp8")
    quantized_q = quantize_q(query, None, None, recipe, form, RAW, logit_scale=0.25 * LOG2_E, use_pdl=False)
    expected = quantize(query.float(), format, shared_scale="row")
    assert_bits_equal(quantized_q.low, expected.data)
    unit = 2.0**-6 if form is INT8 else 1.0
    torch.testing.assert_close(
        quantized_q.descale_and_bias[0],
        e8m0_to_float(expected.scale[..., 0]) * unit * (0.25 * LOG2_E),
        rtol=1e-6,
        atol=0.0,
    )
    assert quantized_q.high is query


def test_both_query_formats_of_the_paper_preset_are_exact() -> None:
    query, _, _ = inputs(length=70)
    recipe = RECIPES["paper"]
    quantized_q = quantize_q(query, None, None, recipe, E5M2, DEQUANTIZED, logit_scale=LOG2_E, use_pdl=False)
    low = quantize(query.float(), "mxfp4", scale_rounding="floor").dequantize()
    torch.testing.assert_close(
        quantized_q.low.float() * quantized_q.descale_and_bias[0][..., None] / LOG2_E, low, rtol=1e-6, atol=0.0
    )
    high = quantize(query.float(), "mxfp8", scale_rounding="floor").dequantize()
    assert torch.equal(quantized_q.high.float(), high)


def test_the_bias_of_quantized_queries_is_their_product_with_the_mean_key() -> None:
    query, _, _ = random_qkv(batch=2, q_heads=4, kv_heads=2, q_len=70, kv_len=70, head_dim=128, dtype=torch.bfloat16)
    mean = torch.randn(2, 2, 128)
    quantized_q = quantize_q(query, mean, None, RECIPES["int8"], INT8, RAW, logit_scale=LOG2_E, use_pdl=False)
    expected = (query.float() * mean.repeat_interleave(2, dim=1)[:, :, None]).sum(-1)
    torch.testing.assert_close(quantized_q.descale_and_bias[1], expected, rtol=1e-5, atol=1e-4)


def test_nvfp4_queries_have_their_heads_global_scale() -> None:
    query, _, _ = inputs(length=70)
    recipe = Recipe(low="nvfp4", scale_rounding="search", pv="fp8")
    global_scale = query_global_scale(query, recipe)
    quantized_q = quantize_q(
        query, None, global_scale, recipe, DEQUANTIZED, RAW, logit_scale=0.5 * LOG2_E, use_pdl=False
    )
    expected = quantize(query.float(), "nvfp4", scale_rounding="search").dequantize()
    assert quantized_q.low.dtype == torch.bfloat16
    assert torch.equal(quantized_q.low.float(), expected)
    assert (quantized_q.descale_and_bias[0] == 0.5 * LOG2_E).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unquantized_rotated_queries_keep_their_dtype(dtype: torch.dtype) -> None:
    query = random_qkv(q_len=70, kv_len=70, head_dim=128, dtype=dtype)[0]
    recipe = RECIPES["nvfp4-keys"]
    quantized_q = quantize_q(query, None, None, recipe, DEQUANTIZED, RAW, logit_scale=LOG2_E, use_pdl=False)
    assert quantized_q.low.dtype == dtype
    torch.testing.assert_close(quantized_q.low.float(), hadamard_rotate(query.float()), rtol=2e-2, atol=2e-3)


# ---- the kernels, emulated

HEADS: dict[str, Any] = {"q_heads": 2, "kv_heads": 1, "head_dim": 128}
ONE: dict[str, Any] = HEADS | {"q_heads": 1}
"""For calls that differ in positions alone."""
CASES = {
    "causal": Case(q_len=500, kv_len=500, **HEADS),
    "few-queries": Case(q_len=69, kv_len=569, **HEADS),
    "batch": Case(q_len=430, kv_len=430, batch=2, q_heads=2, kv_heads=2, head_dim=128),
    "chunk": Case(q_len=150, kv_len=900, options={"q_offset": 750}, **ONE),
    "offset": Case(q_len=150, kv_len=700, options={"q_offset": 800, "kv_offset": 256}, **ONE),
    "bidirectional": Case(q_len=500, kv_len=500, options={"is_causal": False}, **HEADS),
    "cross": Case(q_len=400, kv_len=300, options={"is_causal": False}, **ONE),
    "wide": Case(q_len=100, kv_len=900, options={"is_causal": False, "q_offset": 470}, **ONE),
    "inside-a-tile": Case(q_len=300, kv_len=450, options={"q_offset": 291, "kv_offset": 141}, **ONE),
    "negative-positions": Case(q_len=200, kv_len=430, options={"q_offset": 185, "kv_offset": -45}, **ONE),
    "keys-ahead": Case(q_len=200, kv_len=400, options={"kv_offset": 450, "is_causal": False}, **ONE),
    "keys-end-early": Case(q_len=300, kv_len=200, options={"q_offset": 200}, **ONE),
    "window": Case(q_len=700, kv_len=700, options={"window": 300}, **ONE),
    "window-of-a-tile": Case(q_len=500, kv_len=500, options={"window": 128}, **ONE),
    "window-chunk": Case(q_len=150, kv_len=900, options={"q_offset": 750, "window": 333}, **ONE),
    "window-bidirectional": Case(q_len=700, kv_len=700, options={"window": 200, "is_causal": False}, **ONE),
    "left-padded": Case(
        q_len=430,
        kv_len=430,
        batch=2,
        tensors={"kv_range": [[145, 430], [0, 430]], "kv_offset": [-145, 0], "q_offset": [-145, 0]},
        **HEADS,
    ),
    "right-padded": Case(q_len=430, kv_len=430, batch=3, tensors={"kv_range": [[0, 41], [0, 300], [0, 0]]}, **HEADS),
    "left-padded-window": Case(
        q_len=600,
        kv_len=600,
        batch=2,
        options={"window": 250},
        tensors={"kv_range": [[145, 600], [0, 600]], "kv_offset": [-145, 0], "q_offset": [-145, 0]},
        **HEADS,
    ),
    "padded-bidirectional": Case(
        q_len=430,
        kv_len=430,
        batch=2,
        options={"is_causal": False},
        tensors={"kv_range": [[45, 400], [0, 430]]},
        **HEADS,
    ),
    "softcap": Case(q_len=430, kv_len=430, options={"softcap": 5.0}, **ONE),
    "softcap-above-all-logits": Case(q_len=430, kv_len=430, options={"softcap": 1e7}, **ONE),
    "softcap-and-sinks": Case(
        q_len=430,
        kv_len=430,
        batch=2,
        options={"softcap": 5.0, "is_causal": False},
        tensors={"kv_range": [[45, 400], [0, 0]], "sinks": [0.5, 3.0]},
        **HEADS,
    ),
    "sinks": Case(q_len=430, kv_len=430, tensors={"sinks": [0.5, float("-inf")]}, **HEADS),
    "sinks-of-nothing": Case(
        q_len=500,
        kv_len=500,
        batch=2,
        tensors={"kv_range": [[0, 0], [45, 430]], "sinks": [3.0, float("-inf")]},
        **HEADS,
    ),
}
OF_OTHER_RECIPES = ("few-queries", "left-padded", "softcap-and-sinks", "window-chunk")
"""Cases that continuous integration runs with recipes that share the code of masks, which it tests with one recipe."""
MASKS_OF_OTHER_RECIPES = ("heads", "inside-a-tile", "packed-left-padded", "window-softcap-sinks")
"""The same for masks."""
WIDE_RECIPES = ("int8", "e4m3-rotated", "int8-mxfp8")
"""Recipes that the kernels support with 256 channels."""


@pytest.fixture
def is_short() -> bool:
    """Whether the multi-CTA kernel is emulated."""
    return False


def quantized(
    key: Tensor, value: Tensor, recipe: Recipe, path: ComputePath, *,
    kv_offset: int, rows: Tensor | None, low_tiles: range | None,
) -> Operands:  # fmt: skip
    """Return the quantizer's output, computed in torch for speed; memory that it does not write is bytes of 255."""
    mean = None
    if recipe.smooth_k:
        index = torch.arange(key.shape[2])
        visible = None if rows is None else (index >= rows[:, 2:3]) & (index < rows[:, 3:4])
        mean = key_mean(key, visible)[:, :, 0]
    made = expected_operands(key, value, recipe, path, kv_offset=kv_offset, rows=rows, mean=mean)
    assert made.low is not None
    if low_tiles is not None and path.key is RAW:
        for x in (made.low.key, made.low.value, made.low.key_descale):
            if x is not None and x is not value:
                tiles = made.low.key.shape[2] // TILE
                by_tile = x.view(torch.uint8).view(*x.shape[:2], tiles, -1)
                by_tile[:, :, [i for i in range(tiles) if i not in low_tiles]] = 255
    return made


@pytest.fixture
def emulated(is_short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run calls of the Triton backend on an emulated Hopper kernel."""

    def emulate(kernel: Any, constants: dict[str, Any], grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        gluon_emulator.run(kernel, grid, arguments, constants)

    class EagerPlan:
        """Runs a call on real tensors."""

        def run(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
            query, key, value, recipe = call.query, call.key, call.value, call.recipe
            seq_info = call.seq_info()
            geometry = AttentionGeometry.of(call, seq_info)
            path = select_compute_path(recipe, 90)
            made = quantized(
                key, value, recipe, path, kv_offset=geometry.kv_offset, rows=seq_info,
                low_tiles=geometry.low_tiles(query.shape[2], recipe),
            )  # fmt: skip
            made = replace(made, query_global_scale=query_global_scale(query, recipe))
            layouts = map(TensorLayout.of, (query, key, value))
            shape = PrefillShape(*layouts, geometry, 90, has_softcap=call.softcap is not None)
            config = (configure_multi_cta if is_short else configure_warp_specialized)(shape, path)
            assert config is not None
            out, lse = new_results(query, value)
            sinks = None if call.sinks is None else call.sinks.contiguous()
            launch_attention(
                query, made, geometry, recipe, config, out, lse, scale=call.score_scale, softcap=call.softcap,
                sinks=sinks, tile_counts=call.tile_counts,
            )  # fmt: skip
            return out, lse

    def plan_eagerly(call: AttentionCall) -> Any:
        return plan(call) if call.backend == "reference" else EagerPlan()

    monkeypatch.setattr(hopper, "launch_kernel", emulate)
    monkeypatch.setattr(api, "plan", plan_eagerly)
    # Triton's interpreter takes as long for a block of 32 query rows as for one of 512.
    monkeypatch.setattr(query_quantizer, "ROWS", 512)


WARP_SPECIALIZED_CALLS = [
    *(("causal", recipe, 128) for recipe in RECIPES_TAKEN),
    ("softcap", "nvfp4", 128),
    *(("causal", recipe, 64) for recipe in RECIPES_TAKEN if recipe not in ("int8-pv16", "paper")),
    *(("causal", recipe, head_dim) for recipe in WIDE_RECIPES for head_dim in (96, 192)),
    *((case, recipe, 256) for recipe in WIDE_RECIPES for case in ("causal", "few-queries", "wide")),
    *((case, "int8", 128) for case in CASES),
    *((case, recipe, 128) for recipe in ("int8-mxfp8", "nvfp4-keys") for case in OF_OTHER_RECIPES),
    *((case, "int8", 64) for case in OF_OTHER_RECIPES if "window" not in case),
]
"""Case, recipe and head dimension of each call that continuous integration runs."""
MORE_WARP_SPECIALIZED_CALLS = [
    *((case, recipe, 128) for recipe in ("int8-mxfp8", "nvfp4-keys") for case in CASES),
    *((case, "int8", 64) for case in CASES if "window" not in case),
]


def calls(in_ci: list[tuple[str, str, int]], more: list[tuple[str, str, int]]) -> pytest.MarkDecorator:
    """Parametrize a test by case, recipe and head dimension, each call once."""
    values = sampled(dict.fromkeys((*in_ci, *more)), lambda *call: call in in_ci)
    return pytest.mark.parametrize(("case", "recipe", "head_dim"), values)


@calls(WARP_SPECIALIZED_CALLS, MORE_WARP_SPECIALIZED_CALLS)
def test_emulated_calls_match_the_reference(case: str, recipe: str, head_dim: int, emulated: None) -> None:
    assert_matches_reference(replace(CASES[case], head_dim=head_dim), RECIPES[recipe], torch.bfloat16, "cpu")


@pytest.mark.parametrize("case", sampled(MASKED, MASKS_OF_OTHER_RECIPES.__contains__))
def test_emulated_masks_match_the_reference(case: str, emulated: None) -> None:
    assert_matches_reference(replace(MASKED[case], head_dim=256), RECIPES["int8"], torch.bfloat16, "cpu")


@pytest.mark.parametrize("bands", [(0, 0), (0, 2), (2, 0)])
@pytest.mark.parametrize("case", ["causal", "bidirectional"])
@pytest.mark.parametrize("name", ["int8-pv16", "nvfp4-keys"])  # three blocks in flight, and two
def test_emulated_diagonal_and_sink_tiles_match_the_reference(
    name: str, case: str, bands: tuple[int, int], emulated: None
) -> None:
    recipe = replace(RECIPES[name], diagonal_tiles=bands[0], sink_tiles=bands[1])
    assert_matches_reference(CASES[case], recipe, torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("recipe", "is_short", "is_causal"),
    [
        ("int8", False, True),
        ("int8-pv16", False, False),
        ("nvfp4-keys", False, True),
        ("int8", True, False),
        ("int8-pv16", True, True),
    ],
)
def test_emulated_masked_keys_may_hold_any_value(recipe: str, is_causal: bool, emulated: None) -> None:
    query, key, value = random_qkv(batch=2, q_len=430, kv_len=430, **HEADS, dtype=torch.bfloat16)
    starts, ends = torch.tensor([145, 0]), torch.tensor([430, 290])
    hidden = (torch.arange(430) < starts[:, None]) | (torch.arange(430) >= ends[:, None])
    options: dict[str, Any] = {
        "kv_range": torch.stack([starts, ends], 1), "kv_offset": -starts, "q_offset": -starts, "is_causal": is_causal,
    }  # fmt: skip
    results = [
        attention(query, *(x.masked_fill(hidden[:, None, :, None], filler) for x in (key, value)), RECIPES[recipe],
                  backend="triton", **options)
        for filler in (0.0, float("nan"))
    ]  # fmt: skip
    assert torch.equal(*results)
    assert results[0].isfinite().all()


MULTI_CTA_CALLS = [
    *product(["causal"], ("balanced", *RECIPES_TAKEN), (64, 128)),
    *product(["causal"], ("balanced", "e4m3-rotated", "int8-pv16", "fp4"), (96,)),
    *((case, "balanced", 64) for case in CASES),
    *((case, *of) for case in OF_OTHER_RECIPES for of in (("balanced", 128), ("int8", 96), ("int8-pv16", 128))),
]
MORE_MULTI_CTA_CALLS = [
    *((case, "int8", 96) for case in CASES),
    *((case, recipe, 128) for case in CASES for recipe in ("balanced", "int8-pv16", "paper", "nvfp4")),
]


@pytest.mark.parametrize("is_short", [True])
@calls(MULTI_CTA_CALLS, MORE_MULTI_CTA_CALLS)
def test_emulated_short_calls_match_the_reference(case: str, recipe: str, head_dim: int, emulated: None) -> None:
    assert_matches_reference(replace(CASES[case], head_dim=head_dim), RECIPES[recipe], torch.bfloat16, "cpu")


@pytest.mark.parametrize("is_short", [True])
@pytest.mark.parametrize(
    ("case", "recipe", "head_dim"),
    sampled(
        [(case, *of) for case in MASKED for of in (("balanced", 64), ("int8-pv16", 128), ("nvfp4", 128))],
        lambda case, recipe, head_dim: (
            recipe == "balanced" or (recipe == "int8-pv16" and case in MASKS_OF_OTHER_RECIPES)
        ),
    ),
)
def test_emulated_masks_of_short_calls_match_the_reference(
    case: str, recipe: str, head_dim: int, emulated: None
) -> None:
    assert_matches_reference(replace(MASKED[case], head_dim=head_dim), RECIPES[recipe], torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("case", "recipe", "is_short"),
    sampled(
        product(EXACT_STARTS, ("balanced", "int8-pv16", "paper", "nvfp4-keys"), (False, True)),
        lambda case, recipe, is_short: recipe == "balanced" or (case, recipe) == ("prompt", "int8-pv16"),
    ),
)
def test_emulated_exact_starts_match_the_reference(case: str, recipe: str, emulated: None) -> None:
    assert_an_exact_start_has_no_low_tile(EXACT_STARTS[case], RECIPES[recipe], torch.bfloat16, "cpu")


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("case", ["causal", "inside-a-block"])
def test_emulated_kernels_skip_no_tile_of_an_exact_start(case: str, emulated: None) -> None:
    recipe = replace(RECIPES["balanced"], exact_until=640)
    assert_skips_as_the_reference(SPARSE[case], recipe, torch.bfloat16, "cpu")


@pytest.mark.parametrize("is_short", [True])
@pytest.mark.parametrize("bands", [(0, 0), (0, 2), (2, 0)])
def test_emulated_diagonal_and_sink_tiles_of_short_calls_match_the_reference(
    bands: tuple[int, int], emulated: None
) -> None:
    recipe = replace(RECIPES["balanced"], diagonal_tiles=bands[0], sink_tiles=bands[1])
    assert_matches_reference(CASES["causal"], recipe, torch.float16, "cpu")


@pytest.mark.parametrize("is_short", [True])
def test_emulated_swizzle_groups_need_not_divide_the_heads(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dma_kernels.prefill.plan.select_swizzle_group", lambda *_: 3)
    assert_matches_reference(CASES["batch"], RECIPES["balanced"], torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("case", "recipe", "is_short"),
    sampled(
        product(SPARSE, ("balanced", "fp4"), (False, True)),
        lambda case, recipe, is_short: (
            case == "inside-a-tile"
            or (recipe == "balanced" and case in ("inside-a-block", "bidirectional", "window", "left-padded", "mask"))
            or (case, recipe, is_short)
            in (("sinks", "balanced", True), ("softcap", "balanced", False), ("right-padded", "balanced", False))
        ),
    ),
)
def test_emulated_kernels_skip_the_tiles_that_the_reference_skips(case: str, recipe: str, emulated: None) -> None:
    assert_skips_as_the_reference(with_one_head(SPARSE[case]), RECIPES[recipe], torch.bfloat16, "cpu")


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("recipe", ["int8-pv16", "paper", "mxfp4-row", "nvfp4-keys", "identity"])
def test_emulated_recipes_skip_the_tiles_that_the_reference_skips(recipe: str, emulated: None) -> None:
    assert_skips_as_the_reference(SPARSE["causal"], RECIPES[recipe], torch.float16, "cpu")


@pytest.mark.parametrize("is_short", [False, True])
def test_counting_tiles_changes_no_bit_in_emulated_kernels(emulated: None) -> None:
    assert_counting_changes_no_bit(torch.bfloat16, head_dim=128)

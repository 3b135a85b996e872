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
from dma_kernels.numerics.quantize import e8m0_to_float, quantize
from dma_kernels.numerics.transforms import hadamard_rotate
from dma_kernels.prefill import config as configs
from dma_kernels.prefill.config import (
    ROWS,
    ComputePath,
    OneWarpgroupConfig,
    PortableConfig,
    WarpSpecializedConfig,
    configure_one_warpgroup,
    configure_warp_specialized,
    one_warpgroup_config,
    select_compute_path,
    select_config,
    warp_specialized_config,
)
from dma_kernels.prefill.hopper import host as hopper
from dma_kernels.prefill.hopper import quantize_q as query_quantizer
from dma_kernels.prefill.hopper.quantize_q import QuantizedQueries, quantize_q
from dma_kernels.prefill.operands import DEQUANTIZED, E4M3, INT8, RAW, OperandFormat, Operands, new_results
from dma_kernels.prefill.plan import launch_attention, plan
from dma_kernels.prefill.quantizer import query_global_scale
from dma_kernels.runtime.chip import Chip
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
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs these")

LENGTH = 300
HOPPER = Chip(arch=90, sms=132)
MASK = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
RECIPES_TAKEN = [name for name in RECIPES if name not in ("identity", "balanced", "mxfp8-uniform")]


def inputs(head_dim: int = 128, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    return random_qkv(q_len=length, kv_len=length, head_dim=head_dim, dtype=torch.bfloat16)


def misaligned(tensor: Tensor) -> Tensor:
    """Return a copy at an address that is not aligned for TMA."""
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


def choice_of(
    recipe: str, head_dim: int = 128, *, change: Callable[[Tensor], Tensor] = lambda key: key, **options: Any
) -> tuple[AttentionCall, AttentionGeometry, ComputePath, Chip]:
    """Return what decides the kernel of a call on Hopper."""
    query, key, value = inputs(head_dim)
    call = AttentionCall(query, change(key), value, RECIPES[recipe], **options)
    return call, AttentionGeometry.of(call), select_compute_path(RECIPES[recipe], 90), HOPPER


def test_the_interpreter_always_selects_the_portable_kernel() -> None:
    *call, hopper = choice_of("int8")
    assert isinstance(select_config(*call, replace(hopper, is_interpreted=True)), PortableConfig)
    assert isinstance(select_config(*call, hopper), OneWarpgroupConfig)


@pytest.mark.parametrize(("limits", "call", "kernel"), [
    ({"max_mean_keys": LENGTH}, {}, OneWarpgroupConfig),
    ({}, {}, WarpSpecializedConfig),
    ({}, {"softcap": 30.0}, OneWarpgroupConfig),
    ({}, {"mask": MASK}, OneWarpgroupConfig),
    ({"min_rows": 2 * LENGTH}, {}, WarpSpecializedConfig),
    ({"min_rows": 2 * LENGTH + 1}, {}, OneWarpgroupConfig),
    ({"min_keys": LENGTH}, {}, WarpSpecializedConfig),
    ({"min_keys": LENGTH + 1}, {}, OneWarpgroupConfig),
    ({"min_keys": 200}, {"window": 200}, WarpSpecializedConfig),
    ({"min_keys": 201}, {"window": 200}, OneWarpgroupConfig),
    ({"max_mean_keys": LENGTH // 2}, {}, OneWarpgroupConfig),
    ({"max_mean_keys": LENGTH // 2 - 1}, {}, WarpSpecializedConfig),
    ({"max_mean_keys": LENGTH - 1}, {"is_causal": False}, WarpSpecializedConfig),
    ({"max_mean_keys": 200}, {"window": 200}, OneWarpgroupConfig),
    ({"max_mean_keys": 199}, {"window": 200}, WarpSpecializedConfig),
    ({"max_mean_keys": 200}, {"window": 100, "is_causal": False}, OneWarpgroupConfig),
    ({"max_mean_keys": 199}, {"window": 100, "is_causal": False}, WarpSpecializedConfig),
    ({}, {"head_dim": 64}, WarpSpecializedConfig),
    ({}, {"head_dim": 64, "window": 200}, OneWarpgroupConfig),  # four warpgroups take no window
    ({}, {"head_dim": 80}, PortableConfig),
    ({}, {"change": misaligned}, PortableConfig),
])  # fmt: skip
def test_the_fastest_kernel_that_supports_a_call_is_selected(
    limits: dict[str, int], call: dict[str, Any], kernel: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"max_mean_keys": 0, "min_keys": 0, "min_rows": 0} | limits
    for name, fields in (
        ("one_warpgroup_config", ["max_mean_keys"]),
        ("warp_specialized_config", ["min_keys", "min_rows"]),
    ):
        configure, changes = getattr(configs, name), {field: limits[field] for field in fields}
        monkeypatch.setattr(configs, name, lambda *a, f=configure, c=changes: (found := f(*a)) and replace(found, **c))
    assert isinstance(select_config(*choice_of("balanced", **call)), kernel)


@pytest.mark.parametrize(("arch", "head_dim", "recipe", "is_warp_specialized", "is_one_warpgroup"), [
    (90, 128, "int8", True, True),
    (90, 128, "paper", True, True),
    (90, 128, "fp4", True, True),
    (90, 128, "nvfp4-keys", True, True),
    (90, 96, "int8", True, True),
    (90, 64, "int8", True, True),
    (90, 64, "nvfp4-keys", True, True),
    (90, 64, "int8-pv16", False, True),
    (90, 64, "paper", False, True),
    (90, 256, "int8", True, False),
    (90, 256, "paper", False, False),
    (90, 256, "fp4", False, False),
    (90, 32, "int8", False, False),
    (90, 128, "identity", False, False),
    (100, 128, "int8", False, False),
    (89, 128, "int8", False, False),
])  # fmt: skip
def test_the_kernels_are_configured_for_hopper_alone(
    arch: int, head_dim: int, recipe: str, is_warp_specialized: bool, is_one_warpgroup: bool
) -> None:
    call = arch, select_compute_path(RECIPES[recipe], arch), head_dim
    assert (warp_specialized_config(*call) is not None) == is_warp_specialized
    assert (one_warpgroup_config(*call) is not None) == is_one_warpgroup


def test_one_warpgroup_kernel_rejects_more_blocks_than_a_grid_has(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for most in (-(-LENGTH // ROWS), -(-LENGTH // ROWS) - 1):
        monkeypatch.setattr(configs, "MAX_CTAS", most)
        taken.append(configure_one_warpgroup(*choice_of("balanced")) is not None)
    assert taken == [True, False]


SCALE = 0.25 * LOG2_E


def quantized_queries(recipe: Recipe, form: OperandFormat, dtype: torch.dtype) -> tuple[Tensor, QuantizedQueries]:
    """Return queries, and the same quantized for low keys in an operand format."""
    query, _, _ = random_qkv(q_len=70, kv_len=70, head_dim=128, dtype=dtype)
    global_scale = query_global_scale(query, recipe)
    return query, quantize_q(query, None, global_scale, recipe, form, RAW, logit_scale=SCALE, use_pdl=False)


@pytest.mark.parametrize(("form", "format"), [(INT8, "mxint8"), (E4M3, "mxfp8")])
def test_quantized_queries_equal_the_specification_bit_for_bit(form: OperandFormat, format: str) -> None:
    query, made = quantized_queries(Recipe(low=format, shared_scale="tile", pv="fp8"), form, torch.bfloat16)
    expected = quantize(query.float(), format, shared_scale="row")
    assert_bits_equal(made.low, expected.data)
    unit = 2.0**-6 if form is INT8 else 1.0
    descale = e8m0_to_float(expected.scale[..., 0]) * unit * SCALE
    torch.testing.assert_close(made.descale_and_bias[0], descale, rtol=1e-6, atol=0.0)


def test_nvfp4_queries_have_their_heads_global_scale() -> None:
    recipe = Recipe(low="nvfp4", scale_rounding="search", pv="fp8")
    query, made = quantized_queries(recipe, DEQUANTIZED, torch.bfloat16)
    assert made.low.dtype == torch.bfloat16
    assert torch.equal(made.low.float(), quantize(query.float(), "nvfp4", scale_rounding="search").dequantize())
    assert (made.descale_and_bias[0] == SCALE).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unquantized_rotated_queries_keep_their_dtype(dtype: torch.dtype) -> None:
    query, made = quantized_queries(RECIPES["nvfp4-keys"], DEQUANTIZED, dtype)
    assert made.low.dtype == dtype
    torch.testing.assert_close(made.low.float(), hadamard_rotate(query.float()), rtol=2e-2, atol=2e-3)


# ---- the kernels, emulated

HEADS: dict[str, Any] = {"q_heads": 2, "kv_heads": 1, "head_dim": 128}
LEFT_PADDED: dict[str, Any] = {"kv_offset": [-145, 0], "q_offset": [-145, 0]}


def _case(q_len: int, kv_len: int, *, q_heads: int = 1, tensors: Any = None, batch: int = 1, **options: Any) -> Case:
    """Return a call; one query head suffices if calls differ in positions alone."""
    heads = HEADS | {"q_heads": q_heads}
    return Case(q_len=q_len, kv_len=kv_len, batch=batch, options=options, tensors=tensors or {}, **heads)


CASES = {
    "causal": _case(500, 500, q_heads=2),
    "few-queries": _case(69, 569, q_heads=2),
    "batch": Case(q_len=430, kv_len=430, batch=2, q_heads=2, kv_heads=2, head_dim=128),
    "chunk": _case(150, 900, q_offset=750),
    "offset": _case(150, 700, q_offset=800, kv_offset=256),
    "bidirectional": _case(500, 500, q_heads=2, is_causal=False),
    "cross": _case(400, 300, is_causal=False),
    "wide": _case(100, 900, is_causal=False, q_offset=470),
    "inside-a-tile": _case(300, 450, q_offset=291, kv_offset=141),
    "negative-positions": _case(200, 430, q_offset=185, kv_offset=-45),
    "keys-ahead": _case(200, 400, kv_offset=450, is_causal=False),
    "keys-end-early": _case(300, 200, q_offset=200),
    "window": _case(700, 700, window=300),
    "window-of-a-tile": _case(500, 500, window=128),
    "window-chunk": _case(150, 900, q_offset=750, window=333),
    "window-bidirectional": _case(700, 700, window=200, is_causal=False),
    "left-padded": _case(430, 430, q_heads=2, batch=2, tensors={"kv_range": [[145, 430], [0, 430]], **LEFT_PADDED}),
    "right-padded": _case(430, 430, q_heads=2, batch=3, tensors={"kv_range": [[0, 41], [0, 300], [0, 0]]}),
    "left-padded-window": _case(
        600, 600, q_heads=2, batch=2, window=250, tensors={"kv_range": [[145, 600], [0, 600]], **LEFT_PADDED}
    ),
    "padded-bidirectional": _case(
        430, 430, q_heads=2, batch=2, is_causal=False, tensors={"kv_range": [[45, 400], [0, 430]]}
    ),
    "softcap": _case(430, 430, softcap=5.0),
    "softcap-above-all-logits": _case(430, 430, softcap=1e7),
    "softcap-and-sinks": _case(
        430, 430, q_heads=2, batch=2, softcap=5.0, is_causal=False,
        tensors={"kv_range": [[45, 400], [0, 0]], "sinks": [0.5, 3.0]},
    ),
    "sinks": _case(430, 430, q_heads=2, tensors={"sinks": [0.5, float("-inf")]}),
    "sinks-of-nothing": _case(
        500, 500, q_heads=2, batch=2, tensors={"kv_range": [[0, 0], [45, 430]], "sinks": [3.0, float("-inf")]}
    ),
}  # fmt: skip
OF_OTHER_RECIPES = ("few-queries", "left-padded", "softcap-and-sinks", "window-chunk")
"""Cases of recipes that share the code of masks, which all cases test with one recipe."""
MASKS_OF_OTHER_RECIPES = ("heads", "inside-a-tile", "packed-left-padded", "window-softcap-sinks")
"""The same for masks."""


@pytest.fixture
def is_short() -> bool:
    """Whether the one-warpgroup kernel is emulated."""
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
            config = (configure_one_warpgroup if is_short else configure_warp_specialized)(call, geometry, path, HOPPER)
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
    *product(["causal"], ("int8", "fp4", "nvfp4-keys"), [64]),
    *(("causal", "int8", 96), ("causal", "e4m3-rotated", 192), ("causal", "int8-mxfp8", 256)),
    *product(("causal", "few-queries", "wide"), ["int8"], [256]),
    *product(CASES, ["int8"], [128]),
    *product(OF_OTHER_RECIPES, ("int8-mxfp8", "nvfp4-keys"), [128]),
    *((case, "int8", 64) for case in OF_OTHER_RECIPES if "window" not in case),
]
ONE_WARPGROUP_CALLS = [
    *product(["causal"], ("balanced", *RECIPES_TAKEN), [128]),
    *product(["causal"], ("int8-pv16", "fp4", "paper", "nvfp4-keys"), [64]),
    *product(["causal"], ("balanced", "fp4"), [96]),
    *product(CASES, ["balanced"], [64]),
    *product(OF_OTHER_RECIPES, ["int8-pv16"], [128]),
]
"""Case, recipe and head dimension of each call."""


@pytest.mark.parametrize(
    ("is_short", "case", "recipe", "head_dim"),
    dict.fromkeys(
        [*((False, *call) for call in WARP_SPECIALIZED_CALLS), *((True, *call) for call in ONE_WARPGROUP_CALLS)]
    ),
)
def test_emulated_calls_match_the_reference(case: str, recipe: str, head_dim: int, emulated: None) -> None:
    assert_matches_reference(replace(CASES[case], head_dim=head_dim), RECIPES[recipe], torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("is_short", "recipe", "head_dim", "case"),
    [
        *((False, "int8", 256, case) for case in MASKS_OF_OTHER_RECIPES),
        *((True, "balanced", 64, case) for case in MASKED),
        *((True, "int8-pv16", 128, case) for case in MASKS_OF_OTHER_RECIPES),
    ],
)
def test_emulated_masks_match_the_reference(case: str, recipe: str, head_dim: int, emulated: None) -> None:
    assert_matches_reference(replace(MASKED[case], head_dim=head_dim), RECIPES[recipe], torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("is_short", "name", "case", "bands"),
    [
        *product([False], ["int8-pv16"], ("causal", "bidirectional"), [(0, 0), (0, 2), (2, 0)]),
        (False, "nvfp4-keys", "causal", (0, 2)),
        *product([True], ["balanced"], ["causal"], [(0, 0), (0, 2), (2, 0)]),
    ],
)
def test_emulated_diagonal_and_sink_tiles_match_the_reference(
    name: str, case: str, bands: tuple[int, int], emulated: None
) -> None:
    recipe = replace(RECIPES[name], diagonal_tiles=bands[0], sink_tiles=bands[1])
    assert_matches_reference(with_one_head(CASES[case]), recipe, torch.bfloat16, "cpu")


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
    starts, ends = torch.tensor([145, 0]), torch.tensor([430, 200])
    hidden = (torch.arange(430) < starts[:, None]) | (torch.arange(430) >= ends[:, None])
    options: dict[str, Any] = {"kv_range": torch.stack([starts, ends], 1), "is_causal": is_causal}
    if is_causal:  # otherwise visible keys begin inside a tile
        options |= {"kv_offset": -starts, "q_offset": -starts}
    results = [
        attention(query, *(x.masked_fill(hidden[:, None, :, None], filler) for x in (key, value)), RECIPES[recipe],
                  backend="triton", **options)
        for filler in (0.0, float("nan"))
    ]  # fmt: skip
    assert torch.equal(*results)
    assert results[0].isfinite().all()


@pytest.mark.parametrize(
    ("case", "recipe", "is_short"),
    [
        *product(EXACT_STARTS, ["balanced"], [False]),
        *product(("prompt", "inside-a-tile", "left-padded", "bidirectional"), ["balanced"], [True]),
        ("prompt", "int8-pv16", True),
    ],
)
def test_emulated_exact_starts_match_the_reference(case: str, recipe: str, emulated: None) -> None:
    assert_an_exact_start_has_no_low_tile(with_one_head(EXACT_STARTS[case]), RECIPES[recipe], torch.bfloat16, "cpu")


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("case", ["causal", "inside-a-block"])
def test_emulated_kernels_skip_no_tile_of_an_exact_start(case: str, emulated: None) -> None:
    recipe = replace(RECIPES["balanced"], exact_until=640)
    assert_skips_as_the_reference(with_one_head(SPARSE[case]), recipe, torch.bfloat16, "cpu")


@pytest.mark.parametrize("is_short", [True])
def test_emulated_swizzle_groups_need_not_divide_the_heads(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dma_kernels.prefill.plan.select_swizzle_group", lambda *_: 3)
    assert_matches_reference(CASES["batch"], RECIPES["balanced"], torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("case", "recipe", "is_short"),
    [
        *product(("inside-a-tile", "inside-a-block", "bidirectional", "mask"), ["balanced"], (False, True)),
        *product(("window", "left-padded"), ["balanced"], [False]),
        *product(["inside-a-tile"], ["fp4"], (False, True)),
        *product(["causal"], ("int8-pv16", "nvfp4-keys"), (False, True)),
        ("sinks", "balanced", True),
        *(("softcap", "balanced", False), ("right-padded", "balanced", False)),
    ],
)
def test_emulated_kernels_skip_the_tiles_that_the_reference_skips(case: str, recipe: str, emulated: None) -> None:
    assert_skips_as_the_reference(with_one_head(SPARSE[case]), RECIPES[recipe], torch.bfloat16, "cpu")


@pytest.mark.parametrize("is_short", [False, True])
def test_counting_tiles_changes_no_bit_in_emulated_kernels(emulated: None) -> None:
    assert_counting_changes_no_bit(torch.bfloat16, head_dim=128)

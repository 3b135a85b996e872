"""The split-KV kernels of short calls, in the interpreter. ``tests/gpu`` runs the same cases on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import product
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch
from dma_kernels import Recipe, api, attention, attention_with_lse
from dma_kernels.prefill import plan as plans
from dma_kernels.prefill.plan import plan
from dma_kernels.runtime import chip
from dma_kernels.runtime.reports import kernel_reports
from dma_kernels.testing import assert_bits_equal, random_qkv, relative_error
from prefill_cases import RECIPES, SHORT, Case, assert_matches_reference
from torch import Tensor
from torch.backends import cuda

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device"),
    pytest.mark.usefixtures("poisoned"),  # no split may be read that no CTA wrote
]
BALANCED = RECIPES["balanced"]
EXACT_START = replace(BALANCED, exact_until=512)


def kernels_of(*arguments: Any, **options: Any) -> list[str]:
    """Return the names of the kernels that compute a call."""
    names: list[str] = []
    with kernel_reports(names.append):
        attention(*arguments, **options)
    return names


@pytest.mark.parametrize("case", SHORT)
def test_a_short_call_matches_the_reference(case: str) -> None:
    assert_matches_reference(SHORT[case], BALANCED, torch.float16, "cpu")


MANY_SPLITS = Case(q_len=1, kv_len=1_200, q_heads=1, kv_heads=1, head_dim=256)  # 38; 32 are combined at once


@pytest.mark.parametrize(
    ("case", "sms"),
    [
        *product((SHORT["one-query"], SHORT["nothing-visible"]), (1, 3, 200)),
        *((SHORT["rows-of-uneven-length"], 16), (SHORT["63-queries-of-8-heads"], 200), (MANY_SPLITS, 200)),
    ],
)
def test_any_number_of_ctas_gives_the_same_result(case: Case, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chip, "INTERPRETER", replace(chip.INTERPRETER, sms=sms))
    assert_matches_reference(case, BALANCED, torch.float16, "cpu")


@pytest.mark.parametrize("recipe", ["fp4", "int8-pv16", "identity"])
def test_the_low_tiles_of_a_recipe_do_not_matter(recipe: str) -> None:
    results = (SHORT["all"].call(RECIPES[name], "triton", torch.float16, "cpu") for name in (recipe, "balanced"))
    for ours, expected in zip(*results, strict=True):
        assert_bits_equal(ours, expected)


def test_slots_that_a_static_cache_has_not_filled_are_not_read() -> None:
    query, key, value = random_qkv(batch=2, q_len=3, kv_len=200, dtype=torch.float16)
    results = []
    for filler in (0.0, math.nan, math.inf):
        for x in (key, value):
            x[0, :, 63:] = x[1, :, 100:] = filler
        results.append(attention(query, key, value, BALANCED, q_offset=torch.tensor([60, 97]), backend="triton"))
    assert_bits_equal(results[1], results[0])
    assert_bits_equal(results[2], results[0])


STRIDED = {
    "sliced": lambda x: torch.cat((x, x + 1.0), 2)[:, :, : x.shape[2]],
    "every-other-channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "broadcast-heads": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("layout", STRIDED)
def test_strides_do_not_matter(layout: str) -> None:
    qkv = random_qkv(batch=2, q_heads=4, kv_heads=2, q_len=3, kv_len=90, dtype=torch.float16)
    strided = [STRIDED[layout](x) for x in qkv]
    out, dense = (attention(*each, BALANCED, backend="triton") for each in (strided, [x.contiguous() for x in strided]))
    assert_bits_equal(out, dense)


@pytest.mark.parametrize(("dtype", "shape"), [(torch.int64, ()), (torch.int16, (1,)), (torch.uint8, (2,))], ids=str)
def test_offsets_of_any_integer_dtype_and_shape_are_read(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    qkv = random_qkv(batch=2, q_len=3, kv_len=200, dtype=torch.float16)
    expected = attention(*qkv, BALANCED, q_offset=torch.tensor([130, 130]), backend="triton")
    out = attention(*qkv, BALANCED, q_offset=torch.full(shape, 130, dtype=dtype), backend="triton")
    assert_bits_equal(out, expected)


def test_a_growing_cache_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With padding, a mask, a window that hides keys, and the default of ``q_offset`` as an int."""
    used: list[Any] = []
    monkeypatch.setattr(api, "plan", lambda layouts: (used.append(plan(layouts)), used[-1])[1])
    for step, kv_len in enumerate((90, 91, 101, 107)):  # no multiples of 16, on which strides of masks are specialized
        query, key, value = random_qkv(batch=2, q_heads=4, kv_heads=2, q_len=2, kv_len=kv_len, dtype=torch.float16)
        mask = torch.rand(2, 1, 2, kv_len, generator=torch.Generator().manual_seed(step)) < 0.7
        options: list[dict[str, Any]] = [
            {"kv_range": torch.tensor([[40, kv_len], [0, kv_len]]), "kv_offset": torch.tensor([-40, 0])},
            {"window": 50, "softcap": 5.0, "q_offset": kv_len - 2},
            {"mask": mask.expand(2, 4, 2, kv_len)},
        ]
        for each in options:
            ours, expected = (
                attention(query, key, value, BALANCED, backend=backend, **each) for backend in ("triton", "reference")
            )
            assert relative_error(ours, expected) < 2e-3
    made = [each for each in used if each.kernel == "split-KV"]
    assert len(made) == 12
    assert made == made[:3] * 4


@pytest.mark.parametrize("warm", [False, True])
def test_a_short_call_is_checked_although_a_plan_covers_other_lengths(warm: bool) -> None:
    query, key, value = random_qkv(q_len=2, kv_len=90, dtype=torch.float16)
    mask = torch.ones(1, 1, 2, 90, dtype=torch.bool)
    if warm:
        attention(query, key, value, BALANCED, mask=mask, backend="triton")
    with pytest.raises(ValueError, match="value must have the heads and tokens of key"):
        attention(query, key, value[:, :, :80], BALANCED, mask=mask, backend="triton")
    with pytest.raises(ValueError, match="mask must be broadcastable"):
        attention(query, key, value, BALANCED, mask=mask[..., :80], backend="triton")
    with pytest.raises(ValueError, match="mask must be broadcastable"):
        attention(query, key[:, :, :80], value[:, :, :80], BALANCED, mask=mask, backend="triton")


@pytest.mark.parametrize(
    ("recipe", "q_len", "kv_len", "options", "kernel"),
    [
        ("balanced", 63, 300, {}, "split-KV"),
        ("balanced", 64, 300, {}, "portable"),
        ("balanced", 40, 40, {}, "portable"),
        ("balanced", 1, 300, {"is_causal": False}, "portable"),
        ("paper", 1, 300, {}, "portable"),
    ],
)
def test_short_calls_run_on_the_split_kv_kernel(
    recipe: str, q_len: int, kv_len: int, options: dict[str, Any], kernel: str
) -> None:
    inputs = random_qkv(q_len=q_len, kv_len=kv_len, dtype=torch.float16)
    assert kernels_of(*inputs, RECIPES[recipe], backend="triton", **options) == [kernel]


class TestSDPA:
    """``auto`` on CUDA, where PyTorch's kernel computes the plainest calls; its choice needs no GPU."""

    @pytest.fixture(autouse=True)
    def on_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plans.chip, "resolve_backend", lambda backend, device, dtype: "triton")

    @pytest.mark.parametrize("options", [{}, {"q_offset": 299}, {"window": 300}, {"q_offset": 400, "kv_offset": 101}])
    def test_one_query_over_all_keys_runs_on_pytorchs_kernel(self, options: dict[str, Any]) -> None:
        inputs = random_qkv(batch=2, q_heads=4, kv_heads=2, q_len=1, kv_len=300, dtype=torch.float16)
        assert kernels_of(*inputs, BALANCED, **options) == ["sdpa"]
        out = attention(*inputs, BALANCED, scale=0.1, **options)
        expected = attention(*inputs, BALANCED, scale=0.1, backend="reference", **options)
        assert out.transpose(1, 2).is_contiguous()
        assert relative_error(out, expected) < 2e-3

    @pytest.mark.parametrize(
        ("shape", "options"),
        [
            ({}, {"backend": "triton"}),
            ({}, {"window": 299}),
            ({}, {"q_offset": 298}),
            ({}, {"q_offset": torch.tensor(299)}),
            ({}, {"kv_range": torch.tensor([[0, 300]])}),
            ({}, {"mask": torch.ones(1, 300, dtype=torch.bool)}),
            ({}, {"softcap": 5.0}),
            ({}, {"sinks": torch.zeros(2)}),
            ({"q_len": 2}, {}),
            ({"value_dim": 32}, {}),
        ],
        ids=str,
    )
    def test_other_calls_run_on_the_split_kv_kernel(self, shape: dict[str, int], options: dict[str, Any]) -> None:
        inputs = random_qkv(**({"q_len": 1} | shape), kv_len=300, dtype=torch.float16)
        assert kernels_of(*inputs, BALANCED, **options) == ["split-KV"]

    def test_a_call_with_a_log_sum_exp_runs_on_the_split_kv_kernel(self) -> None:
        names: list[str] = []
        with kernel_reports(names.append):
            attention_with_lse(*random_qkv(q_len=1, kv_len=300, dtype=torch.float16), BALANCED)
        assert names == ["split-KV"]

    @pytest.mark.parametrize(("length", "options"), [(2, {}), (130, {"q_offset": 0}), (512, {"window": 512})], ids=str)
    def test_a_prompt_below_the_border_runs_on_pytorchs_kernel(self, length: int, options: dict[str, Any]) -> None:
        inputs = random_qkv(q_heads=4, kv_heads=2, q_len=length, kv_len=length, dtype=torch.float16)
        assert kernels_of(*inputs, EXACT_START, **options) == ["sdpa"]
        out = attention(*inputs, EXACT_START, **options)
        assert relative_error(out, attention(*inputs, EXACT_START, backend="reference", **options)) < 2e-3

    @pytest.mark.parametrize(("arch", "kernel"), [(80, "sdpa"), (90, "portable"), (100, "portable"), (120, "sdpa")])
    def test_prompts_of_many_rows_run_on_ours_where_pytorchs_is_slow(
        self, kernel: str, on_chip: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plans, "FEW_ROWS", 2 * 4 * 130 - 1)
        inputs = random_qkv(batch=2, q_heads=4, kv_heads=2, q_len=130, kv_len=130, dtype=torch.float16)
        assert kernels_of(*inputs, EXACT_START) == [kernel]
        assert kernels_of(*(x[:1] for x in inputs), EXACT_START) == ["sdpa"]

    @pytest.fixture
    def settings(self) -> Iterator[None]:
        """Restore PyTorch's settings."""
        has_cudnn, has_flash = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled()
        yield
        cuda.enable_cudnn_sdp(has_cudnn)
        cuda.enable_flash_sdp(has_flash)

    @pytest.mark.usefixtures("settings")
    @pytest.mark.parametrize("has_cudnn", [True, False])
    @pytest.mark.parametrize("has_flash", [True, False])
    def test_pytorchs_kernel_is_not_cudnns(
        self, has_cudnn: bool, has_flash: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A user's setting stays, also after an error. Without FlashAttention, cuDNN may be all that is left."""
        found = []

        def note(*_: Any, **__: Any) -> None:
            found.append(cuda.cudnn_sdp_enabled())
            raise RuntimeError("out of memory")

        monkeypatch.setattr(plans, "scaled_dot_product_attention", note)
        cuda.enable_cudnn_sdp(has_cudnn)
        cuda.enable_flash_sdp(has_flash)
        with pytest.raises(RuntimeError, match="out of memory"):
            attention(*random_qkv(q_len=130, kv_len=130, dtype=torch.float16), EXACT_START)
        assert found == [has_cudnn and not has_flash]
        assert cuda.cudnn_sdp_enabled() is has_cudnn

    @pytest.mark.usefixtures("settings")
    def test_threads_leave_pytorchs_setting_as_it_was(self, monkeypatch: pytest.MonkeyPatch) -> None:
        barrier = Barrier(2)

        def compute(query: Tensor, *_: Any, **__: Any) -> Tensor:
            with suppress(BrokenBarrierError):  # both threads are here only without a lock
                barrier.wait(0.2)
            return query

        monkeypatch.setattr(plans, "scaled_dot_product_attention", compute)
        inputs = random_qkv(q_len=130, kv_len=130, dtype=torch.float16)
        cuda.enable_cudnn_sdp(True)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda _: attention(*inputs, EXACT_START), range(2)))
        assert cuda.cudnn_sdp_enabled()
        assert barrier.broken

    @pytest.mark.parametrize(
        ("recipe", "length", "options"),
        [
            (EXACT_START, 513, {}),
            (EXACT_START, 512, {"window": 511}),
            (EXACT_START, 512, {"q_offset": 1}),
            (EXACT_START, 512, {"is_causal": False}),
            (EXACT_START, 512, {"kv_range": torch.tensor([[0, 512]])}),
            (replace(EXACT_START, high="mxfp8"), 512, {}),
            (BALANCED, 512, {}),
        ],
    )
    def test_other_prompts_do_not(self, recipe: Recipe, length: int, options: dict[str, Any]) -> None:
        inputs = random_qkv(q_heads=1, kv_heads=1, q_len=length, kv_len=length, head_dim=16, dtype=torch.float16)
        assert kernels_of(*inputs, recipe, **options) == ["portable"]

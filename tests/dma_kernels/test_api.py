"""The public functions: rejected inputs and their messages, backends, the custom op, ``torch.compile``."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dma_kernels import Recipe, api, attention, attention_with_lse, saturated_values
from dma_kernels.api import PreparedAttention
from dma_kernels.numerics import saturation
from dma_kernels.numerics.call import AttentionCall
from dma_kernels.prefill.plan import plan
from dma_kernels.runtime import chip
from dma_kernels.runtime.chip import resolve_backend
from dma_kernels.testing import RECIPES, assert_bits_equal, random_qkv
from torch import Tensor
from torch.autograd import forward_ad

BALANCED = RECIPES["mxfp8-row"]


def inputs(**shapes: Any) -> dict[str, Any]:
    """A valid call: two batch rows, four query heads on two KV heads, 6 queries and 9 keys of 16 channels."""
    defaults = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 6, "kv_len": 9, "head_dim": 16}
    query, key, value = random_qkv(**(defaults | shapes))
    return {"query": query, "key": key, "value": value, "recipe": BALANCED}


def zeros(*shape: int, **kwargs: Any) -> Tensor:
    return torch.zeros(shape, **kwargs)


# Each: the arguments that replace those of a valid call, the exception, and what its message begins with.
REJECTED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": zeros(4, 6, 16)}, ValueError, "query must be [batch, heads, tokens, head_dim], got shape [4, 6, 16]"),
    ({"value": zeros(9, 16)}, ValueError, "value must be [batch, heads, tokens, head_dim], got shape"),
    ({"query": zeros(2, 4, 6, 16, dtype=torch.int32)}, TypeError, "query must be bf16, fp16, fp32 or fp64, got"),
    ({"key": zeros(2, 2, 9, 16, dtype=torch.bfloat16)}, TypeError, "key must have the dtype of query, torch.float32"),
    ({"value": zeros(2, 2, 9, 16, dtype=torch.float64)}, TypeError, "value must have the dtype of query"),
    ({"key": zeros(1, 2, 9, 16)}, ValueError, "key must have the batch size of query, 2, got 1"),
    ({"value": zeros(3, 2, 9, 16)}, ValueError, "value must have the batch size of query, 2, got 3"),
    ({"value": zeros(2, 4, 9, 16)}, ValueError, "value must have the heads and tokens of key, [2, 9], got [4, 9]"),
    ({"value": zeros(2, 2, 8, 16)}, ValueError, "value must have the heads and tokens of key, [2, 9], got [2, 8]"),
    ({name: zeros(2, 3, 9, 16) for name in ("key", "value")}, ValueError, "the 3 key heads must divide the 4"),
    ({name: zeros(2, 0, 9, 16) for name in ("key", "value")}, ValueError, "the 0 key heads must divide the 4"),
    ({"key": zeros(2, 2, 9, 32)}, ValueError, "key must have the head_dim of query, 16, got 32"),
    ({"query": zeros(2, 4, 6, 0), "key": zeros(2, 2, 9, 0)}, ValueError, "the head_dim of query must be in 1..256"),
    ({"value": zeros(2, 2, 9, 257)}, ValueError, "the head_dim of value must be in 1..256, got 257"),
    ({"sinks": zeros(2)}, ValueError, "sinks must be [4], one logit per query head, got [2]"),
    ({"sinks": 3}, TypeError, "sinks must be a torch.Tensor, got int"),
    ({"sinks": zeros(4, dtype=torch.int64)}, TypeError, "sinks must be floating point, got torch.int64"),
    ({"mask": zeros(2, 1, 6, 9)}, TypeError, "mask must be boolean, got torch.float32"),
    ({"mask": zeros(1, 1, 1, 6, 9, dtype=torch.bool)}, ValueError, "mask must be broadcastable to [2, 4, 6, 9]"),
    ({"mask": zeros(1, 1, 6, 10, dtype=torch.bool)}, ValueError, "mask must be broadcastable to [2, 4, 6, 9]"),
    ({"kv_range": zeros(2, 2)}, ValueError, "kv_range must be integer [2, 2], got torch.float32 [2, 2]"),
    ({"kv_range": zeros(1, 2, dtype=torch.int64)}, ValueError, "kv_range must be integer [2, 2], got torch.int64"),
    ({"q_offset": True}, TypeError, "q_offset must be an int or an integer tensor of shape [2], got True"),
    ({"q_offset": 1.0}, TypeError, "q_offset must be an int or an integer tensor of shape [2], got 1.0"),
    ({"q_offset": zeros(2, dtype=torch.bool)}, ValueError, "q_offset must be an int or an integer tensor of shape"),
    ({"q_offset": zeros(3, dtype=torch.int64)}, ValueError, "q_offset must be an int or an integer tensor of shape"),
    ({"q_offset": -5}, ValueError, "q_offset must be at least kv_offset, 0, where attention is causal"),
    ({"q_offset": 2**31}, ValueError, "q_offset must be within 2**30 of 0, got 2147483648"),
    ({"kv_offset": -(10**30)}, ValueError, "kv_offset must be within 2**30 of 0, got -1000"),
    ({"is_causal": 1}, TypeError, "is_causal must be true or false, got 1"),
    ({"scale": "0.1"}, TypeError, "scale must be a positive finite number, got '0.1'"),
    ({"scale": True}, TypeError, "scale must be a positive finite number, got True"),
    *(({"scale": x}, ValueError, "scale must be a positive finite number") for x in (0.0, math.nan, math.inf)),
    *(({"softcap": x}, ValueError, "softcap must be a positive finite number, got 1") for x in (1e39, 10**400)),
    *(({"window": x}, ValueError, "window must be an integer of at least 1") for x in (True, 0, 4.0)),
    ({"recipe": "balanced"}, TypeError, "recipe must be a dma_kernels.Recipe, got str"),
    *(({"backend": x}, ValueError, "backend must be one of auto, reference, triton") for x in ("flash", ["triton"])),
]


@pytest.mark.parametrize(("replaced", "error", "message"), REJECTED)
def test_an_invalid_input_is_rejected(replaced: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        attention(**(inputs() | replaced))


@pytest.mark.parametrize("name", ["key", "value", "sinks", "mask", "kv_range", "q_offset"])
def test_every_tensor_must_be_a_tensor_on_the_device_of_the_query(name: str) -> None:
    integers = torch.zeros(2, 2, dtype=torch.int64)
    optional = {"sinks": zeros(4), "mask": zeros(6, 9, dtype=torch.bool), "kv_range": integers, "q_offset": integers[0]}
    good = inputs() | optional
    with pytest.raises(ValueError, match=f"{name} must be on the device of query, cpu, got meta"):
        attention(**(good | {name: good[name].to("meta")}))
    with pytest.raises(TypeError, match=rf"{name} must be .*, got (list|\[)"):
        attention(**(good | {name: [0]}))


@pytest.mark.parametrize("shape", [(), (9,), (6, 1), (4, 6, 9)], ids=str)
def test_masks_of_fewer_dimensions_broadcast_as_in_torch(shape: tuple[int, ...]) -> None:
    good = inputs()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5
    assert_bits_equal(attention(**good, mask=mask), attention(**good, mask=mask.expand(2, 4, 6, 9)))


def test_rocm_runs_only_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(chip, "of", lambda device: chip.Chip(arch=94, sms=304))
    device = torch.device("cuda")
    assert resolve_backend("auto", device, torch.bfloat16) == "reference"
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU, and this PyTorch is for ROCm"):
        resolve_backend("triton", device, torch.bfloat16)


def test_auto_warns_once_if_a_cuda_device_runs_the_reference() -> None:
    chip._warn_of_reference.cache_clear()
    cuda = torch.device("cuda")
    with pytest.warns(
        UserWarning, match=r"runs in torch on a CUDA device.* it takes bf16 and fp16, got torch\.float32"
    ):
        assert resolve_backend("auto", cuda, torch.float32) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_backend("auto", cuda, torch.float32) == "reference"
        assert resolve_backend("reference", cuda, torch.float32) == "reference"
        assert resolve_backend("auto", torch.device("cpu"), torch.bfloat16) == "reference"


def test_both_entry_points_have_the_same_parameters() -> None:
    assert inspect.signature(attention).parameters == inspect.signature(attention_with_lse).parameters


DEFAULTS: dict[str, Any] = {
    "q_offset": 3, "kv_offset": 0, "q_offset_rows": None, "kv_offset_rows": None, "kv_range": None, "mask": None,
    "sinks": None, "is_causal": True, "window": None, "scale": 0.25, "softcap": None, "backend": "reference",
    "counts_tiles": False,
}  # fmt: skip
"""Arguments of the custom op after the tensors and before the recipe, in its order."""


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16},
        {"q_len": 0},
        {"value_dim": 24, "is_causal": False, "window": 4},
        {
            "q_offset_rows": torch.tensor([1, 2]),
            "kv_offset_rows": torch.tensor([0, -1]),
            "kv_range": torch.tensor([[0, 9], [1, 9]]),
            "mask": torch.ones(2, 1, 6, 9, dtype=torch.bool),
            "sinks": torch.ones(4),
            "softcap": 2.0,
        },
    ],
    ids=["bf16", "no-queries", "bidirectional", "all-tensors"],
)
def test_the_custom_op_passes_opcheck(options: dict[str, Any]) -> None:
    tensors = list(inputs(**{name: x for name, x in options.items() if name not in DEFAULTS}).values())[:3]
    chosen = {name: options.get(name, default) for name, default in DEFAULTS.items()}
    arguments = (*tensors, *chosen.values(), *dataclasses.asdict(BALANCED).values())
    torch.library.opcheck(torch.ops.dma_kernels.attention.default, arguments)


class TestCompile:
    """All lengths share one graph. The compiler does not trace the kernels inside the op."""

    @staticmethod
    def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
        torch._dynamo.reset()
        graphs: list[int] = []

        def backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            graphs.append(len(graph.graph.nodes))
            return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

        return torch.compile(function, fullgraph=True, dynamic=True, backend=backend), graphs

    def test_causal_attention_compiles_to_one_graph(self) -> None:
        def block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attention(query * 2.0, key, value, BALANCED).transpose(1, 2).flatten(2) + 1.0

        compiled, graphs = self.compiled(block)
        for q_len, kv_len in ((6, 9), (7, 140), (131, 131)):
            qkv = random_qkv(batch=2, q_heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=16)
            assert_bits_equal(compiled(*qkv), block(*qkv))
        assert len(graphs) == 1

    def test_a_growing_decode_offset_compiles_to_one_graph(self) -> None:
        def step(query: Tensor, key: Tensor, value: Tensor, position: int) -> Tensor:
            return attention(query, key, value, BALANCED, q_offset=position)

        compiled, graphs = self.compiled(step)
        qkv = random_qkv(q_len=1, kv_len=64)
        for position in (20, 21, 40):
            assert_bits_equal(compiled(*qkv, position), step(*qkv, position))
        assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
class TestTransforms:
    """Tracers and transforms other than autograd see one operation, or are rejected."""

    def test_a_trace_without_gradients_is_valid_for_other_lengths(self) -> None:
        shapes = {"batch": 1, "q_heads": 2, "kv_heads": 2, "head_dim": 16}
        with torch.no_grad():
            traced = torch.jit.trace(
                lambda *qkv: attention(*qkv, BALANCED), random_qkv(**shapes, q_len=6, kv_len=6), check_trace=False
            )
        for q_len, kv_len in ((6, 6), (3, 9), (200, 300)):
            qkv = random_qkv(**shapes, q_len=q_len, kv_len=kv_len, seed=1)
            assert_bits_equal(traced(*qkv), attention(*qkv, BALANCED))

    @pytest.mark.parametrize("name", ["query", "value", "sinks"])
    def test_dual_tensors_are_rejected(self, name: str) -> None:
        good = inputs() | {"sinks": torch.zeros(4)}
        with forward_ad.dual_level():
            attention(**good)  # without dual tensors
            good[name] = forward_ad.make_dual(good[name], torch.ones_like(good[name]))
            with pytest.raises(NotImplementedError, match="no derivative in forward mode"):
                attention(**good)

    @pytest.mark.parametrize("transform", [torch.func.vmap, torch.compile], ids=["vmap", "compile"])
    def test_jvp_is_rejected(self, transform: Any) -> None:
        query, key, value = random_qkv(q_len=5, kv_len=5)
        function = transform(lambda query: attention(query, key, value, BALANCED))
        query = torch.stack([query, query]) if transform is torch.func.vmap else query
        with pytest.raises(NotImplementedError, match="no derivative in forward mode"):
            torch.func.jvp(function, (query,), (query,))

    def test_hessians_are_rejected(self) -> None:
        """They derive the gradient in forward mode."""
        query, key, value = random_qkv(q_len=3, kv_len=3)
        with pytest.raises(NotImplementedError, match="no derivative in forward mode"):
            torch.func.hessian(lambda query: attention(query, key, value, Recipe()).sum())(query)

    def test_vmap_equals_a_loop(self) -> None:
        query, key, value = random_qkv(q_len=5, kv_len=5)
        queries = torch.stack([query, 2.0 * query])
        outputs = torch.func.vmap(lambda query: attention(query, key, value, BALANCED))(queries)
        for ours, each in zip(outputs, queries, strict=True):
            assert_bits_equal(ours, attention(each, key, value, BALANCED))


def plan_key(**changes: Any) -> AttentionCall:
    """Return the key of a call's plan."""
    query, key, value = random_qkv(q_len=5, kv_len=5, q_heads=2, kv_heads=2, head_dim=32)
    arguments = {"query": query, "key": key, "value": value, "recipe": Recipe()}
    return AttentionCall(**(arguments | changes)).layouts()


ONES = torch.ones(1, 2, 5, 32)


@pytest.mark.parametrize(
    "change",
    [
        {"query": ONES.transpose(1, 2).contiguous().transpose(1, 2)},
        {"query": ONES[:, :, :4]},
        {"query": ONES.double(), "key": ONES.double(), "value": ONES.double()},
        {"key": ONES[:, :1], "value": ONES[:, :1]},
        {"value": ONES[..., :16]},
        {"recipe": Recipe(sink_tiles=2)},
        {"is_causal": False},
        {"scale": 0.5},
        {"q_offset": 3},
        {"kv_offset": 3},
        {"window": 2},
        {"softcap": 3.0},
        {"sinks": torch.zeros(2)},
        {"mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)},
        {"backend": "reference"},
    ],
    ids=lambda change: "-".join(change),
)
def test_calls_that_differ_on_the_host_have_different_plans(change: dict[str, Any]) -> None:
    assert plan_key(**change) != plan_key()


def test_contents_of_tensors_do_not_change_the_plan() -> None:
    assert plan_key(query=ONES, key=ONES + 1.0, value=ONES + 2.0) == plan_key()
    for name, contents in (("kv_range", [[[0, 5]], [[1, 4]]]), ("kv_offset", [[0], [-3]]), ("q_offset", [[0], [7]])):
        first, second = (plan_key(**{name: torch.tensor(each)}) for each in contents)
        assert first == second


def test_a_checked_call_does_not_make_an_unchecked_one_valid() -> None:
    """An option of the wrong type is rejected even after a valid call with an equal option."""
    good = inputs()
    for name, value in (("is_causal", True), ("window", 1), ("q_offset", 1)):
        attention(**good, **{name: value})
        with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
            attention(**good, **{name: 1 if value is True else True})


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("q_len", [20, 100])
@pytest.mark.parametrize(
    "position",
    [
        *(torch.tensor([each]) for each in (2**32 + 5, -(2**32) - 5)),
        *(torch.tensor([each]).to(dtype) for each, dtype in ((2**32 - 1, torch.uint32), (2**40, torch.uint64))),
    ],
    ids=lambda position: f"{position.item()}",
)
def test_positions_on_the_device_are_clipped_to_the_valid_range(position: Tensor, q_len: int, backend: str) -> None:
    """Not taken modulo 2^32: queries far after all keys see all of them in low precision, those before them none."""
    query, key, value = random_qkv(q_len=q_len, kv_len=300, head_dim=32, dtype=torch.float16)
    recipe = Recipe(low="mxfp4", sink_tiles=0)
    limit = 2**30 if position.item() > 0 else -(2**30)
    for options in ({"q_offset": position}, {"kv_offset": position}, {"kv_offset": position, "q_offset": 0}):
        at_limit = {name: torch.tensor([limit]) if x is position else x for name, x in options.items()}
        ours, expected = (attention(query, key, value, recipe, backend=backend, **x) for x in (options, at_limit))
        assert_bits_equal(ours, expected)
        if "kv_offset" not in options:
            assert (expected == 0.0).all() == (limit < 0)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("arch", [90, 80], ids=["e4m3", "dequantized"])
def test_saturated_values_are_counted_and_trigger_one_warning(backend: str, on_chip: None) -> None:
    query, key, value = random_qkv(q_len=520, kv_len=520, head_dim=32, dtype=torch.float16)
    saturation._warn.cache_clear()
    saturation.saturation_counter().zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(query, key, value, Recipe(pv="fp8"), backend=backend)
    assert saturated_values() == 0
    value[0, 0, 200:203, 5] = 1e4
    value[0, 0, 204, 5] = math.nan
    value[0, 0, 205, 6] = -1e4
    calls = [lambda: attention(query, key, value, Recipe(pv="fp8"), backend=backend)] * 2
    if backend == "triton":  # it warns in the next call
        calls.pop()()
    with pytest.warns(UserWarning, match=r"pv='fp8' clipped 4 values.* use pv='bf16'"):
        calls.pop()()
    assert saturated_values() == (8 if backend == "triton" else 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(query, key, value, Recipe(pv="fp8"), backend=backend)
    saturation.saturation_counter().zero_()


def test_a_prepared_call_asks_for_a_plan_where_strides_or_an_alignment_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(api, "plan", lambda layouts: asked.append(layouts) or plan(layouts))
    query, key, value = random_qkv(q_heads=2, kv_heads=1, q_len=130, kv_len=130, head_dim=16, dtype=torch.float16)
    sinks, moved_sinks = torch.zeros(2, dtype=torch.float32), torch.zeros(3, dtype=torch.float32)[1:]
    moved = torch.zeros(key.numel() + 1, dtype=torch.float16)[1:].view_as(key)
    strided = query.transpose(1, 2).contiguous().transpose(1, 2)
    expected = attention(query, key, value, BALANCED, sinks=sinks, backend="triton")
    prepared = PreparedAttention.of(query, key, value, BALANCED, sinks=sinks, backend="triton")
    assert prepared is not None
    for inputs, plans in (
        ((query, key, value, sinks), 0),
        ((query.clone(), key.clone(), value.clone(), sinks.clone()), 0),
        ((strided, key, value, sinks), 1),
        ((query, moved.copy_(key), value, sinks), 1),
        ((query, key, value, moved_sinks), 1),
    ):
        del asked[:]
        out = prepared(*inputs)
        assert len(asked) == plans
        assert_bits_equal(out, expected)

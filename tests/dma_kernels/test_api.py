"""The public functions: rejected inputs and their messages, backends, the custom op, ``torch.compile``."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dma_kernels import Recipe, api, attention, attention_with_lse, saturated_values
from dma_kernels.numerics import saturation
from dma_kernels.numerics.call import AttentionCall
from dma_kernels.prefill.plan import plan
from dma_kernels.runtime import chip
from dma_kernels.runtime.chip import resolve_backend
from dma_kernels.testing import RECIPES, assert_bits_equal, random_qkv, relative_error
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


# Name: the arguments that replace those of a valid call, the exception, its message.
REJECTED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    **{
        f"{name}-device": (
            {name: zeros(*shape, dtype=dtype, device="meta")},
            ValueError,
            f"{name} must be on the device of query, cpu, got meta",
        )
        for name, shape, dtype in (
            ("key", (2, 2, 9, 16), torch.float32),
            ("value", (2, 2, 9, 16), torch.float32),
            ("sinks", (4,), torch.float32),
            ("mask", (1, 1, 6, 9), torch.bool),
            ("kv_range", (2, 2), torch.int64),
            ("q_offset", (2,), torch.int64),
        )
    },
    "query-3d": (
        {"query": zeros(4, 6, 16)},
        ValueError,
        r"query must be \[batch, heads, tokens, head_dim\], got shape \[4, 6, 16\]",
    ),
    "value-2d": ({"value": zeros(9, 16)}, ValueError, r"value must be \[batch, heads, tokens, head_dim\], got shape"),
    "query-int": (
        {"query": zeros(2, 4, 6, 16, dtype=torch.int32)},
        TypeError,
        r"query must be bf16, fp16, fp32 or fp64, got torch\.int32",
    ),
    "key-dtype": (
        {"key": zeros(2, 2, 9, 16, dtype=torch.bfloat16)},
        TypeError,
        r"key must have the dtype of query, torch\.float32, got torch\.bfloat16",
    ),
    "value-dtype": (
        {"value": zeros(2, 2, 9, 16, dtype=torch.float64)},
        TypeError,
        r"value must have the dtype of query, torch\.float32, got torch\.float64",
    ),
    "key-batch": ({"key": zeros(1, 2, 9, 16)}, ValueError, "key must have the batch size of query, 2, got 1"),
    "value-batch": ({"value": zeros(3, 2, 9, 16)}, ValueError, "value must have the batch size of query, 2, got 3"),
    "value-heads": (
        {"value": zeros(2, 4, 9, 16)},
        ValueError,
        r"value must have the heads and tokens of key, \[2, 9\], got \[4, 9\]",
    ),
    "value-tokens": (
        {"value": zeros(2, 2, 8, 16)},
        ValueError,
        r"value must have the heads and tokens of key, \[2, 9\], got \[2, 8\]",
    ),
    "heads-do-not-divide": (
        {"key": zeros(2, 3, 9, 16), "value": zeros(2, 3, 9, 16)},
        ValueError,
        "the 3 key heads must divide the 4 query heads",
    ),
    "no-key-heads": (
        {"key": zeros(2, 0, 9, 16), "value": zeros(2, 0, 9, 16)},
        ValueError,
        "the 0 key heads must divide the 4 query heads",
    ),
    "key-head_dim": ({"key": zeros(2, 2, 9, 32)}, ValueError, "key must have the head_dim of query, 16, got 32"),
    "head_dim-0": (
        {"query": zeros(2, 4, 6, 0), "key": zeros(2, 2, 9, 0)},
        ValueError,
        r"the head_dim of query must be in 1\.\.256, got 0",
    ),
    "value-head_dim-257": (
        {"value": zeros(2, 2, 9, 257)},
        ValueError,
        r"the head_dim of value must be in 1\.\.256, got 257",
    ),
    "sinks-shape": (
        {"sinks": zeros(2)},
        ValueError,
        r"sinks must be \[4\], one logit per query head, got \[2\]",
    ),
    "sinks-dtype": (
        {"sinks": zeros(4, dtype=torch.int64)},
        TypeError,
        r"sinks must be floating point, got torch\.int64",
    ),
    "mask-dtype": ({"mask": zeros(2, 1, 6, 9)}, TypeError, r"mask must be boolean, got torch\.float32"),
    "mask-2d": (
        {"mask": zeros(2, 9, dtype=torch.bool)},
        ValueError,
        r"mask must be broadcastable to \[2, 4, 6, 9\], got \[2, 9\]",
    ),
    "mask-5d": (
        {"mask": zeros(1, 1, 1, 6, 9, dtype=torch.bool)},
        ValueError,
        r"mask must be broadcastable to \[2, 4, 6, 9\], got \[1, 1, 1, 6, 9\]",
    ),
    "key-list": ({"key": [[1.0]]}, TypeError, r"key must be a torch\.Tensor, got list"),
    "sinks-list": ({"sinks": [0.0] * 4}, TypeError, r"sinks must be a torch\.Tensor, got list"),
    "mask-bool": ({"mask": True}, TypeError, r"mask must be a torch\.Tensor, got bool"),
    "kv_range-tuple": ({"kv_range": (0, 9)}, TypeError, r"kv_range must be a torch\.Tensor, got tuple"),
    "is_causal-int": ({"is_causal": 1}, TypeError, "is_causal must be true or false, got 1"),
    "scale-string": ({"scale": "0.1"}, TypeError, r"scale must be a positive finite number, got '0\.1'"),
    "scale-bool": ({"scale": True}, TypeError, "scale must be a positive finite number, got True"),
    "window-bool": ({"window": True}, ValueError, "window must be an integer of at least 1, got True"),
    "q_offset-bool": (
        {"q_offset": True},
        TypeError,
        r"q_offset must be an int or an integer tensor of shape \[2\], got True",
    ),
    "q_offset-negative": (
        {"q_offset": -5},
        ValueError,
        r"q_offset must be at least kv_offset, 0, where attention is causal .*; got -5",
    ),
    "q_offset-large": ({"q_offset": 2**31}, ValueError, r"q_offset must be within 2\*\*30 of 0, got 2147483648"),
    "kv_offset-large": ({"kv_offset": -(10**30)}, ValueError, r"kv_offset must be within 2\*\*30 of 0, got -1000"),
    "backend-list": ({"backend": ["triton"]}, ValueError, r"backend must be one of .*; got \['triton'\]"),
    "mask-longer": (
        {"mask": zeros(1, 1, 6, 10, dtype=torch.bool)},
        ValueError,
        r"mask must be broadcastable to \[2, 4, 6, 9\], got \[1, 1, 6, 10\]",
    ),
    "kv_range-float": (
        {"kv_range": zeros(2, 2)},
        ValueError,
        r"kv_range must be integer \[2, 2\], got torch\.float32 \[2, 2\]",
    ),
    "kv_range-shape": (
        {"kv_range": zeros(1, 2, dtype=torch.int64)},
        ValueError,
        r"kv_range must be integer \[2, 2\], got torch\.int64 \[1, 2\]",
    ),
    "q_offset-float": (
        {"q_offset": 1.0},
        TypeError,
        r"q_offset must be an int or an integer tensor of shape \[2\], got 1\.0",
    ),
    "q_offset-bool-tensor": (
        {"q_offset": zeros(2, dtype=torch.bool)},
        ValueError,
        r"q_offset must be an int or an integer tensor of shape \[2\], got torch\.bool \[2\]",
    ),
    "q_offset-shape": (
        {"q_offset": zeros(3, dtype=torch.int64)},
        ValueError,
        r"q_offset must be an int or an integer tensor of shape \[2\], got torch\.int64 \[3\]",
    ),
    "scale-0": ({"scale": 0.0}, ValueError, r"scale must be a positive finite number, got 0\.0"),
    "scale-nan": ({"scale": math.nan}, ValueError, "scale must be a positive finite number, got nan"),
    "scale-inf": ({"scale": math.inf}, ValueError, "scale must be a positive finite number, got inf"),
    "softcap-0": ({"softcap": 0.0}, ValueError, r"softcap must be a positive finite number, got 0\.0"),
    "window-0": ({"window": 0}, ValueError, "window must be an integer of at least 1, got 0"),
    "window-float": ({"window": 4.0}, ValueError, r"window must be an integer of at least 1, got 4\.0"),
    "recipe-name": ({"recipe": "balanced"}, TypeError, r"recipe must be a dma_kernels\.Recipe, got str"),
    "backend": ({"backend": "flash"}, ValueError, "backend must be one of auto, reference, triton; got 'flash'"),
}


class TestRejected:
    @pytest.mark.parametrize("case", REJECTED)
    def test_an_invalid_input_is_rejected_with_its_message_and_left_unchanged(self, case: str) -> None:
        replaced, exception, message = REJECTED[case]
        good = inputs()
        copies = {name: x.clone() for name, x in good.items() if isinstance(x, Tensor)}
        with pytest.raises(exception, match=message):
            attention(**(good | replaced))
        for name, copy in copies.items():
            assert_bits_equal(good[name], copy)

    @pytest.mark.parametrize("function", [attention, attention_with_lse], ids=["attention", "attention_with_lse"])
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"causal": True}, "got an unexpected keyword argument 'causal'"),
            ({"recipe": None}, "missing 1 required positional argument: 'recipe'"),
        ],
        ids=["unknown", "missing"],
    )
    def test_the_error_names_the_function_called(
        self, function: Callable[..., Any], arguments: dict[str, Any], message: str
    ) -> None:
        given = {name: value for name, value in (inputs() | arguments).items() if value is not None}
        with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) {message}"):
            function(**given)

    def test_positional_options_are_rejected(self) -> None:
        good = inputs()
        with pytest.raises(TypeError, match="positional"):
            attention(*good.values(), False)


class TestMasks:
    @pytest.mark.parametrize("shape", [(), (9,), (6, 9), (6, 1), (4, 6, 9), (1, 6, 9), (2, 1, 6, 9)], ids=str)
    def test_masks_of_fewer_dimensions_broadcast_as_in_torch(self, shape: tuple[int, ...]) -> None:
        good = inputs()
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5
        expected = attention(**good, mask=mask.expand(2, 4, 6, 9))
        for _ in range(3):
            assert_bits_equal(attention(**good, mask=mask), expected)


class TestBackends:
    def test_rocm_runs_only_the_reference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(chip, "device_arch", lambda device: 94)
        device = torch.device("cuda")
        assert resolve_backend("auto", device, torch.bfloat16) == "reference"
        with pytest.raises(RuntimeError, match="needs an NVIDIA GPU, and this PyTorch is for ROCm"):
            resolve_backend("triton", device, torch.bfloat16)


class TestSignatures:
    def test_the_op_takes_every_field_of_the_recipe(self) -> None:
        parameters = torch.ops.dma_kernels.attention.default._schema.arguments
        fields = dataclasses.asdict(Recipe())
        assert [argument.name for argument in parameters][-len(fields) :] == list(fields)

    def test_both_entry_points_have_the_same_parameters(self) -> None:
        ours, theirs = inspect.signature(attention), inspect.signature(attention_with_lse)
        assert ours.parameters == theirs.parameters
        assert pickle.loads(pickle.dumps(attention)) is attention


def op_arguments(recipe: Recipe, **options: Any) -> tuple[Any, ...]:
    """Arguments of the custom op, in its order."""
    good = inputs(**options.pop("shapes", {}))
    arguments = {name: options.get(name) for name in ("q_offset_rows", "kv_offset_rows", "kv_range", "mask", "sinks")}
    return (
        good["query"],
        good["key"],
        good["value"],
        options.get("q_offset", 3),
        options.get("kv_offset", 0),
        *arguments.values(),
        options.get("is_causal", True),
        options.get("window"),
        0.25,
        options.get("softcap"),
        "reference",
        options.get("counts_tiles", False),
        *dataclasses.asdict(recipe).values(),
    )


class TestCustomOp:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"shapes": {"q_len": 0}},
            {"shapes": {"kv_len": 0}},
            {"shapes": {"value_dim": 24}, "is_causal": False, "window": 4},
            {
                "q_offset_rows": torch.tensor([1, 2]),
                "kv_offset_rows": torch.tensor([0, -1]),
                "kv_range": torch.tensor([[0, 9], [1, 9]]),
                "mask": torch.ones(2, 1, 6, 9, dtype=torch.bool),
                "sinks": torch.ones(4),
                "softcap": 2.0,
            },
        ],
        ids=["plain", "no-queries", "no-keys", "bidirectional", "all-tensors"],
    )
    def test_the_custom_op_passes_opcheck(self, options: dict[str, Any]) -> None:
        torch.library.opcheck(torch.ops.dma_kernels.attention.default, op_arguments(BALANCED, **options))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bf16", "fp32", "fp64"])
    @pytest.mark.parametrize("value_dim", [16, 40], ids=lambda d: f"Dv{d}")
    def test_fake_outputs_match_the_real_ones(self, dtype: torch.dtype, value_dim: int) -> None:
        good = inputs(value_dim=value_dim, dtype=dtype)
        real = attention_with_lse(**good)
        fake = attention_with_lse(**{n: x.to("meta") if isinstance(x, Tensor) else x for n, x in good.items()})
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


class TestCompile:
    """All lengths share one graph. The compiler does not trace the kernels inside the op."""

    @staticmethod
    def compiled(function: Callable[..., Any], *, dynamic: bool) -> tuple[Callable[..., Any], list[int]]:
        torch._dynamo.reset()
        graphs: list[int] = []

        def backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
            graphs.append(len(graph.graph.nodes))
            return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

        return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend), graphs

    @pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
    @pytest.mark.parametrize("recipe", [BALANCED, RECIPES["paper"]], ids=["mxfp8-row", "paper"])
    def test_causal_attention_compiles_to_one_graph(self, recipe: Recipe, dynamic: bool) -> None:
        def block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attention(query * 2.0, key, value, recipe).transpose(1, 2).flatten(2) + 1.0

        compiled, graphs = self.compiled(block, dynamic=dynamic)
        for q_len, kv_len in ((6, 9), (7, 140), (131, 131)):
            qkv = random_qkv(batch=2, q_heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=16)
            assert_bits_equal(compiled(*qkv), block(*qkv))
        assert len(graphs) == (1 if dynamic else 3)

    def test_every_option_compiles_to_one_graph(self) -> None:
        def block(query: Tensor, key: Tensor, value: Tensor, offset: Tensor, span: Tensor, mask: Tensor, sinks: Tensor):
            out, lse = attention_with_lse(
                query,
                key,
                value,
                BALANCED,
                scale=0.3,
                q_offset=offset + 3,
                kv_offset=offset,
                kv_range=span,
                window=5,
                softcap=3.0,
                sinks=sinks,
                mask=mask,
                backend="reference",
            )
            return out * 2.0, lse + 1.0

        compiled, _ = self.compiled(block, dynamic=True)
        for q_len, kv_len in ((6, 9), (7, 33)):
            qkv = random_qkv(batch=2, q_heads=4, kv_heads=2, q_len=q_len, kv_len=kv_len)
            rest = (
                torch.tensor([0, -2]),
                torch.tensor([[0, kv_len - 1], [2, kv_len]]),
                torch.ones(2, 1, q_len, kv_len, dtype=torch.bool),
                torch.zeros(4),
            )
            for actual, expected in zip(compiled(*qkv, *rest), block(*qkv, *rest), strict=True):
                assert_bits_equal(actual, expected)

    def test_a_growing_decode_offset_compiles_to_one_graph(self) -> None:
        def step(query: Tensor, key: Tensor, value: Tensor, position: int) -> Tensor:
            return attention(query, key, value, BALANCED, q_offset=position)

        compiled, graphs = self.compiled(step, dynamic=True)
        qkv = random_qkv(q_len=1, kv_len=64)
        for position in (20, 21, 40):
            assert_bits_equal(compiled(*qkv, position), step(*qkv, position))
        assert len(graphs) == 1

    def test_an_invalid_input_keeps_its_message(self) -> None:
        compiled, _ = self.compiled(lambda q, k, v: attention(q, k, v, BALANCED, window=0), dynamic=True)
        with pytest.raises(Exception, match="window must be an integer of at least 1, got 0"):
            compiled(*random_qkv(q_len=4, kv_len=4))


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

    @pytest.mark.parametrize("name", ["query", "key", "value", "sinks"])
    def test_forward_mode_ad_is_rejected(self, name: str) -> None:
        good = inputs() | {"sinks": torch.zeros(4)}
        with forward_ad.dual_level():
            attention(**good)  # without dual tensors
            good[name] = forward_ad.make_dual(good[name], torch.ones_like(good[name]))
            with pytest.raises(NotImplementedError, match="no derivative in forward mode"):
                attention(**good)

    @pytest.mark.parametrize("transform", [lambda f: f, torch.func.vmap, torch.compile], ids=["", "vmap", "compile"])
    def test_jvp_is_rejected(self, transform: Any) -> None:
        query, key, value = random_qkv(q_len=5, kv_len=5)
        function = transform(lambda query: attention(query, key, value, BALANCED))
        if transform is torch.func.vmap:
            query = torch.stack([query, query])
        with pytest.raises(NotImplementedError, match="no derivative in forward mode"):
            torch.func.jvp(function, (query,), (torch.ones_like(query),))

    def test_vmap_equals_a_loop(self) -> None:
        query, key, value = random_qkv(q_len=5, kv_len=5)
        queries = torch.stack([query, 2.0 * query])
        outputs = torch.func.vmap(lambda query: attention(query, key, value, BALANCED))(queries)
        for ours, each in zip(outputs, queries, strict=True):
            assert_bits_equal(ours, attention(each, key, value, BALANCED))


def problem_of(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> AttentionCall:
    """Return the key of a call's plan."""
    problems: list[AttentionCall] = []
    query, key, value = random_qkv(q_len=5, kv_len=5, q_heads=2, kv_heads=2, head_dim=32)
    arguments = {"query": query, "key": key, "value": value, "recipe": Recipe()} | changes
    with monkeypatch.context() as patch:
        patch.setattr(api, "plan", lambda problem: (problems.append(problem), plan(problem))[1])
        attention(**arguments)
    return problems[0]


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
def test_calls_that_differ_on_the_host_have_different_plans(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = problem_of(monkeypatch)
    assert problem_of(monkeypatch, query=ONES, key=ONES + 1.0, value=ONES + 2.0) == usual
    assert problem_of(monkeypatch, **change) != usual


def test_values_read_on_the_device_do_not_change_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, contents in (("kv_range", [[[0, 5]], [[1, 4]]]), ("kv_offset", [[0], [-3]]), ("q_offset", [[0], [7]])):
        first, second = (problem_of(monkeypatch, **{name: torch.tensor(each)}) for each in contents)
        assert first == second


def test_a_checked_call_does_not_make_an_unchecked_one_valid() -> None:
    """An option of the wrong type is rejected even after a valid call with an equal option."""
    good = inputs()
    for name, value in (("is_causal", True), ("window", 1), ("q_offset", 1)):
        attention(**good, **{name: value})
        with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
            attention(**good, **{name: 1 if value is True else True})


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("offset", [2**32 + 5, 2**31, -(2**32) - 5])
def test_positions_on_the_device_are_clipped_to_the_valid_range(offset: int, backend: str) -> None:
    """Not taken modulo 2^32: queries far after all keys see all of them in low precision, those before them none."""
    query, key, value = random_qkv(q_len=20, kv_len=300, head_dim=32, dtype=torch.float16)
    recipe = Recipe(low="mxfp4", sink_tiles=0)
    limit = 2**30 if offset > 0 else -(2**30)
    ours, expected = (
        attention(query, key, value, recipe, q_offset=torch.tensor([each]), backend=backend) for each in (offset, limit)
    )
    assert_bits_equal(ours, expected)
    assert (expected == 0.0).all() == (offset < 0)
    clipped, near = (
        attention(query, key, value, recipe, kv_offset=torch.tensor([each]), q_offset=0, backend=backend)
        for each in (offset, limit)
    )
    assert_bits_equal(clipped, near)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("arch", [90, 80], ids=["e4m3", "dequantized"])
def test_saturated_values_are_counted_and_trigger_one_warning(
    arch: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chip, "INTERPRETED_ARCH", arch)
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


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_values_up_to_ten_times_the_first_tile_are_not_clipped(backend: str) -> None:
    query, key, value = random_qkv(q_len=520, kv_len=520, head_dim=32, dtype=torch.float16)
    value[:, :, 128:] *= 10.0
    before = saturated_values()
    out, exact = (attention(query, key, value, Recipe(pv=pv, low="bf16"), backend=backend) for pv in ("fp8", "bf16"))
    assert saturated_values() == before
    assert relative_error(out, exact) < 0.05

"""Packed documents: each equals the document alone, whatever it is packed with."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from dma_kernels import Recipe, attention, attention_varlen, varlen
from dma_kernels.numerics.recipe import RECIPE_FIELDS
from dma_kernels.testing import RECIPES, assert_bits_equal, random_qkv, relative_error
from prefill_cases import RECIPES as KERNEL_RECIPES
from prefill_cases import make_sparse
from torch import Tensor

EXACT = Recipe(low="bf16", high="bf16")
BALANCED, PAPER = RECIPES["mxint8-tile"], RECIPES["paper"]
LENGTHS = (130, 700, 1, 430, 130, 60, 400)
"""Two documents of equal length, two of four tiles, one of a single token."""


def packed(
    q_lengths: tuple[int, ...], k_lengths: tuple[int, ...] | None = None, **sizes: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
    """Return the arguments of ``attention_varlen`` up to the recipe."""
    k_lengths = q_lengths if k_lengths is None else k_lengths
    sizes = {"q_heads": 4, "kv_heads": 2, "head_dim": 32} | sizes
    made = random_qkv(q_len=sum(q_lengths), kv_len=sum(k_lengths), **sizes)
    ends = (torch.tensor((0, *lengths)).cumsum(0).int() for lengths in (q_lengths, k_lengths))
    query, key, value = (x[0].transpose(0, 1) for x in made)
    return query, key, value, *ends, max(q_lengths, default=0), max(k_lengths, default=0)


def alone(arguments: tuple[Any, ...], recipe: Recipe, **options: Any) -> Tensor:
    """Compute every document by a call of its own."""
    query, key, value, q_ends, k_ends, *_ = arguments
    spans = zip(pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True)
    parts = [
        attention(*(x[start:stop].transpose(0, 1)[None] for x, (start, stop) in ((query, q), (key, k), (value, k))),
                  recipe, **options)[0].transpose(0, 1)
        for q, k in spans
    ]  # fmt: skip
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (BALANCED, {}),
        (BALANCED, {"is_causal": False}),
        (BALANCED, {"window": 150}),
        (BALANCED, {"window": 40, "is_causal": False}),
        (BALANCED, {"softcap": 5.0, "scale": 0.3}),
        (BALANCED, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
        (PAPER, {}),
        (RECIPES["nvfp4-mxfp8"], {"window": 150}),
    ],
    ids=["causal", "bidirectional", "window", "bidirectional-window", "softcap", "sinks", "paper", "nvfp4"],
)
def test_a_document_equals_the_document_alone(recipe: Recipe, options: dict[str, Any]) -> None:
    arguments = packed(LENGTHS)
    out = attention_varlen(*arguments, recipe, **options)
    assert out.shape == arguments[0].shape
    assert out.is_contiguous()
    assert relative_error(out, alone(arguments, recipe, **options)) < 1e-5


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [((5, 70, 1), (200, 430, 391)), ((70, 9), (40, 9)), ((0, 6), (5, 6)), ((6, 3), (0, 9)), ((), ()), ((0,), (0,))],
    ids=["chunks", "more-queries-than-keys", "no-queries", "no-keys", "no-documents", "an-empty-document"],
)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
def test_queries_and_keys_may_have_different_lengths(
    q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], is_causal: bool
) -> None:
    arguments = packed(q_lengths, k_lengths)
    out = attention_varlen(*arguments, BALANCED, is_causal=is_causal)
    if q_lengths:
        assert relative_error(out, alone(arguments, BALANCED, is_causal=is_causal)) < 1e-5
    assert out.shape == arguments[0].shape


def test_values_may_have_another_head_dim_and_inputs_any_strides() -> None:
    query, key, value, *lengths = packed(LENGTHS, value_dim=24)
    value = value.transpose(0, 2).contiguous().transpose(0, 2)
    expected = alone((query, key, value, *lengths), BALANCED)
    assert relative_error(attention_varlen(query, key, value, *lengths, BALANCED), expected) < 1e-5


SKIPPING = Recipe(low="mxint8", shared_scale="tile", skip_threshold=3.0, diagonal_tiles=0, sink_tiles=0)


def test_tiles_are_skipped_and_counted_as_in_documents_alone() -> None:
    arguments = packed((700, 630, 150, 70))
    query, key = (x.transpose(0, 1)[None] for x in arguments[:2])
    make_sparse(query, key)
    counts, expected_counts = (torch.zeros(4, 2, dtype=torch.int64) for _ in range(2))
    out = attention_varlen(*arguments, SKIPPING, tile_counts=counts)
    expected = alone(arguments, SKIPPING, tile_counts=expected_counts)
    assert relative_error(out, expected) < 1e-5
    assert torch.equal(counts, expected_counts)
    assert counts[:, 0].sum() > 0


def recorded(arguments: tuple[Any, ...], recipe: Recipe, **options: Any) -> list[tuple[int, int]]:
    """Return the number of documents and the queries of a document, of each call of ``attention``."""
    calls = []

    def record(query: Tensor, value: Tensor, **_: Any) -> Tensor:
        calls.append((query.shape[0], query.shape[2]))
        return query.new_zeros((*query.shape[:3], value.shape[3]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "attention", record)
        attention_varlen(*arguments, recipe, **options)
    return calls


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on the CPU")
class TestBatches:
    """How many calls the documents take."""

    def test_documents_of_one_length_share_a_call_without_a_copy(self) -> None:
        query = packed((70,) * 5)[0]
        (spans, _), *others = varlen._batches(tuple(range(0, 351, 70)), tuple(range(0, 351, 70)), 4, 0)
        assert not others
        assert spans.take(query).data_ptr() == query.data_ptr()

    @pytest.mark.parametrize(
        ("lengths", "calls"),
        [
            (tuple(range(64, 114)), [(50, 113)]),
            ((4000, *range(100, 120)), [(1, 4000), (20, 119)]),
            ((64, 63, 62), [(1, 64), (2, 63)]),  # a call of fewer than 64 queries is computed differently
        ],
        ids=["many-short", "a-long-one", "around-64"],
    )
    def test_kernels_pad_documents_of_similar_lengths(
        self, lengths: tuple[int, ...], calls: list[tuple[int, int]]
    ) -> None:
        arguments = packed(lengths, tuple(max(100, length) for length in lengths), dtype=torch.float16, q_heads=8)
        assert recorded(arguments, BALANCED, backend="triton") == calls

    def test_nothing_is_padded_in_the_reference_and_where_tiles_are_skipped(self) -> None:
        """Padding would complete a document's last block of 64 queries, which may then skip tiles."""
        assert recorded(packed((100, 90, 100)), BALANCED) == [(2, 100), (1, 90)]
        arguments = packed((640, 630), dtype=torch.float16)
        assert recorded(arguments, SKIPPING, backend="triton") == [(1, 640), (1, 630)]

    @pytest.mark.parametrize(
        ("q_lengths", "k_lengths", "calls", "recipe", "options"),
        [
            ((300, 65, 290, 20, 8), None, [(3, 300), (2, 20)], "balanced", {"is_causal": False}),
            ((300, 65, 290, 20, 8), None, [(3, 300), (2, 20)], "balanced", {"window": 150}),
            ((300, 65, 290, 20, 8), None, [(3, 300), (2, 20)], "paper", {}),
            ((90, 70, 64), (300, 280, 0), [(3, 90)], "balanced", {}),
        ],
        ids=["bidirectional", "window", "paper", "chunks"],
    )
    @pytest.mark.usefixtures("poisoned")
    def test_padded_documents_equal_the_documents_alone(
        self, q_lengths: Any, k_lengths: Any, calls: Any, recipe: str, options: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Up to the order of sums, which depends on whether a kernel reads positions on the device."""
        monkeypatch.setattr(varlen, "CALL_COST", 1 << 30)
        arguments = packed(q_lengths, k_lengths, dtype=torch.float16, q_heads=1, kv_heads=1)
        assert recorded(arguments, KERNEL_RECIPES[recipe], backend="triton") == calls
        out = attention_varlen(*arguments, KERNEL_RECIPES[recipe], backend="triton", **options)
        expected = alone(arguments, KERNEL_RECIPES[recipe], backend="triton", **options)
        for ours, one in zip(out.split(q_lengths), expected.split(q_lengths), strict=True):
            assert relative_error(ours, one) < 1e-3


@pytest.mark.parametrize("is_padded", [False, True], ids=["by-length", "padded"])
def test_the_default_device_does_not_matter(is_padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``torch.set_default_device``, which would put the lengths on a device that the host cannot read."""
    if is_padded:
        batches = varlen._batches
        monkeypatch.setattr(varlen, "_batches", lambda *ends_and_heads: batches(*ends_and_heads[:3], 1 << 30))
    arguments = packed((30, 9, 30, 1))
    expected = attention_varlen(*arguments, EXACT)
    with torch.device("meta"):
        assert torch.equal(attention_varlen(*arguments, EXACT), expected)


class TestGradient:
    @pytest.mark.parametrize(
        "options",
        [{}, {"is_causal": False, "window": 9}, {"softcap": 1.5, "scale": 0.3, "window": 20}],
        ids=["causal", "bidirectional", "softcap"],
    )
    @pytest.mark.parametrize("is_padded", [False, True], ids=["by-length", "padded"])
    @pytest.mark.parametrize("lengths", [((30, 9, 30, 1), None), ((9, 0, 20), (30, 5, 25))], ids=["equal", "chunks"])
    def test_it_equals_that_of_the_documents_alone(
        self, lengths: Any, is_padded: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if is_padded:
            batches = varlen._batches
            monkeypatch.setattr(varlen, "_batches", lambda *ends_and_heads: batches(*ends_and_heads[:3], 1 << 30))
        query, key, value, *ends = packed(*lengths, dtype=torch.float64)
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
        leaves = [x.requires_grad_() for x in (query, key, value, sinks)]
        weight = torch.randn(query.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        found = []
        for function in (attention_varlen, lambda *arguments, **others: alone(arguments[:-1], arguments[-1], **others)):
            out = function(query, key, value, *ends, EXACT, sinks=sinks, **options)
            found.append(torch.autograd.grad((out * weight).sum(), leaves))
        for ours, expected in zip(*found, strict=True):
            torch.testing.assert_close(ours, expected)

    def test_it_passes_straight_through_the_rounding_also_under_torch_func(self) -> None:
        tensors, ends = packed(LENGTHS)[:3], packed(LENGTHS)[3:]

        def loss(query: Tensor, key: Tensor, value: Tensor, recipe: Recipe = PAPER) -> Tensor:
            return attention_varlen(query, key, value, *ends, recipe).sum()

        leaves = [x.clone().requires_grad_() for x in tensors]
        lossy, exact = (torch.autograd.grad(loss(*leaves, recipe), leaves) for recipe in (PAPER, EXACT))
        for ours, transformed, expected in zip(lossy, torch.func.grad(loss, (0, 1, 2))(*tensors), exact, strict=True):
            assert torch.equal(ours, expected)
            torch.testing.assert_close(transformed, expected)


class TestOperator:
    @pytest.mark.parametrize("sinks", [None, torch.zeros(4)], ids=["plain", "sinks"])
    def test_it_passes_opcheck(self, sinks: Tensor | None) -> None:
        query, key, value, *lengths = packed((6, 9))
        tensors = [x.contiguous() for x in (query, key, value)]
        leaves = [x.clone().requires_grad_() for x in tensors]
        recipe = [getattr(BALANCED, name) for name in RECIPE_FIELDS]
        ops = torch.ops.dma_kernels
        options = (sinks, True, None, 0.25, None, "reference", False, *recipe)
        torch.library.opcheck(ops.attention_varlen.default, (*leaves, *lengths, *options))
        options = (sinks, True, None, 0.25, None)
        torch.library.opcheck(ops.attention_varlen_backward.default, (tensors[0], *tensors, *lengths, *options))

    def test_it_compiles_to_one_graph_for_all_lengths(self) -> None:
        def block(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
            longest = query.shape[0]
            return attention_varlen(query * 2.0, key, value, ends, ends, longest, longest, BALANCED) + 1.0

        torch._dynamo.reset()
        compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
        for lengths in ((6, 9), (130, 40), (70, 3, 150)):
            query, key, value, ends, *_ = packed(lengths)
            assert_bits_equal(compiled(query, key, value, ends), block(query, key, value, ends))


ENDS = torch.tensor([0, 6, 15])
# What replaces a valid argument, the exception, and what its message begins with; other checks are those of attention.
REJECTED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": torch.zeros(1, 15, 4, 32)}, ValueError, r"query must be \[tokens, heads, head_dim\], got shape"),
    ({"key": None}, TypeError, r"key must be a torch\.Tensor, got NoneType"),
    ({"value": torch.zeros(14, 2, 32)}, ValueError, r"value must have the heads and tokens of key, \[2, 15\]"),
    ({"window": 0}, ValueError, "window must be an integer of at least 1, got 0"),
    ({"recipe": "balanced"}, TypeError, r"recipe must be a dma_kernels\.Recipe, got str"),
    ({"backend": "flash"}, ValueError, "backend must be one of auto, reference, triton; got 'flash'"),
    ({"tile_counts": torch.zeros(4, 2).long()}, ValueError, "tile_counts needs a recipe that skips tiles"),
    ({"cu_seqlens_q": [0, 6, 15]}, TypeError, r"cu_seqlens_q must be a torch\.Tensor, got list"),
    *(
        ({"cu_seqlens_k": ends}, ValueError, r"cu_seqlens_k must be integer \[documents \+ 1\], got torch")
        for ends in (ENDS.float(), ENDS[None], ENDS[:0])
    ),
    ({"cu_seqlens_q": ENDS.to("meta")}, ValueError, "cu_seqlens_q must be on the CPU or on cpu, got meta"),
    ({"cu_seqlens_k": torch.tensor([0, 3, 6, 15])}, ValueError, "cu_seqlens_k must have the 3 entries of cu_seqlens_q"),
    *(
        ({"cu_seqlens_q": torch.tensor(ends)}, ValueError, "cu_seqlens_q must rise from 0 to the 15 tokens packed")
        for ends in ([0, 6, 14], [1, 6, 15], [0, 16, 15])
    ),
    ({"max_seqlen_k": 8}, ValueError, "max_seqlen_k must be at least the length of the longest document, 9, got 8"),
    ({"max_seqlen_q": 9.0}, TypeError, r"max_seqlen_q must be an int, got 9\.0"),
]


@pytest.mark.parametrize(("replaced", "error", "message"), REJECTED)
def test_an_invalid_input_is_rejected(replaced: dict[str, Any], error: type[Exception], message: str) -> None:
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    good = dict(zip(names, packed((6, 9)), strict=True)) | {"recipe": BALANCED}
    with pytest.raises(error, match=f"^{message}"):
        attention_varlen(**(good | replaced))


def test_vmap_is_rejected() -> None:
    query, *others = packed((6, 9))
    with pytest.raises(NotImplementedError, match=r"torch\.func\.vmap does not apply to attention of packed documents"):
        torch.func.vmap(lambda query: attention_varlen(query, *others, BALANCED))(torch.stack((query, query)))


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("recipe", ["balanced", "paper", "fp4"])
    def test_documents_equal_the_documents_alone(self, recipe: str) -> None:
        lengths = (3000, 130, 700, 1, 64, *range(100, 140), 2900)
        arguments = packed(lengths, dtype=torch.bfloat16, device="cuda", q_heads=8, head_dim=128)
        for ends_device in ("cpu", "cuda"):
            ends = (x.to(ends_device) for x in arguments[3:5])
            out = attention_varlen(*arguments[:3], *ends, *arguments[5:], KERNEL_RECIPES[recipe])
            assert relative_error(out, alone(arguments, KERNEL_RECIPES[recipe])) < 1e-2

    def test_lengths_on_the_cpu_do_not_wait_for_the_device(self) -> None:
        arguments = packed(LENGTHS, dtype=torch.bfloat16, device="cuda", head_dim=128)
        ends = [x.cpu() for x in arguments[3:5]]
        attention_varlen(*arguments[:3], *ends, *arguments[5:], KERNEL_RECIPES["balanced"])  # compile
        torch.cuda.set_sync_debug_mode("error")
        try:
            attention_varlen(*arguments[:3], *ends, *arguments[5:], KERNEL_RECIPES["balanced"])
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_lengths_on_the_device_cannot_be_read_in_a_graph(self) -> None:
        arguments = packed((70, 70), dtype=torch.bfloat16, device="cuda", head_dim=128)
        ends = [x.cuda() for x in arguments[3:5]]
        with (
            pytest.raises(RuntimeError, match="the host reads cu_seqlens_q, which a CUDA graph does not allow"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            attention_varlen(*arguments[:3], *ends, *arguments[5:], KERNEL_RECIPES["balanced"])

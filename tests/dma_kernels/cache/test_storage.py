"""A layer's cache: what it stores, and attention over it equals exact attention to its contents."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import FORMATS, assert_storages_equal, scattered
from dma_kernels import attention
from dma_kernels.cache.api import _append, _cached_attention, _op_arguments, _restore, append, cached_attention, restore
from dma_kernels.cache.formats import cache_format
from dma_kernels.cache.page_layout import PageLayout
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.reference.attention import EXACT
from dma_kernels.testing import relative_error
from torch.library import opcheck

BATCH, Q_HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 2, 32, 24
PLANS = {
    "tokens across boundaries": [126, *[1] * 4, 124, *[1] * 4, 127, 1, 1, 37],
    "chunks": [100, 16, 200, 7, 101],
    "one prompt": [424],
}


def sequence(length: int, seed: int = 0):
    """Return queries, keys with a non-zero mean, and values."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((Q_HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    query, key, value = (
        torch.randn(BATCH, heads, length, dim, generator=generator, dtype=torch.float64) for heads, dim in sizes
    )
    return query, key + 1, value


def empty(format: str, batch: int = BATCH, **options) -> LayerStorage:
    sizes = {"batch": batch, "kv_heads": KV_HEADS, "head_dim": DIM, "value_dim": VALUE_DIM, "dtype": torch.float64}
    return LayerStorage.allocate(format, **(sizes | {"device": torch.device("cpu")} | options))


def filled(format: str, key, value, plan=(1 << 20,), padding=(0, 0), **options) -> LayerStorage:
    storage = empty(format, **options)
    storage.lengths -= torch.tensor(padding, dtype=torch.int32)
    for start, end in steps(plan, key.shape[2]):
        storage.reserve(end // 128)
        storage.append(key[:, :, start:end], value[:, :, start:end])
    return storage


def steps(plan, length):
    """Yield the start and end of each step of a plan, cut off at ``length``."""
    start = 0
    for count in plan:
        end = min(start + count, length)
        if start < end:
            yield start, end
        start = end


def decode(storage, query, key, value, plan, **options):
    outputs = []
    stored = int(storage.lengths.max())
    for start, end in steps(plan, query.shape[2]):
        storage.reserve((stored + end) // 128)
        new = (x[:, :, start:end] for x in (query, key, value))
        outputs.append(cached_attention(*new, storage, **options))
    return torch.cat(outputs, 2)


formats = pytest.mark.parametrize("format", FORMATS)


def read_by(position: int, key, value, format: str, padding: int = 0, diagonal_tiles: int = 1, sink_tiles: int = 1):
    """Return the KV that a query reads from a row: dequantized between the sinks and its band."""
    layout = PageLayout(cache_format(format), key.shape[2], value.shape[2])
    band = (max(position - padding, 0) // 128 - diagonal_tiles) * 128
    coded = slice(sink_tiles * 128 + padding, band + padding)
    keys, values = key.clone(), value.clone()
    if coded.start < coded.stop:
        tiles = (x[:, coded].unflatten(1, (-1, 128)) for x in (key, value))
        keys[:, coded], values[:, coded] = (x.flatten(1, 2).to(key.dtype) for x in layout.decode(layout.encode(*tiles)))
    return keys, values


def oracle(query, key, value, format, padding=(0, 0), first=0, **options):
    """Return exact attention for every query from ``first`` on, however the calls are split."""
    mask = options.pop("mask", None)
    rows = []
    for row, skipped in enumerate(padding):
        visible = torch.tensor([[skipped, key.shape[2]]])
        cuts = [i for i in range(first + 1, query.shape[2]) if (i - skipped) % 128 == 0]
        parts = []
        for start, end in zip([first, *cuts], [*cuts, query.shape[2]], strict=True):
            keys, values = read_by(start, key[row], value[row], format, skipped)
            q = query[row : row + 1, :, start:end]
            hidden = {} if mask is None else {"mask": mask[row : row + 1, :, start - first : end - first]}
            parts.append(
                attention(q, keys[None], values[None], EXACT, q_offset=start, kv_range=visible, **hidden, **options)
            )
        rows.append(torch.cat(parts, 2))
    return torch.cat(rows)


class TestAgreement:
    @formats
    @pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
    @pytest.mark.parametrize(
        ("padding", "options"),
        [
            ((0, 37), {}),
            ((0, 0), {"window": 150}),
            ((0, 0), {"window": 20}),
            ((0, 0), {"softcap": 5.0, "sinks": torch.tensor([0.0, 2.0, -1.0, 5.0]).double(), "scale": 0.3}),
        ],
        ids=["padded", "window", "short-window", "softcap-sinks"],
    )
    def test_steps_match_the_oracle(self, format, plan, padding, options):
        query, key, value = sequence(424)
        storage = empty(format, window=options.get("window"))
        storage.lengths -= torch.tensor(padding, dtype=torch.int32)
        actual = decode(storage, query, key, value, plan, **options)
        assert relative_error(actual, oracle(query, key, value, format, padding, **options)) < 1e-12

    def test_a_bidirectional_mask_matches_the_oracle(self):
        """A random mask over a prefix; its columns begin before position 0."""
        query, key, value = sequence(400)
        generator = torch.Generator().manual_seed(3)
        mask = torch.rand(BATCH, 1, 100, 405, generator=generator) < 0.7
        expected = oracle(query, key, value, "int4", first=300, is_causal=False, mask=mask[..., 5:])
        storage = filled("int4", key[:, :, :300], value[:, :, :300])
        storage.reserve(3)
        new = (x[:, :, 300:] for x in (query, key, value))
        position = torch.tensor([-5, -5])
        actual = cached_attention(*new, storage, is_causal=False, mask=mask, mask_position=position)
        assert relative_error(actual, expected) < 1e-12

    def test_a_fully_masked_row_is_zero(self):
        query, key, value = sequence(10)
        storage = empty("int8")
        storage.lengths -= torch.tensor([0, 20], dtype=torch.int32)
        out = cached_attention(query, key, value, storage)
        assert out[0].abs().min() > 0
        assert out[1].abs().max() == 0
        assert storage.lengths.tolist() == [10, -10]


class TestStores:
    @formats
    def test_codes_do_not_depend_on_how_tokens_are_split_into_calls(self, format):
        _, key, value = sequence(424)
        whole = filled(format, key, value, padding=(0, 37))
        for plan in PLANS.values():
            assert_storages_equal(filled(format, key, value, plan, padding=(0, 37)), whole)

    def test_sinks_hold_the_first_tokens_and_residual_kv_the_last(self):
        _, key, value = sequence(424)
        storage = filled("int8", key, value, sink_tiles=2)
        assert torch.equal(storage.key_sink, key[:, :, :256])
        assert torch.equal(storage.value_sink, value[:, :, :256])
        last = torch.arange(424 - 384, 424)
        assert torch.equal(storage.key_residual[:, :, last % 384], key[:, :, last])
        assert torch.equal(storage.value_residual[:, :, last % 384], value[:, :, last])

    def test_growth_is_geometric_and_a_ring_buffer_is_bounded(self):
        _, key, value = sequence(424)
        storage = filled("int8", key, value)
        assert storage.max_pages == 3  # exactly what the prompt needs
        before = storage.dequantize(0, 384)[0]
        storage.reserve(4)
        assert storage.max_pages == 4
        storage.reserve(100)
        storage.reserve(101)
        assert storage.max_pages == 101
        storage.reserve(256)
        storage.reserve(257)
        assert storage.max_pages == 258
        assert torch.equal(storage.dequantize(0, 384)[0], before)
        ring = empty("int8", window=1000)
        ring.reserve(1 << 20)
        assert ring.max_pages == 11  # a window of 999 earlier keys, two tiles of slack, and the tile that it begins in
        pages = ring.kv_pages
        ring.reserve(1 << 21)
        assert ring.kv_pages is pages  # not copied again

    def test_restore_returns_stored_keys_and_zeros_elsewhere(self):
        """Unquantized KV is exact, quantized KV as precise as its codes, and missing KV zero."""
        _, key, value = sequence(700)
        storage = filled("int4", key, value, padding=(0, 37))
        keys, values = restore(storage, torch.tensor([-5, -42]), 710)
        for row, padding in enumerate((0, 37)):
            assert keys[row, :, : padding + 5].abs().max() == 0
            stored = slice(padding + 5, 705)
            for actual, expected in ((keys, key), (values, value)):
                assert 0 < relative_error(actual[row, :, stored], expected[row, :, padding:]) < 0.2
                assert torch.equal(actual[row, :, 705 - 384 : 705], expected[row, :, -384:])
                assert torch.equal(actual[row, :, stored][:, :128], expected[row, :, padding : padding + 128])
                assert actual[row, :, 705:].abs().max() == 0

    @formats
    def test_restore_leaves_out_a_tile_that_rolled_back_tokens_have_overwritten(self, format):
        """A ring of pages holds the tiles before the newest one that was ever complete."""
        _, key, value = sequence(1100)
        storage = filled(format, key[:, :, :1030], value[:, :, :1030], window=100)
        storage.crop(10)
        oldest = (1030 // 128 - storage.max_pages) * 128
        keys, values = restore(storage, torch.zeros_like(storage.lengths), 1020)
        for actual, expected in ((keys, key), (values, value)):
            assert actual[:, :, :oldest].abs().max() == 0
            assert relative_error(actual[:, :, oldest:], expected[:, :, oldest:1020]) < 0.2


class TestCrop:
    @formats
    def test_repeated_crops_add_up(self, format):
        """Across a tile boundary: two crops of 60 tokens equal never appending 120; a third needs discarded keys."""
        query, key, value = sequence(700)
        storage = filled(format, key[:, :, :580], value[:, :, :580], tiles=5)
        storage.append(*(x[:, :, :120] for x in sequence(120, seed=9)[1:]))
        storage.crop(60)
        storage.crop(60)
        assert storage.rolled_back == 120
        before = storage.mapped(torch.clone)
        with pytest.raises(RuntimeError, match=r"crop removes 180 tokens, .* at most 129 of [0-9]+ can be removed"):
            storage.crop(60)
        assert_storages_equal(storage, before)
        rest = [x[:, :, 580:] for x in (query, key, value)]
        expected = oracle(query, key, value, format, first=580)
        assert relative_error(decode(storage, *rest, [1, 84, 35]), expected) < 1e-12

    @formats
    @pytest.mark.parametrize("window", [None, 20, 300])
    @pytest.mark.parametrize(("length", "end"), [(900, 100), (510, 300), (512, 0), (380, 200)])
    def test_long_crops_may_end_at_unquantized_keys(self, length, end, window, format):
        """The keys, or those missing from the residual KV, are in the sinks; a second crop works as well."""
        query, key, value = sequence(900)
        storages = []
        for stored in (length, end):
            storages.append(filled(format, key[:, :, :stored], value[:, :, :stored], window=window))
        storages[0].crop(length - end)
        for storage in storages:
            storage.reserve(8)
            storage.append(key[:, :, end : end + 100], value[:, :, end : end + 100])
            storage.crop(100)
        rest = [x[:, :, end:] for x in (query, key, value)]
        actual, expected = (decode(each, *rest, [1, 130, 200], window=window) for each in storages)
        assert relative_error(actual, expected) < 1e-12

    @formats
    def test_a_compiled_restore_follows_rollbacks(self, format):
        """Tokens that were then rolled back have displaced the oldest residual keys."""
        _, key, value = sequence(700)
        other, wrong = sequence(120, seed=9)[1:]
        storage = filled(format, key, value)
        storage.reserve(7)
        storage.append(other, wrong)
        storage.crop(120)
        expected = restore(storage, torch.zeros_like(storage.lengths), 700)
        assert relative_error(expected[0], key) < 0.2  # no other one
        torch._dynamo.reset()
        compiled = torch.compile(restore, fullgraph=True, backend="aot_eager")
        for actual, wanted in zip(compiled(storage, torch.zeros_like(storage.lengths), 700), expected, strict=True):
            assert torch.equal(actual, wanted)
        torch.compile(append, fullgraph=True, backend="aot_eager")(storage, other[:, :, :50], wrong[:, :, :50])
        assert storage.rolled_back == 70

    @pytest.mark.parametrize("count", [-3, 1.0])
    def test_an_invalid_count_is_an_error(self, count):
        _, key, value = sequence(20)
        storage = filled("int8", key, value)
        with pytest.raises(ValueError, match=f"^count must be an integer of at least 0, got {count}"):
            storage.crop(count)
        assert storage.lengths.tolist() == [20, 20]

    def test_cropping_to_a_discarded_window_is_an_error(self):
        _, key, value = sequence(1000)
        storage = filled("int8", key, value, window=100)
        before = storage.mapped(torch.clone)
        with pytest.raises(RuntimeError, match="crop removes 600 tokens, but the 16-bit keys"):
            storage.crop(600)
        assert_storages_equal(storage, before)


MASK = torch.ones(3, 23).bool()


class TestErrors:
    @pytest.fixture
    def storage(self):
        _, key, value = sequence(20)
        return filled("int8", key, value)

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"key": (2, 2, 3, 16)}, ValueError, r"key must be \[2, 2, tokens, 32\] as in the cache"),
            ({"key": (2, 3, 3, 32)}, ValueError, r"key must be \[2, 2, tokens, 32\]"),
            ({"value": (1, 2, 3, 24)}, ValueError, r"value must be \[2, 2, tokens, 24\] as in the cache"),
            ({"value": (2, 2, 4, 24)}, ValueError, "value must have as many tokens as key, 3, got 4"),
            ({"value": None}, ValueError, "key and value must be given together"),
            ({"query": (2, 4, 4, 32)}, ValueError, "key must have as many tokens as query, 4, got 3"),
            ({"query": (2, 3, 3, 32)}, ValueError, r"query must be \[2, a multiple of 2, tokens, 32\]"),
            ({"query": (2, 4, 130, 32), "key": None, "value": None}, ValueError, "query must have at most 129 tokens"),
            ({"query": None}, TypeError, r"query must be a torch\.Tensor, got NoneType"),
            ({"query": torch.ones(1, device="meta")}, ValueError, "query must be on the device of the cache, cpu"),
            ({"dtype": torch.float32}, TypeError, "key must have the dtype of the cache, torch.float64"),
            ({"scale": 0.0}, ValueError, "scale must be a positive finite number, got 0.0"),
            ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be \[4\], one logit per query head, got \[3\]"),
            ({"mask": MASK[:, :1].expand(2, 2, 3, 1)}, ValueError, r"mask must be broadcastable to \[2, 4, 3, 1\]"),
            ({"mask": MASK}, ValueError, "mask_position must say which position column 0"),
            ({"mask": MASK, "mask_position": torch.zeros(1).int()}, ValueError, r"mask_position must be integer \[2\]"),
            ({"mask": MASK, "mask_position": torch.zeros(2)}, ValueError, r"mask_position must be integer \[2\]"),
            ({"backend": "cuda"}, ValueError, "backend must be one of auto, reference, triton; got 'cuda'"),
        ],
    )
    def test_an_error_leaves_the_cache_unchanged(self, storage, changes, error, message):
        dtype = changes.pop("dtype", torch.float64)
        given = {"query": (2, 4, 3, 32), "key": (2, 2, 3, 32), "value": (2, 2, 3, 24)} | changes
        given = {name: torch.ones(x, dtype=dtype) if type(x) is tuple else x for name, x in given.items()}
        before = storage.mapped(torch.clone)
        with pytest.raises(error, match=message):
            cached_attention(**given, storage=storage)
        assert_storages_equal(storage, before)

    def test_a_wider_window_than_that_of_the_cache_is_an_error(self):
        query, key, value = sequence(3)
        with pytest.raises(ValueError, match="window must be at most 100, what the cache keeps; got 200"):
            cached_attention(query, key, value, empty("int8", window=100), window=200)

    @pytest.mark.parametrize("name", ["diagonal_tiles", "sink_tiles", "tiles", "window"])
    @pytest.mark.parametrize("size", [-1, 1.5, True])
    def test_an_invalid_size_is_an_error(self, name, size):
        with pytest.raises(ValueError, match=f"^{name} must be an integer of at least [01], got {size}"):
            empty("int8", **{name: size})

    def test_an_invalid_number_of_tiles_is_not_reserved(self, storage):
        for tiles in (-1, 2.5):
            with pytest.raises(ValueError, match=f"^tiles must be an integer of at least 0, got {tiles}"):
                storage.reserve(tiles)

    @pytest.mark.parametrize("name", ["query", "key", "value", "sinks"])
    @pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
    def test_gradients_are_rejected(self, storage, name, is_compiled):
        tensors = dict(zip(("query", "key", "value", "sinks"), (*sequence(3), torch.zeros(Q_HEADS)), strict=True))
        tensors[name].requires_grad_()
        attend = cached_attention
        if is_compiled:
            torch._dynamo.reset()
            attend = torch.compile(cached_attention, backend="aot_eager")
        with torch.enable_grad():
            out = attend(**tensors, storage=storage)
            assert storage.lengths.tolist() == [23, 23]
            with pytest.raises(RuntimeError, match="attention over a cache has no gradient"):
                out.sum().backward()


@formats
def test_torch_compile_traces_attention_as_one_operation(format):
    """With a cache of fixed size, steps across a tile boundary share one graph."""
    query, key, value = sequence(260)
    rest = (x[:, :, 250:] for x in (query, key, value))
    expected = decode(filled(format, key[:, :, :250], value[:, :, :250]), *rest, [1] * 10)
    storage = empty(format, tiles=3)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled_append = torch.compile(append, fullgraph=True, backend="aot_eager")
    compiled = torch.compile(cached_attention, fullgraph=True, backend="aot_eager")
    compiled_append(storage, key[:, :, :250], value[:, :, :250])
    outputs = [compiled(*(x[:, :, i : i + 1].clone() for x in (query, key, value)), storage) for i in range(250, 260)]
    assert relative_error(torch.cat(outputs, 2), expected) < 1e-12
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    keys, _ = torch.compile(restore, fullgraph=True, backend="aot_eager")(storage, storage.lengths - 10, 10)
    assert torch.equal(keys, key[:, :, 250:])


def test_custom_ops_pass_opcheck():
    """Also with more unquantized rows than the batch, in any order."""
    query, key, value = sequence(140)
    storage = filled("int8", key[:, :, :120], value[:, :, :120])
    storage.reserve(2)
    storage = scattered(storage)
    new, pieces = (key[:, :, 120:], value[:, :, 120:]), _op_arguments(storage)
    options = (0.2, True, None, None, None, None, None, "reference")
    opcheck(_cached_attention, (query[:, :, 120:], *new, *pieces, *options))
    opcheck(_append, (*new, *pieces))
    opcheck(_restore, (torch.tensor([-3, 50]), 60, *pieces))


def test_stored_queries_after_a_crop_need_the_keys_that_it_lost():
    """Rolled-back tokens have displaced as many of the oldest residual keys, which the first queries would read."""
    query, key, value = sequence(400)
    storage = filled("int4", key, value)
    storage.crop(100)
    cached_attention(query[:, :, 271:300], None, None, storage)
    with pytest.raises(ValueError, match="query must have at most 29 tokens if their keys are stored already, got 30"):
        cached_attention(query[:, :, 270:300], None, None, storage)


@pytest.mark.parametrize("length", [-1, 2.0, None])
def test_an_invalid_length_is_rejected(length):
    with pytest.raises(ValueError, match=f"^length must be an integer of at least 0, got {length}"):
        restore(empty("int8"), torch.zeros(2).int(), length)


@pytest.mark.parametrize("position", [torch.zeros(2), torch.zeros(1).int(), torch.zeros(2, device="meta").int()])
def test_invalid_positions_are_rejected(position):
    with pytest.raises(ValueError, match=r"^position must be (integer \[2\]|on the device of the cache, cpu)"):
        restore(empty("int8"), position, 5)


def test_an_empty_batch_has_an_empty_output():
    query, key, value = (x[:0] for x in sequence(5))
    assert cached_attention(query, key, value, empty("int8", batch=0)).shape == (0, Q_HEADS, 5, VALUE_DIM)


@pytest.mark.parametrize(
    "name", ["page_table", "lengths", "unquantized_rows", "kv_pages", "key_residual", "value_sink"]
)
def test_unsupported_strides_are_rejected(name: str) -> None:
    storage = empty("int8", batch=4, tiles=3)
    tensor = torch.zeros(4, dtype=torch.int32) if name == "unquantized_rows" else getattr(storage, name)
    with pytest.raises(ValueError, match=f"{name} must be contiguous, got strides"):
        replace(storage, **{name: torch.stack((tensor, tensor), -1)[..., 0]})

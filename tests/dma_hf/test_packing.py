"""Packed rows: each document is computed as if it were alone, however the call describes the documents."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from sampling import sampled
from tiny_models import DECODERS, ENCODERS, IDENTITY, SIZES
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers import masking_utils as upstream

import dma_hf
from dma_hf import DMACache
from dma_hf.attention import dma_attention_forward
from dma_hf.masks import dma_mask
from dma_hf.masks import layer_geometry as packing

LENGTHS = (128, 500, 1, 171)
TOKENS = sum(LENGTHS)
SHORT = (17, 33, 10)


def _positions(lengths=LENGTHS):
    return torch.cat([torch.arange(length) for length in lengths])[None]


def _ends(lengths=LENGTHS):
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def _flash_arguments(lengths=LENGTHS):
    """What Transformers' ``DataCollatorWithFlattening`` makes for FlashAttention, without positions."""
    ends, longest = _ends(lengths), max(lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


ROUTES = {
    "mask function": lambda ids: {"position_ids": _positions(), "use_cache": False},
    "default cache": lambda ids: {"position_ids": _positions()},
    "mask of ones": lambda ids: {"position_ids": _positions(), "attention_mask": torch.ones_like(ids)},
    "cu_seq_lens": lambda ids: {**_flash_arguments(), "use_cache": False},
    "lengths, a cache and a mask of ones": lambda ids: _flash_arguments() | {"attention_mask": torch.ones_like(ids)},
    "cu_seq_lens and positions": lambda ids: {**_flash_arguments(), "position_ids": _positions(), "use_cache": False},
}
"""The ways to say where documents begin. With ``cu_seq_lens_q`` alone, the positions of RoPE run on."""


@pytest.fixture
def reads(monkeypatch):
    """The results of reading positions."""
    found = []
    read = packing._documents_of_positions

    def record(*arguments):
        found.append(read(*arguments))
        return found[-1]

    monkeypatch.setattr(packing, "_documents_of_positions", record)
    return found


def _spans(lengths):
    ends = _ends(lengths).tolist()
    return [slice(*span) for span in pairwise(ends)]


class TestDocuments:
    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("preset", ["balanced", "paper"])
    def test_a_document_equals_the_document_alone(self, preset, route, llama, token_ids, assert_same):
        dma_hf.configure(llama, preset)
        ids = token_ids(1, TOKENS)
        arguments = ROUTES[route](ids)
        packed = llama(ids, **arguments).logits
        for span in _spans(LENGTHS):
            positions = arguments.get("position_ids", torch.arange(TOKENS)[None])[:, span]
            assert_same(packed[:, span], llama(ids[:, span], position_ids=positions, use_cache=False).logits)

    @pytest.mark.parametrize("preset", sampled(["balanced", "paper"], "balanced".__eq__))
    def test_every_architecture_separates_documents(self, decoder, preset, token_ids, assert_same):
        if decoder.model.startswith(("BigBird", "Llama4")):
            pytest.skip("takes no position_ids, or its layers do not pass them on")
        model = decoder.build("dma_mxfp")
        dma_hf.configure(model, preset)
        ids = token_ids(1, TOKENS)
        packed = model(ids, **ROUTES["mask of ones"](ids)).logits
        for span in _spans(LENGTHS)[1:3]:
            assert_same(packed[:, span], model(ids[:, span], use_cache=False).logits)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_belongs_to_no_document(self, side, llama, token_ids, assert_same):
        dma_hf.configure(llama, "paper")
        ids = token_ids(2, 600)
        mask = torch.ones_like(ids)
        mask[0, -100:] = 0
        positions = torch.cat((_positions((300, 200, 100)), _positions((150, 450))))
        positions[0, 500:] = 1
        spans = [(0, slice(0, 300)), (0, slice(300, 500)), (1, slice(0, 150)), (1, slice(150, 600))]
        if side == "left":
            ids[0], mask[0], positions[0] = ids[0].roll(100), mask[0].roll(100), positions[0].roll(100)
            spans[:2] = [(0, slice(100, 400)), (0, slice(400, 600))]
        packed = llama(ids, attention_mask=mask, position_ids=positions).logits
        for row, span in spans:
            assert_same(packed[row : row + 1, span], llama(ids[row : row + 1, span], use_cache=False).logits)

    def test_a_bidirectional_model_separates_documents_by_cu_seq_lens(self, token_ids, assert_same):
        """With every position in reach of the embeddings, ModernBERT has no others."""
        model = ENCODERS["modernbert"].build("dma_mxfp")
        dma_hf.configure(model, "paper")
        ids = token_ids(1, TOKENS)
        packed = model(ids, position_ids=_positions(), **_flash_arguments()).logits
        for span in _spans(LENGTHS):
            assert_same(packed[:, span], model(ids[:, span]).logits)

    def test_a_vision_language_model_separates_documents_by_a_first_row_of_positions(self, token_ids, assert_same):
        """Transformers takes the other three for time, height and width; or ``cu_seq_lens_q``."""
        text = SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
        vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
        config = Qwen2VLConfig(text_config=text, vision_config=vision)
        torch.manual_seed(0)
        model = Qwen2VLForConditionalGeneration._from_config(config, attn_implementation="dma_mxfp").eval()
        dma_hf.configure(model, "paper")
        ids, rows = token_ids(1, TOKENS), _positions().expand(4, 1, -1)
        for arguments in ({"position_ids": rows}, {"position_ids": rows[1:], **_flash_arguments()}):
            packed = model(ids, use_cache=False, **arguments).logits
            for span in _spans(LENGTHS):
                alone = model(ids[:, span], position_ids=rows[1:, :, span], use_cache=False).logits
                assert_same(packed[:, span], alone)

    def test_a_models_own_pattern_is_cut_at_the_documents(self, llama, token_ids, assert_same):
        """Here a 4-D mask of a prefix, in each document."""
        dma_hf.configure(llama, "paper")
        ids = token_ids(1, TOKENS)

        def prefix(length):
            mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
            mask[..., :5] = True
            return mask

        mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
        for span in _spans(LENGTHS):
            mask[..., span, span] = prefix(span.stop - span.start)
        lengths = _flash_arguments((0, *LENGTHS, 0))
        packed = llama(ids, attention_mask=mask, position_ids=_positions(), **lengths).logits
        for span in _spans(LENGTHS):
            alone = llama(ids[:, span], attention_mask=prefix(span.stop - span.start), use_cache=False).logits
            assert_same(packed[:, span], alone)

    def test_sdpa_in_place_of_the_backend_separates_documents_too(self, llama, token_ids, assert_same):
        dma_hf.configure(llama, on_unsupported="sdpa")
        ids = token_ids(1, TOKENS)
        for layer in llama.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs: (args, kwargs | {"position_bias": torch.zeros(1, 1, 1, 1)}),
                with_kwargs=True,
            )
        with pytest.warns(UserWarning, match="does not support position_bias"):
            packed = llama(ids, **ROUTES["mask of ones"](ids)).logits
        for span in _spans(LENGTHS):
            assert_same(packed[:, span], llama(ids[:, span], use_cache=False).logits)


class TestReading:
    def test_positions_are_read_once_in_a_forward_pass(self, llama, token_ids, reads):
        """A later pass reads again, also if nothing tells that the contents have changed. Another model reads, too."""
        ids, positions = token_ids(1, 60), _positions(SHORT)
        llama(ids, position_ids=positions)
        positions.data.copy_(_positions((30, 30)))
        llama(ids, position_ids=positions)
        positions.copy_(_positions((20, 40)))
        DECODERS["llama"].build("dma_mxfp")(ids, position_ids=positions)
        assert [read.tolist() for read in reads] == [[0, 17, 50, 60], [0, 30, 60], [0, 20, 60]]
        with torch.inference_mode():
            llama(ids, position_ids=_positions(SHORT))
        assert len(reads) == 4
        assert dict(dma_hf.stats(llama).uses) == {("reference", "balanced", "none"): 6}

    def test_lengths_are_read_under_another_default_device(self, llama, token_ids, assert_same):
        """As after ``torch.set_default_device("cuda")``."""
        ids, arguments = token_ids(1, TOKENS), {**_flash_arguments(), "use_cache": False}
        expected = llama(ids, **arguments).logits
        with torch.device("meta"):
            assert_same(llama(ids, **arguments).logits, expected)

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_generate_reads_positions_that_it_was_given(self, cache, llama, token_ids, reads):
        """None that it makes itself, and none in decoding steps."""
        options = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": cache}
        llama.generate(token_ids(2, 20), **options)
        assert reads == []
        llama.generate(token_ids(1, 60), position_ids=_positions(SHORT), max_new_tokens=1)
        assert [read.tolist() for read in reads] == [[0, 17, 50, 60]]

    @pytest.mark.parametrize(
        ("route", "settings"),
        sampled(
            [
                *product(("mask function", "mask of ones"), (IDENTITY,)),
                *product(("default cache",), ("balanced", "paper")),
            ],
            lambda route, settings: route == "mask of ones" or settings == "balanced",
        ),
        ids=["mask function", "mask of ones", "balanced", "paper"],
    )
    def test_a_compiled_model_reads_no_positions(self, route, settings, llama, token_ids, assert_same, reads):
        """It separates documents by ``cu_seq_lens``. With a dense mask, tiles do not start anew, so without formats."""
        dma_hf.configure(llama, settings)
        ids = token_ids(1, TOKENS)
        torch._dynamo.reset()
        compiled = torch.compile(llama, fullgraph=True, backend="eager")
        packed = compiled(ids, **ROUTES[route](ids) | _flash_arguments()).logits
        assert reads == []
        for span in _spans(LENGTHS):
            assert_same(packed[:, span], llama(ids[:, span], use_cache=False).logits)


PADDING = {"left": slice(20), "right": slice(-20, None), "holes": slice(20, 30), "whole row": slice(None)}


class TestNotPacked:
    """Positions that do not restart."""

    @pytest.mark.parametrize("hidden", ["masked_fill", "clamp", "minus one"])
    @pytest.mark.parametrize("padding", PADDING)
    def test_padding_is_not_a_document(self, padding, hidden, llama, token_ids, reads):
        ids = token_ids(2, 60)
        mask = torch.ones_like(ids)
        mask[0, PADDING[padding]] = 0
        positions = mask.cumsum(-1) - 1
        if hidden == "masked_fill":  # as Transformers does
            positions = positions.masked_fill(mask == 0, 1)
        elif hidden == "clamp":
            positions = positions.clamp(min=0)
        llama(ids, attention_mask=mask, position_ids=positions.clamp(min=-1) + (hidden == "minus one"))
        assert reads == [None]

    @pytest.mark.parametrize(
        "positions",
        [
            torch.arange(60),
            torch.arange(60) + 7,
            torch.cat((torch.arange(30), torch.arange(90, 120))),
            torch.cat((torch.arange(20), torch.full((20,), 20), torch.arange(21, 41))),
        ],
        ids=["plain", "from seven", "a jump", "one for an image"],
    )
    def test_positions_may_jump_and_repeat(self, positions, llama, token_ids, reads):
        llama(token_ids(1, 60), position_ids=positions[None])
        assert reads == [None]


class TestRefused:
    @pytest.mark.parametrize("route", ["mask of ones", "lengths, a cache and a mask of ones"])
    def test_a_packed_cache_does_not_take_packed_rows(self, route, llama, token_ids):
        ids = token_ids(1, TOKENS)
        with pytest.raises(ValueError, match=r"a packed cache holds one document a row; pass use_cache=False"):
            llama(ids, **ROUTES[route](ids), cache=DMACache(llama.config, "int8"))

    def test_chunks_of_a_row_do_not_fit_its_documents(self, token_ids):
        """Without a mask and a cache, Transformers counts the chunks of Llama 4 within documents."""
        model = DECODERS["llama4"].build("dma_mxfp")
        with pytest.raises(ValueError, match="the model masks rows as a whole; pass position_ids that restart"):
            model(token_ids(1, TOKENS), **ROUTES["cu_seq_lens"](None))

    @pytest.mark.parametrize("hidden", [slice(0), slice(3, 6)], ids=["full", "holes"])
    def test_a_pattern_of_a_row_does_not_fit_its_documents(self, hidden, llama):
        padding = torch.ones(1, 60, dtype=torch.bool)
        padding[:, hidden] = False
        prefix = upstream.or_masks(upstream.causal_mask_function, lambda b, h, q, k: k < 3)
        mask = dma_mask(1, 60, 60, mask_function=prefix, allow_is_causal_skip=False, attention_mask=padding)
        layer, states = llama.model.layers[0].self_attn, torch.ones(3, 1, 4, 60, 16)
        plain = (padding.cumsum(-1) - 1).masked_fill(~padding, 1)
        dma_attention_forward(layer, *states, mask, position_ids=plain)
        with pytest.raises(ValueError, match="position_ids that restart: the model masks rows as a whole"):
            dma_attention_forward(layer, *states, mask, position_ids=_positions(SHORT))

    def test_a_later_chunk_cannot_be_packed(self, llama, token_ids):
        cache = DynamicCache(config=llama.config)
        llama(token_ids(1, 20), cache=cache)
        with pytest.raises(ValueError, match=r"cu_seq_lens_q: the call has 60 queries and 80 keys; pass all tokens in"):
            llama(token_ids(1, 60), cache=cache, **_flash_arguments(SHORT))

    @pytest.mark.parametrize(
        ("arguments", "hidden", "message"),
        [
            (
                {"position_ids": _positions(SHORT)},
                slice(14, 17),
                "position_ids that restart: attention_mask hides tokens",
            ),
            (_flash_arguments(SHORT), slice(7), "cu_seq_lens_q: attention_mask hides tokens; leave attention_mask out"),
            (
                _flash_arguments(SHORT) | {"cu_seq_lens_k": _ends((20, 30, 10))},
                slice(0),
                "cu_seq_lens_k: it differs from",
            ),
            (
                _flash_arguments((17, 33, 9)),
                slice(0),
                "cu_seq_lens_q: it lacks the end of a row, of which there are 1 with",
            ),
        ],
        ids=["a gap between documents", "padding", "other documents of keys", "too few tokens"],
    )
    def test_ambiguous_documents_are_refused(self, arguments, hidden, message, llama, token_ids):
        mask = torch.ones(1, 60, dtype=torch.int64)
        mask[:, hidden] = 0
        with pytest.raises(ValueError, match=f"does not support {message}"):
            llama(token_ids(1, 60), attention_mask=mask if hidden.stop else None, use_cache=False, **arguments)

    def test_each_row_begins_a_document(self, llama, token_ids):
        with pytest.raises(
            ValueError, match="cu_seq_lens_q: it lacks the end of a row, of which there are 2 with 61 to"
        ):
            llama(token_ids(2, 61), use_cache=False, **_flash_arguments((17, 33, 72)))


class TestMask:
    @pytest.mark.parametrize("kind", ["causal", "sliding", "chunked"])
    def test_a_packed_mask_equals_upstreams(self, kind, token_ids):
        config = LlamaConfig(sliding_window=6, attention_chunk_size=7, attn_implementation="sdpa")
        make = getattr(upstream, {"causal": "create_causal_mask"}.get(kind, f"create_{kind}_window_causal_mask"), None)
        make = make or upstream.create_chunked_causal_mask
        arguments = {"inputs_embeds": torch.zeros(2, 60, 64), "attention_mask": None, "cache": None}
        arguments["position_ids"] = torch.cat((_positions(SHORT), _positions((40, 20))))
        expected = make(config, **arguments)
        config._attn_implementation = "dma_mxfp"
        config.attention_chunk_size = 7 if kind == "chunked" else None
        config.sliding_window = 6 if kind == "sliding" else None
        mask = make(config, **arguments)
        assert torch.equal(mask.dense(), expected)
        assert mask.dma_geometry.documents.tolist() == [0, 17, 50, 60, 100, 120]
        assert (mask.dma_geometry.pattern is None) == (kind != "chunked")

    def test_a_mask_that_is_more_than_packed_keeps_its_pattern(self):
        function = upstream.or_masks(upstream.causal_mask_function, lambda b, h, q, k: k < 3)
        packed = upstream.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 0, 1, 1, 1]]))
        sizes = {"batch_size": 1, "q_length": 7, "kv_length": 7, "allow_is_causal_skip": False}
        mask = dma_mask(mask_function=upstream.and_masks(function, packed), **sizes)
        expected = upstream.sdpa_mask(mask_function=upstream.and_masks(function, packed), **sizes)
        assert torch.equal(mask.dense(), expected)
        assert mask.dma_geometry.documents.tolist() == [0, 4, 7]
        for other in (upstream.and_masks(packed, function), upstream.and_masks(function, packed, function), packed):
            mask = dma_mask(mask_function=other, **sizes)
            assert mask.dma_geometry.documents is None
            assert torch.equal(mask.dense(), upstream.sdpa_mask(mask_function=other, **sizes))

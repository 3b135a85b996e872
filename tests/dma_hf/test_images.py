"""Models with images: masks over image tokens, cross-attention to images, and prompts that continue a cache."""

from __future__ import annotations

import pytest
import torch
from hf_outcomes import randomise
from tiny_models import ENCODER, HYBRID, IDENTITY, SIZES
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Kosmos2Config,
    Kosmos2ForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
)

import dma_hf
from dma_hf import DMACache
from dma_hf.cache_layers import DMALayer
from dma_hf.integrations.internals import CACHE_ARGUMENT

GREEDY = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True}
TILES, PATCHES = 4, 65
MLLAMA = {
    "text_config": ENCODER
    | {"num_key_value_heads": 2, "num_hidden_layers": 3, "cross_attention_layers": [1]}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4}
    | {"intermediate_size": 64, "vision_output_dim": 192, "intermediate_layers_indices": [0, 1]}
    | {"image_size": 112, "patch_size": 14, "max_num_tiles": TILES},
    "image_token_index": 96,
}  # the keys of an image are 4 x 65, more than two tiles of a packed cache
KOSMOS2 = {
    "text_config": {"vocab_size": 97, "embed_dim": 64, "layers": 2, "ffn_dim": 64, "attention_heads": 4}
    | {"max_position_embeddings": 512, "dropout": 0.0, "eos_token_id": None, "pad_token_id": 0},
    "vision_config": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"image_size": 28, "patch_size": 14},
    "latent_query_num": 5,
}
IMAGE, IMAGE_TOKENS = 96, 4
GEMMA3 = {
    "text_config": SIZES | HYBRID,
    "vision_config": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"image_size": 32, "patch_size": 8},
    "mm_tokens_per_image": IMAGE_TOKENS,
    "image_token_index": IMAGE,
}


def _build(cls, config, implementation):
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation=implementation).eval()
    randomise(model)
    return model


@pytest.fixture
def mllama():
    def build(implementation):
        return _build(MllamaForConditionalGeneration, MllamaConfig(**MLLAMA), implementation).double()

    return build


@pytest.fixture
def image_prompt(token_ids):
    """A padded batch of two prompts with an image each."""
    ids = token_ids(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    seen = mask[..., None, None].repeat(1, 1, 1, TILES)
    seen[1, :, :, 2:] = 0  # the second image has two tiles
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(2, 1, TILES, 3, 112, 112, generator=generator, dtype=torch.float64),
        "aspect_ratio_ids": torch.tensor([[6], [2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 1, 1, 1]], [[1, 1, 0, 0]]]),
        "cross_attention_mask": seen,
    }


@pytest.mark.parametrize(("max_cache_len", "num_beams"), [(None, 1), (None, 2), (64, 1)])
def test_the_keys_of_images_stay_in_16_bits(max_cache_len, num_beams, mllama, image_prompt):
    """Cross-attention has no diagonal, so a packed layer would dequantize all of them in every step."""
    options = GREEDY | {"num_beams": num_beams}
    expected = mllama("sdpa").generate(**image_prompt, **options, return_dict_in_generate=True)
    model = mllama("dma_mxfp")
    dma_hf.configure(model, IDENTITY, cache="int4")
    cache = DMACache(model.config, max_cache_len=max_cache_len)
    tokens = model.generate(**image_prompt, **options, **{CACHE_ARGUMENT: cache})
    assert torch.equal(tokens, expected.sequences)
    assert [isinstance(layer, DMALayer) for layer in cache.layers] == [True, False, True]
    keys = getattr(expected, CACHE_ARGUMENT).layers[1].keys
    torch.testing.assert_close(cache.layers[1].keys, keys)
    assert keys.shape[2] == TILES * PATCHES


@pytest.mark.parametrize("cache", [None, "int8"])
def test_kosmos_2_generates_with_options(cache, token_ids):
    """It passes them to its vision encoder, too."""
    ids = token_ids(1, 20)
    config = Kosmos2Config(**KOSMOS2)
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    positions = torch.zeros_like(ids)
    positions[:, 2:7] = 1
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_embeds_position_mask": positions}
    expected = _build(Kosmos2ForConditionalGeneration, config, "eager").generate(**inputs, **GREEDY)
    model = _build(Kosmos2ForConditionalGeneration, config, "dma_mxfp")
    dma_hf.configure(model, IDENTITY, cache=cache)
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)


@pytest.fixture
def gemma3():
    def build(implementation):
        return _build(Gemma3ForConditionalGeneration, Gemma3Config(**GEMMA3), implementation).double()

    return build


def _turn(model, cache, earlier, texts, seed):
    """Add a turn of an image between two texts to a conversation, and return its tokens, types and logits."""
    generator = torch.Generator().manual_seed(seed)
    before, after = (torch.randint(3, IMAGE, (1, length), generator=generator) for length in texts)
    tokens = torch.cat((before, torch.full((1, IMAGE_TOKENS), IMAGE), after), 1)
    ids, types = (torch.cat((old, new), 1) for old, new in zip(earlier, (tokens, tokens == IMAGE), strict=True))
    pixels = torch.randn(1, 3, 32, 32, generator=generator, dtype=torch.float64)
    inputs = {"input_ids": ids, "token_type_ids": types.long(), "attention_mask": torch.ones_like(ids)}
    found = model.generate(
        **inputs, pixel_values=pixels, **GREEDY, **{CACHE_ARGUMENT: cache}, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    types = torch.nn.functional.pad(types, (0, found.sequences.shape[1] - types.shape[1]))
    return (found.sequences, types), torch.stack(found.logits, 1)


def test_the_tokens_of_an_image_see_each_other_in_every_turn(gemma3, assert_same):
    """Also in a later turn, whose queries attend to packed keys. All are in the band, so nothing is quantized."""
    sdpa, model = gemma3("sdpa"), gemma3("dma_mxfp")
    dma_hf.configure(model, IDENTITY, diagonal_tiles=3)
    caches = DynamicCache(config=sdpa.config), DMACache(model.config, "int8")
    expected = actual = (torch.empty(1, 0, dtype=torch.long), torch.empty(1, 0, dtype=torch.bool))
    for seed, texts in enumerate(((5, 140), (30, 9), (2, 40))):
        expected, wanted = _turn(sdpa, caches[0], expected, texts, seed)
        actual, logits = _turn(model, caches[1], actual, texts, seed)
        assert torch.equal(actual[0], expected[0])
        assert_same(logits, wanted)

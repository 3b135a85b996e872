"""The arguments that ``generate``, pipelines and the server of the installed Transformers pass to attention."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedTokenizerFast,
    WhisperForConditionalGeneration,
    pipeline,
)

from dma_hf.attention import dma_attention_forward
from dma_hf.support import HARMLESS

OF_ATTENTION = {"attention_mask", "past_key_values", "kwargs", "self"}  # has its own parameters, or none
INTERNAL = {"inputs_tensor", "model_kwargs"}  # methods of GenerationMixin that call each other


def _handed_down():
    """Return every argument that ``generate`` takes or adds for its decoding loops, and those of its callers."""
    generate = set(inspect.signature(GenerationMixin.generate).parameters)
    names = set()
    for loop in ("_sample", "_beam_search", "_assisted_decoding"):
        names |= set(inspect.signature(getattr(GenerationMixin, loop)).parameters)
    names |= set(re.findall(r'"(\w+)":', inspect.getsource(GenerationMixin._extract_generation_mode_kwargs)))
    for source in _callers():
        added = re.findall(r'\bgen(?:erate)?_kwargs\["(\w+)"\] =', source)
        for keys in re.findall(r"\bgen(?:erate)?_kwargs = \{(.*?)\}", source, flags=re.DOTALL):
            added += re.findall(r'"(\w+)":', keys)
        names |= set(added) - set(re.findall(r'generate_kwargs\.pop\("(\w+)"', source))  # the pipeline's own
    # Whisper's `generate` and generation configurations do not pass theirs on.
    kept = {*inspect.signature(WhisperForConditionalGeneration.generate).parameters, *GenerationConfig().to_dict()}
    own = inspect.signature(dma_attention_forward).parameters
    return sorted((names - kept | generate) - OF_ATTENTION - INTERNAL - own.keys())


def _callers():
    """Return the sources of the pipelines and of the server."""
    root = Path(transformers.__file__).parent
    paths = [*root.glob("pipelines/*.py"), *root.glob("cli/serv*.py"), *root.glob("cli/serving/*.py")]
    return [path.read_text(encoding="utf-8") for path in paths]


@pytest.fixture(scope="module")
def tokenizer():
    """A token for each printable character."""
    vocabulary = {text: index for index, text in enumerate(("<unk>", "<eos>", *map(chr, range(32, 127))))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, unk_token="<unk>", pad_token="<unk>", eos_token="<eos>")


def test_arguments_of_generate_are_ignored_and_others_are_not(families):
    """Stop strings, speculation and servers need them. They are accepted by a rule, not by a list."""
    assert any("gen_kwargs = {" in source for source in _callers())  # the server's, in any module
    names = set(_handed_down())
    assert {"tokenizer", "assistant_tokenizer", "assistant_model", "streamer"} <= names - HARMLESS
    layer = families["llama"].build("dma_mxfp").model.layers[0].self_attn
    states = [torch.ones(1, heads, 4, 16) for heads in (4, 2, 2)]
    dma_attention_forward(layer, *states, None, **{name: object() for name in names - {"output_attentions"}})
    others = {"head_mask", "rel_pos", "bias", "block_table", "cache", "something_new", "max_cache_length", *INTERNAL}
    assert not others & names
    for name in others:
        with pytest.raises(ValueError, match=f"does not support the argument '{name}'"):
            dma_attention_forward(layer, *states, None, **{name: torch.ones(4)})


@pytest.mark.parametrize("mode", ["greedy", "beams", "assisted"])
def test_generate_accepts_tokenizers(mode, families, tokenizer, token_ids):
    """With two vocabularies, speculation encodes text again for the other model."""
    model, assistant = (families["llama"].build("dma_mxfp", seed=seed) for seed in (0, 1))
    options = {"max_new_tokens": 3, "pad_token_id": 0, "do_sample": False}
    options |= {"greedy": {}, "beams": {"num_beams": 2}, "assisted": {"assistant_model": assistant}}[mode]
    others = {} if mode == "assisted" else {"stop_strings": ["never"]}
    actual = model.generate(token_ids(1, 7), tokenizer=tokenizer, **others, **options)
    assert torch.equal(actual, model.generate(token_ids(1, 7), **options))


def test_a_pipeline_accepts_stop_strings(families, tokenizer):
    model = families["llama"].build("dma_mxfp")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"do_sample": False, "return_full_text": False, "max_new_tokens": 3}
    text = generator("a prompt", **options)[0]["generated_text"]
    assert len(text) == 3
    assert generator("a prompt", stop_sequence=text[0], **options)[0]["generated_text"] == text[0]

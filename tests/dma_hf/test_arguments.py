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

import dma_hf
from dma_hf.attention import dma_attention_forward
from dma_hf.support import HARMLESS

NEW_TOKENS = 3
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
    return sorted((names - kept | generate) - OF_ATTENTION - INTERNAL)


def _callers():
    """Return the sources of the pipelines and of the server."""
    root = Path(transformers.__file__).parent
    paths = [*root.glob("pipelines/*.py"), *root.glob("cli/serv*.py"), *root.glob("cli/serving/*.py")]
    return [path.read_text(encoding="utf-8") for path in paths]


@pytest.fixture
def spied(families, monkeypatch):
    """A model, and the names of the keyword arguments that its layers received."""
    model, seen = families["llama"].build(dma_hf.NAME), set()
    find = dma_hf.attention.find_unsupported

    def spy(call, *arguments, **options):
        seen.update(name for name, value in call.others.items() if value is not None)
        return find(call, *arguments, **options)

    monkeypatch.setattr(dma_hf.attention, "find_unsupported", spy)
    return model, seen


@pytest.fixture(scope="module")
def tokenizer():
    """A token for each printable character."""
    vocabulary = {text: index for index, text in enumerate(("<unk>", "<eos>", *map(chr, range(32, 127))))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, unk_token="<unk>", pad_token="<unk>", eos_token="<eos>")


@pytest.mark.parametrize("name", _handed_down())
def test_arguments_of_generate_are_ignored(name, families):
    layer = families["llama"].build(dma_hf.NAME).model.layers[0].self_attn
    states = (torch.ones(1, heads, 4, 16) for heads in (4, 2, 2))
    given = {name: False} if name == "output_attentions" else {name: object()}
    options = inspect.signature(dma_attention_forward).parameters
    if name not in options:
        dma_attention_forward(layer, *states, None, **given)


def test_the_arguments_found_include_those_of_generation_and_none_of_attention():
    """Stop strings, speculation and servers need them."""
    assert any("gen_kwargs = {" in source for source in _callers())  # the server's, in any module
    assert {"tokenizer", "assistant_tokenizer", "assistant_model", "streamer"} <= set(_handed_down())
    assert not {"head_mask", "position_bias", "bias", "rel_pos", "cache", "block_table"} & set(_handed_down())


@pytest.mark.parametrize(
    "name", ["head_mask", "rel_pos", "block_table", "temperature", "something_new", "inputs_tensor", "max_cache_length"]
)
def test_an_unknown_argument_is_an_error(name, families):
    layer = families["llama"].build(dma_hf.NAME).model.layers[0].self_attn
    states = (torch.ones(1, heads, 4, 16) for heads in (4, 2, 2))
    with pytest.raises(ValueError, match=f"does not support the argument '{name}'"):
        dma_attention_forward(layer, *states, None, **{name: torch.ones(4)})


@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}, {"do_sample": True}], ids=["greedy", "beams", "sampling"])
def test_generate_accepts_a_tokenizer(mode, spied, tokenizer, token_ids):
    model, seen = spied
    ids = token_ids(1, 7)
    options = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0} | mode
    torch.manual_seed(0)
    expected = model.generate(ids, **options)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, tokenizer=tokenizer, stop_strings=["never"], **options), expected)
    assert "tokenizer" in seen
    assert "tokenizer" not in HARMLESS  # accepted by the rule, not by a list


def test_speculation_accepts_tokenizers(families, tokenizer, token_ids):
    """With two vocabularies, text is encoded again for the other model."""
    model, assistant = (families["llama"].build(dma_hf.NAME, seed=seed) for seed in (0, 1))
    ids = token_ids(1, 7)
    options = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0, "do_sample": False}
    speculating = {"assistant_model": assistant, "tokenizer": tokenizer}
    assert torch.equal(model.generate(ids, **speculating, **options), model.generate(ids, **options))


def test_a_pipeline_accepts_stop_strings(families, tokenizer):
    model = families["llama"].build(dma_hf.NAME)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"do_sample": False, "return_full_text": False, "max_new_tokens": NEW_TOKENS}
    text = generator("a prompt", **options)[0]["generated_text"]
    assert len(text) == NEW_TOKENS
    assert generator("a prompt", stop_sequence=text[0], **options)[0]["generated_text"] == text[0]

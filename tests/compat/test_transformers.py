"""Requirements on every supported version of Transformers, without deprecated features.

Continuous integration also runs this folder on the oldest and newest supported versions.
"""

from __future__ import annotations

import copy
import json
import signal
import tomllib
from itertools import product
from urllib.request import ProxyHandler, Request, build_opener

import pytest
import torch
import transformers
from batched_parts import generate_batch
from packaging.requirements import Requirement
from sampling import sampled
from served import DEMO_MODEL, ROOT, served
from tiny_models import FAMILIES, IDENTITY
from transformers import Cache, EncoderDecoderCache

import dma_hf
from dma_hf.integrations.internals import CACHE_ARGUMENT, SUPPORTED

pytestmark = [
    *(pytest.mark.filterwarnings(f"error::{kind}") for kind in ("FutureWarning", "UserWarning")),
    pytest.mark.usefixtures("no_gradients"),
]
NEW_TOKENS = 6
FAMILIES_TESTED = ("llama", "gemma3", "gpt_oss")


def _ids(length, rows=1):
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(length))


def _generate(model, ids, **options):
    options |= {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def test_the_installed_version_is_in_the_supported_range_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = [each for each in map(Requirement, project["dependencies"]) if each.name == "transformers"]
    assert needed.specifier == Requirement(f"transformers{SUPPORTED}").specifier
    assert transformers.__version__ in needed.specifier


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("is_cached", [False, True], ids=["mask function", "positions"])
def test_documents_of_packed_rows_are_computed_alone(is_cached, family):
    """The mask function of packed rows keeps the documents where this package looks for them."""
    model = FAMILIES[family].build("dma_mxfp")
    dma_hf.configure(model, "paper")
    ids = _ids(530)
    positions = torch.cat((torch.arange(100), torch.arange(430)))[None]
    packed = model(ids, position_ids=positions, use_cache=is_cached).logits[:, 100:]
    alone = model(ids[:, 100:], use_cache=False).logits
    assert (packed - alone).abs().max() < 1e-5 * alone.abs().max()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "bert", "bart"])
def test_unquantized_attention_equals_transformers_own(family):
    other = FAMILIES[family].build(FAMILIES[family].reference)
    model = FAMILIES[family].build("dma_mxfp")
    dma_hf.configure(model, IDENTITY)
    inputs = {"input_ids": _ids(150)} | ({"decoder_input_ids": _ids(140)} if family == "bart" else {})
    for actual, expected in zip(model(**inputs).to_tuple(), other(**inputs).to_tuple(), strict=False):
        if isinstance(actual, torch.Tensor):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "cache"),
    sampled(
        product(FAMILIES_TESTED, ("default", "dynamic", "static", "offered")),
        lambda family, cache: family == "gemma3" or cache == "static",
    ),
)
def test_generate_works_with_caches_of_transformers(family, cache):
    model, other = FAMILIES[family].build("dma_mxfp"), FAMILIES[family].build(FAMILIES[family].reference)
    dma_hf.configure(model, IDENTITY)
    ids = _ids(140, rows=2)
    options = {} if cache in ("default", "offered") else {"cache_implementation": cache}
    expected = _generate(other, ids, **options)
    if cache == "offered":
        options = {CACHE_ARGUMENT: transformers.DynamicCache(config=model.config)}
    assert torch.equal(_generate(model, ids, **options), expected)


@pytest.mark.parametrize(
    ("family", "format", "kind"),
    sampled(
        product(FAMILIES_TESTED, ("int8", "int4"), ("configured", "offered", "static")),
        lambda family, format, kind: family == "gemma3" if format == "int4" else kind == "configured",
    ),
)
def test_generate_with_packed_caches_equals_a_loop(family, format, kind):
    """The loop runs forward passes over the same cache format."""
    model = FAMILIES[family].build("dma_mxfp")
    ids = _ids(300)
    cache, token, expected = dma_hf.DMACache(model.config, cache=format), ids, ids
    for _ in range(NEW_TOKENS):
        token = model(token, **{CACHE_ARGUMENT: cache}).logits[:, -1:].argmax(-1)
        expected = torch.cat((expected, token), 1)
    options = {"return_dict_in_generate": True}
    if kind == "configured":
        dma_hf.configure(model, cache=format)
    else:
        length = {"max_cache_len": 320} if kind == "static" else {}
        options[CACHE_ARGUMENT] = dma_hf.DMACache(model.config, cache=format, **length)
    result = _generate(model, ids, **options)
    assert type(result[CACHE_ARGUMENT]) is dma_hf.DMACache
    assert result[CACHE_ARGUMENT].format == format
    assert torch.equal(result.sequences, expected)


def test_a_packed_cache_has_the_interface_of_a_cache():
    """The methods that Transformers uses during generation and between calls."""
    model = FAMILIES["llama"].build("dma_mxfp")
    cache = dma_hf.DMACache(model.config)
    ids = _ids(300, rows=2)
    assert isinstance(cache, Cache)
    assert cache.get_seq_length() == 0
    model(ids, **{CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() == 300
    assert cache.get_mask_sizes(1, 0) == (301, 0)
    assert cache.is_croppable
    assert len(cache) == 2
    branch = copy.deepcopy(cache)
    step = model(_ids(1, rows=2), **{CACHE_ARGUMENT: branch}).logits
    branch.crop(-1)
    assert branch.get_seq_length() == 300
    assert torch.equal(model(_ids(1, rows=2), **{CACHE_ARGUMENT: branch}).logits, step)
    swapped = copy.deepcopy(cache)
    swapped.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(model(_ids(1, rows=2), **{CACHE_ARGUMENT: swapped}).logits, step.flip(0))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2]))
    torch.testing.assert_close(model(_ids(1, rows=2), **{CACHE_ARGUMENT: cache}).logits, step)
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=["beams", "lookup"])
@pytest.mark.parametrize("family", ["llama", "bart"])
def test_other_generation_modes_use_the_packed_cache(family, options):
    if family == "bart" and "num_beams" not in options:
        pytest.skip("Transformers has no prompt lookup for encoder-decoders")
    model = FAMILIES[family].build("dma_mxfp")
    dma_hf.configure(model, cache="int4")
    result = _generate(model, _ids(40), return_dict_in_generate=True, **options)
    assert type(result[CACHE_ARGUMENT]) is (EncoderDecoderCache if family == "bart" else dma_hf.DMACache)
    assert type(getattr(result[CACHE_ARGUMENT], "self_attention_cache", result[CACHE_ARGUMENT])) is dma_hf.DMACache


@pytest.mark.parametrize("family", FAMILIES_TESTED)
@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_generate_batch_works_with_every_cache(family, format):
    """Each request has the likelihoods of an isolated one over the same kind of cache."""
    model = FAMILIES[family].build("dma_mxfp")
    dma_hf.configure(model, "balanced" if format else "paper", cache=format)
    prompts = [_ids(length)[0].tolist() for length in (5, 300, 140)]
    options = {"page_size": 32, "num_blocks": 64, "return_logprobs": True, "use_cuda_graph": False}
    for output in generate_batch(model, prompts, NEW_TOKENS, **options).values():
        prompt, tokens = output.prompt_ids, output.generated_tokens
        if format:
            cache, chunks = dma_hf.DMACache(model.config, cache=format), [prompt, *([token] for token in tokens[:-1])]
            rows = [model(torch.tensor([chunk]), **{CACHE_ARGUMENT: cache}).logits[0, -1] for chunk in chunks]
            logits = torch.stack(rows)
        else:
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        logprobs = logits.float().log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert len(tokens) == NEW_TOKENS
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, rtol=1e-3, atol=1e-3)
        assert (logprobs.amax(-1) - expected).max() < 1e-3


@pytest.mark.parametrize("options", [[], ["--continuous-batching", "--cache-gib", "0.1"]], ids=["alone", "batched"])
def test_serving_answers_without_deprecated_features(options, tmp_path):
    log, launcher = tmp_path / "stderr", ("-W", "error::FutureWarning:dma_hf")
    options = ("--attn", "dma_mxfp:balanced+int4", *options)
    with served(DEMO_MODEL, *options, log=log, launcher=launcher) as (server, address):
        opener = build_opener(ProxyHandler({}))
        body = json.dumps({"prompt": "The white whale", "max_tokens": 4, "temperature": 0}).encode()
        request = Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        with opener.open(request, timeout=60) as response:
            assert json.load(response)["choices"][0]["text"]
        server.send_signal(signal.SIGINT)
        server.wait(60)
    assert "deprecated" not in log.read_text()

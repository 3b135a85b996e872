"""Whole models as CUDA graphs, and continuous batching, on a GPU."""

from __future__ import annotations

import pytest
import torch
from batched_parts import assert_as_alone, note_parts
from dma_eval.load.models import load_model
from served import DEMO_MODEL
from starlette.testclient import TestClient
from tiny_models import FAMILIES
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, pipeline

import dma_hf
from dma_hf.decoding import EAGER_STEPS
from dma_hf.integrations.internals import CACHE_ARGUMENT
from dma_hf.serving import Sequential, make_app

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 256, "head_dim": 64}
LENGTH = 300  # over two tiles


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def _model(name, setting="balanced"):
    model = FAMILIES[name].build("dma_mxfp", **SIZES).cuda().bfloat16()
    dma_hf.configure(model, setting)
    return model


def _ids(batch, length, seed=0):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_forward_pass_runs_as_one_cuda_graph(name):
    """Replayed with other tokens: the graph contains no values of the first call."""
    model = _model(name)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for seed in range(4):  # two to warm up and record, two replays
        torch.compiler.cudagraph_mark_step_begin()
        ids = _ids(2, LENGTH, seed)
        logits = compiled(ids, use_cache=False).logits.float()
        expected = model(ids, use_cache=False).logits.float()
        assert (logits - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("kind", ["static", "packed", "configured"])
def test_decode_steps_run_as_cuda_graphs(kind):
    """Over a cache of a fixed size ``generate`` compiles its steps, and this package captures the compiled step."""
    model = _model("llama")
    ids = _ids(2, LENGTH)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    if kind == "static":
        options["cache_implementation"] = "static"
    elif kind == "configured":
        dma_hf.configure(model, "balanced", cache="int8")
        options["compile_config"] = CompileConfig()
    tokens = []
    torch._dynamo.utils.counters.clear()
    for disable_compile in (True, False):
        if kind == "packed":
            options["past_key_values"] = dma_hf.DMACache(model.config, max_cache_len=LENGTH + 20)
        dma_hf.reset_stats(model)
        tokens.append(model.generate(ids, disable_compile=disable_compile, **options))
    assert torch.equal(*tokens)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert dma_hf.stats(model).replays == 11 - EAGER_STEPS
    if kind == "packed":
        options["past_key_values"].reset()
    assert torch.equal(model.generate(ids, **options), tokens[0])  # by the same graph
    assert dma_hf.stats(model).replays == 11 - EAGER_STEPS + 11
    assert not dma_hf.stats(model).eager_decoding


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "gemma4"])
def test_generate_decodes_in_cuda_graphs_by_default(name, format):
    """Over a cache that grows: across ends of tiles and of its storage, and over the storage of an earlier call."""
    model = _model(name)
    dma_hf.configure(model, "balanced", cache=format)
    options = {"max_new_tokens": 150, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for batch, seed in ((2, 0), (2, 1), (3, 2)):
        ids = _ids(batch, LENGTH, seed)
        expected = model.generate(ids, disable_compile=True, **options)
        dma_hf.reset_stats(model)
        assert torch.equal(model.generate(ids, **options), expected)
        found = dma_hf.stats(model)
        assert not found.eager_decoding
        assert found.replays > 100


def test_pipelines_and_the_server_decode_in_cuda_graphs():
    loaded = load_model(str(DEMO_MODEL), dtype="bfloat16", device="cuda")
    model, tokenizer = loaded.model, loaded.tokenizer
    model.set_attn_implementation("dma_mxfp")
    dma_hf.configure(model, cache="int4")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    body = {"prompt": "The captain", "max_tokens": 40, "temperature": 0, "ignore_eos": True}

    def piped():
        options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "return_full_text": False}
        return generator("The captain", **options)[0]["generated_text"]

    def served():
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    answers = []
    with TestClient(make_app(Sequential(model, tokenizer))) as client:
        for answer in (piped, served, piped, served):
            dma_hf.reset_stats(model)
            answers.append(answer())
            found = dma_hf.stats(model)
            assert not found.eager_decoding
            assert found.replays >= 39 - EAGER_STEPS
    assert len(set(answers)) == 1


def _batched(prompts, model, **options):
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0, bos_token_id=1)
    batching = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=512, **options)
    return model.generate_batch(prompts, generation_config=settings, continuous_batching_config=batching)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_continuous_batching_equals_isolated_prompts(name):
    """Except where two tokens are nearly tied and bf16 sums decide."""
    model = _model(name)
    prompts = [_ids(1, length, seed=length)[0].tolist() for length in (5, LENGTH, 17, 140)]
    outputs = _batched(prompts, model, use_cuda_graph=False)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.error is None
        tokens = output.generated_tokens
        assert len(tokens) == 6
        logits = model(torch.tensor([prompt + tokens[:-1]]).cuda()).logits[0, len(prompt) - 1 :].float()
        chosen = logits.gather(-1, torch.tensor(tokens)[:, None].cuda())[:, 0]
        assert (logits.amax(-1) - chosen).max() < 0.05 * logits.abs().max()


@pytest.mark.parametrize(
    ("name", "format", "options"),
    [
        ("llama", "int8", {}),
        ("llama", "int4", {"use_cuda_graph": False}),
        ("gemma3", "int4", {"max_batch_tokens": 256}),
    ],
)
def test_packed_pages_equal_isolated_prompts(name, format, options, monkeypatch):
    """By default Transformers runs steps as CUDA graphs, two of them in flight."""
    model = _model(name)
    dma_hf.configure(model, cache=format)
    prompts = [_ids(1, length, seed=length)[0].tolist() for length in (5, LENGTH, 120, 250, LENGTH, 600)]
    parts = note_parts(monkeypatch)
    settings = GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=0, bos_token_id=1)
    batching = ContinuousBatchingConfig(num_blocks=200, **options)
    outputs = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=batching)
    assert [output.error for output in outputs.values()] == [None] * len(prompts)
    largest = float(model(_ids(1, LENGTH)).logits.abs().max())
    # One extra step may have been launched for a finished request.
    for request, output in outputs.items():
        total = len(output.prompt_ids) + len(output.generated_tokens)
        parts[request] = [(past, count) for past, count in parts[request] if past + count <= total]
    assert_as_alone(model, outputs, parts, tolerance=0.05 * largest)


@pytest.mark.parametrize("preset", ["paper", "fp4"])
def test_keys_that_4_bits_cannot_represent_are_warned_of(preset):
    model = FAMILIES["qwen2"].build("dma_mxfp", hidden_size=256)
    attention = model.model.layers[1].self_attn
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight *= 30.0
    attention.k_proj.bias[3] = 100.0
    model = model.cuda().bfloat16()
    dma_hf.configure(model, preset, exact_until=0)
    with pytest.warns(UserWarning, match="cannot represent the keys of this model in 4 bits"):
        model(_ids(1, LENGTH))


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_padded_rows_equal_isolated_prompts(name):
    """Over a packed cache, with sliding windows that have dropped keys: a prompt, then single tokens."""
    model = _model(name)
    lengths, steps = (LENGTH, 70), 8
    ids = _ids(2, LENGTH + steps)
    mask = torch.ones_like(ids)
    mask[1, : LENGTH - lengths[1]] = 0

    def logits(ids, mask):
        cache, start = dma_hf.DMACache(model.config, "int8"), ids.shape[1] - steps
        chunks = [slice(0, start), *(slice(i, i + 1) for i in range(start, ids.shape[1]))]
        each = [
            model(ids[:, chunk], attention_mask=mask[:, : chunk.stop], **{CACHE_ARGUMENT: cache}).logits[:, -1]
            for chunk in chunks
        ]
        return torch.stack(each, 1).float()

    batched = logits(ids, mask)
    for row, length in enumerate(lengths):
        own = slice(LENGTH - length, None)
        alone = logits(ids[row : row + 1, own], mask[row : row + 1, own])
        assert (batched[row] - alone[0]).norm() < 0.02 * alone.norm()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_checkpoints_change_no_gradient(name, reentrant):
    gradients = []
    for checkpoints in (False, True):
        model = _model(name).train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        ids = _ids(2, LENGTH)
        with torch.enable_grad():
            model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad.float() for parameter in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert plain.norm() > 0
        assert (checkpointed - plain).norm() <= 0.02 * plain.norm()

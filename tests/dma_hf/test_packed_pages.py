"""Continuous batching over packed pages: each request equals an isolated one with the same cache format."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from batched_parts import assert_as_alone, generate_batch, note_parts, random_prompts
from dma_kernels import attention
from sampling import sampled
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

import dma_hf
from dma_hf.integrations import paged_cache

LENGTHS = (5, 300, 17, 140, 300, 128)  # less than a tile, whole tiles, more than two
COMPILED = CompileConfig(backend="eager", fullgraph=False, mode=None)
# Each size of a batch is compiled, and the largest one is run, before the first request.
DECODE_COMPILED = {"decode_compile_config": COMPILED, "num_blocks": 60, "max_batch_tokens": 160}


@pytest.fixture
def parts(monkeypatch):
    """The calls that computed each request."""
    return note_parts(monkeypatch)


@pytest.fixture
def llama(families):
    model = families["llama"].build("dma_mxfp", num_hidden_layers=1)
    dma_hf.configure(model, "balanced", cache="int4")
    return model


@pytest.mark.parametrize(
    ("format", "family"),
    sampled(
        product(("int8", "int4", "int4-equalized"), ("llama", "gemma3", "gpt_oss")),
        lambda *case: case in (("int4", "gemma3"), ("int8", "gpt_oss"), ("int4-equalized", "llama")),
    ),
)
def test_requests_of_many_lengths_equal_isolated_ones(format, family, families, parts):
    """Prompts and decode steps share batches; later batches have decode steps only and use block tables."""
    model = families[family].build("dma_mxfp")
    model.config.dma_equalized = format.endswith("equalized")
    dma_hf.configure(model, "balanced", cache=format[:4])
    assert dma_hf.DMACache(model.config).layers[0].format == format
    outputs = generate_batch(model, random_prompts(LENGTHS), 20, max_requests_per_batch=4, num_blocks=60)
    assert all(len(output.generated_tokens) == 20 for output in outputs.values())
    assert_as_alone(model, outputs, parts)
    assert model.config._attn_implementation == "dma_mxfp"


def test_prompts_of_similar_lengths_are_computed_in_one_call(llama, parts, monkeypatch):
    calls = []

    def note(query, *arguments, **options):
        calls.append((len(query), query.shape[2]))
        return attention(query, *arguments, **options)

    monkeypatch.setattr(paged_cache, "attention", note)
    # A prompt of one token is computed like a decoding request, over its empty cache.
    outputs = generate_batch(llama, random_prompts((1, 90, 300, 290, 150, 60, 1, 2100)), 5, num_blocks=120)
    assert sorted(calls) == [(1, 2100), (2, 90), (3, 300)]
    assert_as_alone(llama, outputs, parts)


@pytest.mark.parametrize("tiles", sampled([0, 1, 2], lambda tiles: tiles != 1))
def test_prompts_in_chunks_equal_isolated_ones(tiles, families, parts):
    """Few prompts fit into a batch of 100 tokens; later chunks attend to the cache."""
    model = families["llama"].build("dma_mxfp")
    dma_hf.configure(model, "balanced", cache="int4", sink_tiles=tiles, diagonal_tiles=tiles)
    outputs = generate_batch(
        model, random_prompts(LENGTHS), 12, max_batch_tokens=100, num_blocks=60, max_blocks_per_request=2
    )
    assert any(past > 0 and length > 1 for calls in parts.values() for past, length in calls)
    assert_as_alone(model, outputs, parts)


@pytest.mark.parametrize("is_offloaded", [False, True], ids=["recomputed", "offloaded"])
def test_evicted_requests_are_resumed(is_offloaded, llama, parts, monkeypatch):
    """Three slots leave memory for 11 of 12 pages. Offloaded ones are unchanged after a copy to the CPU and back."""
    empty, away, copied = torch.empty, OffloadingManager._offload_to_cpu, set()
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    monkeypatch.setattr(OffloadingManager, "_offload_to_cpu", lambda *given: copied.update(new := away(*given)) or new)
    options = {"num_blocks": 11, "page_size": 128, "safety_margin": 0.0}
    options |= {"cpu_offload_space": 0.01} if is_offloaded else {}
    outputs = generate_batch(llama, random_prompts([620, 635, 630, 500]), 40, **options)
    assert any(past == 0 for calls in parts.values() for past, _ in calls[1:]) is not is_offloaded
    assert bool(copied) is is_offloaded
    assert_as_alone(llama, outputs, parts)


@pytest.mark.parametrize("are_prompts_compiled", [False, True])
def test_batches_of_compiled_steps_are_padded_and_prompts_alone_are_not(
    are_prompts_compiled, llama, parts, monkeypatch
):
    """Transformers would compute logits of ``max_requests_per_batch`` requests for each prompt."""
    rows, compute = [], ModelRunner.compute_batch

    def note(runner, model, batch):
        rows.append(len(batch["logits_indices"]))
        compute(runner, model, batch)

    monkeypatch.setattr(ModelRunner, "compute_batch", note)
    options = DECODE_COMPILED | {"max_requests_per_batch": 4}
    options |= {"varlen_compile_config": COMPILED} if are_prompts_compiled else {}
    with torch.compiler.set_stance("force_eager"):  # the compiler would take ten times as long
        outputs = generate_batch(llama, random_prompts((127, 9, 17)), 3, **options)
    assert (3 in rows) is not are_prompts_compiled  # the prompts
    assert rows[-1] == 4  # decode steps, padded to a power of 2
    assert_as_alone(llama, outputs, parts)


def test_compiled_decode_steps_equal_those_of_isolated_requests(llama, parts):
    compiled = torch._dynamo.utils.counters["stats"]
    compiled.clear()
    outputs = generate_batch(llama, random_prompts((127, 9, 17)), 8, max_requests_per_batch=1, **DECODE_COMPILED)
    assert compiled["unique_graphs"] > 0
    assert_as_alone(llama, outputs, parts)


@pytest.mark.parametrize("blocks", [None, 0])
def test_batches_of_decode_steps_are_compiled_if_they_have_block_tables(blocks, llama):
    batching = ContinuousBatchingConfig(decode_compile_config=COMPILED, max_blocks_per_request=blocks)
    manager = llama.init_continuous_batching(continuous_batching_config=batching)
    assert (manager.continuous_batching_config.decode_compile_config is None) == (blocks == 0)


@pytest.mark.parametrize(
    ("format", "ratio", "lengths"),
    [("int8", 1.85, {4096: 1.65, 20480: 1.85}), ("int4", 3.3, {4096: 2.78, 12288: 3.3})],
)
def test_packed_pages_hold_the_expected_number_of_tokens(format, ratio, lengths):
    """Compare pages, and whole requests with their 16-bit KV, with a 16-bit cache."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 97}
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=8, head_dim=128, **sizes)
    config._attn_implementation = "dma_mxfp"
    model = LlamaForCausalLM(config).half()
    dma_hf.configure(model, "balanced", cache=format)
    manager = model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(num_blocks=32))
    manager.warmup()  # creates the cache
    cache = manager.batch_processor.cache
    size = cache.num_sectors * cache.bytes_per_sector
    token = 2 * 8 * 128 * 2  # keys and values, heads, channels, bytes
    assert size < 1.05 * 32 * 256 * token
    assert cache.max_tokens_read > ratio * size / token
    for length, least in lengths.items():
        allocators = cache.cache_allocators.values()
        taken = sum(each.needs_new_blocks("one", 0, length) * each.bytes_per_block for each in allocators)
        assert length * token > least * taken


def test_requests_that_share_a_prompt_do_not_share_pages(llama, parts):
    """A shared tile cannot be unquantized for one request and quantized for another."""
    (prefix,) = random_prompts([256])
    outputs = generate_batch(llama, [[*prefix, 5], [*prefix, 6], prefix], 10, num_blocks=40, max_requests_per_batch=1)
    assert {calls[0][0] for calls in parts.values()} == {0}
    assert_as_alone(llama, outputs, parts)


def test_several_sequences_of_one_prompt_equal_isolated_ones(llama, parts):
    """A fork copies pages and the slot."""
    settings = GenerationConfig(max_new_tokens=8, do_sample=True, top_k=1, pad_token_id=0, num_return_sequences=3)
    outputs = llama.generate_batch(
        random_prompts([300]),
        generation_config=settings,
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=40),
    )
    assert [output.error for output in outputs.values()] == [None] * 3
    parent = next(calls for name, calls in parts.items() if name in outputs and "child" not in name)
    for name in outputs:
        if "child" in name:
            parts[name] = [call for call in parent if call[0] < parts[name][0][0]] + parts[name]
    assert_as_alone(llama, outputs, parts)


def test_too_little_memory_and_chunked_attention_are_rejected(llama):
    model = llama
    with pytest.raises(ValueError, match=r"room for 1 sectors of \d+ bytes, but a request needs two.*raise num_blocks"):
        generate_batch(model, random_prompts([9]), 4, num_blocks=1, page_size=16)
    assert model.config._attn_implementation == "dma_mxfp"
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match=r"full and sliding attention, but this model has chunked_attention"):
        generate_batch(model, random_prompts([9]), 4)
    assert model.config._attn_implementation == "dma_mxfp"


def test_a_manager_can_be_reused(llama, parts):
    """A second session reuses the emptied cache of the first."""
    model = llama
    for seed in range(2):
        parts.clear()
        outputs = generate_batch(model, random_prompts([140, 9], seed), 5, num_blocks=20, persistent_manager=True)
        assert model.config._attn_implementation == "dma_mxfp"
        assert_as_alone(model, outputs, parts)
    dma_hf.configure(model, cache="int8")
    message = "the kept manager is for dma_mxfp with cache='int4', but the model runs 'dma_mxfp' with cache='int8'"
    with pytest.raises(RuntimeError, match=message):
        model.generate_batch(random_prompts([9]))
    cache = model._cached_continuous_batching_manager.batch_processor.cache
    cache.pool.try_to_free_sectors()
    assert cache.pool.num_free_sectors == cache.num_sectors
    model.destroy_cached_continuous_batching_manager()


def test_short_requests_leave_no_pages_in_use(llama, parts):
    """With cancellations and evictions, and after a stop that does not wait; all tokens are correct."""
    count, cancelled = 40, ["3", "20"]
    lengths = torch.randint(250, 256, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    settings = GenerationConfig(max_new_tokens=15, do_sample=False, pad_token_id=0, bos_token_id=1)
    # 19 slots leave memory for 11 pages; each request needs one, for the tile after the sink.
    batching = ContinuousBatchingConfig(num_blocks=60, page_size=128, safety_margin=0.0)
    manager = llama.init_continuous_batching(settings, continuous_batching_config=batching)
    manager.start()
    for index, prompt in enumerate(random_prompts(lengths)):
        manager.add_request(prompt, request_id=str(index))
    for name in cancelled:
        manager.cancel_request(name)
    manager.stop(block=False)
    outputs = {output.request_id: output for output in (manager.get_result(timeout=60) for _ in lengths[2:])}
    manager.join(0.0)
    assert [output.error for output in outputs.values()] == [None] * (count - 2)
    assert not outputs.keys() & set(cancelled)
    assert any(past == 0 for calls in parts.values() for past, _ in calls[1:])
    cache = manager.batch_processor.cache
    assert not any(allocator.block_table for allocator in cache.cache_allocators.values())
    cache.pool.try_to_free_sectors()
    assert cache.pool.num_free_sectors == cache.num_sectors
    assert_as_alone(llama, outputs, parts, in_batches=True)
    assert llama.config._attn_implementation == "dma_mxfp"

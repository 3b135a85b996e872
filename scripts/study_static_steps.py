"""Where a compiled step over Transformers' static cache spends its time (Llama-3.1-8B's shape, random weights, batch 1).

PYTHONPATH=TREE:TREE/kernels python static_steps.py LENGTHS VARIANTS, for example 1024,32768,131072 typed,filter,graph,eager-graph
typed        Transformers' compiled call, as generate makes it
filter       the same without guards on modules (torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe)
graph        the Inductor-compiled step without cudagraph trees, captured in one CUDA graph
eager-graph  the eager step, captured
"""

import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import dma_hf

cuda = torch.cuda.is_available()
lengths = [int(x) for x in sys.argv[1].split(",")]
variants = sys.argv[2].split(",")
attn = sys.argv[3] if len(sys.argv) > 3 else "balanced"
torch.manual_seed(0)
sizes = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=128256)
if not cuda:
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=512)
cfg = LlamaConfig(**sizes, max_position_embeddings=262144, rope_theta=5e5)
with torch.device("cuda" if cuda else "cpu"):
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(cfg).eval()
model.set_attn_implementation("dma_mxfp")
dma_hf.configure(model, attn)
device = model.device
sync = torch.cuda.synchronize if cuda else lambda: None
SPARE, STEPS = 160, 30


def filled(length):
    cache = StaticCache(config=model.config, max_cache_len=length + SPARE)
    row = torch.randn(1, cfg.num_key_value_heads, 1, cfg.head_dim, dtype=torch.bfloat16, device=device)
    for layer in cache.layers:
        layer.lazy_initialization(row, row)
        layer.keys.normal_(), layer.values.normal_()
        layer.cumulative_length.fill_(length)
    return cache


def compiled(variant):
    if not cuda:
        return torch.compile(model.__call__, backend="eager")
    if variant == "typed":
        return model.get_compiled_call(None)
    if variant == "filter":
        options = {"triton.cudagraphs": True, "guard_filter_fn": torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe}
        return torch.compile(model.__call__, options=options)
    return torch.compile(model.__call__) if variant == "graph" else model.__call__


def position(ids):
    return torch.full((1, 1), ids.shape[1] - 1, device=device)


def by_generate(forward, cache, length):
    """Return a step as generate runs it, and its host times."""
    state = {"ids": torch.randint(0, 500, (1, length + 1), device=device), "mask": torch.ones(1, length + 1, dtype=torch.long, device=device)}
    host = {"prepare": [], "forward": []}

    def step():
        t = time.perf_counter()
        inputs = model.prepare_inputs_for_generation(
            state["ids"], next_sequence_length=1, cache=cache, attention_mask=state["mask"], use_cache=True,
            position_ids=position(state["ids"]),
        )
        t2 = time.perf_counter()
        out = forward(**inputs, return_dict=True)
        host["prepare"].append(t2 - t), host["forward"].append(time.perf_counter() - t2)
        token = out.logits[:, -1].to(copy=True, dtype=torch.float32).argmax(-1)
        state["ids"] = torch.cat([state["ids"], token[:, None]], -1)
        state["mask"] = torch.cat([state["mask"], state["mask"].new_ones(1, 1)], -1)
        return bool(token.max() == -1)

    return step, host


def captured(forward, cache, length):
    ids = torch.randint(0, 500, (1, 1), device=device)
    positions = torch.tensor([[length]], device=device)

    def call():
        return forward(input_ids=ids, position_ids=positions, attention_mask=None, cache=cache, use_cache=True, return_dict=True).logits

    for _ in range(3):
        call()
    sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = call()
        positions.add_(1)

    def step():
        graph.replay()
        token = logits[:, -1].to(copy=True, dtype=torch.float32).argmax(-1)
        ids.copy_(token[:, None])
        return bool(token.max() == -1)

    return step, graph


@torch.no_grad()
def main():
    for length in lengths:
        for variant in variants:
            cache = filled(length)
            torch._dynamo.reset()
            model.__dict__.pop("_compiled_call", None)
            began = time.perf_counter()
            forward, graph, host = compiled(variant), None, None
            if variant in ("typed", "filter"):
                step, host = by_generate(forward, cache, length)
            else:
                step, graph = captured(forward, cache, length)
            for _ in range(6):
                step()
            sync()
            warm = time.perf_counter() - began
            if host:
                host["prepare"].clear(), host["forward"].clear()
            times = []
            for _ in range(STEPS):
                t = time.perf_counter()
                step()
                times.append(time.perf_counter() - t)
            text = f"{variant:12s} length {length:7d}: step {statistics.median(times) * 1e3:7.3f} ms (min {min(times) * 1e3:.3f}), warm-up {warm:.0f} s"
            if host:
                text += "".join(f", host {k} {statistics.median(v) * 1e3:.3f}" for k, v in host.items())
            if graph is not None:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(10):
                    graph.replay()
                end.record()
                end.synchronize()
                text += f", GPU alone {begin.elapsed_time(end) / 10:.3f}"
            print(text, flush=True)
            if cuda:
                from torch.profiler import ProfilerActivity, profile

                with profile(activities=[ProfilerActivity.CUDA]) as found:
                    for _ in range(4):
                        step()
                    sync()
                rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
                total = sum(row.self_device_time_total for row in rows)
                print(f"    kernels of a step: {total / 4e3:.3f} ms, {sum(row.count for row in rows) // 4} launches")
                for row in rows[:9]:
                    print(f"    {row.self_device_time_total / 4e3:8.3f} ms {row.count // 4:5d} x {row.key[:90]}")
            del step, graph, forward, cache
            torch.cuda.empty_cache() if cuda else None


main()

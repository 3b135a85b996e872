"""Time variants of the split-KV kernel over a full static cache, in CUDA graphs, interleaved (8 kv, 32 q heads, D 128).

PYTHONPATH=TREE:TREE/kernels python tune_split_kv.py
"""

import importlib.util
import pathlib
import statistics
import sys
import tempfile
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dma_kernels import Recipe, attention
from dma_kernels.prefill import split_kv, split_kv_kernel
from dma_kernels.prefill.plan import plan
from dma_kernels.runtime.reports import kernel_reports

BUDGET = 85.0
BEGAN = time.perf_counter()
BALANCED = Recipe(low="mxint8", shared_scale="tile", smooth_k=True, rotate=True, pv="fp8")
KV, Q, D, SCALE, SPARE = 8, 32, 128, 128**-0.5, 64
LENGTHS = [int(x) for x in sys.argv[1].split(",")] if len(sys.argv) > 1 else [1024, 8192, 32768, 131072]
BASE = split_kv.split_kv_config
KERNEL = split_kv.split_kv_kernel


def without_masks():
    """Return the kernel with an unmasked loop over full blocks."""
    path = pathlib.Path(split_kv_kernel.__file__)
    text = path.read_text()
    head = "        for i_key in tl.range(start, stop, BLOCK_N, num_stages=CONFIG.tuning.num_stages):\n"
    assert text.count(head) == 1
    extra = """        full = start + tl.maximum(tl.minimum(stop, q_start + 1) - start, 0) // BLOCK_N * BLOCK_N
        if window is not None:
            full = tl.where(start > q_start + q_len - 1 - window, full, start)
        if mask.ptr is not None:
            full = start
        for i_key in tl.range(start, full, BLOCK_N, num_stages=CONFIG.tuning.num_stages):
            k_pos = i_key + o_n
            k = load_rows(k_rows, i_key, 0, False, D, BLOCK_D, BLOCK_N)
            s = logits(dot(q, tl.trans(k)), scale, scale, softcap, q_start + i_t, k_pos, visibility, False, True, False)
            v = load_rows(v_rows, i_key, 0, False, DV, BLOCK_DV, BLOCK_N)
            acc, m_i, l_i = attend(acc, m_i, l_i, s, scale, v, True, "raw", False)
        for i_key in tl.range(full, stop, BLOCK_N, num_stages=1):
"""
    text = text.replace(head, extra).replace("attend, logits", "attend, load_rows, logits")
    made = pathlib.Path(tempfile.mkdtemp()) / "split_kv_kernel_unmasked.py"
    made.write_text(text)
    name = f"{split_kv_kernel.__package__}.split_kv_kernel_unmasked"
    spec = importlib.util.spec_from_file_location(name, made)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.split_kv_kernel


UNMASKED = without_masks()
VARIANTS = {  # changes of the config, and the kernel
    "base 64 keys 4w 3st 2cta": ({}, KERNEL),
    "unmasked": ({}, UNMASKED),
    "1 cta 5st": ({"num_stages": 5, "ctas_per_sm": 1}, KERNEL),
    "3 cta 2st": ({"num_stages": 2, "ctas_per_sm": 3}, KERNEL),
    "2 cta 2st": ({"num_stages": 2}, KERNEL),
    "unmasked 3 cta 2st": ({"num_stages": 2, "ctas_per_sm": 3}, UNMASKED),
    "128 keys 8w 1cta 3st": ({"block_n": 128, "num_warps": 8, "ctas_per_sm": 1}, KERNEL),
    "128 keys 2cta 2st": ({"block_n": 128, "num_stages": 2}, KERNEL),
    "32 keys 3cta 4st": ({"block_n": 32, "num_stages": 4, "ctas_per_sm": 3}, KERNEL),
    "32 keys 2w 5cta 3st": ({"block_n": 32, "num_warps": 2, "num_stages": 3, "ctas_per_sm": 5}, KERNEL),
}


def use(changes, kernel):
    split_kv.split_kv_config = lambda *arguments: replace(BASE(*arguments), **changes)
    split_kv.split_kv_kernel = kernel
    plan.cache_clear()


def exact(query, key, value):
    """Attention in fp32, [1, Q, 1, D]."""
    q = query[0, :, 0].float().view(KV, Q // KV, D)
    p = torch.softmax(torch.einsum("hgd,htd->hgt", q, key[0].float()) * SCALE, -1)
    return torch.einsum("hgt,htd->hgd", p, value[0].float()).reshape(1, Q, 1, D)


def captured(step, caches, calls):
    """Return a replay of ``calls`` calls over the caches in turn, and the last output of the first cache."""
    for key, value in caches[:1]:
        for _ in range(2):
            out = step(key, value)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            made = step(*caches[i % len(caches)])
            if i == 0:
                out = made
    return graph, out


def main():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    device = torch.device("cuda")
    a = torch.empty(1 << 29, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    compiled, failed = set(), set()
    for length in LENGTHS:
        size = 2 * KV * (length + SPARE) * D * 2
        count = max(2, -(-(256 << 20) // size)) if size < (400 << 20) else 1
        caches = [
            tuple(torch.randn(1, KV, length + SPARE, D, dtype=torch.bfloat16, device=device) for _ in range(2))
            for _ in range(count)
        ]
        query = torch.randn(1, 1, Q, D, dtype=torch.bfloat16, device=device).transpose(1, 2)
        q_offset = torch.tensor(length - 1, device=device)
        kv_range = torch.tensor([[0, length]], device=device)
        calls = max(count, 8)

        def ours(key, value):
            return attention(
                query, key, value, BALANCED, q_offset=q_offset, kv_offset=0, kv_range=kv_range, scale=SCALE,
            )

        def sdpa(key, value):
            return F.scaled_dot_product_attention(query, key[:, :, :length], value[:, :, :length], scale=SCALE, enable_gqa=True)

        expected = exact(query, *(x[:, :, :length] for x in caches[0]))
        runs = {}
        for name, (changes, kernel) in VARIANTS.items():
            if name in failed:
                continue
            if name not in compiled and time.perf_counter() - BEGAN > BUDGET * 0.75:
                print(f"  {name}: left out, no time to compile", flush=True)
                failed.add(name)
                continue
            use(changes, kernel)
            try:
                with kernel_reports(lambda kernel_name: assert_split(kernel_name)):
                    runs[name] = captured(ours, caches, calls)
                compiled.add(name)
            except Exception as error:  # a variant that does not fit
                print(f"  {name}: {type(error).__name__}: {str(error)[:150]}", flush=True)
                failed.add(name)
                torch.cuda.synchronize()
        use({}, KERNEL)
        for name, backend in (("sdpa flash", SDPBackend.FLASH_ATTENTION), ("sdpa cudnn", SDPBackend.CUDNN_ATTENTION)):
            try:
                with sdpa_kernel(backend):
                    runs[name] = captured(sdpa, caches, calls)
            except Exception as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:150]}", flush=True)
                torch.cuda.synchronize()
        half = min(size, a.numel()) // 2
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                at = (i * half) % (a.numel() - half + 1) // 16 * 16
                b[at : at + half].copy_(a[at : at + half])
        runs["copy_ of half the bytes"] = graph, None
        times = {name: [] for name in runs}
        for _ in range(3):
            for graph, _ in runs.values():
                graph.replay()
        for _ in range(9):
            for name, (graph, _) in runs.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(2):
                    graph.replay()
                end.record()
                end.synchronize()
                times[name].append(begin.elapsed_time(end) * 1e3 / calls / 2)
        moved = 2 * KV * length * D * 2
        print(f"length {length}, {count} caches, {calls} calls a graph: us a call (min), GB/s of the median, error")
        for name, (_, out) in runs.items():
            us = statistics.median(times[name])
            error = "" if out is None else f"{(out.float() - expected).abs().max().item() / expected.abs().max().item():.1e}"
            nbytes = 2 * half if out is None else moved
            print(f"  {name:28s} {us:8.2f} ({min(times[name]):8.2f})  {nbytes / us / 1e3:7.0f}  {error}", flush=True)
        del runs, caches
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - BEGAN:.0f} s")


def assert_split(name):
    assert name == "split-KV", name


if __name__ == "__main__":
    main()

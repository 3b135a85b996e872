"""vLLM as a peer of ``dma-hf bench serve``: its offline engine, on a model of the same shape with random weights.

Needs the package ``vllm``, on a GPU.
"""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from .peers import import_peer
from .requests import Request, figures

VLLM = {"vllm": "auto", "vllm:fp8": "fp8"}
"""By name in results, the data type of its paged cache; ``auto`` is that of the model."""


def answer(
    model: PreTrainedModel,
    label: str,
    warm: Sequence[Request],
    requests: Sequence[Request],
    *,
    longest: int,
    seed: int,
    cache_gib: float | None,
) -> dict[str, Any]:
    """Answer requests that arrive at the same time, and return figures by the names of the result's fields.

    Args:
        model: Gives the engine its configuration and data type. It leaves the GPU meanwhile.
        label: Of :data:`VLLM`.
        warm: Requests that come first and are not counted.
        requests: Requests that are counted.
        longest: Tokens of the longest request.
        seed: Of the weights.
        cache_gib: Memory for the paged cache; ``None`` for what the engine finds free.
    """
    vllm = import_peer("vllm")
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    sizes: dict[str, Any] = {}
    if cache_gib is not None:  # the utilization is then only what must be free at the start
        sizes = {"kv_cache_memory_bytes": int(cache_gib * 2**30), "gpu_memory_utilization": 0.5}
    device, engine = model.device, None
    model.to("cpu")
    torch.cuda.empty_cache()
    try:
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            engine = vllm.LLM(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype=str(model.dtype).removeprefix("torch."),
                kv_cache_dtype=VLLM[label],
                max_model_len=longest,
                enable_prefix_caching=False,
                disable_log_stats=False,  # which has the times of tokens
                seed=seed,
                **sizes,
            )
            _run(vllm, engine, warm)
            start = time.time()  # vLLM's clock of arrivals
            outputs = _run(vllm, engine, requests)
            seconds = time.time() - start
    finally:
        engine = None
        gc.collect()
        model.to(device)
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    times = [output.metrics for output in outputs]
    between = [
        1e3 * (each.last_token_ts - each.first_token_ts) / (count - 1)
        for each, count in zip(times, counts, strict=True)
        if count > 1
    ]
    first = [each.arrival_time - start + each.first_token_latency for each in times]
    found = figures(seconds, sum(counts), first, between)
    return found | {"cache_bytes": sizes.get("kv_cache_memory_bytes")}


def _run(vllm: Any, engine: Any, requests: Sequence[Request]) -> list[Any]:
    options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    lengths = [vllm.SamplingParams(max_tokens=each.new_tokens, **options) for each in requests]
    prompts = [{"prompt_token_ids": each.prompt} for each in requests]
    outputs: list[Any] = engine.generate(prompts, lengths, use_tqdm=False)
    return outputs

"""Profile steps of decoding: how long they take, how long the device works in them, and on what.

    python scripts/profile_steps.py generate sdpa+static dma_mxfp:kv4+dma-static --out generate-profile.csv
    python scripts/profile_steps.py serve dma_mxfp+int8 dma_mxfp+int4 --cache-gib 24 --out serve-profile.csv

Models, caches and settings are those of ``dma-hf bench generate`` and ``dma-hf bench serve``. A step is from one token
of a sequence to its next; of serving only those count in which every request decodes: after the last prompt, and before
the first request ends. Figures are medians over steps. The device works while a kernel or a copy runs, inside CUDA
graphs too. Recording slows the host, so steps without the profiler come first. Cells about what the profile does not
have, as the device on a CPU, are empty. What the device spent most time on is printed, with the kind it is taken for.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import itertools
import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from statistics import median
from typing import NamedTuple

import torch
from dma_eval.backends import Backend, activate, parse_backends
from dma_eval.bench.generate import UNTIMED_STEPS, GenerateRun, build_model, parse_runs
from dma_eval.bench.serve import RequestSet, check, parse_requests
from dma_eval.environment import need_transformers, versions
from dma_eval.errors import UserError
from dma_eval.models import batching_settings, parse_device
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from dma_hf.integrations.cache_argument import CACHE_ARGUMENT

OURS = r"^(append|decode|prefill|quantize|query_factor|restore|stage_queries)\w*_kernel"
KINDS = {
    "attention and what stores keys and values": rf"{OURS}|attention|flash|fmha|sdpa|index_copy|index_put",
    "products with weights and the sums of their parts": r"nvjet|gemm|gemv|splitk",
    "the rest": "",
}
"""Kinds of kernels, by what their names contain; the first counts."""
GUARDS, REGION, LAUNCH = "TorchDynamo Cache Lookup", "Torch-Compiled Region", "cudaGraphLaunch"
GENERATED_STEPS = 32  # without the profiler, and as many with it
LEAST_STEPS = 3  # of serving
SHOWN_KERNELS = 30


class Span(NamedTuple):
    """What ran from one time to another, in seconds of ``time.perf_counter``."""

    start: float
    end: float
    name: str
    on_device: bool


Profile = tuple[list[float], list[float], list[Span]]
"""Ends of steps without the profiler, ends of steps with it, and what ran while it was on."""


class Recorder:
    """Records the device and, of the host, the thread that starts it and calls of CUDA in all threads."""

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        self._is_cuda = device.type == "cuda"
        self._profiler = profile(activities=activities if self._is_cuda else activities[:1])

    def start(self) -> None:
        self._profiler.start()
        with record_function("both clocks"):
            self._marked = time.perf_counter()

    def stop(self) -> list[Span]:
        """Return what was recorded.

        Raises:
            RuntimeError: That has nothing of a CUDA device.
        """
        self._profiler.stop()
        events = self._profiler.events()  # type: ignore[no-untyped-call]
        zero = self._marked - next(1e-6 * each.time_range.end for each in events if each.name == "both clocks")
        spans = []
        for each in events:
            on_device = each.device_type != DeviceType.CPU
            if not (on_device and each.is_user_annotation):  # there it is a range's kernels and what is between them
                start, end = zero + 1e-6 * each.time_range.start, zero + 1e-6 * each.time_range.end
                spans.append(Span(start, end, each.name, on_device))
        if self._is_cuda and not any(span.on_device for span in spans):
            raise RuntimeError("the profiler saw nothing on the device; see whether CUPTI works and is not in use")
        return spans


class Steps(BaseStreamer):  # type: ignore[misc]
    """Notes when ``generate`` has its tokens, and records the last of its steps."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._times: list[float] = []
        self._first = 1 + UNTIMED_STEPS  # the prompt is put before all tokens
        self._last = self._first + GENERATED_STEPS
        self.new_tokens = self._last + 1 + GENERATED_STEPS

    def put(self, value: torch.Tensor) -> None:
        self._times.append(time.perf_counter())
        if len(self._times) == self._last + 1:
            self._recorder.start()

    def end(self) -> None:
        self.plain, self.recorded = self._times[self._first : self._last + 1], self._times[self._last + 1 :]
        self.spans = self._recorder.stop()


def covered(spans: Iterable[Span], steps: Sequence[tuple[float, float]]) -> list[float]:
    """Return for how long at least one of the spans goes on during each step."""
    union: list[tuple[float, float]] = []
    for start, end, *_ in sorted(spans):
        if union and start <= union[-1][1]:
            start, end = union[-1][0], max(union.pop()[1], end)
        union.append((start, end))
    return [sum((max(0.0, min(e, end) - max(s, start)) for s, e in union), 0.0) for start, end in steps]


@cache
def kind_of(kernel: str) -> str:
    """Return which of ``KINDS`` a kernel is."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE))


def figures(plain: Sequence[float], recorded: Sequence[float], spans: Sequence[Span]) -> dict[str, str]:
    """Return cells, by the ends of steps without the profiler and of steps with it, and by what ran in those."""
    steps = list(itertools.pairwise(recorded))
    seen = [span for span in spans if span.end > recorded[0] and span.start < recorded[-1]]
    device = [span for span in seen if span.on_device]

    def host(*names: str) -> list[float]:
        return covered((span for span in seen if not span.on_device and span.name.startswith(names)), steps)

    works, launches = covered(device, steps), host(LAUNCH)
    kinds = {kind: covered((span for span in device if kind_of(span.name) == kind), steps) for kind in KINDS}
    seconds = {
        "a step, without the profiler": [end - start for start, end in itertools.pairwise(plain)],
        "a step, in the profile": [end - start for start, end in steps],
        "the device works": works,
        **{f"of that {kind}": each for kind, each in kinds.items()},
        "the host in Dynamo's guards": host(GUARDS),
        "the host in the compiled region, but not launching": list(map(operator.sub, host(REGION, LAUNCH), launches)),
        "the host launches the graph": launches,
    }
    cells = {f"{what}, ms": f"{1e3 * median(each):.2f}" if any(each) else "" for what, each in seconds.items()}
    share = median(inside / (end - start) for inside, (start, end) in zip(works, steps, strict=True))
    return {"steps": str(len(steps)), **cells, "the device works, % of a step": f"{100 * share:.1f}" if share else ""}


@torch.inference_mode()
def profile_generate(model: PreTrainedModel, run: GenerateRun, context: int) -> Profile:
    """Generate after a random prompt."""
    torch.compiler.reset()
    activate(model, run.backend)
    steps = Steps(Recorder(model.device))
    prompt = torch.randint(model.config.vocab_size, (1, context), device=model.device)
    model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        **{CACHE_ARGUMENT: run.make_cache(model, context + steps.new_tokens)},
        max_new_tokens=steps.new_tokens,
        do_sample=False,
        streamer=steps,
    )
    return steps.plain, steps.recorded, steps.spans


def profile_serve(model: PreTrainedModel, backend: Backend, requests: RequestSet, gib: float | None) -> Profile:
    """Answer requests twice, with other prompts each time, since pages may be shared.

    Raises:
        RuntimeError: One failed.
        UserError: They decode together for too few steps.
    """

    def answer(seed: int) -> list[float]:
        outputs = model.generate_batch(
            [each.prompt for each in requests.draw(seed, model.config.vocab_size)],
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=batching_settings(model, gib),
            max_new_tokens=requests.new[1],
            record_timestamps=True,
            persistent_manager=True,
        )
        times = [output.timestamps for output in outputs.values() if output.error is None]
        if len(times) < requests.count:
            raise RuntimeError(f"{requests.count - len(times)} of {requests.count} requests failed, as the log says")
        return steady(times)

    gc.collect()  # the manager of the backend before, and its graphs, are cycles
    activate(model, backend)
    recorder = Recorder(model.device)
    try:
        plain = answer(seed=1)
        recorder.start()
        return plain, answer(seed=0), recorder.stop()
    finally:
        model.destroy_cached_continuous_batching_manager()


def steady(times: Sequence[Sequence[float]]) -> list[float]:
    """Return those of the first request's times of tokens at which all requests decode.

    Raises:
        UserError: They are too few.
    """
    first, last = max(each[0] for each in times), min(each[-1] for each in times)
    found = [moment for moment in times[0] if first <= moment <= last]
    if len(found) <= LEAST_STEPS:
        raise UserError(f"--requests: expected {LEAST_STEPS} steps in which all decode, got fewer; ask for more tokens")
    return found


def profile_all(args: argparse.Namespace) -> None:
    """Make the model, profile one run or backend after another, and write the table after each."""
    device = parse_device(args.device)
    torch.manual_seed(0)
    model = build_model(args.shape, device, torch.bfloat16, args.layers)
    profiles: dict[str, Callable[[], Profile]]
    if args.command == "serve":
        need_transformers("5.23", "serve")
        (requests,) = parse_requests([args.requests])
        check(model, [requests], args.cache_gib)
        profiles = {
            each.label: partial(profile_serve, model, each, requests, args.cache_gib)
            for each in parse_backends(args.runs)
        }
    else:
        profiles = {each.label: partial(profile_generate, model, each, args.context) for each in parse_runs(args.runs)}
    facts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        **versions(("torch", "triton", "transformers")),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": f"{args.shape}, {model.config.num_hidden_layers} layers, bfloat16",
        "tokens": args.requests if args.command == "serve" else f"1x{args.context}",
    }
    columns: dict[str, dict[str, str]] = {}
    for label, measure in profiles.items():
        plain, recorded, spans = measure()
        columns[label] = facts | figures(plain, recorded, spans)
        rows = ([what, *(cells[what] for cells in columns.values())] for what in columns[label])
        with open(args.out, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([["what", *columns], *rows])
        print(f"{label}, in the steps of the profile:")
        microseconds: Counter[str] = Counter()
        for span in spans:
            if span.on_device and recorded[0] <= span.start < recorded[-1]:
                microseconds[span.name] += round(1e6 * (span.end - span.start))
        for name, spent in microseconds.most_common(SHOWN_KERNELS):
            print(f"{spent:10,} us  {kind_of(name):50} {name[:120]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("generate", "serve"))
    parser.add_argument("runs", nargs="+", help="ATTENTION+CACHE of generate, backends of serve; as for dma-hf bench")
    parser.add_argument("--out", required=True, help="CSV file")
    parser.add_argument("--shape", default="llama-3.1-8b", help="as for dma-hf bench (default: llama-3.1-8b)")
    parser.add_argument("--layers", type=int, help="of the model (default: as many as the shape has)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--context", type=int, default=8192, help="tokens of generate's prompt (default: 8192)")
    parser.add_argument("--requests", default="64x4096+64", help="of serve, COUNTxPROMPT+NEW (default: 64x4096+64)")
    parser.add_argument("--cache-gib", type=float, help="memory for pages of serve (default: most of what is free)")
    args = parser.parse_args()
    try:
        profile_all(args)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

"""``dma-hf bench``: the speed of attention alone, of ``generate``, and of many requests at once, side by side.

Every command writes its JSON file after each measurement, so an interruption keeps the results so far.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dma_eval import console, options
from dma_eval.bench.results import DecodeReport, GenerateReport, PrefillReport, ServeReport, UrlReport
from dma_eval.commands.bench_options import (
    CPU_REQUESTS,
    REQUESTS,
    BenchOptions,
    DecodeOptions,
    GenerateOptions,
    PrefillOptions,
    ServeOptions,
)
from dma_eval.environment import need_transformers, portable
from dma_eval.errors import UserError
from dma_eval.files import parse, write_json
from dma_eval.names import DECODE_PEERS, PREFILL_PEERS, SERVE_PEERS, check_compared, check_names, check_runs
from dma_eval.results import Results, here_and_now

if TYPE_CHECKING:
    import torch

    from dma_eval.load.models import LoadedModel
    from dma_eval.show.pages import Table

Report = PrefillReport | DecodeReport | GenerateReport | ServeReport
Plot = Callable[[Any, str, Path], None]
"""Draws results below a title, and writes the file."""


def time_prefill(args: PrefillOptions) -> int:
    """Time prefill attention: SDPA, other packages and dma_mxfp on the same inputs. Quantization is counted.

    Inputs are random normal numbers. With --inputs they come from a real model, in its own heads or embedded in wider
    ones. Only real attention has tiles that a skip_threshold can skip. The table shows medians of interleaved calls. On
    a CUDA device it also shows isolated calls, at the clock that the power limit allows. Errors are relative to fp64 on
    sampled rows. Random inputs are also measured with two outlier key channels. The JSON file is written after every
    shape. Exit code 1 if no implementation ran on some shape, 2 for invalid input. The default takes several minutes on
    an H200; --shape, --attn and --seconds shorten it.

    Examples:
    dma-hf bench prefill --json prefill.json --plot prefill.png
    dma-hf bench prefill --attn sdpa dma_mxfp:balanced dma_mxfp:my.toml --shape 1x16384:32/8:128
    dma-hf bench prefill --attn sdpa fa3 fa3:fp8 dma_mxfp:balanced --shape 1x8192:32/8:128 1x16384:32/8:64:full
    dma-hf bench prefill --inputs HuggingFaceTB/SmolLM2-135M --data book.txt --length 8192 --head-dim 64 128 --layers 14
    dma-hf bench prefill --device cpu --shape 1x256:4/2:64
    """
    options.prepare_files(**_files(args))
    check_compared(args.attn, "--attn", PREFILL_PEERS)
    _check_dtype(args)
    _check_inputs(args)
    options.check_inputs(args.inputs, args.data, "--inputs")
    with console.starting():
        from dma_eval.bench import prefill
        from dma_eval.bench.capture import captured_calls
        from dma_eval.bench.shown import plot_prefill, prefill_tables
        from dma_eval.load.models import parse_device

    backends = prefill.parse_implementations(args.attn or prefill.default_names(parse_device(args.device)))
    reader = None if args.inputs is None else _load_reader(args, "inputs")
    device, dtype, facts = _look(args)
    if reader is not None:
        captured = captured_calls(
            *reader, str(args.data), args.length, args.head_dim, batch=args.batch, layers=args.layers, seed=args.seed
        )
        found = (prefill.measure_layers(s, inputs, backends, seconds=args.seconds) for s, inputs in captured)
    else:
        shapes = args.shapes_on(device)
        found = (prefill.measure_shape(s, backends, device, dtype, seconds=args.seconds) for s in shapes)
    report = PrefillReport(**facts, results=[])
    _record(args, report, report.results, chain.from_iterable(found))
    title = f"Prefill attention on {report.device.name}, {args.dtype}"
    return _finish(args, report, title, prefill_tables(report.results), plot_prefill)


def _check_dtype(args: BenchOptions) -> None:
    if args.dtype == "float32":
        raise UserError("--dtype: expected bfloat16 or float16, got float32")


def _check_inputs(args: PrefillOptions) -> None:
    """Check that options of random inputs and of a model's inputs are not mixed.

    Raises:
        UserError: They are, or --inputs lacks a text or a length.
    """
    if args.inputs is None:
        if extra := _given(args, "data", "length", "batch", "head_dim", "layers", "yarn"):
            raise UserError(f"{', '.join(extra)}: only with --inputs, which names the model that reads the text")
        return
    if args.shape:
        raise UserError("--inputs excludes --shape: the model's layers decide; give --length and --batch")
    if missing := [f"--{name}" for name in ("data", "length") if not getattr(args, name)]:
        raise UserError(f"--inputs also needs {' and '.join(missing)}")


def _given(args: BenchOptions, *names: str) -> list[str]:
    """Return those of the options that differ from their defaults."""
    defaults = type(args)()
    given = (name for name in names if getattr(args, name) != getattr(defaults, name))
    return [f"--{name.replace('_', '-')}" for name in given]


def _load_reader(args: PrefillOptions | GenerateOptions, option: str) -> tuple[LoadedModel, torch.Tensor]:
    """Load the model that an option names, and tokenize the text."""
    from dma_eval.load.data import load_text, tokenize
    from dma_eval.load.models import load_model

    assert args.data is not None  # which every command has checked
    name = getattr(args, option)
    with console.working(f"Loading {name}"):
        text = load_text(args.data)
        loaded = load_model(name, dtype=args.dtype, device=args.device, yarn=args.yarn, option=f"--{option}")
        return loaded, tokenize(loaded.tokenizer, text.content)


def time_decode(args: DecodeOptions) -> int:
    """Time one step of decoding: SDPA on 16-bit caches and dma_mxfp on packed ones.

    Medians of interleaved steps, called from Python and, on a CUDA device, replayed as CUDA graphs. A step of dma_mxfp
    stores the new key and attends. The JSON file is written after every shape. Exit code 1 if no implementation ran on
    some shape, 2 for invalid input.

    Examples:
    dma-hf bench decode --json decode.json
    dma-hf bench decode --size 1x131072 8x32768 --heads 32/8 --head-dim 128
    dma-hf bench decode --cache sdpa dma_mxfp:balanced+int4 dma_mxfp:my.toml+int8 --size 1x32768
    dma-hf bench decode --device cpu --size 2x300 --heads 4/2 --head-dim 64
    """
    options.prepare_files(**_files(args))
    check_compared(args.cache, "--cache", DECODE_PEERS)
    _check_dtype(args)
    with console.starting():
        from dma_eval.bench import decode
        from dma_eval.bench.shown import decode_tables
        from dma_eval.bench.timing import copy_bandwidth

    backends = decode.parse_implementations(args.cache or decode.default_names())
    device, dtype, facts = _look(args)
    shapes = args.shapes_on(device)
    found = (decode.measure_shape(shape, backends, device, dtype, seconds=args.seconds) for shape in shapes)
    copy = copy_bandwidth(device) if device.type == "cuda" else None
    report = DecodeReport(**facts, copy_bytes_per_second=copy, results=[])
    _record(args, report, report.results, chain.from_iterable(found))
    return _finish(args, report, "", decode_tables(report.results, copy))


def time_generate(args: GenerateOptions) -> int:
    """Time generate: seconds to the first token, tokens per second, memory.

    Each run calls generate as a user does, and times a later call. Without --model the weights are random, which
    affects only tile skipping. The JSON file is written after every run.
    Exit code 1 if no run worked at some context, 2 for invalid input.

    Examples:
    dma-hf bench generate --json generate.json
    dma-hf bench generate --context 32768 --run sdpa+dynamic dma_mxfp+int8 dma_mxfp+int4 --longest
    dma-hf bench generate --context 131072 --run sdpa+static dma_mxfp+int4 --weights fp8
    dma-hf bench generate --model HuggingFaceTB/SmolLM2-135M --data book.txt --yarn 4 --context 32000
    dma-hf bench generate --device cpu --shape tiny --dtype float32 --run sdpa+dynamic dma_mxfp+int4
    """
    options.prepare_files(**_files(args))
    check_runs(args.runs)
    if args.model is None and (args.data or args.yarn):
        raise UserError("--data and --yarn need --model; without it prompts are random")
    if args.model is not None and (args.shape or not args.data):
        raise UserError("--model needs --data, a text for the prompts, and excludes --shape")
    options.check_inputs(args.model, args.data)
    with console.starting():
        from dma_eval.bench import generate
        from dma_eval.bench.shown import generate_tables
        from dma_eval.load.data import leading_tokens

    runs = generate.parse_runs(args.runs or generate.default_runs())
    device, dtype, facts = _look(args)
    if args.longest and device.type != "cuda":
        raise UserError("--longest needs a CUDA device, because a CPU has no clear limit of memory")
    contexts = args.contexts_on(device)
    name, text = args.name_on(device), None
    begins_with: list[str] = []
    if args.model is None:
        with console.working(f"Making {name}"):
            model = generate.build_model(name, device, dtype)
    else:
        loaded, text = _load_reader(args, "model")
        for context in contexts:
            loaded.check_positions(context + args.new_tokens, "--context with --new-tokens")
        model = generate.never_stopping(loaded.model)
        begins_with = loaded.tokenizer.convert_ids_to_tokens(leading_tokens(loaded.tokenizer))
    parameters = model.num_parameters()
    if args.weights is not None:
        with console.working("Quantizing the weights"):
            generate.quantize_weights(model)
    report = GenerateReport(
        **facts,
        model=portable(name),
        data=None if args.data is None else portable(args.data),
        begins_with=begins_with,
        **{key: getattr(args, key) for key in ("yarn", "weights", "batch", "new_tokens")},
        parameters=parameters,
        weight_bytes=generate.weight_bytes(model),
        results=[],
        longest=[],
    )
    how = {"batch": args.batch, "new_tokens": args.new_tokens, "prefix": len(begins_with)}
    found = generate.measure(model, contexts, runs, text=text, **how)
    _record(args, report, report.results, found)
    if args.longest:
        _record(args, report, report.longest, generate.longest_contexts(model, runs, args.batch))
    weights = f"{args.weights or args.dtype} weights of {report.weight_bytes / 2**30:.1f} GiB"
    title = f"{report.model}, {weights}, batch {args.batch}, {report.device.name}"
    return _finish(args, report, title, generate_tables(report, title))


def time_serve(args: ServeOptions) -> int:
    """Time many requests at once: new tokens per second, waiting times, requests at once.

    Transformers' continuous batching answers them, as in `generate_batch` and `dma-hf serve --continuous-batching`.
    Random weights are as fast as trained ones. Eight warm-up requests before each run are not counted. In the table,
    "first" is the time to the first token, including waiting, and "between" is the time between two tokens. Both are
    medians and 99th percentiles. vLLM reports only the mean "between" of each request. "at once" is the largest number
    of requests that had pages at the same time. "per token" is the memory of a token in pages, and "per request" the
    memory of a request outside of pages. The JSON file is written after every run. Exit code 1 if a backend failed, 2
    for invalid input.

    Examples:
    dma-hf bench serve --json serve.json --plot serve.png
    dma-hf bench serve --requests 256x512-4096+64-256 --attn dma_mxfp dma_mxfp+int8 dma_mxfp+int4 --cache-gib 16
    dma-hf bench serve --requests 32x2048+64 --attn vllm vllm:fp8 dma_mxfp+int8 dma_mxfp+int4 --cache-gib 10
    dma-hf bench serve --model meta-llama/Llama-3.1-8B --requests 32x2048+64
    dma-hf bench serve --device cpu --shape tiny --dtype float32 --requests 8x64-512+16-32
    dma-hf bench serve --url http://localhost:8000/v1 --requests 64x2048+64 --rate 1 4 16 --json served.json
    """
    options.prepare_files(**_files(args))
    if args.url is not None:
        return _time_url(args)
    if given := _given(args, "rate", "tokenizer", "extra_body"):
        raise UserError(f"{', '.join(given)}: only with --url")
    check_names(args.attn, others=SERVE_PEERS)
    if args.model is not None and (args.shape or args.layers):
        raise UserError("--model excludes --shape and --layers; give one or the other")
    options.check_inputs(args.model, None)
    with console.starting():
        need_transformers("5.18", "bench serve")
        from dma_eval.bench import serve
        from dma_eval.bench.generate import build_model, weight_bytes
        from dma_eval.bench.requests import parse_requests
        from dma_eval.bench.shown import plot_serve, serve_table
        from dma_eval.load.models import load_model

    backends = serve.parse_served(args.attn)
    device, dtype, facts = _look(args)
    sets = parse_requests(args.requests or (REQUESTS if device.type == "cuda" else CPU_REQUESTS))
    name = args.name_on(device)
    with console.working(f"{'Making' if args.model is None else 'Loading'} {name}"):
        if args.model is None:
            model = build_model(name, device, dtype, args.layers)
        else:
            model = load_model(name, dtype=args.dtype, device=str(device)).model
    serve.check(model, sets, args.cache_gib)
    report = ServeReport(
        **facts,
        model=portable(name),
        layers=model.config.get_text_config().num_hidden_layers,
        parameters=model.num_parameters(),
        weight_bytes=weight_bytes(model),
        cache_gib=args.cache_gib,
        results=[],
    )
    found = serve.measure(model, sets, backends, seed=args.seed, cache_gib=args.cache_gib, is_compiled=args.compile)
    _record(args, report, report.results, found)
    room = "" if args.cache_gib is None else f", cache of {args.cache_gib:g} GiB"
    title = f"{report.model}, {report.layers} layers, {args.dtype}, {report.device.name}{room}"
    code = _finish(args, report, title, [serve_table(report.results, title)], plot_serve)
    return console.FAILED if any(result.failure is not None for result in report.results) else code


def _time_url(args: ServeOptions) -> int:
    """Measure a server from outside.

    Raises:
        UserError: An option is only for models in this process, or openai is not installed.
    """
    if given := _given(args, "shape", "layers", "cache_gib", "compile", "plot", "attn", "dtype", "device"):
        raise UserError(f"--url excludes {', '.join(given)}: the server has its own model")
    if find_spec("openai") is None:
        raise UserError("--url needs openai, not installed here: pip install 'dma-hf[serve]'")
    try:
        extra_body = parse(dict[str, Any], args.extra_body.encode())
    except ValueError as error:
        raise UserError(f"--extra-body: expected a JSON object, got {args.extra_body!r}") from error
    with console.starting():
        from dma_eval.bench.requests import parse_requests
        from dma_eval.bench.serve_url import Target
        from dma_eval.bench.shown import url_table

    sets = parse_requests(args.requests or REQUESTS)
    assert args.url is not None
    target = Target(args.url, args.model, args.tokenizer, extra_body)
    report = UrlReport(
        **here_and_now(), seed=args.seed, url=args.url, model=portable(target.model), extra_body=extra_body, results=[]
    )
    _record(args, report, report.results, target.measure(sets, args.rate or [math.inf], args.seed))
    console.print_table(url_table(report.results, f"{target.model} at {args.url}"))
    for message, count in sum((Counter(result.errors) for result in report.results), Counter()).items():
        console.print_warning(f"{count} request{'s' * (count > 1)} failed: {message}")
    if args.json is not None:
        console.print_wrote(args.json)
    return console.FAILED if any(result.errors for result in report.results) else 0


def _files(args: BenchOptions) -> dict[str, Path | None]:
    """The files that a benchmark may write, by their options."""
    return {name: getattr(args, name, None) for name in ("json", "markdown", "plot")}


def _look(args: BenchOptions) -> tuple[torch.device, torch.dtype, dict[str, Any]]:
    """Seed PyTorch, and return the device, the dtype, and the first fields of the report."""
    import torch

    from dma_eval.bench.timing import look_at
    from dma_eval.load.models import parse_device

    device = parse_device(args.device)
    torch.manual_seed(args.seed)
    with console.working("Looking at the device"):
        facts = {"dtype": args.dtype, "device": look_at(device), "seed": args.seed}
        return device, getattr(torch, args.dtype), facts | here_and_now()


def _record(args: BenchOptions, report: Results, results: list[Any], found: Iterable[Any]) -> None:
    """Append what is found to a list of the report, and write the report after each."""
    for result in found:
        results.append(result)
        if args.json is not None:
            write_json(report, args.json, indent=1)


def _reference_runs(args: BenchOptions, report: Report) -> list[str]:
    """Return a warning that names what the PyTorch reference computed: its speed is not that of the kernels."""
    import torch
    from dma_kernels.runtime.chip import resolve_backend

    from dma_eval.load.models import parse_device

    device, dtype = parse_device(args.device), getattr(torch, args.dtype)
    ran = {result.label: result.config for result in report.results if result.failure is None}
    labels = [
        label
        for label, config in ran.items()
        if config is not None and resolve_backend(config["backend"], device, dtype) == "reference"
    ]
    if not labels:
        return []
    where = f"{device.type}, {args.dtype}"
    way_out = "kernels need a CUDA device, and bfloat16 or float16"
    return [f"{', '.join(labels)} ran in the PyTorch reference, not in the kernels ({where}); {way_out}"]


def _finish(args: BenchOptions, report: Report, title: str, tables: list[Table], plot: Plot | None = None) -> int:
    """Show tables and failures, write and draw them, and name the files. Return 1 if nothing ran somewhere, else 0."""
    from dma_eval.bench.shown import failures, place_of
    from dma_eval.show.pages import Page
    from dma_eval.show.render import page_to_markdown

    files = _files(args)
    page = Page(title, tables, warnings=failures(report.results) + _reference_runs(args, report))
    if files["markdown"] is not None:
        text = page_to_markdown(replace(page, notes=[f"Command: `{report.command}`."]))
        files["markdown"].write_text(text, encoding="utf-8")
    if plot is not None and files["plot"] is not None:
        plot(report.results, title, files["plot"])
    console.print_page(page)
    for path in filter(None, files.values()):
        console.print_wrote(path)
    ran = {place_of(result) for result in report.results if result.failure is None}
    return 0 if all(place_of(result) in ran for result in report.results) else console.FAILED

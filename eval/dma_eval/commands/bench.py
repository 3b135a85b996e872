"""``dma-hf bench``: the speed of a model on this machine, beside SDPA: attention alone, and ``generate``.

The scripts in ``benchmarks`` compare single kernels with those of other packages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dma_eval import config, console
from dma_eval.config import option
from dma_eval.environment import portable
from dma_eval.errors import UserError
from dma_eval.files import check_file
from dma_eval.load.hub import check_inputs
from dma_eval.names import check_runs, check_yarn

DEFAULT_MODEL, CPU_MODEL = "llama-3.1-8b", "tiny"


@dataclass(frozen=True, kw_only=True)
class BenchOptions(config.RunOptions):
    dtype: Literal["bfloat16", "float16", "float32"] = option("bfloat16", help="Data type of what is not quantized.")
    shape: Literal["llama-3.1-8b", "llama-3.2-1b", "tiny"] | None = option(
        None, shown=f"{DEFAULT_MODEL}; on a CPU {CPU_MODEL}", help="Model with random weights."
    )
    model: str | None = option(
        None, "-m", metavar=config.MODEL["metavar"], help="Hub name, local folder, or GGUF file; instead of --shape."
    )
    data: str | None = config.data_option(
        None, "-d", help="Text file or Hub dataset for the prompts of --model.", panel=None
    )
    yarn: float | None = config.yarn_option()
    context: list[int] = option(
        [], metavar="TOKENS...", min=1, shown="8192; on a CPU 256", help="Tokens of the prompt."
    )
    runs: list[str] = option(
        [],
        "--run",
        "-r",
        metavar="ATTENTION+CACHE...",
        shown="sdpa with dynamic and static, flash_attention_3+dynamic if installed, dma_mxfp:balanced with dynamic, "
        "int8 and int4",
        help="What to compare; the first is the reference. Caches: dynamic (Transformers' default); static "
        "(Transformers' static cache, whose steps it compiles on a GPU); int8, int4 (DMACache).",
    )
    batch: int = option(1, min=1, help="Sequences.")
    new_tokens: int = option(48, min=8, help="Tokens to generate in each sequence.")
    weights: Literal["fp8"] | None = option(
        None,
        shown="as --dtype says",
        help="Quantize the weights of linear layers after loading: fp8 (torchao, a scale per row and per token).",
    )
    json: Path | None = config.json_option()


def bench(args: BenchOptions) -> int:
    """Time a model on this machine, beside SDPA: attention of one layer, and generate.

    Attention has the model's heads and random inputs, and is timed over a prompt and in a step over a cache. Each run
    of generate is called as a user calls it, and a later call is timed: seconds to the first token, tokens per second,
    memory. Without --model the weights are random, which affects only tile skipping.
    The default takes a minute or two on an H200. The JSON file is written after every result.
    Exit code 1 if nothing worked at some context, 2 for invalid input.

    Examples:
    dma-hf bench
    dma-hf bench -m HuggingFaceTB/SmolLM2-135M --data book.txt --context 2048 8000 --json bench.json
    dma-hf bench --context 32768 --run sdpa+dynamic dma_mxfp+int8 dma_mxfp+int4
    dma-hf bench --context 131072 --run sdpa+static dma_mxfp+int4 --weights fp8
    dma-hf bench --device cpu --shape tiny --dtype float32 --run sdpa+dynamic dma_mxfp+int4
    """
    check_file(args.json, "--json")
    check_runs(args.runs)
    check_yarn(args.yarn)
    if args.model is None and (args.data or args.yarn):
        raise UserError("--data and --yarn need --model; without it prompts are random")
    if args.model is not None and (args.shape or not args.data):
        raise UserError("--model needs --data, a text for the prompts, and excludes --shape")
    check_inputs(args.model, args.data)
    with console.starting():
        import torch

        from dma_eval.bench import attention, generate
        from dma_eval.bench.results import BenchReport, finish, record, tables
        from dma_eval.bench.timing import look
        from dma_eval.load.data import load_text
        from dma_eval.load.models import load_model

    runs = generate.parse_runs(args.runs or generate.default_runs())
    device, dtype, facts = look(args)
    if args.weights is not None:
        generate.torchao_quantization()  # refused before the model is loaded
    # In ascending order, because a static cache is at least as large as the largest before.
    contexts = sorted(set(args.context or ([8192] if device.type == "cuda" else [256])))
    begins_with: list[str] = []
    if args.model is None or args.data is None:
        name = args.shape or (DEFAULT_MODEL if device.type == "cuda" else CPU_MODEL)
        with console.working(f"Making {name}"):
            model = generate.build_model(name, device, dtype)
        prompts = [torch.randint(model.config.vocab_size, (args.batch, context)) for context in contexts]
    else:
        name = args.model
        with console.working(f"Loading {name}"):
            text = load_text(args.data)
            loaded = load_model(name, dtype=args.dtype, device=args.device, yarn=args.yarn)
            tokens = loaded.tokenize(text.content)
        for context in contexts:
            loaded.check_positions(context + args.new_tokens, "--context with --new-tokens")
        prompts = [generate.text_windows(tokens, args.batch, n, "--context") for n in contexts]
        model, begins_with = generate.never_stopping(loaded.model), tokens.begins_with
    parameters = model.num_parameters()
    if args.weights is not None:
        with console.working("Quantizing the weights"):
            generate.quantize_weights(model)
    report = BenchReport(
        **facts,
        model=portable(name),
        data=None if args.data is None else portable(args.data),
        begins_with=begins_with,
        **{key: getattr(args, key) for key in ("yarn", "weights", "batch", "new_tokens")},
        parameters=parameters,
        weight_bytes=generate.weight_bytes(model),
        attention=[],
        results=[],
    )
    shapes = attention.shapes_of(model, contexts, args.batch)
    record(args.json, report, report.attention, attention.measure_attention(shapes, runs, device, dtype))
    record(args.json, report, report.results, generate.measure(model, prompts, runs, new_tokens=args.new_tokens))
    weights = f"{args.weights or args.dtype} weights of {report.weight_bytes / 2**30:.1f} GiB"
    title = f"{report.model}, {weights}, batch {args.batch}, {report.device.name}"
    return finish(args.json, report, title, tables(report, title), [*report.attention, *report.results])

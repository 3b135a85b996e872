"""The commands that measure quality. Each makes a suite from its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from dma_eval import config, console
from dma_eval.config import REQUIRED, FidelityPart, PerplexityPart, StressPart, Suite, TasksPart, option
from dma_eval.errors import UserError
from dma_eval.files import check_file, check_folder
from dma_eval.load.hub import check_inputs
from dma_eval.names import parse_name

SUITES = ", ".join(config.suite_names())
CHANGES = {"max_windows": ("perplexity", "fidelity", "stress"), "limit": ("tasks",), "batch_size": ("tasks",)}
"""Options that change a suite, and the parts in which they do."""
DEMO = PerplexityPart(contexts=[4096], max_windows=2)


@dataclass(frozen=True, kw_only=True)
class PplOptions(config.QualityOptions):
    context: int | None = config.context_option(None, "-c")
    json: Path | None = config.json_option()


@dataclass(frozen=True, kw_only=True)
class SuiteOptions(config.AllPresetsOptions):
    suite: str = option(REQUIRED, "-s", metavar="NAME|FILE.toml", help=f"{SUITES}, or a TOML file.")
    out: Path = config.out_option(REQUIRED, "-o", help="Folder for the report and every answer.")
    max_windows: int | None = config.windows_option(None, shown="all")
    limit: int | None = config.limit_option()
    batch_size: int | None = config.sequences_option(None, shown="what the suite says")


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    out: Path = config.out_option(Path("dma-demo"), "-o", help="Folder for the report.")


def ppl(args: PplOptions, text: config.TextOptions, part: PerplexityPart) -> int:
    """Compare attention backends: perplexity, divergence from the first one, speed and memory.

    Every backend reads the same tokens with the same weights. After Ctrl-C the command shows and writes the results of
    the finished windows. With --out they are saved, and the same command resumes after them. Exit code 1 if a backend
    failed, 2 for invalid input.

    Examples:
    dma-hf ppl -m HuggingFaceTB/SmolLM2-135M --data Salesforce/wikitext:wikitext-2-raw-v1:test --context 2048
    dma-hf ppl -m model.gguf --data book.txt --attn sdpa dma_mxfp:balanced dma_mxfp:paper --json r.json
    dma-hf ppl -m ./model --data rows.jsonl --column content --attn sdpa dma_mxfp:my.toml --context 8192 --stride 4096
    """
    check_file(args.json, "--json")
    part = replace(part, contexts=[] if args.context is None else [args.context])
    return measure(args, Suite(name="ppl", perplexity=part), text, json_file=args.json)


def fidelity(args: config.QualityOptions, text: config.TextOptions, part: FidelityPart) -> int:
    """Compare attention backends with SDPA in fp32: by token, position and head, and in greedy continuations.

    The reference has the same weights in fp32, whatever --dtype is. Add sdpa to see the loss of the dtype alone. Every
    layer is measured on SDPA's own inputs, so an error belongs to the head that shows it. Exit code 1 if a backend
    failed, 2 for invalid input.

    Examples:
    dma-hf fidelity -m HuggingFaceTB/SmolLM2-135M --data book.txt --context 4096 --max-windows 8 --out run
    dma-hf fidelity -m ./model --data book.txt --attn sdpa dma_mxfp:fp4 --dtype bfloat16 --head-windows 4
    """
    return measure(args, Suite(name="fidelity", fidelity=part), text)


def lm_eval(args: config.QualityOptions, part: TasksPart, tasks: config.TaskFolderOptions) -> int:
    """Compare attention backends on lm-eval tasks: accuracy, paired differences with intervals, flipped answers.

    Every backend answers the same samples in the same order. With --out, every answer is saved, and an interrupted run
    resumes. Under accelerate launch the processes split the samples. Exit code 1 if a backend failed, 2 for invalid
    input.

    Examples:
    dma-hf lm-eval -m HuggingFaceTB/SmolLM2-135M --tasks arc_easy,hellaswag --limit 500 --out run
    dma-hf lm-eval -m ./model --tasks my_task --include-path ./tasks --attn sdpa dma_mxfp:balanced dma_mxfp:fp4
    accelerate launch -m dma_eval lm-eval -m ./model --tasks lambada_openai --out run
    """
    return measure(args, Suite(name="lm-eval", tasks=part), include_path=tasks.include_path)


def stress(args: config.AllPresetsOptions, text: config.TextOptions, part: StressPart) -> int:
    """Compare attention backends on copies of the model (twins) with larger outlier channels.

    The report begins with the outlier channels of the model's own keys and queries. A scale twin multiplies some
    channels of every head and divides the other operand, so it computes the same function. A bias twin has large key
    biases, and is compared with its own exact attention. Exit code 1 if a backend failed, 2 for invalid input.

    Examples:
    dma-hf stress -m meta-llama/Llama-3.2-1B --data Salesforce/wikitext:wikitext-2-raw-v1:test --out run
    dma-hf stress -m model.gguf --data book.txt --attn sdpa dma_mxfp:balanced dma_mxfp:my.toml --context 4096
    """
    return measure(args, Suite(name="stress", stress=part), text)


def suite(args: SuiteOptions, text: config.OptionalTextOptions, tasks: config.TaskFolderOptions) -> int:
    """Run all measurements of a suite: perplexity, fidelity, tasks, stress.

    Results are written to --out after each part, and finished parts are not measured again. Under accelerate launch the
    processes split the samples of tasks. If a part fails, the error is reported and the other parts continue. Exit code
    1 if a part or a backend failed, 2 for invalid input.

    Examples:
    dma-hf suite --suite quick -m HuggingFaceTB/SmolLM2-135M --out run
    accelerate launch -m dma_eval suite --suite standard -m ./model --out run
    dma-hf suite --suite my.toml -m ./model --data book.txt --include-path ./tasks --out run
    """
    suite = config.load_suite(args.suite)
    for name, kinds in CHANGES.items():
        value = getattr(args, name)
        if value is None:
            continue
        changed = {kind: replace(part, **{name: value}) for kind in kinds if (part := getattr(suite, kind)) is not None}
        if not changed:
            raise UserError(f"--{name.replace('_', '-')}: suite {suite.name} measures no {' or '.join(kinds)}")
        suite = replace(suite, **changed)
    return measure(args, suite, text, include_path=tasks.include_path, goes_on=True)


def demo(args: DemoOptions) -> int:
    """Compare SDPA with every preset on a small model that comes with the package, in a minute or two on a CPU.

    Measures perplexity and divergence on a held-out text. Needs no network. Writes results.json, pages, plots and
    configurations to the folder.

    Examples:
    dma-hf demo
    dma-hf demo --out /tmp/report
    """
    assets = resources.files("dma_eval") / "assets"
    with resources.as_file(assets / "demo_model") as model, resources.as_file(assets / "heldout.txt") as file:
        options = config.AllPresetsOptions(model=str(model), dtype="float32", out=args.out)
        return measure(options, Suite(name="demo", perplexity=DEMO), config.TextOptions(data=str(file)))


def measure(
    args: config.QualityOptions,
    suite: Suite,
    text: config.OptionalTextOptions | None = None,
    *,
    include_path: Sequence[Path] = (),
    goes_on: bool = False,
    json_file: Path | None = None,
) -> int:
    """Run a suite, show and write its results, and return the exit code."""
    for name in args.attn:
        parse_name(name)
    if args.out is not None:
        check_folder(args.out)
    if suite.perplexity is not None:  # the model and the text may shorten the default context
        suite.perplexity.check(min(suite.perplexity.contexts, default=config.DEFAULT_CONTEXT))
    check_inputs(args.model, *suite.texts(None if text is None else text.data))
    with console.starting():
        from dma_eval.load.backends import default_names, parse_backends

        backends = parse_backends(args.attn or default_names())  # before slow imports
        from dma_eval.run import Run
    return Run(args, backends, suite, text, include_path).measure(goes_on=goes_on, json_file=json_file)

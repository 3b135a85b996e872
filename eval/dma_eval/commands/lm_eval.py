"""``dma-hf lm-eval``: lm-eval tasks under several attention backends, compared sample by sample."""

from __future__ import annotations

import typer
from rich.markup import escape

from dma_eval import console, options
from dma_eval.commands.shared import join, leave, load

DEFAULT_ATTN = ["sdpa", "dma_mxfp:balanced"]
EPILOG = """
[bold]Examples[/]

dma-hf lm-eval -m HuggingFaceTB/SmolLM2-135M --tasks arc_easy,hellaswag --limit 500 --out run

dma-hf lm-eval -m ./model --tasks my_task --include-path ./tasks --attn sdpa dma_mxfp:balanced dma_mxfp:fp4

accelerate launch -m dma_eval lm-eval -m ./model --tasks lambada_openai --out run
"""


def lm_eval(
    model: options.Model,
    tasks: options.Tasks,
    attn: options.Attn = DEFAULT_ATTN,
    include_path: options.IncludePath = [],  # noqa: B006 (Typer copies it)
    limit: options.Limit = None,
    num_fewshot: options.FewShot = None,
    apply_chat_template: options.ChatTemplate = False,
    batch_size: options.TaskBatchSize = 8,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = 0,
    out: options.Out = None,
    debug: options.Debug = False,
) -> None:
    """Compare attention backends on lm-eval tasks: accuracy, paired differences with intervals, flipped answers.

    Every backend answers the same samples in the same order. With --out, every answer is kept there, and a run that was
    interrupted goes on where it stopped. Started by accelerate launch, the processes split the samples. Exit code 1 if
    a backend failed, 2 for invalid input.
    """
    with console.user_errors(debug):
        with console.starting():
            from dma_eval.backends import parse_backends
            from dma_eval.report import describe_model, make_report
            from dma_eval.run_folder import make_folder, write_run
            from dma_eval.section_pages import task_page
            from dma_eval.task_records import RecordStore
            from dma_eval.tasks import TaskOptions, evaluate_tasks, find_tasks

        processes = join(device, seed)
        if out is not None and processes.is_main:
            make_folder(out)
        backends = parse_backends(attn)
        with console.working("Looking for the tasks"):
            names = find_tasks(tasks, include_path)
        loaded = load(model, processes, dtype, device, device_map, revision, trust_remote_code)
        settings = TaskOptions(
            limit=limit, num_fewshot=num_fewshot, batch_size=batch_size, chat_template=apply_chat_template, seed=seed
        )
        with console.answering() as (on_unit, on_answers):
            section = evaluate_tasks(
                loaded,
                describe_model(loaded),
                names,
                backends,
                settings,
                store=RecordStore(out),
                processes=processes,
                on_unit=on_unit,
                on_answers=on_answers,
            )
        console.print_page(task_page(section))
        if out is not None and processes.is_main:
            seconds = {backend.label: sum(backend.seconds.values()) for backend in section.backends}
            report = make_report(
                loaded, command=console.command_line(), seed=seed, tasks=[section], part_seconds=seconds
            )
            files = write_run(report, out)
            console.print_line(f"\nWrote {escape(', '.join(files))} to {escape(str(out))}/")
        leave()
    if any(backend.failures for backend in section.backends):
        raise typer.Exit(console.BACKEND_FAILED)

"""Command-line options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL_PANEL, TEXT_PANEL, WINDOW_PANEL, OUTPUT_PANEL = "Model", "Text", "Windows", "Output"
TASK_PANEL = "Tasks"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME|FOLDER|FILE.gguf",
        help="Hub name, local folder, or GGUF file.",
        show_default=False,
    ),
]
Attn = Annotated[
    list[str],
    typer.Option(
        "--attn",
        "-a",
        metavar="BACKEND...",
        help="Attention backends to compare; the first is the reference. An attn_implementation of Transformers, or "
        "dma_mxfp:PRESET, or dma_mxfp:FILE.toml; +cache after it reads through a DMACache. Takes several values, and "
        "may be repeated.",
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit on the Hub.", show_default="the main branch", rich_help_panel=MODEL_PANEL),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Let code that comes with the model run.",
        show_default="off",
        rich_help_panel=MODEL_PANEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto, float32, bfloat16 or float16; auto is the checkpoint's own, float32 for GGUF.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda or cuda:N; auto is CUDA if present.", rich_help_panel=MODEL_PANEL)
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        help="Spread the model over several devices: auto, balanced, sequential. Instead of --device.",
        show_default="one device",
        rich_help_panel=MODEL_PANEL,
    ),
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        "-d",
        metavar="FILE|DATASET",
        help="Text file; .json, .jsonl, .csv or .parquet file; or a Hub dataset as NAME, NAME:CONFIG or "
        "NAME:CONFIG:SPLIT.",
        show_default=False,
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        help="Split of the dataset, if --data does not name it.",
        show_default="test; all of a file",
        rich_help_panel=TEXT_PANEL,
    ),
]
Column = Annotated[str, typer.Option(help="The dataset's column of text.", rich_help_panel=TEXT_PANEL)]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        "-c",
        help="Tokens per window.",
        show_default="2048, or the model's maximum if less",
        rich_help_panel=WINDOW_PANEL,
    ),
]
MaxWindows = Annotated[
    int | None, typer.Option(help="Stop after so many windows.", show_default="all", rich_help_panel=WINDOW_PANEL)
]
WindowBatchSize = Annotated[
    int, typer.Option("--batch-size", help="Windows per forward pass.", rich_help_panel=WINDOW_PANEL)
]
Tasks = Annotated[
    list[str],
    typer.Option(
        "--tasks",
        "-t",
        metavar="TASK...",
        help="Tasks or groups of lm-eval, or YAML files. Takes several values, with commas or spaces between them.",
        show_default=False,
    ),
]
IncludePath = Annotated[
    list[Path],
    typer.Option(
        "--include-path",
        metavar="FOLDER...",
        help="Folders with task YAMLs of your own.",
        show_default="none",
        rich_help_panel=TASK_PANEL,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1, help="Take the first so many samples of each task.", show_default="all", rich_help_panel=TASK_PANEL
    ),
]
FewShot = Annotated[
    int | None,
    typer.Option(
        "--num-fewshot",
        min=0,
        help="Examples in each prompt.",
        show_default="what each task says",
        rich_help_panel=TASK_PANEL,
    ),
]
ChatTemplate = Annotated[
    bool,
    typer.Option(
        "--apply-chat-template",
        help="Put prompts through the model's chat template.",
        show_default="off",
        rich_help_panel=TASK_PANEL,
    ),
]
TaskBatchSize = Annotated[
    int, typer.Option("--batch-size", min=1, help="Sequences per forward pass.", rich_help_panel=TASK_PANEL)
]
Seed = Annotated[
    int, typer.Option(min=0, max=2**32 - 1, help="Seed of PyTorch's random numbers.", rich_help_panel=MODEL_PANEL)
]
Json = Annotated[
    Path | None,
    typer.Option("--json", help="Write all results as JSON.", show_default="not written", rich_help_panel=OUTPUT_PANEL),
]
Markdown = Annotated[
    Path | None,
    typer.Option(
        "--markdown", help="Write a readable report.", show_default="not written", rich_help_panel=OUTPUT_PANEL
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        help="Write the plots, as .png, .svg or .pdf.",
        show_default="not written",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="Folder for the whole report: results.json, a page, plots, configurations.",
        show_default="not written",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", show_default="off", rich_help_panel=OUTPUT_PANEL),
]

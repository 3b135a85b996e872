"""Command-line options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL_PANEL, TEXT_PANEL, WINDOW_PANEL, OUTPUT_PANEL = "Model", "Text", "Windows", "Output"

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
        "dma_mxfp:PRESET, or dma_mxfp:FILE.toml. Takes several values, and may be repeated.",
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
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", show_default="off", rich_help_panel=OUTPUT_PANEL),
]

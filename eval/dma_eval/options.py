"""Options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dma_eval.command import REQUIRED, option
from dma_eval.load import hub
from dma_eval.load.data import text_file
from dma_eval.names import check_device, check_loading, check_yarn, parse_source

DEFAULT_ATTN = ["sdpa", "dma_mxfp:balanced"]
MODEL: dict[str, Any] = {"metavar": "NAME|FOLDER|FILE.gguf", "help": "Hub name, local folder, or GGUF file."}
OUTPUT, TASKS, TEXT = "Output", "Tasks", "Text"
"""Sections of the help."""


BACKENDS = (
    "Attention backends to compare; the first is the reference. An attn_implementation of Transformers, "
    "dma_mxfp:PRESET, or dma_mxfp:FILE.toml; +int8 or +int4 reads through a DMACache. Takes several values."
)
DATA = "Text file; .json, .jsonl, .csv or .parquet file; or a Hub dataset, NAME, NAME:CONFIG or NAME:CONFIG:SPLIT."
YARN = "Extend the model's positions by this factor with YaRN."
yarn_option = partial(option, None, metavar="FACTOR", help=YARN)


def attn_option(default: list[str], shown: str | bool = True) -> Any:
    """The backends to compare."""
    return option(default, "-a", metavar="BACKEND...", shown=shown, help=BACKENDS)


def data_option(default: Any = REQUIRED, help: str = DATA, panel: str | None = TEXT) -> Any:
    """The text."""
    return option(default, "-d", metavar="FILE|DATASET", panel=panel, help=help)


def out_option(default: Any, help: str, metavar: str = "FOLDER", shown: str | bool = True) -> Any:
    """The folder, or file, to write."""
    return option(default, "-o", metavar=metavar, panel=OUTPUT, help=help, shown=shown)


json_option = partial(option, None, metavar="FILE", panel=OUTPUT, help="Write all results as JSON.")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The device and the random seed."""

    device: str = option("auto", help="auto, cpu, cuda or cuda:N; auto is CUDA if present.")
    seed: int = option(0, min=0, max=2**32 - 1, help="Seed of PyTorch's random numbers.")

    def __post_init__(self) -> None:
        """Check what needs no imports."""
        check_device(self.device)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(RunOptions):
    """How a model is loaded. Subclasses name the model."""

    model: str = ""
    revision: str | None = option(None, shown="the main branch", help="Branch, tag or commit on the Hub.")
    trust_remote_code: bool = option(False, help="Allow code that comes with the model to run.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", help="Data type of the weights; auto is the checkpoint's own, float32 for GGUF."
    )
    device_map: str | None = option(
        None, help="Spread the model over several devices: auto, balanced, sequential. Instead of --device."
    )
    yarn: float | None = yarn_option()

    def __post_init__(self) -> None:
        """Check what needs no imports."""
        super().__post_init__()
        check_yarn(self.yarn)
        check_loading(self.model, device=self.device, device_map=self.device_map, revision=self.revision)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions):
    """The model, named by an option."""

    model: str = option(REQUIRED, "-m", **MODEL)


@dataclass(frozen=True, kw_only=True)
class QualityOptions(ModelOptions):
    """Options of every command that compares backends on a model."""

    attn: list[str] = attn_option(DEFAULT_ATTN)
    out: Path | None = out_option(
        None,
        "Folder for the whole report: results.json, pages, plots, configurations. Finished parts in it are not "
        "measured again.",
    )


@dataclass(frozen=True, kw_only=True)
class AllPresetsOptions(QualityOptions):
    """The same, with every preset by default."""

    attn: list[str] = attn_option([], shown="sdpa and every preset")


@dataclass(frozen=True, kw_only=True)
class OptionalTextOptions:
    """An optional text."""

    data: str | None = data_option(None)
    split: str | None = option(
        None, panel=TEXT, shown="test; all of a file", help="Split of the dataset, if --data does not name it."
    )
    column: str = option("text", panel=TEXT, help="The dataset's column of text.")


@dataclass(frozen=True, kw_only=True)
class TextOptions(OptionalTextOptions):
    """The text to read."""

    data: str = data_option()


@dataclass(frozen=True, kw_only=True)
class TaskFolderOptions:
    """Folders with tasks that do not come with lm-eval."""

    include_path: list[Path] = option([], metavar="FOLDER...", panel=TASKS, help="Folders with your own task YAMLs.")


def check_inputs(model: str | None, data: str | None, option: str = "--model") -> None:
    """Check before slow imports that a model and a text exist. Those of the Hub need a network, or its cache."""
    path = None if model is None else parse_source(model, option).path
    is_on_hub = path is not None and not Path(path).is_dir()
    has_remote_text = data is not None and text_file(data) is None
    if is_on_hub or has_remote_text:
        hub.prepare(path if is_on_hub else None, option)

"""What this package reads and sets in Transformers' objects beyond their public interfaces, and the supported versions.

It imports nothing else of this package, so every module may use it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, masking_utils

SUPPORTED = ">=5.18,<5.25"
"""The range in ``pyproject.toml``. Continuous integration tests both ends."""


class UnsupportedTransformersError(RuntimeError):
    """A private interface of the installed Transformers differs from the supported versions."""


def _unsupported(interface: str, difference: str) -> UnsupportedTransformersError:
    return UnsupportedTransformersError(
        f"Transformers {transformers.__version__} is installed, where {interface} {difference}; dma-hf supports "
        f"transformers{SUPPORTED}: pip install 'transformers{SUPPORTED}'"
    )


def check_version(interface: str) -> None:
    """Raise if the installed Transformers is older or newer than those that continuous integration tests."""
    oldest, too_new = (tuple(map(int, re.findall(r"\d+", bound))) for bound in SUPPORTED.split(","))
    if not oldest <= tuple(map(int, transformers.__version__.split(".")[:2])) < too_new:
        raise _unsupported(interface, "has not been tested")


@contextmanager
def private_imports() -> Iterator[None]:
    """Turn a failed import from Transformers within a ``with`` block into :class:`UnsupportedTransformersError`."""
    try:
        yield
    except ImportError as error:
        if not str(error.name).startswith("transformers"):
            raise
        raise _unsupported(str(error.name), f"cannot be imported as expected ({error})") from error


# ---- names of attention implementations. The public ``set_attn_implementation`` refuses names that only continuous
# batching knows, and reloads kernels from the Hub.


def attention_name(config: PreTrainedConfig) -> Any:
    """Return the name of the attention implementation that the layers of a configuration run, or ``None``."""
    return config._attn_implementation


def decoder_attention(model: PreTrainedModel) -> Any:
    """Return the name of the attention implementation that a model's decoder runs."""
    return attention_name(model.config.get_text_config(decoder=True))


def set_attention_name(config: PreTrainedConfig, name: Any) -> None:
    """Set the name in a configuration and those nested in it."""
    config._attn_implementation = name


def takes_attention_names(model: type[PreTrainedModel]) -> bool:
    """Return whether the layers of a model class look up their attention by its name, or, in a notebook, may do so.

    Transformers reads the source code of the class, which a notebook lacks.
    """
    return bool(model._can_set_attn_implementation()) or not hasattr(sys.modules[model.__module__], "__file__")


def distinct_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Return the configurations of a model's modules and those nested in them, each once, outermost first.

    Some parts of a composite model are plain modules with a copy of a configuration (X-CLIP).
    """
    found: dict[int, PreTrainedConfig] = {}
    pending = [getattr(module, "config", None) for module in model.modules()]
    while pending:
        config = pending.pop(0)
        if not isinstance(config, PreTrainedConfig) or id(config) in found:
            continue
        found[id(config)] = config
        pending.extend(getattr(config, name, None) for name in config.sub_configs)
    return list(found.values())


def rename(model: nn.Module, new: Callable[[Any], Any]) -> list[tuple[PreTrainedConfig, Any]]:
    """Rename the attention of a model's parts, and return the old names for :func:`restore_names`."""
    saved = [(config, attention_name(config)) for config in distinct_configs(model)]
    for config, name in saved:  # outermost first, because the setter also writes to nested ones
        set_attention_name(config, new(name))
    return saved


def restore_names(saved: list[tuple[PreTrainedConfig, Any]]) -> None:
    """Undo :func:`rename`."""
    for config, name in saved:
        set_attention_name(config, name)


# ---- arguments and configurations

_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters

CACHE_ARGUMENT = "cache" if "cache" in _PARAMETERS else "past_key_values"
"""``cache`` in Transformers 5.24 and later, which deprecates ``past_key_values``."""

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the argument with which a caller may pass a cache to ``generate``."""


def commit_of(config: PreTrainedConfig) -> str | None:
    """Return the commit, or ``None`` for a local folder."""
    commit: str | None = getattr(config, "_commit_hash", None)  # set only by `from_pretrained`
    return commit


# ---- collected outputs. Models such as GPT-2 do not pass ``output_attentions`` on to their layers.

with private_imports():
    from transformers.utils.output_capturing import _active_collector


def is_collecting_attentions() -> bool:
    """Return whether the running model collects attention weights with hooks."""
    collected = _active_collector.get()
    return bool(collected) and any(name.endswith("attentions") for name in collected)


def is_output_hook(hook: Any) -> bool:
    """Return whether a forward hook is one of Transformers that only collects requested outputs."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


# ---- what Transformers combines in a mask function: a pattern, a window, and the documents of packed rows. It keeps
# all of it in closures. A function that another release makes in another way is not recognized. Its mask is then dense,
# and tiles do not restart with each document.

_AND = masking_utils.and_masks().__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_PACKED = masking_utils.packed_sequence_mask_function(None).__code__
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # older releases may lack it
_REMAPPED = None if _remap is None else _remap(None, None).__code__


def is_causal_window(mask_function: Callable[..., Any], window: int) -> bool:
    """Return whether a pattern is a causal window of this size, without anything else."""
    parts = _captured(mask_function, _AND).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not masking_utils.causal_mask_function:
        return False
    return bool(_captured(parts[0], _WINDOW).get("sliding_window") == window)


def split_packed(mask_function: Callable[..., Any]) -> tuple[Callable[..., Any], Tensor] | None:
    """Return the pattern within a document, and a number for the document of each token, ``[B, T]``.

    ``None`` means that the function is not that of packed rows.
    """
    parts = _captured(mask_function, _AND).get("mask_functions", ())
    if len(parts) != 2:
        return None
    pattern, packed = parts
    documents = _captured(packed, _PACKED).get("packed_sequence_mask")
    if documents is None:
        return None
    return _captured(pattern, _REMAPPED).get("mask_function", pattern), documents


def _captured(function: Any, code: CodeType | None) -> dict[str, Any]:
    """Return the variables that a function with this code captured, by name; none of another function."""
    if not isinstance(function, FunctionType) or function.__code__ is not code:
        return {}
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(code.co_freevars, cells, strict=True))

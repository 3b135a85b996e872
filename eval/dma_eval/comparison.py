"""One comparison from start to end: text to tokens to windows to measurements to statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from .backends import Backend
from .data import Text, make_windows, tokenize
from .distributed import Processes
from .models import LoadedModel
from .perplexity import check_context, measure
from .results import DataInfo, PerplexitySection
from .summary import position_edges, summarize

DEFAULT_CONTEXT = 2048


def compare(
    loaded: LoadedModel,
    text: Text,
    backends: Sequence[Backend],
    *,
    context: int | None = None,
    stride: int | None = None,
    max_windows: int | None = None,
    batch_size: int = 1,
    processes: Processes | None = None,
    on_start: Callable[[int], None] = lambda passes: None,
    on_pass: Callable[[Backend], None] = lambda backend: None,
) -> PerplexitySection:
    """Measure perplexity and fidelity of every backend on the same tokens.

    Args:
        loaded: The model and its tokenizer.
        text: What to read.
        backends: The backends; the first is the reference.
        context: Tokens per window; 2,048 by default, or the model's maximum where that is less.
        stride: Distance of two windows; ``context`` by default.
        max_windows: Read at most so many windows.
        batch_size: Windows per forward pass.
        processes: The processes that split the windows; one by default. Each must make this call, and gets all results.
        on_start: Called once with the number of window passes to come in this process, or a few more.
        on_pass: Called after each window pass with its backend.

    Raises:
        UserError: An option is out of range, the text is too short, or the model cannot run it.
    """
    if context is None:
        context = min(DEFAULT_CONTEXT, loaded.max_context or DEFAULT_CONTEXT)
    stride = context if stride is None else stride
    input_ids = tokenize(loaded.tokenizer, text.content)
    windows = make_windows(len(input_ids), context, stride, max_windows)
    check_context(loaded, input_ids, context)
    processes = processes or Processes()
    on_start(math.ceil(len(windows) / processes.count) * len(backends))
    measurements, memory_kind = measure(
        loaded.model, input_ids, windows, backends, batch_size=batch_size, processes=processes, on_pass=on_pass
    )
    return PerplexitySection(
        data=describe_text(text, input_ids),
        context=context,
        stride=stride,
        batch_size=batch_size,
        windows=len(windows),
        tokens_scored=sum(window.scored for window in windows),
        memory_kind=memory_kind,
        position_edges=position_edges(context),
        backends=summarize(measurements, windows, context),
    )


def describe_text(text: Text, input_ids: Tensor) -> DataInfo:
    """Facts about a text and its tokens."""
    return DataInfo(
        name=text.name,
        config=text.config,
        split=text.split,
        column=text.column,
        sha256=text.sha256,
        characters=len(text.content),
        tokens=len(input_ids),
    )

"""The results file of ``dma-hf bench generate``: its schema, as dataclasses.

The file is the JSON of a :class:`GenerateReport`: objects have the fields of the dataclasses below under the same
names, and every field is present. ``schema_version`` counts up when a field comes, goes or changes its meaning. Numbers
that do not exist (of a run that failed, or on a CPU) are null.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .speed_results import SpeedReport

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """One attention and cache at one length of context.

    Attributes:
        label: ``ATTENTION+CACHE``, as asked for.
        context: Tokens of the prompt, in each sequence.
        config: The resolved configuration of ``dma_mxfp``; null for any other attention.
        failure: Why it did not run; null if it did. If it did not, the numbers below are null.
        first_token_seconds: From the call of ``generate`` to the first new token.
        step_milliseconds: Median time between two tokens.
        step_milliseconds_fast: The first quartile.
        step_milliseconds_slow: The third quartile.
        steps: Timed intervals between tokens.
        tokens_per_second: New tokens of all sequences, by ``step_milliseconds``.
        speedup: Step time of the context's first run over this one's.
        cache_bytes: What the cache holds.
        peak_bytes: Most memory allocated while generating, weights left out.
    """

    label: str
    context: int
    config: dict[str, Any] | None
    failure: str | None = None
    first_token_seconds: float | None = None
    step_milliseconds: float | None = None
    step_milliseconds_fast: float | None = None
    step_milliseconds_slow: float | None = None
    steps: int | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    cache_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class LongestContext:
    """How many tokens fit.

    Attributes:
        label: ``ATTENTION+CACHE``.
        tokens: The longest context over which one more token could be computed, all sequences of one length; to a
            sixteenth, and not beyond the model's positions. The cache is filled without computing the context.
    """

    label: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class GenerateReport(SpeedReport):
    """Everything that one run measured.

    Attributes:
        model: The shape's name, or that of a real model.
        parameters: How many the model has.
        weight_bytes: What its weights take.
        batch: Sequences.
        new_tokens: Generated in each sequence.
        results: By context, then in the order asked for.
        longest: If it was asked for.
    """

    schema_version: int = SCHEMA_VERSION
    model: str
    parameters: int
    weight_bytes: int
    batch: int
    new_tokens: int
    results: list[GenerateResult]
    longest: list[LongestContext]

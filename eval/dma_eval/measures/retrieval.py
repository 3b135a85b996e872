"""Retrieval from long prompts: a sentence hidden in prose, or one of many key-value pairs.

Each prompt ends by repeating the beginning of the hidden passage. Its answer is the rest of that passage. The answer is
scored in one forward pass. It counts as found if the model would generate it greedily.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from dma_eval.config import RetrievalPart
from dma_eval.errors import UserError, one_line
from dma_eval.load.backends import Backend, activate
from dma_eval.load.data import Text, leading_tokens, tokenize
from dma_eval.load.reading import continuation_log_probs, log_likelihood
from dma_eval.results import RetrievalBackend, RetrievalCell, RetrievalKind, RetrievalSection
from dma_eval.session import Session

SHORTEST = 1024
PLACES = ("Oslo", "Lima", "Cairo", "Delhi", "Paris", "Quito", "Tokyo", "Dakar")
NEEDLE = "\n\nThe secret number of {place} is"
DIGITS = "0123456789abcdef"
BATCH_TOKENS = 16_384  # of questions in one pass


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]  # the prompt
    answer: list[int]  # the tokens that should follow


def default_lengths(max_context: int | None) -> list[int]:
    """Return the four largest powers of two from 1,024 to the model's maximum, or that if it is less."""
    limit = max_context or 4 * SHORTEST
    lengths = [SHORTEST * 2**i for i in range(12) if SHORTEST * 2**i <= limit]
    return lengths[-4:] or [limit]


def measure_retrieval(
    session: Session, kind: RetrievalKind, part: RetrievalPart, text: Text | None = None
) -> RetrievalSection:
    """Ask every backend the same questions. ``kind`` is ``needle``, which needs a text, or ``kv``."""
    loaded = session.loaded
    lengths = sorted(set(part.lengths)) or default_lengths(loaded.max_context)
    depths = sorted(set(part.depths))
    loaded.check_positions(lengths[-1], "--lengths")
    for backend in session.backends:
        activate(loaded.model, backend)
    prompts = _Prompts(loaded.tokenizer, kind, text, lengths[-1])
    prompts.make(lengths[0], depths[0], random.Random(session.seed))  # fails at once if it has no room
    places = list(itertools.product(lengths, depths))
    session.progress.begin(f"Asking, {kind}", len(places) * len(session.backends))
    cells: dict[tuple[str, int, float], RetrievalCell] = {}
    failures: dict[str, str] = {}
    kept = 0
    for length, depth in places:
        seeds = [f"{session.seed} {length} {depth} {sample}" for sample in range(part.samples)]
        asked = [prompts.make(length, depth, random.Random(seed)) for seed in seeds]
        for backend in session.backends:
            if backend.label not in failures:
                try:
                    cells[backend.label, length, depth], is_kept = session.piece(
                        RetrievalCell,
                        partial(_ask, loaded.model, backend, asked, length=length, depth=depth),
                        *(f"retrieval, {kind}", backend.label, f"{length}, {depth}"),
                        backends=[backend],
                        seeds=seeds,
                        text=None if text is None else text.sha256,
                    )
                    kept += is_kept
                except (RuntimeError, ValueError, TypeError) as error:
                    failures[backend.label] = one_line(error)
            session.progress.advance(backend.label)
    if kept:
        session.progress.kept(f"retrieval, {kind}: {kept:,} of {len(places) * len(session.backends):,} parts")
    return RetrievalSection(
        kind=kind,
        lengths=lengths,
        depths=depths,
        samples=part.samples,
        begins_with=loaded.tokenizer.convert_ids_to_tokens(leading_tokens(loaded.tokenizer)),
        backends=[
            RetrievalBackend(
                **backend.info,
                failure=failures.get(backend.label),
                cells=[cells[key] for place in places if (key := (backend.label, *place)) in cells],
            )
            for backend in session.backends
        ],
    )


class _Prompts:
    """Makes prompts of exact lengths."""

    def __init__(self, tokenizer: Any, kind: str, text: Text | None, longest: int) -> None:
        self._tokenizer = tokenizer
        self._kind = kind
        self._begin = leading_tokens(tokenizer)
        self._prose: list[int] = []
        if kind == "needle":
            assert text is not None
            self._prose = tokenize(tokenizer, text.content)[len(self._begin) :].tolist()
            if len(self._prose) < longest:
                raise UserError(
                    f"--data: the text has {len(self._prose):,} tokens, too few for prompts of {longest:,}; "
                    "give more text or smaller --lengths"
                )

    def make(self, length: int, depth: float, rng: random.Random) -> Prompt:
        """Return a prompt that has ``length`` tokens together with its answer."""
        return (self._needle if self._kind == "needle" else self._pairs)(length, depth, rng)

    def _needle(self, length: int, depth: float, rng: random.Random) -> Prompt:
        question = self._encode(NEEDLE.format(place=rng.choice(PLACES)))
        answer = self._encode(f" {rng.randrange(10_000, 100_000)}")
        needle = [*question, *answer, *self._encode(".\n\n")]
        room = self._room(length, len(self._begin) + len(needle) + len(question) + len(answer))
        start = rng.randrange(len(self._prose) - room + 1)
        prose = self._prose[start : start + room]
        place = round(depth * room)
        return Prompt([*self._begin, *prose[:place], *needle, *prose[place:], *question], answer)

    def _pairs(self, length: int, depth: float, rng: random.Random) -> Prompt:
        def pair() -> tuple[list[int], list[int]]:
            key, value = ("".join(rng.choices(DIGITS, k=4)) for _ in range(2))
            return self._encode(f"\n{key}:"), self._encode(f" {value}")

        question, answer = pair()
        room = self._room(length, len(self._begin) + 2 * len(question) + 2 * len(answer))
        others: list[list[int]] = []
        while True:
            key, value = pair()
            if sum(map(len, others)) + len(key) + len(value) > room:
                break
            if key != question:
                others.append([*key, *value])
        fill = room - sum(map(len, others))  # less than a pair: the end of the first one, to reach the exact length
        others.insert(0, [*key, *value][len(key) + len(value) - fill :])
        place = round(depth * (len(others) - 1)) + 1
        body = [token for each in [*others[:place], [*question, *answer], *others[place:]] for token in each]
        return Prompt([*self._begin, *body, *question], answer)

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    @staticmethod
    def _room(length: int, taken: int) -> int:
        if length <= taken:
            raise UserError(f"--lengths: {length} tokens are too few for a prompt; the minimum is {taken + 1}")
        return length - taken


@torch.inference_mode()
def _ask(
    model: PreTrainedModel, backend: Backend, prompts: Sequence[Prompt], *, length: int, depth: float
) -> RetrievalCell:
    """Ask questions of one length and depth."""
    activate(model, backend)
    correct, losses = 0, []
    rows = max(1, BATCH_TOKENS // len(prompts[0].tokens))
    for begin in range(0, len(prompts), rows):
        batch = prompts[begin : begin + rows]
        found = continuation_log_probs(model, backend, [(prompt.tokens, prompt.answer) for prompt in batch])
        for prompt, log_probs in zip(batch, found, strict=True):
            likelihood, is_greedy = log_likelihood(log_probs, prompt.answer)
            correct += is_greedy
            losses.append(-likelihood / len(prompt.answer))
    return RetrievalCell(
        length=length, depth=depth, correct=correct, samples=len(prompts), nll=sum(losses) / len(losses)
    )

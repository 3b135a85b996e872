"""Sets of requests that arrive at the same time."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dma_eval.errors import UserError
from dma_eval.names import refuse_repeats

WARM_REQUESTS, WARM_TOKENS = 8, 8
_FORM = re.compile(r"(\d+)x(\d+)(?:-(\d+))?\+(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens are generated after it."""

    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True)
class RequestSet:
    """Requests that arrive at the same time."""

    name: str  # as it was given
    count: int
    prompt: tuple[int, int]  # fewest and most tokens
    new: tuple[int, int]  # likewise

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.prompt[1] + self.new[1]

    @property
    def rehearsal(self) -> RequestSet:
        """Requests of the longest prompt, in which kernels are compiled and recorded. They are not counted."""
        return replace(self, count=WARM_REQUESTS, prompt=(self.prompt[1],) * 2, new=(WARM_TOKENS,) * 2)

    def draw(self, seed: int, vocabulary: int) -> list[Request]:
        """Return the requests: of one seed always the same, and with no common beginning that pages could share."""
        chance = random.Random(f"{self.name} {seed}")
        return [
            Request(chance.choices(range(vocabulary), k=chance.randint(*self.prompt)), chance.randint(*self.new))
            for _ in range(self.count)
        ]


def parse_requests(names: Sequence[str]) -> list[RequestSet]:
    """Resolve sets of requests as given on the command line.

    Raises:
        UserError: There are none, two are the same, or one is not of the form.
    """
    refuse_repeats("--requests", names)
    found = []
    for name in names:
        match = _FORM.fullmatch(name)
        if match is None:
            raise UserError(f"--requests: expected COUNTxPROMPT+NEW, such as 32x2048+64 or 8x64-512+16, got {name!r}")
        count, low, high, least, most = match.groups()
        prompt, new = (int(low), int(high or low)), (int(least), int(most or least))
        if min(int(count), prompt[0], new[0]) < 1 or prompt[0] > prompt[1] or new[0] > new[1]:
            raise UserError(f"--requests: numbers are at least 1, and ranges go up, got {name!r}")
        found.append(RequestSet(name, int(count), prompt, new))
    return found


def figures(seconds: float, new_tokens: int, first: list[float], between: list[float]) -> dict[str, Any]:
    """Return what was measured of answers, by the names of the result's fields.

    Args:
        seconds: Until the last token of the last request.
        new_tokens: Of all requests.
        first: Seconds until the first token of each request.
        between: Milliseconds between tokens.
    """
    found: dict[str, Any] = {"seconds": seconds, "tokens_per_second": new_tokens / seconds}
    for name, values in (("first_token_seconds", first), ("between_tokens_milliseconds", between)):
        found[name], found[f"{name}_p99"] = np.quantile(values, [0.5, 0.99]).tolist() if values else (None, None)
    return found

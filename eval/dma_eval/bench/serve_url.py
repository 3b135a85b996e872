"""Load a server with OpenAI's interface over HTTP, from outside: this project's, vLLM, SGLang or another one."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openai import APIConnectionError, AsyncOpenAI, OpenAI
from transformers import AutoTokenizer

from dma_eval.errors import UserError, one_line

from .requests import RequestSet, figures
from .results import UrlResult

TIMEOUT_SECONDS = 3600.0  # of one request: waiting is what is measured
CONNECT_SECONDS = 10.0


@dataclass
class Answer:
    """The result of a request."""

    sent: float  # seconds since the client started, as all times
    times: list[float]  # when pieces of text arrived
    prompt_tokens: int = 0
    new_tokens: int = 0
    error: str | None = None


class Target:
    """A server, one of its models, and the tokenizer that prompts are made with.

    Args:
        url: The address with ``/v1``.
        model: The name of the model; ``None`` is the server's only one.
        tokenizer: Hub name or folder; ``None`` is the model's name.
        extra_body: Further fields of every request.

    Raises:
        UserError: The server does not answer, has several models or none of this name, or there is no such tokenizer.
    """

    def __init__(self, url: str, model: str | None, tokenizer: str | None, extra_body: dict[str, Any]) -> None:
        key = os.environ.get("OPENAI_API_KEY", "none")
        self._options: dict[str, Any] = {"base_url": url, "api_key": key, "max_retries": 0, "timeout": CONNECT_SECONDS}
        try:
            names = [str(each.id) for each in OpenAI(**self._options).models.list()]
        except APIConnectionError as error:
            raise UserError(f"--url: no server at {url}: {one_line(error.__cause__ or error)}") from error
        except Exception as error:  # the client also passes on those of parsing and of its HTTP library
            raise UserError(f"--url: {url}/models: {one_line(error)}") from error
        if model is None and len(names) != 1:
            raise UserError(f"--url: the server has {len(names)} models; choose one by --model")
        if model is not None and model not in names:
            raise UserError(f"--model: the server has no {model!r}; it has {', '.join(names)}")
        self.model = model or names[0]
        self._extra_body = extra_body
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(tokenizer or self.model)
        except (OSError, ValueError) as error:
            raise UserError(f"--tokenizer: {one_line(error)}; give a Hub name or a folder") from error

    def measure(self, sets: Sequence[RequestSet], rates: Sequence[float], seed: int) -> Iterator[UrlResult]:
        """Send every set of requests at every rate, and yield each result when it is ready.

        A rate is the mean of a Poisson process, in requests per second. An infinite rate sends all at the same time.
        """
        for requests in sets:
            asyncio.run(self._send(self._draw(requests.rehearsal, seed + 1), math.inf, seed + 1))
            asked = self._draw(requests, seed)
            for rate in rates:
                yield summarize(requests, rate, asyncio.run(self._send(asked, rate, seed)))

    def _draw(self, requests: RequestSet, seed: int) -> list[tuple[str, int]]:
        """Return the prompt of each request, and the tokens to generate."""
        drawn = requests.draw(seed, len(self._tokenizer))
        return [(self._text(request.prompt), request.new_tokens) for request in drawn]

    async def _send(self, asked: Sequence[tuple[str, int]], rate: float, seed: int) -> list[Answer]:
        arrivals = arrival_times(len(asked), rate, seed)
        async with AsyncOpenAI(**self._options | {"timeout": TIMEOUT_SECONDS}) as client:
            start = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._ask(client, prompt, new_tokens, start, at))
                    for (prompt, new_tokens), at in zip(asked, arrivals, strict=True)
                ]
        return [task.result() for task in tasks]

    async def _ask(self, client: AsyncOpenAI, prompt: str, new_tokens: int, start: float, at: float) -> Answer:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        answer = Answer(time.perf_counter() - start, [])
        try:
            stream = await client.completions.create(
                model=self.model,
                prompt=prompt,
                max_tokens=new_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=self._extra_body,
            )
            async for chunk in stream:
                if any(choice.text for choice in chunk.choices):
                    answer.times.append(time.perf_counter() - start)
                if chunk.usage is not None:
                    answer.prompt_tokens, answer.new_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        except Exception as error:  # as in __init__; each counts against the server
            answer.error = one_line(error)
        else:
            if not answer.times:
                answer.error = "the answer has no text"
            elif not answer.new_tokens:
                answer.error = "the answer ends without its usage"
        return answer

    def _text(self, ids: list[int]) -> str:
        """Return the text of these tokens. Its tokenization may differ slightly."""
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        again = self._tokenizer(text, add_special_tokens=False).input_ids[: len(ids)]
        return str(self._tokenizer.decode(again))


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Return the times in seconds at which requests are sent: random with this mean rate, or 0 if it is infinite."""
    if math.isinf(rate):
        return [0.0] * count
    chance = random.Random(seed)
    return list(itertools.accumulate(chance.expovariate(rate) for _ in range(count)))


def summarize(requests: RequestSet, rate: float, answers: Sequence[Answer]) -> UrlResult:
    """Return the figures of the answers without an error, and how many had one."""
    right = [answer for answer in answers if answer.error is None]
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    result = UrlResult(
        requests=requests.name,
        rate=None if math.isinf(rate) else rate,
        completed=len(right),
        errors=dict(errors),
        prompt_tokens=sum(answer.prompt_tokens for answer in right),
        new_tokens=sum(answer.new_tokens for answer in right),
    )
    if not right:
        return result
    first = [answer.times[0] - answer.sent for answer in right]
    between = [1e3 * (b - a) for answer in right for a, b in itertools.pairwise(answer.times)]
    seconds = max(answer.times[-1] for answer in right) - min(answer.sent for answer in answers)
    return replace(result, **figures(seconds, result.new_tokens, first, between))

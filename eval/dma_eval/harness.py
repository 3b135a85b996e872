"""The lm-eval model ``dma-hf``: lm-eval's Hugging Face model with a choice of attention backend.

The package declares it as an entry point of lm-eval. For versions of lm-eval that do not read entry points,
``python -m dma_eval.lm_eval`` is lm-eval's own command line with the model registered. It scores log-likelihoods
differently from lm-eval's ``hf`` in three ways. Padding is masked: in a quantized format several keys share a scale, so
visible padding would make results depend on the batch. Probabilities are computed in fp32, at scored positions only.
Logits that are not finite stop the evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partialmethod
from typing import Any

from accelerate import Accelerator
from accelerate.state import PartialState
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator
from torch import Tensor
from transformers import LogitsProcessorList

from dma_hf.integrations.internals import CACHE_ARGUMENT

from .errors import one_line
from .load.backends import Backend, activate, new_cache, parse_backends
from .load.models import LoadedModel
from .load.reading import NonFiniteLogitsError, continuation_log_probs, log_likelihood, origin
from .names import DMA

Request = tuple[Any, list[int], list[int]]
"""The strings (or ``None``), the tokens of the context and those of the continuation."""
OWN = "has no token of its own to score"  # for it is empty, or merges with the end of its context


class BackendFailure(RuntimeError):
    """The backend cannot finish these tasks. The message says why."""


@register_model("dma-hf")
class DMALM(HFLM):  # type: ignore[misc]
    """A causal language model under one attention backend.

    Args:
        pretrained: Hub name, folder or loaded model.
        attn: The backend: an ``attn_implementation`` of Transformers, ``dma_mxfp:PRESET`` or ``dma_mxfp:FILE.toml``,
            with ``+int8`` or ``+int4`` read through a ``DMACache``.
        batch_size: Sequences per forward pass.
        kwargs: Arguments of lm-eval's ``hf``: ``dtype``, ``revision``, ``gguf_file``, ``parallelize``, ...
    """

    def __init__(self, pretrained: Any, attn: str = DMA, batch_size: int | str | None = 1, **kwargs: Any) -> None:
        if "attn_implementation" in kwargs:
            raise ValueError(
                f"attn_implementation={kwargs['attn_implementation']} would be replaced by the backend; give attn=..."
            )
        if not str(batch_size).isdecimal():
            raise ValueError(f"batch_size must be a number, got {batch_size!r}; dma-hf does not search for one")
        (backend,) = parse_backends([attn], "attn")
        super().__init__(pretrained=pretrained, batch_size=batch_size, **kwargs)
        if self.backend != "causal":
            raise ValueError(f"dma-hf evaluates causal language models, got {type(self.model).__name__}")
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None:  # lm-eval counts processes on GPUs only
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        self.failure: str | None = None
        self.on_answers: Callable[[int], None] = lambda count: None
        self.use(backend)

    @classmethod
    def of(cls, loaded: LoadedModel, *, batch_size: int) -> DMALM:
        """Wrap a loaded model, in each process of a run."""
        lm = cls(loaded.model, attn="sdpa", tokenizer=loaded.tokenizer, batch_size=batch_size)
        state = PartialState()
        if state.num_processes > 1:
            lm.accelerator = Accelerator(cpu=state.device.type == "cpu")
            lm._rank, lm._world_size = state.process_index, state.num_processes
        return lm

    def use(self, backend: Backend) -> None:
        """Switch to ``backend``, and clear the failure of the previous one."""
        activate(self.model, backend)
        self._reader = backend
        self.failure = None

    loglikelihood_rolling = partialmethod(HFLM.loglikelihood_rolling, disable_tqdm=True)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation after its context, and whether it is the greedy one."""
        for context, continuation in (request.args for request in requests):
            # After an empty context, lm-eval looks at the first token of the continuation.
            if context == "" and not self.tok_encode(continuation, add_special_tokens=False):
                self._fail(_no_token(context, continuation, OWN))
                return [(0.0, False)] * len(requests)
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)  # type: ignore[no-any-return]

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one."""
        del disable_tqdm  # lm-eval's bar counts only one process; the command line has its own
        if self.failure is None:
            try:
                return self._score(requests, override_bs or self.batch_size)
            except (RuntimeError, ValueError, TypeError) as error:
                self._fail(error)
        return [(0.0, False)] * len(requests)

    def _score(self, requests: Sequence[Request], batch_size: int) -> list[tuple[float, bool]]:
        for strings, context, continuation in requests:
            if not continuation:
                raise _no_token(strings[0], strings[1], OWN)
            if not context:
                raise _no_token(strings[0], strings[1], "has no token to read before the continuation")
        collator = Collator(
            requests,
            sort_fn=lambda request: (-len(request[1]) - len(request[2]), tuple(request[1] + request[2])),
            group_by="contexts" if self.logits_cache else None,
            group_fn=lambda request: request[-2] + request[-1][:-1],
        )
        answers: list[tuple[float, bool]] = []
        for chunk in collator.get_batched(n=batch_size):
            done = len(answers)
            for (strings, context, continuation), row in zip(chunk, self._log_probs(chunk), strict=True):
                # Requests that differ only in their last token share a row.
                for key, tokens, shared in collator.get_cache(strings, context, continuation, row[None]):
                    answer = log_likelihood(shared[0], tokens)
                    answers.append(answer)
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, answer)
            self.on_answers(len(answers) - done)
        original: list[tuple[float, bool]] = collator.get_original(answers)
        return original

    def _log_probs(self, chunk: Sequence[Request]) -> Iterator[Tensor]:
        """Yield log-probabilities at the positions that predict each continuation, fp32 ``[continuation, V]``."""
        most = max(len(continuation) for _, _, continuation in chunk)
        if most > self.max_length:
            raise ValueError(f"a continuation has {most:,} tokens, but the model's maximum is {self.max_length:,}")
        pairs = [(before[-(self.max_length + 1 - len(after)) :], after) for _, before, after in chunk]
        return continuation_log_probs(self.model, self._reader, pairs)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Continue each context up to a stop string, greedily unless the task says otherwise."""
        if self.failure is None:
            try:
                answers: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
            except (RuntimeError, ValueError, TypeError) as error:
                self._fail(error)
            else:
                self.on_answers(len(answers))
                return answers
        return [""] * len(requests)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        inputs = {"input_ids": context, "attention_mask": options.get("attention_mask"), "use_cache": False}

        def check(ids: Tensor, scores: Tensor) -> Tensor:
            """Raise if logits are NaN or plus infinity. Otherwise return them unchanged."""
            if bool((scores.isnan() | scores.isposinf()).any()):
                where = origin(self.model, lambda: self.model(**inputs))
                raise NonFiniteLogitsError(f"NaN or infinite logits after {ids.shape[1]:,} tokens{where}")
            return scores

        options["logits_processor"] = LogitsProcessorList([check])
        cache = new_cache(self.model, self._reader)
        if cache is not None:
            options[CACHE_ARGUMENT] = cache
        generated: Tensor = super()._model_generate(context, max_length, stop, **options)
        return generated

    def _fail(self, error: Exception) -> None:
        """Stop the evaluation. With several processes, only note the failure, so that all finish together."""
        self.failure = one_line(error)
        if self.world_size == 1:
            raise BackendFailure(self.failure) from error


def _no_token(context: str, continuation: str, why: str) -> ValueError:
    """Return the error of a sample, which shows the end of its context and the beginning of its continuation."""
    which = f"context ending in {context[-40:]!r} with continuation {continuation[:40]!r}"
    return ValueError(f"{which} {why}; change the sample, or its target_delimiter")

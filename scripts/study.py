"""What ``measure_*.py`` share: windows of a text, read by a model whose attention is replaced, and files of results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from dma_eval.environment import portable
from dma_eval.load.data import Window, full_windows, leading_tokens, load_text, tokenize
from dma_eval.load.models import load_model
from dma_eval.measures.perplexity import score
from dma_eval.measures.stress import RANGE_TOKENS, attention_layers
from dma_eval.results import here_and_now
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

NAME = "measured_attention"
Model = Annotated[str, typer.Option(help="Folder, GGUF file or Hub name.")]
Data = Annotated[str, typer.Option(help="The text, as for dma-hf ppl.")]
Out = Annotated[Path, typer.Option(help="JSON file of the results.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


class Study:
    """A model and windows of a text of one length."""

    def __init__(self, model: str, data: str, device: str, length: int, windows: int) -> None:
        yarn = 4 if length > 8192 else None
        loaded = load_model(model, dtype="float32", device=device, yarn=yarn)
        tokens = tokenize(loaded.tokenizer, load_text(data).content[: 8 * length * windows])
        assert len(tokens) >= length * windows, f"the text has {len(tokens)} tokens, {windows} x {length} are needed"
        prefix = len(leading_tokens(loaded.tokenizer))
        self.model: PreTrainedModel = loaded.model
        self.windows = full_windows(tokens, windows, length, prefix).to(self.model.device)
        self.layers = attention_layers(self.model, tokens[:RANGE_TOKENS])

    def read(self, attention: Callable[..., Any] | None = None, windows: Tensor | None = None) -> list[Tensor]:
        """Return the logits of every window, with SDPA or another function of Transformers' interface."""
        if attention is not None:
            AttentionInterface.register(NAME, attention)
            AttentionMaskInterface.register(NAME, lambda *_args, **_options: None)
        self.model.set_attn_implementation("sdpa" if attention is None else NAME)
        with torch.inference_mode():
            chosen = self.windows if windows is None else windows
            return [self.model(input_ids=ids[None], use_cache=False).logits[0] for ids in chosen]

    def compare(self, logits: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
        """Return what logits lose against exact ones: KL per token, change of the perplexity, other first choices."""
        scored = Window(0, self.windows.shape[1], 1)
        found = [score(own, ids, scored, base) for own, ids, base in zip(logits, self.windows, exact, strict=False)]
        bases = [score(base, ids, scored) for base, ids in zip(exact, self.windows, strict=False)]
        kl = np.concatenate([each.kl for each in found]).astype(np.float64)
        nll, base_nll = (np.concatenate([each.nll for each in some]).astype(np.float64) for some in (found, bases))
        return {
            "kl": kl.mean(),
            "kl_stderr": kl.std() / math.sqrt(len(kl)),
            "perplexity": math.exp(nll.mean()),
            "change_percent": 100 * math.expm1((nll - base_nll).mean()),
            "flips": 1 - np.concatenate([each.agree for each in found]).mean(),
        }


class Writer:
    """A JSON file of results, written after each one."""

    def __init__(self, out: Path, **compared: str) -> None:
        facts = here_and_now()
        self._path, self._report = out, facts | {"environment": asdict(facts["environment"])}
        self._report |= {key: portable(value) for key, value in compared.items()}
        self._results: list[dict[str, Any]] = []

    def add(self, result: dict[str, Any]) -> None:
        """Write one more result, and print its short values."""
        self._results.append(result)
        text = json.dumps(self._report | {"results": self._results})
        self._path.write_text(text.replace(', {"', ',\n{"') + "\n", encoding="utf-8")  # one line for each
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in result.items()}
        print(*(f"{key}={value}" for key, value in shown.items() if not isinstance(value, list)), flush=True)

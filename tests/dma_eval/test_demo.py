"""The demo on the model and the text of the package, with fewer tokens than a user gets."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from dma_eval import console
from dma_eval.commands import quality
from dma_eval.config import PerplexityPart
from dma_eval.load.backends import default_names, parse_backends
from dma_eval.load.models import load_model
from dma_eval.load.reading import continued
from dma_eval.results import read_report

ASSETS = Path(quality.__file__).parents[1] / "assets"
LABELS = default_names()


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_writes_the_report(run, tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "DEMO", PerplexityPart(contexts=[512], max_windows=2))
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", math.inf)  # of progress, which a busy machine would show
    result = run("demo", "--out", tmp_path / "out", code=0)
    assert result.stderr == ""
    files = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert files.keys() == {"configs", "parts", "report.md", "report.html", "results.json", "positions-512.png"}
    report = read_report(files["results.json"])
    (section,) = report.perplexity
    assert [backend.label for backend in section.backends] == LABELS
    assert all(backend.failure is None and not backend.fallbacks for backend in section.backends)
    assert (section.context, section.windows, section.tokens_scored) == (512, 2, 1022)
    assert (Path(report.model.name).name, Path(section.data.name).name) == ("demo_model", "heldout.txt")
    assert str(ASSETS) not in files["results.json"].read_text(encoding="utf-8")
    markdown = files["report.md"].read_text(encoding="utf-8")
    for label in LABELS:
        assert f"| {label} |" in markdown
        assert label in result.stdout
    assert "](positions-512.png)" in markdown


def test_a_continuation_is_what_a_model_without_a_cache_would_add(loaded):
    prompt = torch.tensor(loaded.tokenizer("the white whale said").input_ids)[None]
    (backend,) = parse_backends(["sdpa"])
    (tokens,) = continued(loaded.model, backend, prompt, 8)
    expected = prompt
    for _ in range(8):
        with torch.inference_mode():
            token = loaded.model(input_ids=expected, use_cache=False).logits[:, -1:].argmax(-1)
        expected = torch.cat([expected, token], dim=1)
    assert tokens.equal(expected[0, prompt.shape[1] :])


def test_far_keys_matter_to_the_demo_model():
    """A passage of 256 tokens is copied from more than 1,024 tokens back, and not when those keys are hidden."""
    loaded = load_model(str(ASSETS / "demo_model"), dtype="float32", device="cpu")
    tokens = loaded.tokenize((ASSETS / "heldout.txt").read_text(encoding="utf-8")).ids
    window = tokens[None, 9000 : 9000 + 2048].clone()
    window[:, -256:] = window[:, 300:556]
    query, key = torch.arange(2048)[:, None], torch.arange(2048)
    near = (key <= query) & ((query - key < 256) | (key < 128))
    right = {}
    for name, mask in {"full": None, "local": near[None, None]}.items():
        with torch.inference_mode():
            logits = loaded.model(window, attention_mask=mask, use_cache=False).logits
        right[name] = (logits[:, -241:-1].argmax(-1) == window[:, -240:]).float().mean().item()
    assert right["full"] > 0.75 > 0.45 > right["local"], right

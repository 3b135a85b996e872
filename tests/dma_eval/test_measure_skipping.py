"""``scripts/measure_skipping.py``: its attention is that of the reference, and it runs from a text to a plot."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dma_kernels import attention
from dma_kernels.testing import random_qkv
from script_files import load_script

from dma_hf import PRESETS


@pytest.fixture
def script() -> Any:
    return load_script("measure_skipping")


@pytest.mark.parametrize("preset", ["balanced", "fp4"])
@pytest.mark.parametrize("threshold", [None, 0.7])
def test_computes_what_the_reference_does(script: Any, preset: str, threshold: float | None) -> None:
    query, key, value = random_qkv(q_heads=4, kv_heads=2, q_len=1024, kv_len=1024, head_dim=32)
    key[:, :, 256:640] *= 0.02
    recipe = PRESETS[preset].recipe
    measured = script.SkippingAttention(recipe, script.Rule(threshold), 1, 4, elements=1 << 18)
    out, _ = measured(SimpleNamespace(layer_idx=0), query, key, value, None, scaling=0.25)
    counts = torch.zeros(4, 2, dtype=torch.int64)
    recipe = replace(recipe, skip_threshold=threshold or math.inf)
    expected = attention(query, key, value, recipe, scale=0.25, tile_counts=counts)
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-3, atol=1e-3)
    assert measured.skipped[0].tolist() == (64 * counts[:, 0]).tolist()
    assert measured.low[0].tolist() == (64 * counts[:, 1]).tolist()
    assert (threshold is None) == (counts[:, 0].sum() == 0)


def test_exact_estimates_skip_what_the_rule_does(script: Any) -> None:
    """One sampled row of one, and extremes or means of one key, are the maximum itself."""
    query, key, value = random_qkv(q_heads=2, kv_heads=1, q_len=640, kv_len=640, head_dim=16)
    key -= key.mean(2, keepdim=True)
    key[:, :, 128:384] *= 0.02
    recipe = replace(PRESETS["balanced"].recipe, low="bf16", shared_scale="block", pv="bf16")
    script.ESTIMATES |= {"rows": script.every(1), "extremes": script.extremes_of(1), "means": script.mean_of(1)}
    script.ESTIMATES["antidiagonals"] = script.antidiagonals_of(1)
    found = []
    for kind in ("high", "rows", "extremes", "means", "antidiagonals"):
        measured = script.SkippingAttention(recipe, script.Rule(0.7, kind), 1, 2, elements=1 << 20)
        measured(SimpleNamespace(layer_idx=0), query, key, value, None, scaling=0.25)
        found.append(measured.skipped.tolist())
    assert found[0] != [[0, 0]]
    assert found == [found[0]] * 5


def test_measures_and_draws(script: Any, model_folder: Path, text_file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def run(*arguments: Any) -> None:
        monkeypatch.setattr("sys.argv", ["x", *map(str, arguments)])
        script.main()

    unchanged, *twins = script.TWINS
    runs = [(unchanged, preset, script.Rule(t, kind)) for preset in ("balanced", "fp4") for t, kind in [(None, "high")]]
    runs += [
        (unchanged, "balanced", script.Rule(1.0, kind))
        for kind in ("high", "running", "length", "rows", "every row of 8")
    ]
    runs += [(twins[0], "balanced", script.Rule(1.0)), (twins[-1], "balanced", script.Rule(1.0))]
    monkeypatch.setattr(script, "plan", lambda _length: iter(runs))
    options = ("--lengths", 512, "--windows", 1, "--device", "cpu", "--elements", 1 << 16)
    run("measure", "--model", model_folder, "--data", text_file, "--out", tmp_path / "r.json", *options)
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [result["kind"] for result in results] == [rule.kind for _, _, rule in runs]
    assert all(0 <= result["skipped"] <= 1 and result["kl"] >= 0 for result in results)
    assert "lost_p999" in results[2]
    run("plot", tmp_path / "r.json", "--out", tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 1000

"""``scripts/measure_*.py``: attention with skipping is that of the reference, and both run on a text."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
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
    estimates = (script.every, script.extremes_of, script.mean_of, script.antidiagonals_of)
    script.ESTIMATES |= {each.__name__: partial(each, 1) for each in estimates}
    found = []
    for kind in ("high", *(each.__name__ for each in estimates)):
        measured = script.SkippingAttention(recipe, script.Rule(0.7, kind), 1, 2, elements=1 << 20)
        measured(SimpleNamespace(layer_idx=0), query, key, value, None, scaling=0.25)
        found.append(measured.skipped.tolist())
    assert found[0] != [[0, 0]]
    assert found == [found[0]] * 5


@pytest.fixture
def run(monkeypatch: Any, model_folder: Path, text_file: Path, tmp_path: Path) -> Any:
    def run(script: Any, name: str, *arguments: Any) -> dict[str, Any]:
        files = ["--model", model_folder, "--data", text_file, "--out", tmp_path / "r.json", "--device", "cpu"]
        monkeypatch.setattr("sys.argv", [f"x/{name}.py", *map(str, [*files, *arguments])])
        with pytest.raises(SystemExit, match=r"^0$"):
            typer.run(script.main)
        report = json.loads((tmp_path / "r.json").read_text())
        assert report["command"].startswith(f"python scripts/{name}.py --model {model_folder.name} --data ")
        assert report["environment"]["packages"]["torch"] == metadata.version("torch")
        return report

    return run


def test_skipping_is_measured(script: Any, run: Any, monkeypatch: Any) -> None:
    unchanged, *twins = script.TWINS
    runs = [(unchanged, preset, script.Rule()) for preset in ("balanced", "fp4")]
    kinds = ("high", "running", "length", "rows", "every row of 8")
    runs += [(unchanged, "balanced", script.Rule(1.0, kind)) for kind in kinds]
    runs += [(twins[0], "balanced", script.Rule(1.0)), (twins[-1], "balanced", script.Rule(1.0))]
    monkeypatch.setattr(script, "plan", lambda _length, *, quick: iter(runs))
    report = run(script, "measure_skipping", "--lengths", 512, "--windows", 1, "--elements", 1 << 16)
    assert [result["kind"] for result in report["results"]] == [rule.kind for _, _, rule in runs]
    assert all(0 <= result["skipped"] <= 1 and result["kl"] >= 0 for result in report["results"])
    assert "lost_p999" in report["results"][2]


@pytest.mark.parametrize("length", [2048, 4096])
def test_the_plan_has_every_row_of_the_committed_results(length: int, script: Any) -> None:
    planned = [(t.name, p, r.threshold, r.kind) for t, p, r in script.plan(length, quick=True)]
    assert len(set(planned)) == len(planned)
    path = Path(__file__).parents[2] / f"benchmarks/skipping/smollm2-{length}-cpu.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    assert "--quick" in report["command"]
    assert {each["length"] for each in report["results"]} == {length}
    done = {(each["twin"], each["preset"], each["threshold"], each["kind"]) for each in report["results"]}
    assert done <= set(planned)
    assert done < {(t.name, p, r.threshold, r.kind) for t, p, r in script.plan(8192, quick=False)}


def test_cache_formats_are_measured(run: Any, monkeypatch: Any) -> None:
    script = load_script("measure_cache_formats")
    monkeypatch.setattr(script, "FORMATS", [script.UNROTATED, script.INT4])
    results = run(script, "measure_cache_formats", "--context", 512, "--windows", 1)["results"]
    assert list(dict.fromkeys(each["twin"] for each in results)) == list(script.MEASURED)
    names = [each["format"] for each in results if each["twin"] == "unchanged"]
    assert names[:3] == ["int4, not rotated", "int4, V rotated", "int4, V rotated; the first layer in int8"]
    assert all(0 < each["kl"] < 1 for each in results if each["twin"] == "unchanged")


def test_draws_are_measured(run: Any) -> None:
    script = load_script("measure_cache_formats")
    results = run(script, "measure_cache_formats", "--context", 512, "--windows", 1, "--draws", 2)["results"]
    measured = [(each["twin"], each["draw"]) for each in results]
    assert measured == [(twin, draw) for twin in script.DRAWN for draw in (0, 1)]
    for first, second in (results[:2], results[2:]):
        assert first["kl"] != second["kl"]


def test_draws_change_attention_by_rounding_alone() -> None:
    script = load_script("measure_cache_formats")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 640, 32, generator=generator) for heads in (4, 2, 2))

    def attend(draw: int | None) -> torch.Tensor:
        cached = script.Cached(script.INT8, draw=draw)
        return cached(SimpleNamespace(layer_idx=0), query, key, value, None, scaling=0.25)[0]

    assert not torch.equal(attend(0), attend(1))
    for draw in (0, 1):
        torch.testing.assert_close(attend(draw), attend(None), rtol=0, atol=0.02)


def test_the_committed_formats_are_those_of_the_script() -> None:
    script = load_script("measure_cache_formats")
    path = Path(__file__).parents[2] / "benchmarks/cache-formats-h100.json"
    formats = {each["format"]: each["bits"] for each in json.loads(path.read_text(encoding="utf-8"))["results"]}
    planned = [*script.FORMATS, *script.mixed(script.INT4, list(range(30)))]
    assert formats == {form.name: round(form.mean_bits(30), 3) for form in planned}

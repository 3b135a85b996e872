"""``dma-hf bench prefill``: what it measures, shows and writes, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from dma_eval.bench import peers, prefill
from dma_eval.bench.inputs import Inputs, exact_rows
from dma_eval.bench.peers import PACKAGES, Prepared, causal_block_mask
from dma_eval.bench.prefill import default_names, measure_shape, parse_implementations, prepare
from dma_eval.bench.results import PrefillReport, PrefillResult, PrefillShape
from dma_eval.bench.shapes import parse_shape
from dma_eval.bench.shown import failures, plot_prefill, prefill_tables
from dma_eval.bench.timing import Timing
from dma_eval.commands.bench_options import PrefillOptions
from PIL import Image
from torch.nn import functional as F

import dma_hf

Run = Callable[..., Any]
TINY = ("--device", "cpu", "--seconds", 0.0)
CAUSAL, FULL = ("--shape", "1x48:2/1:32"), ("--shape", "1x48:2/1:32:full")
CPU = torch.device("cpu")


@pytest.fixture
def bench(run: Run) -> Run:
    """Run ``dma-hf bench prefill`` on the CPU, as short as possible."""
    return lambda *arguments: run("bench", "prefill", *TINY, *arguments)


def result(label: str, length: int, **changes: Any) -> PrefillResult:
    shape = PrefillShape(length=length, head_dim=64, query_heads=4, kv_heads=2, is_causal=True)
    return PrefillResult(shape=shape, label=label, config=None, **changes)


class TestCommand:
    def test_shows_and_writes_every_implementation(self, bench: Run, tmp_path: Path) -> None:
        path, picture = tmp_path / "new" / "r.json", tmp_path / "r.png"
        done = bench("--attn", "sdpa", "dma_mxfp:balanced", *CAUSAL, "--json", path, "--plot", picture)
        assert done.exit_code == 0, done.output
        assert "head_dim 32, 2/1 heads, causal" in done.stdout
        report = json.loads(path.read_text())
        assert report.keys() == {field.name for field in fields(PrefillReport)}
        assert report["device"]["name"] == "cpu"
        reference, balanced = report["results"]
        assert reference.keys() == {field.name for field in fields(PrefillResult)}
        assert [reference["label"], balanced["label"]] == ["sdpa", "dma_mxfp:balanced"]
        assert balanced["shape"] == {
            "length": 48, "head_dim": 32, "query_heads": 2, "kv_heads": 1, "is_causal": True, "batch": 1,
            "inputs": None, "documents": 1,
        }  # fmt: skip
        assert balanced["config"] == dma_hf.PRESETS["balanced"].to_dict()
        assert reference["speedup"] == 1.0
        assert balanced["speedup"] == pytest.approx(reference["milliseconds"] / balanced["milliseconds"])
        assert 0.0 < reference["error"] < 0.01
        assert 0.0 < balanced["error"] < 0.1
        assert 0.0 < reference["error_with_outliers"] < 0.02
        assert 0.0 < balanced["error_with_outliers"] < 0.1
        for name in ("extra_bytes", "graph_milliseconds", "sustained_milliseconds", "quantize_milliseconds"):
            assert balanced[name] is None  # not on a CPU
        with Image.open(picture) as image:
            assert image.width > 1000

    @pytest.mark.parametrize("backend", ["auto", "reference"])
    def test_a_cpu_says_that_the_reference_ran(self, bench: Run, tmp_path: Path, backend: str) -> None:
        file, page = tmp_path / "mine.toml", tmp_path / "r.md"
        file.write_text(f'backend = "{backend}"\n', encoding="utf-8")
        done = bench("--attn", "sdpa", "dma_mxfp:balanced", f"dma_mxfp:{file}", *CAUSAL, "--markdown", page)
        expected = "dma_mxfp:balanced, dma_mxfp:mine ran in the PyTorch reference, not in the kernels"
        assert f"Warning: {expected}" in " ".join(done.stderr.split())
        assert expected in page.read_text(encoding="utf-8")
        assert "PyTorch reference" not in bench("--attn", "sdpa", *CAUSAL).output

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    def test_what_is_compared_by_default_runs_on_a_cpu(self, bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
        done = bench("--shape", "1x256:2/1:32")
        assert done.exit_code == 0, done.output
        assert "did not run" not in done.output

    def test_an_interruption_keeps_what_there_is(
        self, bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = prefill.measure_shape

        def interrupted(shape: PrefillShape, *arguments: Any, **options: Any) -> list[PrefillResult]:
            if not shape.is_causal:
                raise KeyboardInterrupt
            return whole(shape, *arguments, **options)

        monkeypatch.setattr(prefill, "measure_shape", interrupted)
        path = tmp_path / "r.json"
        bench("--attn", "sdpa", "dma_mxfp", *CAUSAL, *FULL, "--json", path)
        results = json.loads(path.read_text())["results"]
        assert [(r["shape"]["is_causal"], r["label"]) for r in results] == [(True, "sdpa"), (True, "dma_mxfp")]

    def test_shapes_one_by_one(self, bench: Run, tmp_path: Path) -> None:
        shapes = ("2x20:4/2:16", "1x30:2/2:32:full")
        names = ("length", "head_dim", "query_heads", "kv_heads", "is_causal", "batch", "inputs", "documents")
        done = bench("--attn", "sdpa", "--shape", *shapes, "--json", tmp_path / "r.json")
        assert done.exit_code == 0, done.output
        assert [r["shape"] for r in json.loads((tmp_path / "r.json").read_text())["results"]] == [
            dict(zip(names, (20, 16, 4, 2, True, 2, None, 1), strict=True)),
            dict(zip(names, (30, 32, 2, 2, False, 1, None, 1), strict=True)),
        ]

    @pytest.mark.parametrize(
        ("name", "package"),
        [
            ("fa3", "fa3-fwd"),
            ("fa3:fp8", "fa3-fwd"),
            ("fa3:fp8:prequantized", "fa3-fwd"),
            ("fa4", "flash-attn-4"),
            ("cudnn:fp8", "nvidia-cudnn-frontend"),
            ("cudnn:fp8:prequantized", "nvidia-cudnn-frontend"),
            ("flashinfer:t6", "flashinfer-python"),
            ("sage", "sageattention"),
        ],
    )
    def test_a_package_that_is_missing_is_named(
        self, name: str, package: str, bench: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in PACKAGES:
            monkeypatch.setitem(sys.modules, module, None)
        done = bench("--attn", "sdpa", name, *FULL)
        assert done.exit_code == 0, done.output
        assert f"Warning: {name} did not run: " in done.stderr
        assert f"is not installed: pip install {package}" in done.stderr

    def test_one_that_cannot_run_is_reported_and_the_rest_is_measured(self, bench: Run, tmp_path: Path) -> None:
        done = bench("--attn", "sdpa", "sdpa:cudnn", *FULL, "--json", tmp_path / "r.json")
        assert done.exit_code == 0, done.output
        assert "Warning: sdpa:cudnn did not run: " in done.stderr
        ran, failed = json.loads((tmp_path / "r.json").read_text())["results"]
        assert ran["failure"] is None
        assert failed["failure"]
        assert failed["milliseconds"] is None

    def test_a_shape_that_nothing_ran_on_is_a_failure(self, bench: Run) -> None:
        done = bench("--attn", "sdpa:cudnn", *FULL)
        assert done.exit_code == 1, done.output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["--attn", "dma_mxfp:balanced+int4"],
                "--attn: 'dma_mxfp:balanced+int4' reads through a cache, which is not timed",
            ),
            (["--attn", "sdpa", "flsh"], "--attn: unknown name 'flsh'; valid: sdpa, sdpa:flash, sdpa:cudnn"),
            (["--attn", "dma_mxfp:fast"], "--attn: unknown preset 'fast'; valid: balanced"),
            (["--attn", "sdpa", "sdpa"], "--attn: sdpa is given more than once"),
            (
                ["--shape", "8:32/8:128"],
                "--shape: expected BATCHxTOKENS:QUERY/KV:HEAD_DIM[:MASK], such as 8x4096:32/8:128, ",
            ),
            (["--shape", "1x64:6/4:128"], "--shape: expected QUERY/KV with KV dividing QUERY, such as 32/8, got '6/4'"),
            (["--shape", "1x64:8/2:128:window"], "--shape: expected BATCHxTOKENS:QUERY/KV:HEAD_DIM[:MASK]"),
            (["--length", "0"], "'--length': Input should be greater than or equal to 1, got '0'"),
            (["--length", "8"], "--length: only with --inputs"),
            (["--dtype", "float64"], "'--dtype': 'float64' is not one of"),
            (["--shape", "1000000000000x64:4/2:64"], "--shape: cannot make inputs of 64 tokens"),
            (["--device", "tpu"], "--device: expected auto, cpu, cuda or cuda:N; got 'tpu'"),
            (["--device", "meta"], "--device: expected auto, cpu, cuda or cuda:N; got 'meta'"),
            (["--device", "cuda:99"], "--device: 'cuda:99' does not exist: "),
            (["--plot", "r.gif"], "--plot: expected a file ending in .png, .svg, .pdf, got r.gif"),
        ],
    )
    def test_refuses(self, arguments: list[str], message: str, run: Run, refused: Callable[[Any], str]) -> None:
        assert message in refused(run("bench", "prefill", "--device", "cpu", *arguments))

    def test_help_of_the_group(self, run: Run) -> None:
        assert "prefill" in run("bench", "--help").stdout


class TestShapes:
    def test_defaults(self) -> None:
        """Eight lengths of one family, and one shape for each other head_dim, number of heads and mask."""
        families = Counter(shape.family for shape in PrefillOptions().shapes_on(torch.device("cuda")))
        assert sorted(families.values()) == [1, 1, 1, 8]
        assert len(PrefillOptions().shapes_on(CPU)) == 2

    def test_flops(self) -> None:
        shape = parse_shape("2x100:4/2:64:full")
        assert shape.flops == 2 * 4 * 2 * 2 * 100 * 100 * 64  # batch, heads, products, a multiply and an add
        assert 2 * parse_shape("2x100:4/2:64").flops == shape.flops


class TestMeasuring:
    def test_default_has_every_preset(self) -> None:
        names = default_names(torch.device("cuda"))
        assert names[:4] == ["sdpa", "sdpa:flash", "sdpa:cudnn", "flex"]
        assert names[4:] == [f"dma_mxfp:{preset}" for preset in dma_hf.PRESETS]
        assert default_names(CPU) == [name for name in names if name != "sdpa:cudnn"]
        assert [implementation.label for implementation in parse_implementations(names)] == names

    @pytest.mark.parametrize("is_causal", [True, False])
    def test_error_is_against_exact_attention(self, is_causal: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(2, h, 20, 16, generator=generator) for h in (4, 2, 2))
        rows = torch.tensor([0, 7, 19])
        expected = F.scaled_dot_product_attention(
            query.double(), key.double(), value.double(), is_causal=is_causal, enable_gqa=True
        )
        inputs = Inputs(query, key, value, 0.25, is_causal)
        torch.testing.assert_close(exact_rows(inputs, rows), expected[:, :, rows])

    def test_a_wrong_implementation_shows_in_the_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        shape = PrefillShape(length=40, head_dim=16, query_heads=2, kv_heads=1, is_causal=True)
        monkeypatch.setattr(
            prefill,
            "prepare",
            lambda backend, inputs: Prepared(lambda: torch.zeros_like(inputs.query)),
        )
        (found,) = measure_shape(shape, parse_implementations(["sdpa"]), CPU, torch.bfloat16, seconds=0.0)
        assert found.error == found.error_with_outliers == 1.0

    def test_causal_block_mask_is_the_triangle(self) -> None:
        mask = causal_block_mask(300, CPU)
        blocks = torch.arange(3)
        assert torch.equal(mask.to_dense()[0, 0].bool(), blocks[:, None] >= blocks)
        assert mask.full_kv_num_blocks is not None
        assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 1, 2]
        index = torch.arange(300)
        assert torch.equal(peers._is_visible(index, index, index[:, None], index), index[:, None] >= index)

    @pytest.mark.slow
    @pytest.mark.parametrize("is_causal", [True, False])
    def test_flex_computes_the_same(self, is_causal: bool) -> None:
        query, key, value = (torch.randn(1, h, 200, 32) for h in (4, 2, 2))
        inputs = Inputs(query, key, value, 0.1, is_causal)
        out = prepare(*parse_implementations(["flex"]), inputs).run()
        expected = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=0.1, enable_gqa=True)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


class TestReport:
    def test_table(self) -> None:
        numbers = {
            "milliseconds": 2.0,
            "sustained_milliseconds": 1.9,
            "tflops": 123.4,
            "speedup": 1.5,
            "error": 0.01,
            "error_with_outliers": 0.2,
            "extra_bytes": 50,
        }
        quantized = {"quantize_milliseconds": 0.3, "input_bytes": 100}
        measured = [result("a", 2048, **numbers, **quantized), result("b", 2048, failure="no unit")]
        (table,) = prefill_tables(measured)
        assert table.caption == "head_dim 64, 4/2 heads, causal, dense random inputs"
        cells = ["2.000", "1.900", "0.300", "123", "1.50x", "0.0100", "0.2000", "0.50 of QKV"]
        assert table.rows == [["a", "2,048", *cells], ["b", "2,048", "failed", *["–"] * 7]]

    def test_failures_are_reported_once(self) -> None:
        results = [*(result("b", n, failure="no unit") for n in (64, 128, 256)), result("a", 64)]
        found = failures(results)
        assert found == ["b did not run: no unit (64 tokens, head_dim 64, 4/2 heads, causal and 2 more)"]

    def test_what_cannot_be_a_graph_is_reported(self) -> None:
        found = failures([result("b", 64, graph_failure="it waits"), result("a", 64)])
        assert found == ["b cannot be a CUDA graph: it waits (64 tokens, head_dim 64, 4/2 heads, causal)"]

    def test_plot_of_failures_alone(self, tmp_path: Path) -> None:
        plot_prefill([result("b", 64, failure="no unit")], "title", tmp_path / "p.svg")
        assert "title" in (tmp_path / "p.svg").read_text()


def test_short_calls_are_also_timed_as_graphs_and_all_are_timed_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers on a stand-in for a GPU: ``long`` is too long for a graph, and the second ``broken`` cannot be one."""
    timed: dict[str, Any] = {}

    def interleaved(runs: dict[str, Any], device: object, *, seconds: float) -> dict[str, Timing]:
        return {name: Timing(median=run(), fast=1.0, slow=9.0, repeats=5) for name, run in runs.items()}

    def captured(runs: dict[str, Any], device: object) -> tuple[dict[str, Any], dict[str, str]]:
        refusals = {name: "it waits" for name, run in runs.items() if run() == 1.5}
        return {name: lambda run=run: run() / 2 for name, run in runs.items() if name not in refusals}, refusals

    def isolated(run: Any, device: object, *, seconds: float, milliseconds: float) -> float:
        run()
        timed[str(len(timed))] = milliseconds
        return 0.7

    for name, stand_in in (("time_interleaved", interleaved), ("captured", captured), ("time_isolated", isolated)):
        monkeypatch.setattr(prefill, name, stand_in)
    times = {"short": (1.0, 2.0), "long": (3.0, 4.0), "broken": (1.0, 1.5)}
    calls = {name: [Prepared(lambda ms=ms: ms) for ms in layers] for name, layers in times.items()}
    found = prefill._time_calls(calls, torch.device("cuda"), 1.0)
    assert {name: each["milliseconds"] for name, each in found.items()} == {"short": 3.0, "long": 7.0, "broken": 2.5}
    assert {name: each.get("graph_milliseconds") for name, each in found.items()} == {
        "short": 1.5,
        "long": None,
        "broken": None,
    }
    assert [each.get("graph_failure") for each in found.values()] == [None, None, "it waits"]
    assert {each["sustained_milliseconds"] for each in found.values()} == {0.7}
    assert list(timed.values()) == [3.0, 7.0, 2.5]

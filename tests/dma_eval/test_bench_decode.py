"""``dma-hf bench decode``: what it measures, shows and writes, and what it refuses."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dma_eval.bench import decode, timing
from dma_eval.bench.decode import filled_storage, measure_shape, parse_implementations, prepare, read_bytes
from dma_eval.bench.results import DecodeReport, DecodeResult, DecodeShape
from dma_eval.bench.shown import decode_tables
from dma_eval.bench.timing import Timing
from dma_eval.commands.bench_options import SIZES, DecodeOptions
from dma_eval.errors import UserError
from transformers import QuantizedCache

import dma_hf

Run = Callable[..., Any]
TINY = ("--device", "cpu", "--size", "2x300", "--head-dim", 32, "--heads", "2/1", "--seconds", 0.0)
SHAPE = DecodeShape(length=300, batch=2, head_dim=32, query_heads=2, kv_heads=1)


def test_shows_and_writes_every_cache(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.json"
    done = run("bench", "decode", *TINY, "--json", path)
    assert done.exit_code == 0, done.output
    assert "head_dim 32, 2/1 heads" in done.stdout
    report = json.loads(path.read_text())
    assert report.keys() == {field.name for field in fields(DecodeReport)}
    labels = ["sdpa", "sdpa:flash", "sdpa:dynamic", "dma_mxfp:balanced+int8", "dma_mxfp:balanced+int4"]
    assert [result["label"] for result in report["results"] if result["label"] != "sdpa+quanto4"] == labels
    assert report["copy_bytes_per_second"] is None
    assert "of copy" not in done.stdout
    for result in report["results"]:
        assert result.keys() == {field.name for field in fields(DecodeResult)}
    assert report["results"][0]["speedup"] == 1.0
    assert report["results"][0]["bytes_ratio"] == 1.0


def test_all_that_is_compared_by_default_is_installed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("bench", "decode", *TINY)
    assert done.exit_code == 0, done.output
    assert "did not run" not in done.output
    for is_installed in (True, False):
        monkeypatch.setattr(decode, "is_optimum_quanto_available", lambda answer=is_installed: answer)
        assert ("sdpa+quanto4" in decode.default_names()) == is_installed


def test_a_cpu_says_that_the_reference_ran(run: Run) -> None:
    done = run("bench", "decode", *TINY, "--cache", "sdpa", "dma_mxfp:balanced+int8")
    message = "dma_mxfp:balanced+int8 ran in the PyTorch reference, not in the kernels"
    assert message in " ".join(done.stderr.split())
    done = run("bench", "decode", *TINY, "--cache", "sdpa")
    assert "reference" not in done.output


def test_packed_caches_of_the_default_shapes_are_smaller_than_16_bits() -> None:
    for shape in DecodeOptions().shapes_on(torch.device("cpu")):
        for config in (dma_hf.DMAConfig(cache="int8"), dma_hf.DMAConfig(cache="int4")):
            storage = filled_storage(config, replace(shape, kv_heads=1), torch.device("cpu"), torch.bfloat16)
            assert storage.nbytes < replace(shape, kv_heads=1).cache_bytes(2)


@pytest.mark.parametrize("keys", [1, 127, 128, 129, 300, 384, 385, 1024, 1025])
@pytest.mark.parametrize("config", [{}, {"diagonal_tiles": 0}, {"diagonal_tiles": 2, "sink_tiles": 0}])
def test_a_step_reads_each_tile_in_the_form_that_the_rule_names(keys: int, config: dict[str, int]) -> None:
    dma = dma_hf.DMAConfig(cache="int4", **config)
    storage = filled_storage(dma, replace(SHAPE, length=keys), torch.device("cpu"), torch.bfloat16)
    own = (keys - 1) // 128
    expected = 0
    for tile in range(own + 1):
        is_high = tile >= own - dma.diagonal_tiles or tile < dma.sink_tiles
        tokens = min(keys - 128 * tile, 128)
        # Two bytes for each channel of a key and a value; or codes, and scales with zero points: of keys by channel, of
        # values by token.
        expected += tokens * 64 * 2 if is_high else 128 * 64 // 2 + 32 * 4 + 128 * 4
    assert read_bytes(storage, keys) == expected * SHAPE.batch * SHAPE.kv_heads


def test_bandwidth_counts_what_a_step_reads_and_not_what_is_allocated() -> None:
    implementations = parse_implementations(["sdpa", "sdpa:dynamic", "dma_mxfp:balanced+int4"])
    results = measure_shape(SHAPE, implementations, torch.device("cpu"), torch.bfloat16, seconds=0.0)
    assert results[0].read_bytes == results[1].read_bytes == SHAPE.cache_bytes(2)
    assert results[2].read_bytes == 2 * (SHAPE.length + 1) * 64 * 2 < results[2].cache_bytes
    for result in results:
        assert result.bytes_per_second == pytest.approx(1e3 * result.read_bytes / result.milliseconds)


def test_the_table_has_the_share_of_the_copy_bandwidth() -> None:
    result = DecodeResult(shape=SHAPE, label="sdpa", config=None, milliseconds=1.0, bytes_per_second=1.5e12)
    (table,) = decode_tables([result], 3e12)
    assert table.rows[0][table.headers.index("of copy")] == "50 %"
    (table,) = decode_tables([result], None)
    assert "of copy" not in table.headers


def test_copy_bandwidth_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(runs: Mapping[str, Callable[[], Any]], device: torch.device, *, seconds: float) -> dict[str, Timing]:
        for run in runs.values():
            run()
        return {name: Timing(median=2.0, fast=2.0, slow=2.0, repeats=3) for name in runs}

    monkeypatch.setattr(timing, "time_interleaved", fake)
    assert timing.copy_bandwidth(torch.device("cpu"), size=1000) == 2 * 1000 / 2e-3


@pytest.mark.gpu
def test_a_gpu_shows_the_share_of_its_copy_bandwidth(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    caches = ("sdpa", "dma_mxfp:balanced+int8", "dma_mxfp:balanced+int4")
    done = run("bench", "decode", "--size", "64x4096", "--seconds", 0.1, "--cache", *caches, "--json", path)
    assert done.exit_code == 0, done.output
    assert "of copy" in done.stdout
    assert "reference" not in done.output
    report = json.loads(path.read_text())
    for result in report["results"]:
        assert 0 < result["read_bytes"] <= result["cache_bytes"]
        assert result["bytes_per_second"] < 1.2 * report["copy_bytes_per_second"]  # no more than the memory delivers


def test_an_interruption_keeps_what_there_is(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decode.measure_shape

    def interrupted(shape: DecodeShape, *arguments: Any, **options: Any) -> list[DecodeResult]:
        if shape.length == 200:
            raise KeyboardInterrupt
        return whole(shape, *arguments, **options)

    monkeypatch.setattr(decode, "measure_shape", interrupted)
    path = tmp_path / "r.json"
    run(
        "bench",
        "decode",
        *TINY[:3],
        "2x300",
        "1x200",
        *TINY[4:],
        "--cache",
        "sdpa",
        "dma_mxfp:balanced+int4",
        "--json",
        path,
    )
    results = json.loads(path.read_text())["results"]
    assert [(result["shape"]["length"], result["label"]) for result in results] == [
        (300, "sdpa"),
        (300, "dma_mxfp:balanced+int4"),
    ]


def test_a_cache_that_cannot_run_is_reported_beside_the_others() -> None:
    config = dma_hf.DMAConfig(cache="int8").to_dict() | {"backend": "triton"}
    sdpa, packed = parse_implementations(["sdpa", "dma_mxfp:balanced+int8"])
    broken = replace(packed, label="broken", config=dma_hf.DMAConfig(**config))
    results = measure_shape(SHAPE, [sdpa, broken], torch.device("cpu"), torch.float32, seconds=0.0)
    assert results[0].failure is None
    assert results[1].failure is not None
    assert "bf16 and fp16" in results[1].failure
    assert results[1].milliseconds is None


def test_a_quantized_cache_without_its_package_is_reported_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.cache_utils.is_optimum_quanto_available", lambda: False)
    arguments = [*TINY[:3], "2x300", "1x200", *TINY[4:]]
    done = run("bench", "decode", *arguments, "--cache", "sdpa", "sdpa+quanto4")
    assert done.exit_code == 0, done.output  # what else there is was measured
    assert done.stderr.count("did not run") == 1
    assert "optimum-quanto" in done.stderr
    assert "and 1 more" in " ".join(done.stderr.split())


@pytest.mark.skipif(
    "fp8" not in inspect.getsource(QuantizedCache.__init__),
    reason="Transformers before 5.23 has no fp8 backend, and the others need packages",
)
class TestQuantizedCache:
    def test_is_measured_where_its_backend_is_there(self) -> None:
        sdpa, quantized = parse_implementations(["sdpa", "sdpa+fp8"])
        results = measure_shape(SHAPE, [sdpa, quantized], torch.device("cpu"), torch.bfloat16, seconds=0.0)
        assert [result.failure for result in results] == [None, None]
        assert results[1].bytes_ratio == pytest.approx(0.5, abs=0.01)

    def test_every_run_appends_to_the_same_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A length that is new makes SDPA prepare itself, which a run of the next cache would be spared."""
        lengths: list[int] = []

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
            lengths.append(key.shape[2])
            return query

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        step = prepare(parse_implementations(["sdpa+fp8"])[0], SHAPE, torch.device("cpu"), torch.float32).run
        step()
        step()
        assert lengths == [SHAPE.length + 1] * 2


@pytest.mark.parametrize("length", [300, 383, 384])
def test_the_packed_cache_holds_what_the_shape_says(length: int) -> None:
    shape = replace(SHAPE, length=length)
    storage = filled_storage(dma_hf.DMAConfig(cache="int4"), shape, torch.device("cpu"), torch.float32)
    assert storage.lengths.tolist() == [length, length]
    assert storage.max_pages * 128 >= length + 205  # a token for each run of a measurement


def test_shapes_are_all_combinations() -> None:
    assert len(DecodeOptions().shapes_on(torch.device("cuda"))) == len(SIZES)
    shapes = DecodeOptions(heads=["32/8", "9/3"], head_dim=[64, 128], size=["1x300"]).shapes_on(torch.device("cpu"))
    families = [(s.query_heads, s.kv_heads, s.head_dim) for s in shapes]
    assert families == [(32, 8, 64), (32, 8, 128), (9, 3, 64), (9, 3, 128)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "8"), "--size: expected BATCHxKEYS, such as 8x32768, got '8'"),
        (("--size", "0x300"), "--size: expected BATCHxKEYS, such as 8x32768, got '0x300'"),
        (("--heads", "9/2"), "--heads: expected QUERY/KV with KV dividing QUERY"),
        (("--head-dim", 0), "'--head-dim': Input should be greater than or equal to 1, got '32 0'"),
        (("--dtype", "float8"), "Invalid value for '--dtype': 'float8' is not one of"),
        (("--cache", "sdpa", "sdpa"), "--cache: sdpa is given more than once"),
        (("--cache", "dma_mxfp:kv9"), "--cache: unknown preset 'kv9'"),
        (("--cache", "dma_mxfp:fp4"), "--cache: 'dma_mxfp:fp4' has no cache; add +int8 or +int4"),
        (
            ("--cache", "fp8"),
            "--cache: unknown name 'fp8'; valid: sdpa, sdpa:flash, sdpa:dynamic, fa3, fa3:fp8, sdpa+quanto4, "
            "sdpa+quanto2, sdpa+hqq8, ",
        ),
    ],
)
def test_invalid_input_is_refused(run: Run, arguments: tuple[object, ...], message: str) -> None:
    done = run("bench", "decode", *TINY, *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_no_cache_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="--cache needs at least one value"):
        parse_implementations([])

"""``benchmarks/prefill.py`` and ``benchmarks/decode.py``: what they measure, show and write, and what they refuse."""

from __future__ import annotations

import inspect
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, replace

import decode
import prefill
import pytest
import torch
from dma_eval.bench.attention import filled_storage
from dma_eval.bench.results import Shape, failures
from dma_eval.bench.timing import Timing
from dma_eval.load.backends import Backend
from kernel_bench import command, timing
from kernel_bench.inputs import Inputs, exact_rows
from kernel_bench.peers import PACKAGES, Prepared
from kernel_bench.results import DecodeReport, DecodeResult, PrefillReport, PrefillResult, PrefillShape
from torch.nn import functional as F
from transformers import QuantizedCache

import dma_hf

CPU = torch.device("cpu")
CAUSAL, FULL = "1x48:2/1:32", "1x48:2/1:32:full"
STEPS = ("--size", "2x300", "--head-dim", 32, "--heads", "2/1")
SHAPE = Shape(length=300, batch=2, head_dim=32, query_heads=2, kv_heads=1)


@pytest.fixture
def script(monkeypatch):
    """Run a script on the CPU, as short as possible, and return its exit code, output and messages."""

    def invoke(module, *arguments):
        shown, told = io.StringIO(), io.StringIO()
        given = ["--device", "cpu", "--seconds", "0", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", [str(module.__file__), *given])
        with redirect_stdout(shown), redirect_stderr(told), pytest.raises(SystemExit) as stopped:
            command.run(module.main, module.make_options())
        return stopped.value.code, shown.getvalue(), " ".join(told.getvalue().split())

    return invoke


def backends(*names, peers=prefill.PEERS, caches=False):
    return command.parse_compared(names, "--attn", tuple(peers), caches=caches)


def test_prefill_shows_and_writes_every_implementation(script, tmp_path):
    path = tmp_path / "new" / "r.json"
    code, shown, told = script(
        prefill, "--attn", "sdpa", "dma_mxfp:balanced", "sage", "--shape", CAUSAL, "--json", path
    )
    assert code == 0
    assert "head_dim 32, 2/1 heads, causal, dense random inputs" in shown
    assert "Warning: sage did not run: SageAttention is not installed: pip install sageattention" in told
    assert "Warning: dma_mxfp:balanced ran in the PyTorch reference, not in the kernels" in told
    report = json.loads(path.read_text())
    assert report.keys() == {field.name for field in fields(PrefillReport)}
    assert report["command"].startswith("python benchmarks/prefill.py --device cpu --seconds 0 --attn sdpa ")
    reference, balanced, _ = report["results"]
    assert reference.keys() == {field.name for field in fields(PrefillResult)}
    assert balanced["config"] == dma_hf.PRESETS["balanced"].to_dict()
    assert reference["speedup"] == 1.0
    assert balanced["speedup"] == pytest.approx(reference["milliseconds"] / balanced["milliseconds"])
    assert 0.0 < reference["error"] < 0.01
    assert 0.0 < balanced["error"] < 0.1
    assert 0.0 < balanced["error_with_outliers"] < 0.1
    for name in ("extra_bytes", "graph_milliseconds", "sustained_milliseconds"):
        assert balanced[name] is None  # not on a CPU


def test_decode_shows_and_writes_every_cache(script, tmp_path):
    path = tmp_path / "r.json"
    code, shown, told = script(decode, *STEPS, "--json", path)
    assert code == 0
    assert "head_dim 32, 2/1 heads" in shown
    assert "of copy" not in shown
    assert "did not run" not in told
    report = json.loads(path.read_text())
    assert report.keys() == {field.name for field in fields(DecodeReport)}
    labels = ["sdpa", "sdpa:flash", "sdpa:dynamic", "dma_mxfp:balanced+int8", "dma_mxfp:balanced+int4"]
    assert [result["label"] for result in report["results"] if result["label"] != "sdpa+quanto4"] == labels
    assert report["results"][0].keys() == {field.name for field in fields(DecodeResult)}
    assert (report["results"][0]["speedup"], report["results"][0]["bytes_ratio"]) == (1.0, 1.0)


def test_an_interruption_keeps_what_there_is(script, tmp_path, monkeypatch):
    def interrupted(shape, *arguments, **options):
        if not shape.is_causal:
            raise KeyboardInterrupt
        return whole(shape, *arguments, **options)

    whole = prefill.measure_shape
    monkeypatch.setattr(prefill, "measure_shape", interrupted)
    path = tmp_path / "r.json"
    code, _, _ = script(prefill, "--attn", "sdpa", "dma_mxfp", "--shape", CAUSAL, FULL, "--json", path)
    assert code == 130
    assert [r["label"] for r in json.loads(path.read_text())["results"]] == ["sdpa", "dma_mxfp"]


def test_a_shape_that_nothing_ran_on_is_a_failure(script):
    assert script(prefill, "--attn", "sdpa:cudnn", "--shape", FULL)[0] == 1


@pytest.mark.parametrize("name", [name for name in prefill.PEERS if name[:4] != "sdpa"])
def test_a_package_that_is_missing_is_named(name, monkeypatch):
    for module in PACKAGES:
        monkeypatch.setitem(sys.modules, module, None)
    inputs = Inputs(*(torch.randn(1, h, 8, 16) for h in (2, 1, 1)), 0.25)
    with pytest.raises(ImportError, match=r"is not installed: pip install [\w-]+ \("):
        prefill.prepare(Backend(name, name), inputs)


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (prefill, ["--attn", "dma_mxfp+int4"], "--attn: 'dma_mxfp+int4' reads through a cache; leave out +CACHE"),
        (prefill, ["--attn", "sdpa", "flsh"], "--attn: unknown name 'flsh'; valid: sdpa, sdpa:flash, sdpa:cudnn"),
        (prefill, ["--attn", "dma_mxfp:fast"], "--attn: unknown preset 'fast'; valid: balanced"),
        (prefill, ["--attn", "sdpa", "sdpa"], "--attn: sdpa is given more than once"),
        (prefill, ["--shape", "8:32/8:128"], "--shape: expected BATCHxTOKENS:QUERY/KV:HEAD_DIM[:full], such as "),
        (prefill, ["--shape", "1x64:6/4:128"], "--shape: expected QUERY/KV with KV dividing QUERY, such as 32/8"),
        (prefill, ["--shape", "1000000000000x64:4/2:64"], "--shape: cannot make inputs of 64 tokens"),
        (prefill, ["--device", "tpu"], "--device: expected auto, cpu, cuda or cuda:N; got 'tpu'"),
        (prefill, ["--inputs", "model"], "--inputs needs --data and --length, and excludes --shape"),
        (prefill, ["--dtype", "float32"], "argument --dtype: invalid choice: 'float32'"),
        (prefill, ["--seconds", "nan"], "argument --seconds: expected a finite number of at least 0, got 'nan'"),
        (
            prefill,
            ["--seed", str(2**64)],
            "argument --seed: expected an integer of at most 64 bits, got '18446744073709",
        ),
        (prefill, ["--length", "0"], "argument --length: expected an integer of at least 1, got '0'"),
        (prefill, ["--batch", "-2"], "argument --batch: expected an integer of at least 1, got '-2'"),
        (prefill, ["--layers", "0"], "argument --layers: expected an integer of at least 1, got '0'"),
        (decode, ["--head-dim", "0"], "argument --head-dim: expected an integer of at least 1, got '0'"),
        (decode, ["--size", "8"], "--size: expected BATCHxKEYS, such as 8x32768, got '8'"),
        (decode, ["--size", "0x300"], "--size: expected BATCHxKEYS, such as 8x32768, got '0x300'"),
        (decode, ["--heads", "9/2"], "--heads: expected QUERY/KV with KV dividing QUERY"),
        (decode, ["--cache", "dma_mxfp:fp4"], "--cache: 'dma_mxfp:fp4' has no cache; add +int8 or +int4"),
        (decode, ["--cache", "fp8"], "--cache: unknown name 'fp8'; valid: sdpa, sdpa:flash, sdpa:dynamic, fa3"),
    ],
)
def test_invalid_input_is_refused(script, module, arguments, message):
    code, _, told = script(module, *arguments)
    assert (code, message in told) == (2, True), told


def test_every_default_is_a_name_that_can_be_given():
    on_cuda = prefill.default_names(torch.device("cuda"))
    assert [each.label for each in backends(*on_cuda)] == on_cuda
    assert prefill.default_names(CPU) == [name for name in on_cuda if name != "sdpa:cudnn"]
    steps = decode.default_names()
    assert [each.label for each in backends(*steps, peers=decode.PEERS, caches=True)] == steps
    for value in (*prefill.SHAPES, *prefill.CPU_SHAPES):
        prefill.parse_shape(value)
    assert len(decode.shapes_of(decode.make_options().parse_args([]), torch.device("cuda"))) == len(decode.SIZES)


def test_flops_count_a_multiply_and_an_add_of_both_products():
    shape = prefill.parse_shape("2x100:4/2:64:full")
    assert shape.flops == 2 * 4 * 2 * 2 * 100 * 100 * 64
    assert 2 * prefill.parse_shape("2x100:4/2:64").flops == shape.flops


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_error_is_against_exact_attention(is_causal):
    query, key, value = (torch.randn(2, h, 20, 16) for h in (4, 2, 2))
    rows = torch.tensor([0, 7, 19])
    wide = (x.double() for x in (query, key, value))
    expected = F.scaled_dot_product_attention(*wide, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(exact_rows(Inputs(query, key, value, 0.25, is_causal), rows), expected[:, :, rows])


def test_a_wrong_implementation_shows_in_the_error(monkeypatch):
    shape = PrefillShape(length=40, head_dim=16, query_heads=2, kv_heads=1, is_causal=True)
    zeros = Prepared(lambda: torch.zeros(1, 2, 40, 16))
    monkeypatch.setattr(prefill, "prepare", lambda backend, inputs: zeros)
    (found,) = prefill.measure_shape(shape, backends("sdpa"), CPU, torch.bfloat16, seconds=0.0)
    assert found.error == found.error_with_outliers == 1.0


def test_implementations_are_interleaved_layer_by_layer():
    """Otherwise they would not share one clock."""
    runs = []
    calls = {
        label: [Prepared(lambda label=label, layer=layer: runs.append((label, layer))) for layer in range(2)]
        for label in "ab"
    }
    prefill._time_calls(calls, CPU, seconds=0.0)
    assert runs[:4] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def test_short_calls_are_also_timed_as_graphs_and_all_are_timed_isolated(monkeypatch):
    """Two layers on a stand-in for a GPU: ``long`` is too long for a graph, and the second ``broken`` cannot be one."""
    timed = []

    def interleaved(runs, device, *, seconds):
        return {name: Timing(median=run(), fast=1.0, slow=9.0, repeats=5) for name, run in runs.items()}

    def captured(runs, device):
        refusals = {name: "it waits" for name, run in runs.items() if run() == 1.5}
        return {name: lambda run=run: run() / 2 for name, run in runs.items() if name not in refusals}, refusals

    def isolated(runs, device, *, seconds, milliseconds):
        timed.append(milliseconds)
        return 0.7

    for name, stand_in in (("time_interleaved", interleaved), ("captured", captured), ("time_isolated", isolated)):
        monkeypatch.setattr(prefill, name, stand_in)
    times = {"short": (1.0, 2.0), "long": (3.0, 4.0), "broken": (1.0, 1.5)}
    calls = {name: [Prepared(lambda ms=ms: ms) for ms in layers] for name, layers in times.items()}
    found = prefill._time_calls(calls, torch.device("cuda"), 1.0)
    assert [each["milliseconds"] for each in found.values()] == timed == [3.0, 7.0, 2.5]
    assert [each.get("graph_milliseconds") for each in found.values()] == [1.5, None, None]
    assert [each.get("graph_failure") for each in found.values()] == [None, None, "it waits"]
    assert {each["sustained_milliseconds"] for each in found.values()} == {0.7}


def test_skipped_tiles_are_counted(tmp_path):
    path, off = tmp_path / "skipping.toml", tmp_path / "off.toml"
    path.write_text("skip_threshold = 1.0\nexact_until = 0\n", encoding="utf-8")
    off.write_text("skip_threshold = inf\nexact_until = 0\n", encoding="utf-8")
    dense = Inputs(*(torch.randn(1, h, 512, 16, dtype=torch.bfloat16) for h in (2, 1, 1)), 0.25)
    key = torch.cat((0.01 * dense.key[:, :, :256], dense.key[:, :, 256:]), 2)
    sparse = replace(dense, query=4 * dense.query, key=key)  # the one low tile is tile 1, of queries 384 to 511
    shape = PrefillShape(length=512, head_dim=16, query_heads=2, kv_heads=1, is_causal=True)
    compared = backends(f"dma_mxfp:{off}", f"dma_mxfp:{path}")
    skips_nothing, skipping = prefill.measure_layers(shape, [dense, sparse], compared, seconds=0.0)
    assert (skips_nothing.skipped_share, skipping.skipped_share) == (None, 0.5)
    (table,) = prefill.tables([skips_nothing, skipping])
    column = table.headers.index("skipped")
    assert [row[column] for row in table.rows] == ["–", "50.0 %"]


def test_failures_are_reported_once_for_all_shapes():
    def result(label, length, **changes):
        shape = PrefillShape(length=length, head_dim=64, query_heads=4, kv_heads=2, is_causal=True)
        return PrefillResult(shape=shape, label=label, config=None, **changes)

    results = [*(result("b", n, failure="no unit") for n in (64, 128)), result("a", 64, graph_failure="it waits")]
    place = "64 tokens, head_dim 64, 4/2 heads, causal, dense random inputs"
    expected = [f"b did not run: no unit ({place} and 1 more)", f"a cannot be a CUDA graph: it waits ({place})"]
    assert failures(results) == expected


class TestSteps:
    @pytest.mark.parametrize("keys", [1, 127, 128, 129, 300, 384, 385, 1024, 1025])
    @pytest.mark.parametrize("config", [{}, {"diagonal_tiles": 0}, {"diagonal_tiles": 2, "sink_tiles": 0}])
    def test_read_each_tile_in_the_form_that_the_rule_names(self, keys, config):
        dma = dma_hf.DMAConfig(cache="int4", **config)
        storage = filled_storage(dma, replace(SHAPE, length=keys), CPU, torch.bfloat16)
        own = (keys - 1) // 128
        expected = 0
        for tile in range(own + 1):
            is_high = tile >= own - dma.diagonal_tiles or tile < dma.sink_tiles
            tokens = min(keys - 128 * tile, 128)
            # Two bytes for each channel of a key and a value; or codes, and scales with zero points: of keys by
            # channel, of values by token.
            expected += tokens * 64 * 2 if is_high else 128 * 64 // 2 + 32 * 4 + 128 * 4
        assert decode.read_bytes(storage, keys) == expected * SHAPE.batch * SHAPE.kv_heads

    def test_bandwidth_counts_what_a_step_reads_and_not_what_is_allocated(self):
        compared = backends("sdpa", "sdpa:dynamic", "dma_mxfp:balanced+int4", peers=decode.PEERS, caches=True)
        results = decode.measure_shape(SHAPE, compared, CPU, torch.bfloat16, seconds=0.0)
        assert results[0].read_bytes == results[1].read_bytes == SHAPE.cache_bytes(2)
        assert results[2].read_bytes == 2 * (SHAPE.length + 1) * 64 * 2 < results[2].cache_bytes
        for result in results:
            assert result.bytes_per_second == pytest.approx(1e3 * result.read_bytes / result.milliseconds)

    def test_the_table_has_the_share_of_the_copy_bandwidth(self):
        result = DecodeResult(shape=SHAPE, label="sdpa", config=None, milliseconds=1.0, bytes_per_second=1.5e12)
        (table,) = decode.tables([result], 3e12)
        assert table.rows[0][table.headers.index("of copy")] == "50 %"

    def test_copy_bandwidth_counts_reads_and_writes(self, monkeypatch):
        fixed = Timing(median=2.0, fast=2.0, slow=2.0, repeats=3)
        monkeypatch.setattr(timing, "time_interleaved", lambda runs, device, *, seconds: dict.fromkeys(runs, fixed))
        assert timing.copy_bandwidth(CPU, size=1000) == 2 * 1000 / 2e-3

    def test_of_a_cache_that_cannot_run_are_reported_beside_the_others(self):
        config = dma_hf.DMAConfig(cache="int8", backend="triton")
        compared = [*backends("sdpa"), Backend("broken", "dma_mxfp", config)]
        ran, failed = decode.measure_shape(SHAPE, compared, CPU, torch.float32, seconds=0.0)
        assert ran.failure is None
        assert "bf16 and fp16" in (failed.failure or "")
        assert failed.milliseconds is None

    @pytest.mark.skipif(
        "fp8" not in inspect.getsource(QuantizedCache.__init__),
        reason="Transformers before 5.23 has no fp8 backend, and the others need packages",
    )
    def test_over_a_quantized_cache_append_to_the_same_keys(self, monkeypatch):
        """A length that is new makes SDPA prepare itself, which a run of the next cache would be spared."""
        lengths = []

        def attend(query, key, value, **options):
            lengths.append(key.shape[2])
            return query

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        (quantized,) = backends("sdpa+fp8", peers=decode.PEERS, caches=True)
        step = decode.prepare(quantized, SHAPE, CPU, torch.float32)
        step.run()
        step.run()
        assert lengths == [SHAPE.length + 1] * 2
        assert step.cache_bytes == pytest.approx(SHAPE.cache_bytes(2) / 2, rel=0.02)

    @pytest.mark.parametrize("length", [300, 383, 384])
    def test_find_room_for_every_run_of_a_measurement(self, length):
        shape = replace(SHAPE, length=length)
        storage = filled_storage(dma_hf.DMAConfig(cache="int4"), shape, CPU, torch.float32)
        assert storage.lengths.tolist() == [length, length]
        assert storage.max_pages * 128 >= length + 205

    @pytest.mark.gpu
    def test_on_a_gpu_read_no_more_than_the_memory_delivers(self, script, tmp_path):
        path = tmp_path / "r.json"
        caches = ("sdpa", "dma_mxfp:balanced+int8", "dma_mxfp:balanced+int4")
        options = ("--device", "cuda", "--seconds", 0.1, "--size", "64x4096", "--cache", *caches, "--json", path)
        code, shown, told = script(decode, *options)
        assert code == 0, told
        assert "of copy" in shown
        assert "reference" not in told
        report = json.loads(path.read_text())
        for result in report["results"]:
            assert 0 < result["read_bytes"] <= result["cache_bytes"]
            assert result["bytes_per_second"] < 1.2 * report["copy_bytes_per_second"]


@pytest.mark.gpu
def test_prefill_on_a_gpu_times_graphs_and_isolated_calls(script, tmp_path):
    path = tmp_path / "r.json"
    options = ("--device", "cuda", "--shape", "1x2048:8/2:128", "--attn", "sdpa", "dma_mxfp:balanced", "--json", path)
    code, _, told = script(prefill, *options)
    assert code == 0, told
    balanced = json.loads(path.read_text())["results"][1]
    for name in ("graph_milliseconds", "sustained_milliseconds", "extra_bytes"):
        assert balanced[name] > 0, name

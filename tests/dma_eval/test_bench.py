"""``dma-hf bench``: attention and runs of ``generate`` with their figures, on a tiny model and a CPU."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from dma_eval.bench import attention, generate
from dma_eval.bench.generate import build_model, measure, parse_runs
from dma_eval.bench.results import BenchReport, Shape
from dma_eval.errors import UserError
from dma_eval.load.models import load_model
from script_files import load_script
from tiny_models import FAMILIES, OTHERS

import dma_hf
from dma_hf.config import cache_of
from dma_hf.integrations.internals import CACHE_ARGUMENT
from dma_hf.stats import count_replay

RUNS = ("sdpa+dynamic", "sdpa+static", "dma_mxfp:balanced+int8", "dma_mxfp+int4")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return build_model("tiny", CPU, torch.float32)


def prompts(*contexts, batch=1):
    return [torch.randint(256, (batch, context)) for context in contexts]


@pytest.fixture(scope="module")
def results(model):
    return list(measure(model, prompts(40, 400, batch=2), parse_runs(RUNS), new_tokens=12))


def test_every_run_is_timed_at_every_context(results):
    assert [(r.context, r.label) for r in results] == [(c, label) for c in (40, 400) for label in RUNS]
    per_token = 2 * 2 * 2 * 2 * 16 * 4  # batch, K and V, layers, heads, channels, fp32
    for result in results:
        assert result.failure is None
        if "+int" not in result.label:
            assert result.cache_bytes == per_token * (result.context + 12 - 1)
        assert result.steps == 12 - 1
        assert 0 < result.step_milliseconds_fast <= result.step_milliseconds <= result.step_milliseconds_slow
        assert result.tokens_per_second == pytest.approx(2000 / result.step_milliseconds)
        assert result.first_token_seconds > 0
        assert result.peak_bytes is None  # no GPU
        assert result.graph_steps == 0
        assert (result.config is None) == result.label.startswith("sdpa")
        first = next(r for r in results if r.context == result.context)
        assert result.speedup == first.step_milliseconds / result.step_milliseconds


class TestCacheBytes:
    def test_layers_with_a_recurrent_state_count_in_every_cache(self):
        model = OTHERS["bamba"].build("sdpa")
        runs = parse_runs(["sdpa+dynamic", "dma_mxfp:balanced+int8"])
        dynamic, packed = measure(model, [torch.randint(90, (1, 20))], runs, new_tokens=8)
        assert (dynamic.failure, packed.failure) == (None, None)
        state = 4 * 128 * (16 + 4) + 4 * 2 * 16 * 4  # 8 heads of 16 by 16; 4 last inputs of 128 + 2 * 16 channels
        assert dynamic.cache_bytes == state + 2 * 2 * 16 * 4 * (20 + 8 - 1)
        assert packed.cache_bytes > state

    def test_layers_that_share_keys_hold_none(self):
        model, prompt = OTHERS["gemma3n"].build("sdpa"), torch.randint(90, (1, 16))
        (result,) = measure(model, [prompt], parse_runs(["sdpa+dynamic"]), new_tokens=8)
        assert result.failure is None
        assert result.cache_bytes == 2 * 2 * 2 * 16 * 4 * (16 + 8 - 1)  # of two layers of four


def test_the_timed_call_repeats_earlier_ones(model, monkeypatch):
    """With a graph that is replayed in every decoding step."""
    calls = []

    def generate_tokens(*, input_ids, max_new_tokens, streamer=None, **options):
        calls.append((input_ids.shape[1], max_new_tokens, streamer is not None))
        for _ in range(max_new_tokens - 1):
            count_replay(model, [])
        if streamer is not None:
            streamer.times += range(1, max_new_tokens + 2)
        return SimpleNamespace(**{CACHE_ARGUMENT: SimpleNamespace(layers=[])})

    monkeypatch.setattr(model, "generate", generate_tokens)
    (result,) = measure(model, prompts(12_000), parse_runs(["sdpa+dynamic"]), new_tokens=8)
    assert calls == [(12_000, 8, False), (12_000, 8, False), (12_000, 8, True)]
    assert result.graph_steps == 7


def test_runs_are_what_a_user_types(model, monkeypatch):
    def recorded(**arguments):
        caches.add((cache_of(model), arguments.get("cache_implementation")))
        assert not {"cache", "past_key_values", "compile_config", "disable_compile"} & set(arguments)
        return typed(**arguments)

    caches, typed = set(), model.generate
    monkeypatch.setattr(model, "generate", recorded)
    for name, expected in zip(RUNS, [(None, None), (None, "static"), ("int8", None), ("int4", None)], strict=True):
        (result,) = measure(model, prompts(20), parse_runs([name]), new_tokens=8)
        assert result.failure is None
        assert caches == {expected}
        assert cache_of(model) is None  # a packed cache takes no memory of later runs
        caches.clear()


@pytest.mark.parametrize("is_installed", [True, False])
def test_flash_attention_3_is_a_default_where_it_is_installed(is_installed, monkeypatch, capsys):
    monkeypatch.setattr(generate, "is_flash_attn_3_available", lambda: is_installed)
    names = generate.default_runs()
    assert names[0] == "sdpa+dynamic"
    assert ("flash_attention_3+dynamic" in names) == is_installed
    assert ("flash_attention_3+dynamic is left out" in capsys.readouterr().err) != is_installed
    assert [run.label for run in parse_runs(names)] == names


def test_runs_that_fail_leave_the_others(model, monkeypatch):
    def broken(**options):
        if options.get("cache_implementation") == "static":
            raise ValueError("no room")
        return typed(**options)

    def switch(name):
        if name == "eager":
            raise ValueError("no eager attention")
        switched(name)

    typed, switched = model.generate, model.set_attn_implementation
    monkeypatch.setattr(model, "generate", broken)
    monkeypatch.setattr(model, "set_attn_implementation", switch)
    runs = parse_runs(["sdpa+static", "eager+dynamic", "sdpa+dynamic"])
    static, eager, dynamic = measure(model, [torch.randint(90, (1, 20))], runs, new_tokens=8)
    assert (static.failure, static.step_milliseconds) == ("no room", None)
    assert eager.failure == "LlamaForCausalLM cannot run attention 'eager+dynamic': no eager attention"
    assert (dynamic.failure, dynamic.speedup) == (None, None)  # there is nothing to compare with


def test_an_interruption_keeps_what_there_is(tmp_path, run, monkeypatch):
    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return measure_one(*arguments)

    calls, measure_one = [], generate._measure_one
    monkeypatch.setattr(generate, "_measure_one", interrupted)
    path = tmp_path / "g.json"
    arguments = ["--device", "cpu", "--shape", "tiny", "--dtype", "float32", "--context", "40", "--new-tokens", "10"]
    assert run("bench", *arguments, "--run", *RUNS, "--json", path).exit_code != 0
    assert [r["label"] for r in json.loads(path.read_text())["results"]] == list(RUNS[:2])
    assert list(tmp_path.iterdir()) == [path]


class TestFp8Weights:
    def test_torchao_quantizes_all_linear_layers_except_the_last(self, monkeypatch):
        model = build_model("tiny", CPU, torch.bfloat16)
        chosen = []

        def quantize(model, config, filter_fn):
            chosen.extend(name for name, module in model.named_modules() if filter_fn(module, name))

        quantization = pytest.importorskip("torchao.quantization")
        monkeypatch.setattr(quantization, "quantize_", quantize)
        generate.quantize_weights(model)
        linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        assert chosen == [name for name in linear if name != "lm_head"]
        assert len(chosen) == 7 * model.config.num_hidden_layers

    def test_the_bytes_are_those_of_what_is_stored(self):
        quantization = pytest.importorskip("torchao.quantization")
        layer = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        quantization.quantize_(layer, quantization.Float8WeightOnlyConfig())
        assert 64 * 32 < generate.weight_bytes(layer) < 64 * 32 + 33 * 4

    def test_what_cannot_be_quantized_is_refused(self, run, monkeypatch):
        def told():
            result = run("bench", "--device", "cpu", "--shape", "tiny", "--weights", "fp8", "--context", "40")
            assert result.exit_code == 2
            return " ".join(result.stderr.split())

        assert "--weights fp8: torchao cannot quantize this model" in told()
        monkeypatch.setitem(sys.modules, "torchao.quantization", None)
        monkeypatch.setattr(generate, "build_model", None)  # it is refused before a model is made
        assert "--weights fp8 needs torchao: pip install torchao" in told()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["sdpa"], "expected ATTENTION.CACHE with a cache of dynamic, static, int8, int4, got 'sdpa'"),
        (["dma_mxfp:kv9+int8"], r"--run: unknown preset 'kv9'; .* or a TOML file \(dma_mxfp:FILE.toml\)"),
        (
            ["sdpa+int4"],
            r"--run: unknown backend 'sdpa\+int4'; .*, and after it a cache \(\+dynamic, \+static\); presets, files "
            r"and \+int8, \+int4 are for dma_mxfp$",
        ),
        (["dma_mxfp+int4+dynamic"], "expected ATTENTION.CACHE with one cache, got 'dma_mxfp.int4.dynamic'"),
        (["sdpa+dynamic+static"], "with one cache, got 'sdpa.dynamic.static'"),
        (["sdpa+static", "sdpa+static"], "sdpa.static is given more than once"),
    ],
    ids=str,
)
def test_wrong_runs(names, message):
    with pytest.raises(UserError, match=message):
        parse_runs(names)


def test_a_run_has_the_cache_of_its_name_and_not_that_of_its_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('cache = "int4"\n')
    runs = parse_runs([f"dma_mxfp:{file}+{cache}" for cache in ("dynamic", "int4", "int8")])
    assert [(run.label, run.config.cache) for run in runs] == [
        ("dma_mxfp:mine+dynamic", None),
        ("dma_mxfp:mine+int4", "int4"),
        ("dma_mxfp:mine+int8", "int8"),
    ]


def test_the_script_of_typed_calls_refuses_unknown_runs_and_needs_a_gpu(tmp_path, monkeypatch):
    script = load_script("measure_generate")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for runs, message in ((["int4"], "--run: unknown run 'int4'; valid: sdpa; "), (None, "it needs a CUDA device")):
        with pytest.raises(UserError, match=message):
            script.main(tmp_path / "out.json", run=runs)


def test_unknown_shape():
    with pytest.raises(UserError, match="unknown shape '8b'; valid: "):
        build_model("8b", CPU, torch.float32)


def test_command(tmp_path, run):
    arguments = ["--device", "cpu", "--shape", "tiny", "--context", 40, 20, 40, "--new-tokens", 10]
    result = run("bench", *arguments, "--run", *RUNS[:3], "--json", tmp_path / "g.json", code=0)
    assert "One layer, batch 1, head_dim 16, 4/2 heads, random inputs" in result.stdout
    assert "ran in the PyTorch reference, not in the kernels" in " ".join(result.stderr.split())
    report = json.loads((tmp_path / "g.json").read_text())
    assert report.keys() == {field.name for field in fields(BenchReport)}
    # Contexts ascend, so that a static cache is no larger than needed.
    assert [(r["context"], r["label"]) for r in report["results"]] == [(n, run) for n in (20, 40) for run in RUNS[:3]]
    calls = [("prompt", "sdpa"), ("prompt", "dma_mxfp:balanced"), ("step", "sdpa"), ("step", "dma_mxfp:balanced+int8")]
    found = [(r["shape"]["length"], r["call"], r["label"]) for r in report["attention"]]
    assert found == [(length, *call) for length in (20, 40) for call in calls]
    assert report["weight_bytes"] >= 2 * report["parameters"]


SHAPE = Shape(length=300, head_dim=16, query_heads=4, kv_heads=2, batch=2)


class TestAttention:
    def test_times_each_recipe_once_and_each_cache_and_compares_with_sdpa(self):
        names = ["dma_mxfp:balanced+dynamic", "dma_mxfp:balanced+static", "dma_mxfp+int8", "dma_mxfp:fp4+int4"]
        results = list(attention.measure_attention([SHAPE], parse_runs(names), CPU, torch.bfloat16))
        prompt = ["sdpa", "dma_mxfp:balanced", "dma_mxfp:fp4"]
        assert [r.label for r in results] == [*prompt, "sdpa", "dma_mxfp+int8", "dma_mxfp:fp4+int4"]
        for call in ("prompt", "step"):
            base, *others = (r for r in results if r.call == call)
            assert base.speedup == 1.0
            assert all(r.speedup == base.milliseconds / r.milliseconds for r in others)

    @pytest.mark.parametrize(("call", "length"), [("prompt", 300), ("step", 1)])
    def test_calls_have_the_shape_of_the_model(self, call, length):
        for config in (None, dma_hf.DMAConfig(cache="int4")):
            out = attention.prepare(call, config, SHAPE, CPU, torch.bfloat16)()
            assert out.shape == (2, 4, length, 16)

    def test_what_cannot_run_leaves_the_others(self):
        triton = replace(parse_runs(["dma_mxfp+dynamic"])[0], config=dma_hf.DMAConfig(backend="triton"))
        sdpa, failed, _ = attention.measure_attention([SHAPE], [triton], CPU, torch.float32)
        assert sdpa.speedup == 1.0
        assert "bf16 and fp16" in failed.failure
        assert failed.milliseconds is None

    def test_shapes_are_those_of_the_model_unless_its_heads_have_several_sizes(self, model, capsys):
        assert attention.shapes_of(model, [300], 2) == [SHAPE]
        assert attention.shapes_of(FAMILIES["deepseek_v3"].build("sdpa"), [300], 1) == []
        assert "Only generate is timed" in capsys.readouterr().err

    @pytest.mark.gpu
    def test_on_a_gpu_kernels_are_timed(self):
        runs = parse_runs(["dma_mxfp:balanced+dynamic", "dma_mxfp+int8", "dma_mxfp+int4"])
        results = list(attention.measure_attention([SHAPE], runs, torch.device("cuda"), torch.bfloat16))
        assert [r.failure for r in results] == [None] * 5


def test_a_real_model_reads_windows_of_a_text(tmp_path, run, model_folder, text_file, monkeypatch):
    def recorded(model, call, batch):
        prompts.append(call.keywords["input_ids"])
        return timed(model, call, batch)

    prompts, timed = [], generate._timed
    monkeypatch.setattr(generate, "_timed", recorded)
    arguments = ["--model", model_folder, "--data", text_file, "--context", 520, "--yarn", 2, "--batch", 2]
    common = ["--device", "cpu", "--dtype", "float32", "--new-tokens", 10, "--run", "sdpa+dynamic", "dma_mxfp+dynamic"]
    run("bench", *arguments, *common, "--json", tmp_path / "g.json", code=0)
    report = json.loads((tmp_path / "g.json").read_text())
    assert (report["model"], report["data"], report["yarn"]) == (model_folder.name, text_file.name, 2.0)
    tokens = load_model(str(model_folder), device="cpu").tokenize(text_file.read_text()).ids
    assert torch.equal(prompts[0], tokens[:1040].view(2, 520))
    assert torch.equal(prompts[1], prompts[0])


def test_a_context_beyond_the_positions_is_refused(run, refused, model_folder, text_file):
    arguments = ["--model", model_folder, "--data", text_file, "--context", 505, "--new-tokens", 8]
    message = refused(run("bench", "--device", "cpu", "--dtype", "float32", *arguments, "--run", "sdpa+dynamic"))
    assert message.startswith("Error: --context with --new-tokens: ")
    assert "takes 512 positions, got 513; lower it, or extend the positions with --yarn 2" in message

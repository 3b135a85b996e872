"""``dma-hf bench prefill --inputs``: capturing a model's attention, wider heads, and the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dma_eval.bench import shown
from dma_eval.bench.capture import capture_layers, choose_layers, text_windows
from dma_eval.bench.inputs import Inputs, embedded
from dma_eval.bench.peers import Prepared
from dma_eval.bench.prefill import _time_calls, measure_layers, parse_implementations
from dma_eval.bench.results import ModelInputs, PrefillResult, PrefillShape
from dma_eval.bench.shown import prefill_tables
from dma_eval.errors import UserError
from dma_eval.load.models import LoadedModel, ModelSource, load_model
from tiny_models import FAMILIES
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

Run = Callable[..., Any]


def _attention(inputs: Inputs) -> Tensor:
    return F.scaled_dot_product_attention(*inputs.tensors, is_causal=True, scale=inputs.scale, enable_gqa=True)


def _loaded(family: str, **changes: Any) -> LoadedModel:
    model: PreTrainedModel = FAMILIES[family].build("sdpa", **changes)
    return LoadedModel(family, ModelSource(family), model, None)


def _layer_outputs(loaded: LoadedModel, ids: Tensor) -> list[Tensor]:
    """What every layer's attention gives to its output projection, ``[B, T, H * D]``."""
    found: list[Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, arguments: found.append(arguments[0]))
        for layer in loaded.model.model.layers
    ]
    with torch.no_grad():
        loaded.model(ids)
    for hook in hooks:
        hook.remove()
    return found


def test_implementations_take_turns_on_each_layer() -> None:
    """Otherwise they would not share one clock."""
    runs: list[tuple[str, int]] = []
    calls = {label: [Prepared(partial(runs.append, (label, layer))) for layer in range(2)] for label in "ab"}
    _time_calls(calls, torch.device("cpu"), seconds=0.0)
    assert runs[:4] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


class TestCapture:
    @pytest.mark.parametrize("family", ["llama", "qwen3", "granite"])
    def test_attention_of_what_is_captured_is_that_of_the_model(self, family: str) -> None:
        loaded = _loaded(family)
        ids = torch.randint(2, 97, (2, 40))
        expected = _layer_outputs(loaded, ids)
        found = capture_layers(loaded, ids, [0, 1])
        for layer, inputs in found.items():
            out = _attention(inputs).transpose(1, 2).flatten(2)
            torch.testing.assert_close(out, expected[layer])

    def test_the_model_runs_its_own_attention_afterwards(self, loaded: LoadedModel) -> None:
        capture_layers(loaded, torch.zeros(1, 8, dtype=torch.int64), [1])
        assert loaded.model.config._attn_implementation == "sdpa"

    def test_only_the_requested_layers_are_kept(self, loaded: LoadedModel) -> None:
        assert list(capture_layers(loaded, torch.zeros(1, 8, dtype=torch.int64), [1])) == [1]

    def test_layers_are_evenly_spaced_among_those_with_full_attention(self) -> None:
        model = _loaded("llama", num_hidden_layers=30).model
        assert choose_layers(model, None) == list(range(30))
        assert choose_layers(model, 3) == [0, 14, 29]
        assert choose_layers(model, 1) == [0]
        assert len(set(choose_layers(model, 14))) == 14
        assert choose_layers(_loaded("cohere2").model, None) == [1]  # layer 0 has a sliding window

    def test_more_layers_than_there_are_is_an_error(self, loaded: LoadedModel) -> None:
        with pytest.raises(UserError, match="--layers: wanted 3, but LlamaForCausalLM has 2 with full attention"):
            choose_layers(loaded.model, 3)

    @pytest.mark.parametrize(
        ("family", "layer", "message"),
        [
            ("mistral", 0, "layer 0 uses a mask; only plain causal attention is timed"),
            ("deepseek_v3", 0, "layer 0 has keys of 32 channels and values of 24"),
            ("llama", 7, "LlamaForCausalLM calls no attention function in layers 7"),
        ],
    )
    def test_attention_that_is_not_plain_is_refused(self, family: str, layer: int, message: str) -> None:
        with pytest.raises(UserError, match=message):
            capture_layers(_loaded(family), torch.zeros(1, 60, dtype=torch.int64), [layer])

    def test_a_window_that_reaches_every_key_is_plain(self) -> None:
        assert list(capture_layers(_loaded("mistral"), torch.zeros(1, 20, dtype=torch.int64), [0])) == [0]

    def test_yarn_takes_more_tokens(self, model_folder: Path) -> None:
        loaded = load_model(str(model_folder), dtype="float32", device="cpu", yarn=2.0)
        inputs = capture_layers(loaded, torch.zeros(1, 600, dtype=torch.int64), [0])[0]
        assert inputs.query.shape == (1, 2, 600, 32)

    def test_every_sequence_reads_another_window(self) -> None:
        windows = text_windows(torch.arange(20), 3, 5, "--length")
        assert windows.tolist() == [list(range(begin, begin + 5)) for begin in (0, 5, 10)]
        with pytest.raises(UserError, match="--data: the text has 20 tokens, too few for 3 x 7"):
            text_windows(torch.arange(20), 3, 7, "--length")


def test_the_plot_counts_every_layer() -> None:
    inputs = ModelInputs(model="m", data="d", layers=(0, 1, 2), model_layers=3, model_head_dim=16)
    shape = PrefillShape(length=100, head_dim=16, query_heads=2, kv_heads=1, is_causal=True, inputs=inputs)
    result = PrefillResult(shape=shape, label="sdpa", config=None, milliseconds=4.0, tflops=3.0, graph_milliseconds=2.0)
    assert shown._tflops(result) == 6.0
    assert shown._tflops(replace(result, graph_milliseconds=None)) == 3.0


class TestEmbedding:
    @pytest.mark.parametrize("head_dim", [24, 32, 64])
    def test_keeps_scores_and_outputs(self, head_dim: int) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = Inputs(*(torch.randn(2, h, 30, 24, generator=generator).double() for h in (4, 2, 2)), 0.1)
        wide = embedded(inputs, head_dim)
        assert wide.scale == inputs.scale
        assert wide.query.shape == (2, 4, 30, head_dim)

        def scores(each: Inputs) -> Tensor:
            return each.query @ each.key.repeat_interleave(2, 1).mT

        torch.testing.assert_close(scores(wide), scores(inputs), rtol=1e-12, atol=1e-12)
        out, wide_out = _attention(inputs), _attention(wide)
        torch.testing.assert_close(wide_out @ wide_out.mT, out @ out.mT, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(wide_out.norm(dim=-1), out.norm(dim=-1), rtol=1e-12, atol=1e-12)

    def test_spreads_over_all_channels_and_keeps_the_dtype(self) -> None:
        inputs = Inputs(*(torch.randn(1, 1, 50, 16, dtype=torch.bfloat16) for _ in range(3)), 0.25)
        wide = embedded(inputs, 32)
        assert wide.query.dtype == torch.bfloat16
        assert (wide.query.float().std((0, 1, 2)) > 0.1).all()

    def test_of_the_same_size_is_the_same(self) -> None:
        inputs = Inputs(*(torch.randn(1, 1, 5, 16) for _ in range(3)), 0.25)
        assert embedded(inputs, 16) is inputs


@pytest.fixture
def bench(run: Run, model_folder: Path, text_file: Path) -> Run:
    """Time the tiny model's attention; later options take precedence."""
    common = ("--device", "cpu", "--inputs", model_folder, "--data", text_file, "--length", 256, "--seconds", 0.0)
    return lambda *arguments: run("bench", "prefill", *common, *arguments)


class TestCommand:
    def test_sums_over_layers_and_labels_the_inputs(
        self, bench: Run, tmp_path: Path, model_folder: Path, text_file: Path
    ) -> None:
        path, page = tmp_path / "r.json", tmp_path / "r.md"
        done = bench("--attn", "sdpa", "dma_mxfp", "--head-dim", 32, 64, "--json", path, "--markdown", page)
        assert done.exit_code == 0, done.output
        caption = "head_dim 32, 2/1 heads, causal, inputs of tiny-llama, 2 of 2 layers, prose.txt"
        assert caption in done.stdout
        assert caption in page.read_text()
        results = json.loads(path.read_text())["results"]
        assert [(each["shape"]["head_dim"], each["label"]) for each in results] == [
            (head_dim, label) for head_dim in (32, 64) for label in ("sdpa", "dma_mxfp")
        ]
        for each in results:
            assert each["shape"]["inputs"] == {
                "model": model_folder.name, "data": text_file.name, "layers": [0, 1], "model_layers": 2,
                "model_head_dim": 32, "yarn": None, "begins_with": [],
            }  # fmt: skip
            assert each["error"] < 0.05
            assert each["error_with_outliers"] is each["skipped_share"] is None
        flops = 4 * 2 * 256 * 256 // 2 * 32
        assert results[0]["tflops"] == pytest.approx(2 * flops / results[0]["milliseconds"] / 1e9)

    def test_random_inputs_are_labelled_too(self, run: Run, tmp_path: Path) -> None:
        page = tmp_path / "r.md"
        common = ("--device", "cpu", "--shape", "1x32:2/1:16", "--attn", "sdpa", "--seconds", 0.0)
        done = run("bench", "prefill", *common, "--markdown", page)
        assert done.exit_code == 0, done.output
        assert "head_dim 16, 2/1 heads, causal, dense random inputs" in page.read_text()

    def test_a_batch_is_of_several_windows(self, bench: Run, tmp_path: Path) -> None:
        done = bench("--attn", "sdpa", "--batch", 3, "--length", 64, "--layers", 1, "--json", tmp_path / "r.json")
        assert done.exit_code == 0, done.output
        results = json.loads((tmp_path / "r.json").read_text())["results"]
        assert [(r["shape"]["batch"], r["shape"]["length"]) for r in results] == [(3, 64), (3, 256)]

    def test_skipped_tiles_are_counted(self, tmp_path: Path) -> None:
        path, off = tmp_path / "skipping.toml", tmp_path / "off.toml"
        path.write_text("skip_threshold = 1.0\n", encoding="utf-8")
        off.write_text("skip_threshold = inf\n", encoding="utf-8")
        dense = Inputs(*(torch.randn(1, h, 512, 16, dtype=torch.bfloat16) for h in (2, 1, 1)), 0.25)
        key = torch.cat((0.01 * dense.key[:, :, :256], dense.key[:, :, 256:]), 2)
        sparse = replace(dense, query=4 * dense.query, key=key)  # the one low tile is tile 1, of queries 384 to 511
        shape = PrefillShape(length=512, head_dim=16, query_heads=2, kv_heads=1, is_causal=True)
        skips_nothing, skipping = measure_layers(
            shape,
            [dense, sparse],
            parse_implementations([f"dma_mxfp:{off}", f"dma_mxfp:{path}"]),
            seconds=0.0,
        )
        assert skips_nothing.skipped_share is None
        assert skipping.skipped_share == 0.5
        (table,) = prefill_tables([skips_nothing, skipping])
        column = table.headers.index("skipped")
        assert [row[column] for row in table.rows] == ["–", "50.0 %"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--shape", "1x8:2/1:32"], "--inputs excludes --shape: the model's layers decide; give --length and"),
            (["--head-dim", "16"], "--head-dim: at least the model's own, 32; got 16"),
            (["--layers", "5"], "--layers: wanted 5, but LlamaForCausalLM has 2 with full attention"),
            (["--length", "1000"], "takes 512 positions, got 1,000; lower it, or extend the positions with --yarn 2"),
            (["--batch", "1000"], "--data: the text has "),
            (["--data", "absent.txt"], "--data: no such file: absent.txt"),
            (["--inputs", "./absent"], "--inputs: no such folder: ./absent"),
        ],
    )
    def test_refuses(self, arguments: list[str], message: str, bench: Run, refused: Callable[[Any], str]) -> None:
        assert message in refused(bench("--attn", "sdpa", *arguments))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--data", "x.txt"], "--data: only with --inputs, which names the model that reads the text"),
            (["--layers", "2", "--head-dim", "128"], "--head-dim, --layers: only with --inputs"),
            (["--inputs", "model"], "--inputs also needs --data and --length"),
        ],
    )
    def test_refuses_half_of_it(
        self, arguments: list[str], message: str, run: Run, refused: Callable[[Any], str]
    ) -> None:
        assert message in refused(run("bench", "prefill", "--device", "cpu", *arguments))

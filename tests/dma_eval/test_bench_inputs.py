"""``benchmarks/prefill.py --inputs``: capturing a model's attention, and the report."""

from __future__ import annotations

import shutil

import prefill
import pytest
import torch
from dma_eval.bench.generate import text_windows
from dma_eval.errors import UserError
from dma_eval.load.data import Tokens
from dma_eval.load.models import LoadedModel, load_model
from kernel_bench.capture import capture_layers, choose_layers
from kernel_bench.command import parse_compared
from tiny_models import FAMILIES
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM


def _attention(inputs):
    return F.scaled_dot_product_attention(*inputs.tensors, is_causal=True, scale=inputs.scale, enable_gqa=True)


def _loaded(family, **changes):
    model = FAMILIES[family].build("sdpa", **changes)
    return LoadedModel(family, model, None)


def _layer_outputs(loaded, ids):
    """What every layer's attention gives to its output projection, ``[B, T, H * D]``."""
    found = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, arguments: found.append(arguments[0]))
        for layer in loaded.model.model.layers
    ]
    with torch.no_grad():
        loaded.model(ids)
    for hook in hooks:
        hook.remove()
    return found


class TestCapture:
    @pytest.mark.parametrize("family", ["llama", "qwen3", "granite"])
    def test_attention_of_what_is_captured_is_that_of_the_model(self, family):
        loaded = _loaded(family)
        ids = torch.randint(2, 97, (2, 40))
        expected = _layer_outputs(loaded, ids)
        found = capture_layers(loaded, ids, [0, 1])
        for layer, inputs in found.items():
            out = _attention(inputs).transpose(1, 2).flatten(2)
            torch.testing.assert_close(out, expected[layer])

    def test_only_the_requested_layers_are_kept(self, model_folder):
        """Of more tokens than the model was made for, if YaRN extends its positions."""
        loaded = load_model(str(model_folder), dtype="float32", device="cpu", yarn=2.0)
        ((layer, inputs),) = capture_layers(loaded, torch.zeros(1, 600, dtype=torch.int64), [1]).items()
        assert (layer, inputs.query.shape) == (1, (1, 2, 600, 32))
        assert loaded.model.config._attn_implementation == "sdpa"  # as before

    def test_layers_are_evenly_spaced_among_those_with_full_attention(self):
        model = _loaded("llama", num_hidden_layers=30).model
        assert choose_layers(model, None) == list(range(30))
        assert choose_layers(model, 3) == [0, 14, 29]
        assert choose_layers(model, 1) == [0]
        assert len(set(choose_layers(model, 14))) == 14
        assert choose_layers(_loaded("cohere2").model, None) == [1]  # layer 0 has a sliding window
        with pytest.raises(UserError, match="--layers: wanted 31, but LlamaForCausalLM has 30 with full attention"):
            choose_layers(model, 31)

    @pytest.mark.parametrize(
        ("family", "layer", "message"),
        [
            ("mistral", 0, "layer 0 uses a mask; only plain causal attention is timed"),
            ("deepseek_v3", 0, "layer 0 has keys of 32 channels and values of 24"),
            ("llama", 7, "LlamaForCausalLM calls no attention function in layers 7"),
        ],
    )
    def test_attention_that_is_not_plain_is_refused(self, family, layer, message):
        with pytest.raises(UserError, match=message):
            capture_layers(_loaded(family), torch.zeros(1, 60, dtype=torch.int64), [layer])

    def test_a_window_that_reaches_every_key_is_plain(self):
        assert list(capture_layers(_loaded("mistral"), torch.zeros(1, 20, dtype=torch.int64), [0])) == [0]

    def test_every_sequence_reads_another_window(self):
        windows = text_windows(Tokens(torch.arange(20), []), 3, 5, "--length")
        assert windows.tolist() == [list(range(begin, begin + 5)) for begin in (0, 5, 10)]
        with pytest.raises(UserError, match="--data: the text has 20 tokens, too few for 3 x 7"):
            text_windows(Tokens(torch.arange(20), []), 3, 7, "--length")


def layers_of(model, text, *arguments):
    given = ["--device", "cpu", "--inputs", model, "--data", text, "--length", 256, *arguments]
    return list(prefill.model_inputs(prefill.make_options().parse_args([*map(str, given)])))


class TestCommand:
    def test_times_are_sums_over_layers_and_shapes_name_the_inputs(self, model_folder, text_file):
        compared = parse_compared(["sdpa", "dma_mxfp"], "--attn", tuple(prefill.PEERS), caches=False)
        ((shape, inputs),) = layers_of(model_folder, text_file)
        results = prefill.measure_layers(shape, inputs, compared, seconds=0.0)
        assert [each.label for each in results] == ["sdpa", "dma_mxfp"]
        assert all(each.error < 0.05 for each in results)
        assert all(each.error_with_outliers is each.skipped_share is None for each in results)
        assert shape.family == "head_dim 32, 2/1 heads, causal, inputs of tiny-llama, 2 of 2 layers, prose.txt"
        flops = 4 * 2 * 256 * 256 // 2 * 32
        assert results[0].tflops == pytest.approx(2 * flops / results[0].milliseconds / 1e9)

    def test_a_tokenizer_of_another_model_is_refused(self, model_folder, text_file, tmp_path):
        folder = shutil.copytree(model_folder, tmp_path / "model")
        config = LlamaConfig.from_pretrained(folder)
        config.vocab_size = 200
        LlamaForCausalLM(config).save_pretrained(folder)
        with pytest.raises(UserError, match=r"tokenizer gives token 2.*, but the model's vocabulary has 200 entries"):
            layers_of(folder, text_file)

    def test_a_batch_is_of_several_windows(self, model_folder, text_file):
        found = layers_of(model_folder, text_file, "--batch", 3, "--length", 256, 64, "--layers", 1)
        assert [(shape.batch, shape.length, len(layers)) for shape, layers in found] == [(3, 64, 1), (3, 256, 1)]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--length", 1000], "takes 512 positions, got 1,000; lower it, or extend the positions with --yarn 2"),
            (["--data", "absent.txt"], "--data: "),
            (["--inputs", "./absent"], "--inputs: no such folder: ./absent"),
            (["--yarn", 1], "--yarn: expected a factor above 1, got 1"),
            (["--yarn", "nan"], "--yarn: expected a factor above 1, got nan"),
        ],
    )
    def test_invalid_input_is_refused(self, arguments, message, model_folder, text_file):
        with pytest.raises(UserError) as refused:
            layers_of(model_folder, text_file, *arguments)
        assert message in str(refused.value)

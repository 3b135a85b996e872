"""Models from folders and GGUF files, and devices by name."""

from __future__ import annotations

import copy
import json
import math
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from dma_eval.bench.attention import shapes_of
from dma_eval.errors import UserError
from dma_eval.load import models
from dma_eval.load.models import ModelSource, load_model, parse_device, parse_source, rescale
from dma_eval.results import read_report
from gguf_files import write_gguf
from tiny_models import FAMILIES
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM


@pytest.fixture
def gguf_file(loaded, model_folder, tmp_path):
    """The tiny Llama in fp32 as a GGUF file."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, loaded.model, tokenizer=model_folder / "tokenizer.json")
    return path


class TestLoad:
    def test_gguf_file(self, gguf_file, loaded, prose, capfd):
        """The same weights and tokens as from the folder, and no progress bars."""
        from_gguf = load_model(str(gguf_file), device="cpu")
        assert capfd.readouterr() == ("", "")
        assert from_gguf.info.quantization is None
        assert (from_gguf.model.dtype, from_gguf.max_context) == (torch.float32, 512)
        ids = loaded.tokenizer(prose[:200], return_tensors="pt").input_ids
        assert from_gguf.tokenizer(prose[:200]).input_ids[-ids.shape[1] :] == ids[0].tolist()
        with torch.inference_mode():
            torch.testing.assert_close(from_gguf.model(ids).logits, loaded.model(ids).logits, rtol=1e-5, atol=1e-5)

    def test_folder(self, model_folder, capfd):
        loaded = load_model(str(model_folder), dtype="bfloat16", device="cpu")
        assert capfd.readouterr() == ("", "")
        assert (loaded.info.name, loaded.model.dtype) == (model_folder.name, torch.bfloat16)
        assert not loaded.model.training


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (4, 2, 16)),
        ({"global_head_dim": 32}, (4, 2, None)),
        ({"num_global_key_value_heads": 1, "attention_k_eq_v": True}, (4, None, 16)),
    ],
)
def test_layers_may_differ_in_their_heads(changes, expected, ppl, model_folder, tmp_path, capsys):
    """As those of Gemma 4, whose global layers have other heads than its local ones."""
    model = FAMILIES["gemma4"].build("sdpa", vocab_size=300, vocab_size_per_layer_input=300, **changes)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "model")
    options = ("-m", tmp_path / "model", "--attn", "sdpa", "dma_mxfp", "dma_mxfp+int8", "--out", tmp_path / "run")
    ppl(*options, code=0)
    info = read_report(tmp_path / "run").model
    assert (info.query_heads, info.kv_heads, info.head_dim) == expected
    assert "None" not in (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    assert bool(shapes_of(model, [128], 1)) == (not changes)


class TestYarn:
    """Positions beyond the model's own, as Transformers rescales them."""

    @pytest.mark.parametrize("kind", ["folder", "gguf"])
    def test_positions_are_multiplied(self, kind, model_folder, gguf_file, loaded, prose):
        path = {"folder": model_folder, "gguf": gguf_file}[kind]
        longer = load_model(str(path), device="cpu", yarn=4)
        assert (loaded.max_context, longer.max_context, longer.info.yarn) == (512, 2048, 4)
        longer.check_positions(2048, "--context")
        message = r"--context: .* takes 2,048 positions, got 2,049; .* with --yarn 5"
        with pytest.raises(UserError, match=message):
            longer.check_positions(2049, "--context")
        config = copy.deepcopy(loaded.model.config)
        config.max_position_embeddings = 2048
        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
        config.rope_parameters = config.rope_parameters | rope
        expected = LlamaForCausalLM(config).eval()
        expected.load_state_dict(loaded.model.state_dict())
        ids = loaded.tokenizer(prose, return_tensors="pt").input_ids[:, :600]
        with torch.inference_mode():
            torch.testing.assert_close(longer.model(ids).logits, expected(ids).logits, rtol=1e-5, atol=1e-5)
            assert not torch.allclose(longer.model(ids).logits, loaded.model(ids).logits, rtol=1e-2)

    def test_refused(self, loaded, model_folder):
        for factor in (0.5, math.nan):
            with pytest.raises(UserError, match=rf"--yarn: expected a factor above 1, .*; got {factor:g} and llama"):
                load_model(str(model_folder), device="cpu", yarn=factor)
        config = GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=32, vocab_size=8)
        with pytest.raises(UserError, match="got 4 and gpt2 with none"):
            rescale(config, 4)
        with pytest.raises(
            UserError, match=r"--context: .* takes 32 positions, got 33; lower it$"
        ):  # nor is it advised
            replace(loaded, model=GPT2LMHeadModel(config)).check_positions(33, "--context")


class TestSource:
    def test_names(self, model_folder, gguf_file):
        assert parse_source(str(model_folder)) == ModelSource(str(model_folder))
        assert parse_source(str(gguf_file)) == ModelSource(str(gguf_file.parent), "tiny.gguf")
        assert parse_source("owner/name") == ModelSource("owner/name")
        assert parse_source("gpt2") == ModelSource("gpt2")
        assert parse_source("owner/name/sub/file.gguf") == ModelSource("owner/name", "sub/file.gguf")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            *((name, f"no such file: {name}") for name in ("/a/b.gguf", "a/b.gguf", "~/a/b.gguf", "../a/b.gguf")),
            ("", "expected a folder, a .gguf file or a Hub name, got ''"),
            ("a/b/c", "no such folder"),
        ],
    )
    def test_no_name_of_a_model(self, name, message):
        with pytest.raises(UserError, match=f"--model: {message}"):
            parse_source(name)


OWN_MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_with_its_own_code_loads_if_its_code_is_trusted(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    folder = shutil.copytree(model_folder, tmp_path / "own")
    (folder / "own.py").write_text(OWN_MODEL, encoding="utf-8")
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    assert load_model(str(folder), device="cpu", trust_remote_code=True).info.architecture == "OwnModel"
    with pytest.raises(UserError, match="contains custom code"):
        load_model(str(folder), device="cpu")


def test_weights_that_do_not_fit_in_their_dtype_are_refused(model_folder, monkeypatch):
    needed = 2 * load_model(str(model_folder), device="cpu").model.num_parameters()
    monkeypatch.setattr(models, "free_memory", lambda device: needed)
    assert load_model(str(model_folder), dtype="bfloat16", device="cpu").model.dtype == torch.bfloat16
    with pytest.raises(UserError, match=r"needs 0.0 GiB for its weights in float32, and cpu has 0.0 GiB free; use ano"):
        load_model(str(model_folder), dtype="float32", device="cpu")


def test_devices():
    assert parse_device("cpu") == torch.device("cpu")
    assert parse_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(UserError, match=r"--device: expected auto, cpu, cuda or cuda:N; got 'gpu'"):
        parse_device("gpu")
    with pytest.raises(UserError, match=r"--device: 'cuda:99' does not exist: \d+ CUDA devices found"):
        parse_device("cuda:99")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_in_which_a_cpu_is_slow_are_pointed_out(loaded, tmp_path, dtype, capsys):
    loaded.model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    load_model(str(tmp_path), device="cpu")
    hint = f"has weights in {dtype}, in which a CPU computes slowly; --dtype float32 is several times faster"
    assert (hint in " ".join(capsys.readouterr().err.split())) == (dtype != "float32")
    load_model(str(tmp_path), device="cpu", dtype=dtype)
    assert capsys.readouterr().err == ""

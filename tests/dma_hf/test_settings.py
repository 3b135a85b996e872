"""The ``dma_mxfp`` section of a model's configuration: written, read, saved and loaded."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

import dma_hf
from dma_hf import PRESETS, DMAConfig


def test_runtime_settings_are_not_saved(llama, token_ids, tmp_path):
    """They depend on the machine: a CPU could not load a model saved on a GPU."""
    dma_hf.configure(llama, "fp4", backend="reference", on_unsupported="sdpa", cache="int8")
    twin = copy.deepcopy(llama)
    assert dma_hf.configure(twin) == dma_hf.configure(llama)
    assert dma_hf.configure(twin).on_unsupported == "sdpa"
    llama.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["dma_mxfp"]
    assert not {"backend", "on_unsupported"} & saved.keys()
    loaded = type(llama).from_pretrained(tmp_path, attn_implementation="dma_mxfp")
    assert torch.equal(loaded(token_ids(1, 400)).logits, llama(token_ids(1, 400)).logits)
    assert dma_hf.configure(loaded) == DMAConfig.from_preset("fp4", cache="int8")
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_runtime_settings_of_an_older_version_are_ignored(llama, token_ids):
    """It saved all fields; those with default values cause no warning."""
    for name, value in (("backend", "triton"), ("on_unsupported", "sdpa")):
        llama.config.dma_mxfp = PRESETS["fp4"].to_dict() | {name: value}
        with pytest.warns(UserWarning, match=f"sets {name}='{value}', which is ignored"):
            llama(token_ids(1, 5))
        assert dma_hf.configure(llama) == PRESETS["fp4"]
    llama.config.dma_mxfp = PRESETS["fp4"].to_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llama(token_ids(1, 5))


def test_the_section_determines_the_computation(llama, token_ids):
    ids = token_ids(1, 400)
    default = llama(ids).logits
    outputs = {name: (dma_hf.configure(llama, name), llama(ids).logits)[1] for name in PRESETS}
    assert torch.equal(outputs["balanced"], default)
    assert not torch.equal(outputs["balanced"], outputs["paper"])
    assert not torch.equal(outputs["fp4"], outputs["paper"])
    llama.config.dma_mxfp["low"] = "mxfp8"  # edited in place: read at every call
    assert not torch.equal(llama(ids).logits, outputs["paper"])


def test_configure_starts_from_the_current_settings(llama):
    """Omitted arguments keep the value of the setting; presets have none of cache and runtime."""
    assert dma_hf.configure(llama) == DMAConfig()
    arguments = {"cache": "int4", "backend": "reference", "on_unsupported": "sdpa"}
    config = dma_hf.configure(llama, "fp4", **arguments)
    assert config == DMAConfig.from_preset("fp4", **arguments)
    assert llama.config.dma_mxfp == config.to_section()
    assert dma_hf.configure(llama, cache=None, sink_tiles=2) == replace(config, cache=None, sink_tiles=2)
    assert dma_hf.configure(llama, "fp4") == PRESETS["fp4"]


def test_configure_reaches_every_part_of_a_composite_model(llava, families, tmp_path):
    """Also one in another module, and plain modules with a configuration of their own (X-CLIP)."""
    llama = families["llama"].build("sdpa")
    layer = llama.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    expected = dma_hf.configure(torch.nn.Sequential(llava, llama), "fp4", activate=True).to_section()
    for each in (llava.config, llava.config.text_config, llava.config.vision_config, llama.config):
        assert each._attn_implementation == "dma_mxfp"
        assert each.dma_mxfp == layer.config.dma_mxfp == expected
    llava.config.text_config.dma_mxfp["low"] = "mxfp8"
    assert llava.config.vision_config.dma_mxfp == expected  # each part has a section of its own
    llava.save_pretrained(tmp_path)
    loaded = type(llava).from_pretrained(tmp_path, attn_implementation="dma_mxfp")
    assert loaded.config.vision_config.dma_mxfp == expected
    assert loaded.config.text_config.dma_mxfp["low"] == "mxfp8"


def _mamba(llama):
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    return MambaForCausalLM._from_config(MambaConfig(**sizes))


def _bloom(llama):
    return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))


NO_MODEL = {
    "Linear, which contains no PreTrainedModel": lambda llama: torch.nn.Linear(2, 2),
    r"SimpleNamespace; pass its model: configure\(pipeline.model": lambda llama: SimpleNamespace(model=llama),
    "LlamaConfig; load a model with attn_implementation='dma_mxfp', and pass that": lambda llama: llama.config,
    "str; load a model": lambda llama: "gpt2",
    "NoneType; load a model": lambda llama: None,
}
WITHOUT_DMA = {
    "does not reach the attention of bloom, .* attn_implementation='eager'": _bloom,
    "MambaForCausalLM has no attention": _mamba,
}


@pytest.mark.parametrize("message", NO_MODEL)
def test_configure_requires_a_transformers_model(message, llama):
    with pytest.raises(TypeError, match=f"expected a Transformers model, got {message}"):
        dma_hf.configure(NO_MODEL[message](llama), "fp4")


@pytest.mark.parametrize("message", WITHOUT_DMA)
def test_configure_rejects_other_attention(message, llama):
    model = WITHOUT_DMA[message](llama)
    with pytest.raises(ValueError, match=message):
        dma_hf.configure(model, "fp4", activate=True)
    assert not hasattr(model.config, "dma_mxfp")


def test_configure_requires_dma_mxfp_and_a_valid_setting(families):
    """Otherwise nothing changes."""
    model = families["llama"].build("sdpa")
    message = r"LlamaForCausalLM runs attention 'sdpa', .* attn_implementation='dma_mxfp', or pass activate=True"
    with pytest.raises(ValueError, match=message):
        dma_hf.configure(model, "fp4")
    with pytest.raises(ValueError, match="sink_tiles must be an integer of at least 0, got -1"):
        dma_hf.configure(model, "fp4", activate=True, sink_tiles=-1)
    assert not hasattr(model.config, "dma_mxfp")
    assert model.config._attn_implementation == "sdpa"


def _loaded_with(section, model, folder):
    """Return a model as loaded from a repository with this section."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dma_mxfp": section}))
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="dma_mxfp")


def test_config_json_may_name_a_preset(llama, token_ids, tmp_path):
    loaded = _loaded_with("fp4", llama, tmp_path)
    dma_hf.configure(llama, "fp4")
    assert torch.equal(loaded(token_ids(1, 400)).logits, llama(token_ids(1, 400)).logits)
    assert dma_hf.configure(loaded, sink_tiles=3) == DMAConfig.from_preset("fp4", sink_tiles=3)


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        ("fast", ValueError, "unknown preset 'fast'; expected one of balanced, fp4, paper"),
        ({"lo": "mxfp4"}, ValueError, "unknown key 'lo'; valid keys: low, "),
        ({"low": ["mxfp4"]}, ValueError, r"low must be one of .* got \['mxfp4'\]"),
        ([1], TypeError, r"expected a preset .* or a mapping of fields, got \[1\]"),
    ],
)
def test_an_invalid_section_in_config_json_is_an_error(section, error, message, llama, token_ids, tmp_path):
    loaded = _loaded_with(section, llama, tmp_path)
    with pytest.raises(error, match=f"the 'dma_mxfp' section of the model's config.json: {message}"):
        loaded(token_ids(1, 8))
    dma_hf.configure(loaded, "balanced")
    loaded(token_ids(1, 8))

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
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
)

import dma_hf
from dma_hf import PRESETS, DMAConfig


@pytest.fixture
def llama(families):
    return families["llama"].build("dma_mxfp")


def _snapshot(model):
    return [json.dumps(module.config.to_dict(), default=str) for module in model.modules() if hasattr(module, "config")]


def test_configure_writes_the_section(llama):
    config = dma_hf.configure(llama, "fp4", sink_tiles=2)
    assert config == DMAConfig.from_preset("fp4", sink_tiles=2)
    assert llama.config.dma_mxfp == config.to_section()
    json.dumps(llama.config.dma_mxfp)


def test_runtime_settings_are_not_saved(llama, tmp_path):
    """They depend on the machine: a CPU could not load a model saved on a GPU."""
    dma_hf.configure(llama, "fp4", backend="reference", on_unsupported="sdpa", cache="int8")
    twin = copy.deepcopy(llama)
    assert dma_hf.configure(twin) == dma_hf.configure(llama)
    assert dma_hf.configure(twin).on_unsupported == "sdpa"
    llama.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["dma_mxfp"]
    assert not {"backend", "on_unsupported"} & saved.keys()
    loaded = type(llama).from_pretrained(tmp_path, attn_implementation="dma_mxfp")
    assert dma_hf.configure(loaded) == DMAConfig.from_preset("fp4", cache="int8")


def test_runtime_settings_of_an_older_version_are_ignored(llama, token_ids):
    """It saved all fields; those with default values cause no warning."""
    for name, value in (("backend", "triton"), ("on_unsupported", "sdpa")):
        llama.config.dma_mxfp = PRESETS["fp4"].to_dict() | {name: value}
        with pytest.warns(
            UserWarning, match=f"sets {name}='{value}', which is ignored, because it depends on the machine"
        ):
            llama(token_ids(1, 5))
        assert dma_hf.configure(llama) == PRESETS["fp4"]
    llama.config.dma_mxfp = PRESETS["fp4"].to_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llama(token_ids(1, 5))


def test_configure_starts_from_the_current_settings(llama):
    assert dma_hf.configure(llama) == DMAConfig()
    dma_hf.configure(llama, "paper")
    assert dma_hf.configure(llama, sink_tiles=2) == DMAConfig.from_preset("paper", sink_tiles=2)


def test_the_section_determines_the_computation(llama, token_ids):
    ids = token_ids(1, 400)
    default = llama(ids).logits
    outputs = {name: (dma_hf.configure(llama, name), llama(ids).logits)[1] for name in PRESETS}
    assert torch.equal(outputs["balanced"], default)
    assert not torch.equal(outputs["balanced"], outputs["paper"])
    assert not torch.equal(outputs["fp4"], outputs["paper"])
    llama.config.dma_mxfp["low"] = "mxfp8"  # edited in place: read at every call
    assert not torch.equal(llama(ids).logits, outputs["paper"])


def test_configure_reaches_every_part_of_a_composite_model(tmp_path):
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"head_dim": 16, "intermediate_size": 32, "vocab_size": 64, "layer_types": ["full_attention"]}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=63)
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="dma_mxfp").eval()
    expected = dma_hf.configure(model, "fp4").to_section()
    parts = (model.config, model.config.text_config, model.config.vision_config)
    assert all(part.dma_mxfp == expected for part in parts)
    assert len({id(part.dma_mxfp) for part in parts}) == 3
    model.save_pretrained(tmp_path)
    loaded = Gemma3ForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="dma_mxfp")
    assert loaded.config.text_config.dma_mxfp == loaded.config.vision_config.dma_mxfp == expected


def test_configure_activates_every_model_inside_another_module(families):
    models = [families[name].build("sdpa") for name in ("llama", "bert")]
    dma_hf.configure(torch.nn.Sequential(*models), "fp4", activate=True)
    for model in models:
        assert model.config._attn_implementation == "dma_mxfp"
        assert model.config.dma_mxfp["low"] == "nvfp4"


@pytest.mark.parametrize(
    ("arguments", "changes", "error", "message"),
    [
        (("fast",), {}, ValueError, "unknown preset 'fast'"),
        (("fp4",), {"tiles": 2}, ValueError, "unknown key 'tiles'; valid keys: "),
        (("fp4",), {"sink_tiles": -1}, ValueError, "sink_tiles must be an integer of at least 0, got -1"),
        (({"low": "mxfp3"},), {}, ValueError, "low must be one of"),
        ((7,), {}, TypeError, "expected a preset"),
    ],
)
def test_an_invalid_setting_changes_nothing(llama, arguments, changes, error, message):
    dma_hf.configure(llama, "paper")
    before = _snapshot(llama)
    with pytest.raises(error, match=message):
        dma_hf.configure(llama, *arguments, activate=True, **changes)
    assert _snapshot(llama) == before


def test_configure_requires_a_model_with_dma_mxfp(families):
    model = families["llama"].build("sdpa")
    message = r"LlamaForCausalLM runs attention 'sdpa', .* attn_implementation='dma_mxfp', or pass activate=True"
    with pytest.raises(ValueError, match=message):
        dma_hf.configure(model, "fp4")
    assert not hasattr(model.config, "dma_mxfp")
    assert model.config._attn_implementation == "sdpa"
    dma_hf.configure(model, "fp4", activate=True)
    assert model.config._attn_implementation == "dma_mxfp"
    assert model.config.dma_mxfp["low"] == "nvfp4"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: torch.nn.Linear(2, 2), "Linear, which contains no PreTrainedModel"),
        (
            lambda model: SimpleNamespace(model=model),
            r"SimpleNamespace; pass its model: configure\(pipeline.model, ...\)",
        ),
        (lambda model: model.config, "LlamaConfig; load a model with attn_implementation='dma_mxfp', and pass that"),
        (lambda model: "gpt2", "str; load a model"),
        (lambda model: None, "NoneType; load a model"),
    ],
    ids=["module", "pipeline", "configuration", "name", "nothing"],
)
def test_configure_requires_a_transformers_model(make, message, llama):
    with pytest.raises(TypeError, match=f"expected a Transformers model, got {message}"):
        dma_hf.configure(make(llama), "fp4")


def test_configure_rejects_built_in_attention():
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"does not reach the attention of bloom, .* attn_implementation='eager'"):
        dma_hf.configure(model, "fp4", activate=True)
    assert not hasattr(model.config, "dma_mxfp")


def test_settings_survive_saving_and_loading(llama, token_ids, tmp_path):
    dma_hf.configure(llama, "fp4", low_q="bf16", on_unsupported="sdpa")
    expected = llama(token_ids(1, 400)).logits
    llama.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="dma_mxfp")
    assert loaded.config.dma_mxfp == llama.config.dma_mxfp
    assert torch.equal(loaded(token_ids(1, 400)).logits, expected)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def _edit_config(folder, section):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dma_mxfp": section}))


def test_the_cache_and_runtime_settings_are_arguments(llama):
    """Omitted ones keep the value of the setting; presets have none."""
    config = dma_hf.configure(llama, "fp4", cache="int4", backend="reference", on_unsupported="sdpa")
    assert config == DMAConfig.from_preset("fp4", cache="int4", backend="reference", on_unsupported="sdpa")
    assert dma_hf.configure(llama, cache=None) == replace(config, cache=None)
    assert dma_hf.configure(llama, "fp4") == PRESETS["fp4"]


def test_config_json_may_name_a_preset(llama, token_ids, tmp_path):
    dma_hf.configure(llama, "fp4")
    llama.save_pretrained(tmp_path)
    _edit_config(tmp_path, "fp4")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="dma_mxfp")
    assert torch.equal(loaded(token_ids(1, 400)).logits, llama(token_ids(1, 400)).logits)
    assert dma_hf.configure(loaded, sink_tiles=3) == DMAConfig.from_preset("fp4", sink_tiles=3)


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        ("fast", ValueError, "unknown preset 'fast'; expected one of balanced, fp4, paper"),
        ({"lo": "mxfp4"}, ValueError, "unknown key 'lo'; valid keys: low, "),
        ({"low": "mxfp3"}, ValueError, "low must be one of"),
        ({"low": ["mxfp4"]}, ValueError, r"low must be one of .* got \['mxfp4'\]"),
        ([1], TypeError, r"expected a preset .* or a mapping of fields, got \[1\]"),
    ],
)
def test_an_invalid_section_in_config_json_is_an_error(section, error, message, llama, token_ids, tmp_path):
    llama.save_pretrained(tmp_path)
    _edit_config(tmp_path, section)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="dma_mxfp")
    with pytest.raises(error, match=f"the 'dma_mxfp' section of the model's config.json: {message}"):
        loaded(token_ids(1, 8))
    assert loaded.config.dma_mxfp == section
    dma_hf.configure(loaded, "balanced")
    loaded(token_ids(1, 8))


def test_configure_reaches_plain_modules_with_their_own_configuration(llama):
    """X-CLIP's frame encoder is not a model, and has a private copy of the configuration."""
    layer = llama.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    dma_hf.configure(llama, "paper")
    assert layer.config.dma_mxfp == PRESETS["paper"].to_section()


def test_a_model_without_attention_is_rejected():
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    model = MambaForCausalLM._from_config(MambaConfig(**sizes))
    with pytest.raises(ValueError, match="MambaForCausalLM has no attention"):
        dma_hf.configure(model, activate=True)
    assert not hasattr(model.config, dma_hf.NAME)

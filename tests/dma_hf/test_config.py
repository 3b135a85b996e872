"""Configurations: presets, their TOML files, and rejected settings."""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from pathlib import Path

import pytest
from dma_kernels import Recipe
from transformers import LlamaConfig

from dma_hf import PRESETS, DMAConfig
from dma_hf.config import config_of

CONFIGS = Path(__file__).parents[2] / "configs"


def test_presets_are_immutable_and_set_only_numerics():
    with pytest.raises(TypeError):
        PRESETS["balanced"] = DMAConfig(low="mxfp4")
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["balanced"].low = "mxfp4"
    for preset in PRESETS.values():
        assert preset == DMAConfig(**dataclasses.asdict(preset.recipe), high_layers=preset.high_layers)


def test_the_toml_files_equal_the_presets():
    assert {path.stem: DMAConfig.from_toml(path) for path in CONFIGS.glob("*.toml")} == dict(PRESETS)
    for path in CONFIGS.glob("*.toml"):
        assert not {"cache", "backend", "on_unsupported"} & tomllib.loads(path.read_text()).keys()


@pytest.mark.parametrize(
    "config",
    [
        *(DMAConfig.from_preset(name, low_q="bf16", cache="int4") for name in PRESETS),
        *(DMAConfig(skip_threshold=threshold) for threshold in (6, 6.5, 1e-5, 1e30, float("inf"))),
    ],
)
def test_configurations_round_trip(config, tmp_path):
    """Runtime settings only in a dictionary, because a file may be for another machine."""
    runtime = {"backend": "triton", "on_unsupported": "sdpa"}
    changed = dataclasses.replace(config, **runtime)
    assert DMAConfig.from_dict(changed.to_dict()) == changed
    changed.to_toml(tmp_path / "c.toml")
    assert DMAConfig.from_toml(tmp_path / "c.toml") == config
    assert DMAConfig.from_toml(tmp_path / "c.toml", **runtime) == changed
    LlamaConfig(dma_mxfp=config.to_dict()).save_pretrained(tmp_path)
    assert DMAConfig.from_dict(LlamaConfig.from_pretrained(tmp_path).dma_mxfp) == config


def test_the_examples_in_its_docstring_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    DMAConfig().to_toml("my.toml")
    lines = inspect.cleandoc(DMAConfig.__doc__).splitlines()
    examples = [line for line in lines if line.startswith("    DMAConfig")]
    assert len(examples) == 3
    for example in examples:
        assert isinstance(eval(example.strip()), DMAConfig)


def test_the_recipe_has_only_numerics():
    config = DMAConfig(low="mxint8", backend="reference")
    recipe = config.recipe
    assert type(recipe) is Recipe
    assert {f.name: getattr(config, f.name) for f in dataclasses.fields(Recipe)} == dataclasses.asdict(recipe)


def test_valid_settings_are_accepted(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('low = "mxint8"\nbackend = "triton"\n')
    expected = DMAConfig(low="mxint8", backend="triton")
    assert config_of("fp4") is PRESETS["fp4"]
    assert config_of(expected) is expected
    recipe = Recipe(low="mxfp4")
    assert config_of(recipe).recipe == recipe
    for setting in (expected, {"low": "mxint8", "backend": "triton"}, path, str(path)):
        assert config_of(setting) == expected
        assert config_of(setting, sink_tiles=3) == dataclasses.replace(expected, sink_tiles=3)
    assert config_of(recipe, cache="int8") == dataclasses.replace(config_of(recipe), cache="int8")


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ("fast", ValueError, "unknown preset 'fast'; expected one of balanced, fp4, paper"),
        ("fp4+int8", ValueError, r"unknown preset 'fp4\+int8'; .*; dma_hf.configure\(model, 'fp4', cache='int8'\)"),
        ("dma_mxfp:fp4", ValueError, r"; dma_hf.configure\(model, 'fp4'\)"),
        ("dma_mxfp:fp4+int8", ValueError, r"; dma_hf.configure\(model, 'fp4', cache='int8'\)"),
        (4, TypeError, r"setting must be a preset \(balanced, fp4, paper\), .* got 4"),
        ({"lo": "mxfp4"}, ValueError, "unknown key 'lo'; valid keys: low, low_q, .*on_unsupported"),
        ({"lo": "mxfp4", "hi": 1}, ValueError, "unknown keys 'lo', 'hi'"),
        ({"low": "fp4"}, ValueError, "low must be one of bf16, .*; got 'fp4'"),
        ({"skip_threshold": 0.0}, ValueError, "skip_threshold must be a number above 0, or None; got 0.0"),
        ({"backend": "cuda"}, ValueError, "backend must be one of auto, reference, triton; got 'cuda'"),
        ({"on_unsupported": "eager"}, ValueError, "on_unsupported must be one of error, sdpa; got 'eager'"),
        *(
            ({"cache": cache}, ValueError, re.escape(f"cache must be one of int8, int4, or None; got {cache!r}"))
            for cache in ("yes", True, 8, ["int4", "int8"])
        ),
    ],
)
def test_invalid_settings_are_rejected(setting, error, message):
    with pytest.raises(error, match=message):
        config_of(setting)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('low = "fp4"', r"c\.toml: low must be one of"),
        ('[dma]\nlow = "mxfp4"', r"c\.toml: unknown key 'dma'"),
        ("low = mxfp4", r"c\.toml: not a TOML file: "),
    ],
)
def test_invalid_files_are_rejected(text, message, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        config_of(path)
    with pytest.raises(FileNotFoundError, match=r"none\.toml"):
        config_of(tmp_path / "none.toml")


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    (tmp_path / "c.toml").write_text('low = "mxfp4"\n', encoding="utf-8-sig")
    assert config_of(tmp_path / "c.toml") == DMAConfig(low="mxfp4")


def test_from_dict_requires_a_mapping():
    with pytest.raises(TypeError, match=r"here: expected a mapping of configuration keys, got \['low'\]"):
        DMAConfig.from_dict(["low"], source="here")


@pytest.mark.parametrize("name", [5, None, ["fp4"]])
def test_from_preset_requires_a_name(name):
    with pytest.raises(TypeError, match=r"name must be a preset \(balanced, fp4, paper\), got "):
        DMAConfig.from_preset(name)

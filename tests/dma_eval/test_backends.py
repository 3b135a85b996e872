"""Names of attention backends."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
from dma_eval import names
from dma_eval.bench import generate
from dma_eval.commands.bench import BenchOptions
from dma_eval.errors import UserError
from dma_eval.load import baselines
from dma_eval.load.backends import Backend, activate, default_names, implementations, parse_backends
from dma_kernels.cache.formats import CACHE_FORMATS
from dma_kernels.numerics.formats import TILE
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dma_hf
from dma_hf.config import PAGED_NAME

FP4_INT4 = dma_hf.DMAConfig.from_preset("fp4", cache="int4")


class TestParse:
    @pytest.mark.parametrize(
        ("name", "backend"),
        [
            ("sdpa", Backend("sdpa", "sdpa")),
            ("sdpa+hqq4", Backend("sdpa+hqq4", "sdpa", peer_cache="+hqq4")),
            ("dma_mxfp", Backend("dma_mxfp", "dma_mxfp", dma_hf.PRESETS["balanced"])),
            ("dma_mxfp:paper", Backend("dma_mxfp:paper", "dma_mxfp", dma_hf.PRESETS["paper"])),
            ("dma_mxfp+int8", Backend("dma_mxfp+int8", "dma_mxfp", dma_hf.DMAConfig(cache="int8"))),
            ("dma_mxfp:fp4+int4", Backend("dma_mxfp:fp4+int4", "dma_mxfp", FP4_INT4)),
        ],
    )
    def test_names(self, name, backend):
        assert parse_backends([name]) == (backend,)
        assert backend.reads_cache == ("+" in name)

    @pytest.mark.parametrize(
        ("name", "cache", "config", "label"),
        [
            ("mine.toml", "+int4", dma_hf.DMAConfig(low="mxfp4"), "dma_mxfp:mine+int4"),
            ("mine.toml", "", dma_hf.DMAConfig(cache="int4"), "dma_mxfp:mine+int4"),
            ("balanced.toml", "", dma_hf.PRESETS["balanced"], "dma_mxfp:balanced"),
            ("balanced.toml", "", dma_hf.PRESETS["fp4"], "dma_mxfp:balanced.toml"),
            ("balanced+int4.toml", "", dma_hf.DMAConfig(cache="int4"), "dma_mxfp:balanced+int4"),
            ("fp4+int4.toml", "", dma_hf.DMAConfig(cache="int4"), "dma_mxfp:fp4+int4.toml+int4"),
        ],
    )
    def test_files(self, tmp_path, name, cache, config, label):
        """A report and a card name presets by their labels alone, so the label of a preset means its numerics."""
        config.to_toml(tmp_path / name)
        expected = replace(config, cache=cache.removeprefix("+") or config.cache)
        assert parse_backends([f"dma_mxfp:{tmp_path / name}{cache}"]) == (Backend(label, "dma_mxfp", expected),)

    def test_default_names_hold_every_preset_and_every_cache(self):
        configs = [backend.config for backend in parse_backends(default_names())[1:]]
        assert configs == [*dma_hf.PRESETS.values(), *(dma_hf.DMAConfig(cache=cache) for cache in CACHE_FORMATS)]

    def test_labels_are_unique(self, tmp_path):
        for folder in ("one", "two"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "my.toml").touch()
        names = ["sdpa", "sdpa", "eager", f"dma_mxfp:{tmp_path}/one/my.toml", f"dma_mxfp:{tmp_path}/two/my.toml"]
        labels = [backend.label for backend in parse_backends(names)]
        assert labels == ["sdpa #1", "sdpa #2", "eager", "dma_mxfp:my #1", "dma_mxfp:my #2"]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("flash", r"backend 'flash'; valid: .*dma_mxfp, .* \(\+quanto4, .*files and \+int8, .* for dma_mxfp"),
            ("", "unknown backend ''"),
            ("sdpa:fp4", "unknown backend 'sdpa:fp4'"),
            ("sdpa+int4", r"unknown backend 'sdpa\+int4'"),
            ("paged|sdpa+hqq4", r"unknown backend 'paged\|sdpa\+hqq4'"),  # it would see keys after the query
            ("dma_mxfp:fast", r"unknown preset 'fast'; valid: balanced, fp4, paper, or a TOML file .*\+int8, \+int4\)"),
            ("dma_mxfp:", "unknown preset 'dma_mxfp:'"),
            ("dma_mxfp:paper+hqq4", r"unknown preset 'paper\+hqq4'"),
            ("dma_mxfp:balanced+dynamic", r"unknown preset 'balanced\+dynamic'"),
            ("dma_mxfp+int3", r"unknown preset 'dma_mxfp\+int3'"),
            ("dma_mxfp:missing.toml", "no such file: missing.toml"),
        ],
    )
    def test_unknown(self, name, message):
        with pytest.raises(UserError, match=message):
            parse_backends(["sdpa", name])

    def test_attention_of_continuous_batching_is_not_listed(self, monkeypatch):
        """Ours appears in Transformers' table when a first model is served."""
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, PAGED_NAME, ALL_ATTENTION_FUNCTIONS["dma_mxfp"])
        assert not any("paged" in each for each in implementations())


def test_presets_are_those_of_the_plugin():
    assert tuple(dma_hf.PRESETS) == names.PRESETS
    assert {f"+{format}": format for format in CACHE_FORMATS} == names.FORMAT_SUFFIXES
    assert tuple(baselines.QUANTIZED) == names.PEER_SUFFIXES
    assert all(name.startswith(names.SIMULATED) for name in baselines.SCHEMES)
    assert names.TILE == TILE


def test_choices_of_the_benchmark_are_known_before_slow_imports():
    assert ("dynamic", "static", *generate.PACKED) == names.GENERATE_CACHES
    (shapes,) = (kind for kind in get_args(get_type_hints(BenchOptions)["shape"]) if kind is not type(None))
    assert get_args(shapes) == tuple(generate.SHAPES)


class TestActivate:
    def test_switches_back_and_forth(self, loaded):
        for backend in parse_backends(["dma_mxfp:fp4", "sdpa", "dma_mxfp:paper"]):
            activate(loaded.model, backend)
            assert loaded.model.config._attn_implementation == backend.implementation
            if backend.config is not None:
                assert loaded.model.config.dma_mxfp == backend.config.to_section()

    def test_missing_library(self, loaded):
        with pytest.raises(UserError, match="LlamaForCausalLM cannot run attention 'flash_attention_3'"):
            activate(loaded.model, Backend("flash_attention_3", "flash_attention_3"))

    def test_model_that_does_not_follow(self, loaded, monkeypatch):
        monkeypatch.setattr(loaded.model, "set_attn_implementation", lambda name: None)
        with pytest.raises(UserError, match="ignores attn_implementation: it still runs 'sdpa' after 'eager' was set"):
            activate(loaded.model, Backend("eager", "eager"))

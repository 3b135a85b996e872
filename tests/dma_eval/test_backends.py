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


class TestParse:
    def test_names(self, identity_file):
        names = ["sdpa", "eager", "dma_mxfp:paper", f"dma_mxfp:{identity_file}"]
        assert parse_backends(names) == (
            Backend("sdpa", "sdpa"),
            Backend("eager", "eager"),
            Backend("dma_mxfp:paper", "dma_mxfp", dma_hf.DMAConfig.from_preset("paper")),
            Backend("dma_mxfp:identity", "dma_mxfp", dma_hf.DMAConfig.from_toml(identity_file)),
        )

    def test_balanced_is_the_default(self):
        assert parse_backends(["dma_mxfp"]) == (
            Backend("dma_mxfp", "dma_mxfp", dma_hf.DMAConfig.from_preset("balanced")),
        )

    @pytest.mark.parametrize(
        ("name", "preset", "cache"),
        [
            ("dma_mxfp+int8", "balanced", "int8"),
            ("dma_mxfp:balanced+int4", "balanced", "int4"),
            ("dma_mxfp:fp4+int4", "fp4", "int4"),
        ],
    )
    def test_cache(self, name, preset, cache):
        (backend,) = parse_backends([name])
        assert backend == Backend(name, "dma_mxfp", replace(dma_hf.PRESETS[preset], cache=cache))
        assert backend.reads_cache

    def test_file_with_cache(self, identity_file):
        (backend,) = parse_backends([f"dma_mxfp:{identity_file}+int4"])
        assert (backend.label, backend.reads_cache) == ("dma_mxfp:identity+int4", True)

    def test_the_label_says_that_a_file_names_a_cache(self, tmp_path):
        dma_hf.DMAConfig(cache="int4").to_toml(tmp_path / "mine.toml")
        (backend,) = parse_backends([f"dma_mxfp:{tmp_path}/mine.toml"])
        assert (backend.label, backend.reads_cache) == ("dma_mxfp:mine+int4", True)

    @pytest.mark.parametrize(
        ("name", "config", "label"),
        [
            ("balanced.toml", dma_hf.PRESETS["balanced"], "dma_mxfp:balanced"),
            ("balanced.toml", dma_hf.PRESETS["fp4"], "dma_mxfp:balanced.toml"),
            ("balanced+int4.toml", dma_hf.DMAConfig(cache="int4"), "dma_mxfp:balanced+int4"),
            ("fp4+int4.toml", dma_hf.DMAConfig(cache="int4"), "dma_mxfp:fp4+int4.toml+int4"),
        ],
    )
    def test_the_label_of_a_preset_means_its_numerics(self, tmp_path, name, config, label):
        """A report and a card name presets by their labels alone."""
        config.to_toml(tmp_path / name)
        (backend,) = parse_backends([f"dma_mxfp:{tmp_path / name}"])
        assert backend == Backend(label, "dma_mxfp", config)

    def test_cache_of_transformers(self):
        assert parse_backends(["sdpa+hqq4"]) == (Backend("sdpa+hqq4", "sdpa", peer_cache="+hqq4"),)

    def test_default_names_hold_every_preset_and_every_cache(self):
        backends = parse_backends(default_names())
        configs = [backend.config for backend in backends[1:]]
        assert configs == [*dma_hf.PRESETS.values(), *(dma_hf.DMAConfig(cache=cache) for cache in CACHE_FORMATS)]
        cached = [backend.label for backend in backends if backend.reads_cache]
        assert cached == [f"dma_mxfp:balanced+{cache}" for cache in CACHE_FORMATS]

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
            (
                "flash",
                r"unknown backend 'flash'; valid: .*dma_mxfp, .*eager, .*files and \+int8, .* are for dma_mxfp",
            ),
            ("dma_mxfp:fast", r"unknown preset 'fast'; valid: balanced, fp4, paper, or a TOML file .*\+int8, \+int4\)"),
            ("dma_mxfp:", r"unknown preset 'dma_mxfp:'; valid: balanced, fp4, paper, or a TOML file"),
            (
                "sdpa:fp4",
                r"unknown backend 'sdpa:fp4'; valid: .* cache \(\+quanto4, .*; presets, .* for dma_mxfp",
            ),
            ("sdpa+int4", r"unknown backend 'sdpa\+int4'; .* and \+int8, \+int4 are for dma_mxfp"),
            ("dma_mxfp:paper+hqq4", r"unknown preset 'paper\+hqq4'; .*, and after it a cache \(\+int8, \+int4\)"),
            ("dma_mxfp:+int4", r"unknown preset '\+int4'"),
            ("dma_mxfp:balanced+int3", r"unknown preset 'balanced\+int3'; .* a cache \(\+int8, \+int4\)"),
            ("dma_mxfp+int3", r"unknown preset 'dma_mxfp\+int3'; .* a cache \(\+int8, \+int4\)"),
            ("dma_mxfp:missing.toml", r"no such file: missing.toml"),
            ("paged|sdpa+hqq4", r"unknown backend 'paged\|sdpa\+hqq4'"),  # it would see keys after the query
            ("", r"unknown backend ''"),
        ],
    )
    def test_unknown(self, name, message):
        with pytest.raises(UserError, match=message):
            parse_backends(["sdpa", name])

    def test_attention_of_continuous_batching_is_not_listed(self, monkeypatch):
        """Ours appears in Transformers' table when a first model is served."""
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, PAGED_NAME, ALL_ATTENTION_FUNCTIONS[dma_hf.NAME])
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

"""Importing ``dma_hf`` only registers ``dma_mxfp``."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from transformers import GenerationMixin, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dma_hf
from dma_hf.attention import dma_attention_forward
from dma_hf.masks import dma_mask

SCRIPT = """
import logging, os, random, sys, warnings
import torch, transformers
from transformers import LlamaConfig, LlamaModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

def loggers():
    known = {name: logging.getLogger(name) for name in list(logging.root.manager.loggerDict)} | {"": logging.root}
    return {name: (each.level, each.propagate, len(each.handlers)) for name, each in known.items()}

def state():
    return {
        "process": (dict(os.environ), list(sys.path), list(warnings.filters), transformers.logging.get_verbosity()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "precision": (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
        "seeds": (torch.random.initial_seed(), torch.get_rng_state().sum().item(), random.getstate()[1][:4]),
    }

def registered():
    return [{name: each[name] for name in each} for each in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]

tiny = LlamaConfig(num_hidden_layers=1, vocab_size=8, hidden_size=32, intermediate_size=8, num_attention_heads=2)
try:
    LlamaModel._from_config(tiny, attn_implementation="dma_mxfp")
except Exception as error:
    assert "dma_mxfp" in str(error), error
else:
    raise AssertionError("dma_mxfp is known without the import")

before, functions, logs = state(), registered(), loggers()
import dma_hf
after = state()
assert before == after, [key for key in before if before[key] != after[key]]
changed = {name: (logs[name], level) for name, level in loggers().items() if name in logs and logs[name] != level}
assert not changed, changed
for old, new in zip(functions, registered()):
    assert {name.partition(":")[0].partition("+")[0] for name in set(new) - set(old)} == {"dma_mxfp"}, new
    assert all(new[name] is old[name] for name in old)
"""


def test_importing_registers_and_changes_nothing_else(python):
    """Without the import the name is unknown."""
    done = python("-c", SCRIPT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_importing_again_changes_nothing():
    before = (dma_attention_forward, dma_mask, GenerationMixin._prepare_cache_for_generation)
    importlib.reload(dma_hf)
    after = (ALL_ATTENTION_FUNCTIONS["dma_mxfp"], ALL_MASK_ATTENTION_FUNCTIONS["dma_mxfp"])
    assert (*after, GenerationMixin._prepare_cache_for_generation) == before


@pytest.mark.parametrize("setting", [":fp4", ":balanced+int4", ":paper+int8", "+int4"])
def test_a_preset_is_accepted_at_load_time(setting, tmp_path, token_ids, families):
    """It overrides the repository's settings until the model is configured or switched."""
    source = families["llama"].build("dma_mxfp")
    preset, _, cache = setting.removeprefix(":").partition("+")
    expected = dma_hf.configure(source, preset or "balanced", cache=cache or None)
    ids = token_ids(1, 300)
    logits = source(ids).logits
    dma_hf.configure(source, "balanced").to_dict()
    source.save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation=f"dma_mxfp{setting}")
    assert torch.equal(model(ids).logits, logits)
    assert dma_hf.configure(model) == expected
    assert model.config._attn_implementation == "dma_mxfp"
    dma_hf.configure(model, "paper")
    model.set_attn_implementation(f"dma_mxfp{setting}")
    if ":" in setting:
        assert torch.equal(model(ids).logits, logits)
    else:
        assert dma_hf.configure(model) == dma_hf.DMAConfig.from_preset("paper", cache="int4")


@pytest.mark.parametrize(
    "name", ["dma_mxpf", "dma_mxfp:fp44", "dma_mxfp:", "dma_mxfp:my.toml", "dma_mxfp:fp4+int5", "dma_mxfp+int5"]
)
def test_a_typo_in_the_name_is_an_error(name, families):
    with pytest.raises(ValueError, match=f'attn_implementation="{re.escape(name)}"` is not supported'):
        families["llama"].build(name)

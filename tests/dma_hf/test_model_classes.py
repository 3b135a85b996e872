"""Model classes that need what ``dma_mxfp`` does not support, or take no custom attention, raise errors."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

import pytest
import torch
import transformers
from tiny_models import IDENTITY
from transformers.models.llama.modeling_llama import LlamaAttention

import dma_hf

TINY = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = LLAMA | {"num_key_value_heads": 2}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}

WITH_BIAS = {
    "T5ForConditionalGeneration": (T5, r"position_bias: the model passed one of shape \[1, 4, 5, 5\]"),
    "DogeForCausalLM": (GROUPED, "an additive bias as attention_mask"),
}
BUILT_IN = {"BloomForCausalLM": {"n_embd": 64, "n_layer": 2, "n_head": 4}, "RoFormerForMaskedLM": LLAMA}
WITHOUT_PACKED_CACHE = {
    "DeepseekV3ForCausalLM": (
        LLAMA
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
        | {"first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1},
        "deepseek_v3 cannot use a packed cache, because it caches latents",
    ),
    "DiffLlamaForCausalLM": (GROUPED, "diffllama cannot .* it attends twice in a layer"),
    "FalconH1ForCausalLM": (
        GROUPED | {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
        r"falcon_h1 cannot .* its layers also hold other states \(LinearAttentionAndFullAttentionLayer\)",
    ),
}
"""Sizes of a model, and why it cannot use a packed cache."""


def _build(name, sizes):
    cls = getattr(transformers, name, None)
    if cls is None:
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    return cls._from_config(cls.config_class(**(TINY | sizes)), attn_implementation="dma_mxfp").eval()


def _inputs(model):
    ids = torch.arange(5, 10)[None]
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


@pytest.mark.parametrize("name", WITH_BIAS)
def test_classes_with_a_bias_are_rejected_or_run_with_the_fallback(name):
    sizes, message = WITH_BIAS[name]
    model = _build(name, sizes)
    with pytest.raises(ValueError, match=f"dma_mxfp attention does not support {message}"):
        model(**_inputs(model))
    dma_hf.configure(model, on_unsupported="sdpa")
    with pytest.warns(UserWarning, match="Such calls run SDPA"):
        logits = model(**_inputs(model)).logits
    assert dma_hf.stats(model).fallbacks.total() >= 2
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits, model(**_inputs(model)).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_attention_is_rejected(name):
    model = _build(name, BUILT_IN[name])
    with pytest.raises(ValueError, match=r"does not reach the attention of \w+, which such models compute themselves"):
        model(**_inputs(model))
    with pytest.raises(ValueError, match=r"does not reach"):
        dma_hf.configure(model)


@pytest.mark.parametrize("name", [*BUILT_IN, "OpenAIGPTLMHeadModel"])
def test_loading_warns_of_built_in_attention(name):
    """A model that also makes its masks itself runs its own attention without an error (OpenAI GPT, XLNet, DeBERTa)."""
    with pytest.warns(UserWarning, match=r"does not reach the attention of \w+[-\w]*, which such models compute"):
        _build(name, BUILT_IN.get(name, BUILT_IN["BloomForCausalLM"]))


def test_loading_a_composite_model_does_not_warn_of_one_part():
    """The vision encoder computes its attention itself, and the language model runs ``dma_mxfp``."""
    vision = {"hidden_size": 32, "output_channels": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 32}
    parts = {"vision_config": vision, "text_config": GROUPED | TINY}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not reach")
        model = _build("GotOcr2ForConditionalGeneration", parts)
    model(**_inputs(model))
    assert dma_hf.stats(model).calls == 2


@pytest.mark.parametrize(
    ("name", "sizes", "way_out"),
    [
        ("FalconForCausalLM", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, "'sdpa'$"),
        ("GPTNeoForCausalLM", {"hidden_size": 64, "num_layers": 2, "attention_types": [[["global"], 2]]}, "'eager'$"),
        ("DeepseekVLHybridForConditionalGeneration", {}, r"'sdpa', or .* language model alone: {'text_config'"),
    ],
)
def test_a_class_with_a_table_of_attention_layers_is_rejected(name, sizes, way_out):
    """Upstream looks up their class by the implementation's name, and would raise a ``KeyError``."""
    message = rf"attn_implementation='dma_mxfp' does not reach \w+, which chooses .* attn_implementation={way_out}"
    with pytest.raises(ValueError, match=message):
        _build(name, sizes)


class MyConfig(transformers.LlamaConfig):
    model_type = "mine"


class MyAttention(LlamaAttention):
    """A layer that inherits the choice of its attention."""


class MyModel(transformers.LlamaForCausalLM):
    config_class = MyConfig

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = MyAttention(config, index)


def test_a_class_derived_from_another_attention_is_accepted():
    config = MyConfig(**TINY, **LLAMA, num_key_value_heads=2)
    model = MyModel._from_config(config, attn_implementation="dma_mxfp").eval()
    dma_hf.configure(model, IDENTITY)
    logits = model(**_inputs(model)).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits, model(**_inputs(model)).logits, rtol=1e-4, atol=1e-5)


def test_a_class_of_a_notebook_is_accepted(monkeypatch):
    """Its source code, in which Transformers looks for attention layers, cannot be read."""
    monkeypatch.setitem(sys.modules, "notebook", ModuleType("notebook"))
    members = {"__module__": "notebook", "_can_set_attn_implementation_cached_value": None}
    config_class = type("NotebookConfig", (MyConfig,), members)
    sys.modules["notebook"].NotebookModel = type("NotebookModel", (MyModel,), members | {"config_class": config_class})
    config = config_class(**TINY, **LLAMA, num_key_value_heads=2)
    model = sys.modules["notebook"].NotebookModel._from_config(config, attn_implementation="dma_mxfp").eval()
    assert not model._can_set_attn_implementation()
    assert model(**_inputs(model)).logits.isfinite().all()
    assert dma_hf.stats(model).calls == 2


@pytest.mark.parametrize("name", WITHOUT_PACKED_CACHE)
def test_a_packed_cache_is_refused_where_it_would_not_be_used(name):
    """By ``configure``, by a new cache, and by ``generate`` if the implementation's name has the cache."""
    sizes, reason = WITHOUT_PACKED_CACHE[name]
    model, message = _build(name, sizes), rf"{reason}.*; set cache=None for Transformers' 16-bit cache: dma_hf\.conf"
    with pytest.raises(ValueError, match=message):
        dma_hf.configure(model, "balanced", cache="int4")
    with pytest.raises(ValueError, match=message):
        dma_hf.DMACache(model.config)
    model.set_attn_implementation("dma_mxfp:balanced+int8")
    with pytest.raises(ValueError, match=message):
        model.generate(**_inputs(model), max_new_tokens=2)
    dma_hf.configure(model, cache=None)
    assert model.generate(**_inputs(model), max_new_tokens=2, min_new_tokens=2).shape == (1, 7)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2", "granite", "bert", "modernbert", "bart"])
def test_attention_weights_are_not_returned(name, families, token_ids):
    model = families[name].build("dma_mxfp")
    inputs = {"input_ids": token_ids(1, 5)} | ({"decoder_input_ids": token_ids(1, 5)} if name == "bart" else {})
    with pytest.warns(UserWarning, match="no attention weights for output_attentions=True"):
        logits = model(**inputs, output_attentions=True).logits
    assert torch.equal(model(**inputs).logits, logits)


@pytest.mark.parametrize("checkpoints", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_gradients_are_those_of_the_models_own_attention(name, padding, checkpoints, families, token_ids):
    """Without quantization."""
    ids = token_ids(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    labels = ids.clone()
    labels[0, : padding + 1] = -100  # padding has labels too
    gradients = []
    for implementation in ("eager", "dma_mxfp"):
        model = families[name].build(implementation, attention_dropout=0.0).train()
        if implementation == "dma_mxfp":
            dma_hf.configure(model, low="bf16", high="bf16", pv="bf16", shared_scale="block", smooth_k=False)
        if checkpoints is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
        with torch.enable_grad():
            loss = model(ids, attention_mask=mask, labels=labels, use_cache=False).loss
            loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    expected, actual = gradients
    for parameter, gradient in expected.items():
        torch.testing.assert_close(actual[parameter], gradient, msg=lambda text, p=parameter: f"{p}: {text}")

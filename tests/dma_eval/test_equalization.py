"""``equalize`` preserves logits bit for bit and balances query and key ranges, or rejects the model."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace

import pytest
import torch
from dma_eval.equalization import equalize, measure_ranges
from tiny_models import DECODERS, ENCODERS, FAMILIES, SIZES, VOCABULARY, Family
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dma_hf

NEOX = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
EQUALIZED = {
    **{
        name: family
        for name, family in (DECODERS | ENCODERS).items()
        if name not in ("gpt2", "llama4", "bigbird_pegasus", "bert")
    },
    # fused queries, keys and values by head
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX | {"rotary_pct": 0.5}),
    "phi": Family("PhiForCausalLM", "PhiConfig", NEOX | {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "glm": Family("GlmForCausalLM", "GlmConfig", SIZES | {"partial_rotary_factor": 0.5}),  # partial and interleaved
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config", SIZES),  # norms over all heads at once
    "hunyuan": Family("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", SIZES),  # norms after the rotary embedding
    "qwen3_next": Family(  # half of the query projection is a gate; norms are 1 + w
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        SIZES
        | {"layer_types": ["full_attention", "full_attention"], "num_experts": 4, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32, "num_experts_per_tok": 2},
    ),
    "smollm3": Family("SmolLM3ForCausalLM", "SmolLM3Config", SIZES | {"no_rope_layers": [1, 0]}),
    "yarn": Family("LlamaForCausalLM", "LlamaConfig", SIZES | {"rope_parameters": YARN}),  # queries and keys are scaled
}
ONE_PLUS = ("gemma3", "qwen3_next")
QK = re.compile(
    r"(q|k|kv|qkv|query|key|Wqkv|query_key_value)_?(a_|b_)?(proj|norm|layernorm)?(_with_mqa)?\.(weight|bias)$"
)


pytestmark = pytest.mark.usefixtures("no_gradients")


def _tokens(length=1200):
    return torch.randint(3, VOCABULARY, (2, length // 2), generator=torch.Generator().manual_seed(5))


def _unbalanced(family, dtype=torch.float32):
    """A model with query and key channels of very different magnitudes; all weights are exact in BF16."""
    model, generator = family.build(family.reference), torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if QK.search(name):
            if parameter.dim() == 1:
                parameter.add_(0.25 * torch.randn(parameter.shape, generator=generator))
            factors = torch.exp2(torch.randint(-4, 5, parameter.shape[:1], generator=generator).float())
            parameter.mul_(factors.view(-1, *[1] * (parameter.dim() - 1)))
        parameter.copy_(parameter.bfloat16())
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", EQUALIZED)
def test_logits_are_bit_identical_and_ranges_become_equal(name, dtype):
    """In BF16 the gains of a norm of 1 + w are rounded once more."""
    model, tokens = _unbalanced(EQUALIZED[name], dtype), _tokens()
    expected = model(input_ids=tokens).logits.float()
    exponents = equalize(model, tokens)
    actual = model(input_ids=tokens).logits.float()
    assert len(exponents) == 2
    if name in ONE_PLUS and dtype == torch.bfloat16:
        assert any(each.any() for each in exponents.values())
        assert (actual - expected).abs().max() <= 2**-5 * expected.abs().max()
    else:
        assert all(each.any() for each in exponents.values())
        assert torch.equal(actual, expected)
    if name not in ONE_PLUS and dtype == torch.float32:
        assert not any(each.any() for each in equalize(model, tokens).values())


def test_keys_and_queries_have_equal_ranges_per_rotary_pair():
    model, tokens = _unbalanced(DECODERS["llama"]), _tokens()
    equalize(model, tokens)
    for queries, keys in measure_ranges(model, tokens).values():
        pairs = [each.unflatten(-1, (2, -1)).amax(1) for each in (queries.view(2, 2, -1).amax(1), keys)]
        assert (torch.log2(pairs[0] / pairs[1]).abs() <= 1).all()  # the ratio has the square of the scale


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_rescaled_copy_gets_the_same_equalized_weights(name):
    model, twin, tokens = (*(_unbalanced(DECODERS[name]) for _ in range(2)), _tokens())
    scale = torch.tensor([5, 0, -3, 0, 0, 1, 0, 0] * 2).repeat(2)  # two heads of two halves
    for layer in twin.model.layers:
        for projection, powers in (
            (layer.self_attn.k_proj, scale),
            (layer.self_attn.q_proj, -scale.view(2, 1, 16).expand(2, 2, 16)),
        ):
            factors = torch.exp2(powers.flatten().float())
            projection.weight.mul_(factors[:, None])
            if projection.bias is not None:
                projection.bias.mul_(factors)
    plain, undone = equalize(model, tokens), equalize(twin, tokens)
    assert all(torch.equal(undone[layer] + scale.view(2, 16), plain[layer]) for layer in plain)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True))


def test_norms_of_one_plus_w_are_scaled_only_if_fp32_is_exact():
    """The weights use all FP32 bits, so scaling by a power below 1 must keep 1 + w exact."""
    model, tokens = _unbalanced(DECODERS["gemma3"]), _tokens()
    for layer in model.model.layers:
        layer.self_attn.k_norm.weight.copy_(torch.rand(16, generator=torch.Generator().manual_seed(2)) * 30)
    expected = model(input_ids=tokens).logits
    exponents = equalize(model, tokens)
    assert any(each.any() for each in exponents.values())
    assert torch.equal(model(input_ids=tokens).logits, expected)


def test_a_saved_equalized_model_loads_as_a_plain_model_whose_4_bit_keys_are_rotated(tmp_path):
    model, tokens = _unbalanced(DECODERS["qwen3"]), _tokens()
    expected = model(input_ids=tokens).logits
    assert dma_hf.DMACache(model.config, "int4").layers[0].format == "int4"
    equalize(model, tokens)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert torch.equal(loaded(input_ids=tokens).logits, expected)
    assert loaded.config.dma_equalized is True
    assert dma_hf.DMACache(loaded.config, "int4").layers[0].format == "int4-equalized"
    assert dma_hf.DMACache(loaded.config, "int8").layers[0].format == "int8"


def test_unbalanced_keys_are_not_rotated():
    """Weights shared by queries and keys cannot be scaled, so outliers remain."""
    model, tokens = _unbalanced(DECODERS["gemma3"]), _tokens()
    for layer in model.model.layers:  # near -1, where few values of 1 + w have an exact multiple by a power of two
        layer.self_attn.k_norm.weight.fill_(-0.99)
        layer.self_attn.k_norm.weight[3] = 60.0
    equalize(model, tokens)
    assert model.config.dma_equalized is False
    assert dma_hf.DMACache(model.config, "int4").layers[0].format == "int4"


def test_only_the_weights_of_the_model_change():
    model = _unbalanced(DECODERS["llama"]).train()
    before = (model.config._attn_implementation, model.config.use_cache, model.config.to_dict())
    equalize(model, _tokens())
    after = model.config.to_dict()
    assert after.pop("dma_equalized") is True
    assert (model.config._attn_implementation, model.config.use_cache, after) == before
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_eager_attention_elsewhere_is_not_affected():
    """A user's own "eager", and an eager model in another thread."""
    model, other = _unbalanced(DECODERS["llama"]), DECODERS["llama"].build("eager")
    ids = _tokens()[:1, :50]
    expected, during = other(input_ids=ids).logits, []

    def run_other(*_):
        thread = threading.Thread(target=lambda: during.append(other(input_ids=ids).logits))
        thread.start()
        thread.join()

    model.model.layers[1].register_forward_pre_hook(run_other)
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["eager"] = own
    try:
        equalize(model, _tokens())
        assert ALL_ATTENTION_FUNCTIONS["eager"] is own
    finally:
        del ALL_ATTENTION_FUNCTIONS["eager"]
    assert during
    for logits in during:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def _one_layer_twice(model):
    model.model.layers[1] = model.model.layers[0]


def _one_weight_twice(model):
    model.model.layers[1].self_attn.k_proj.weight = model.model.layers[0].self_attn.k_proj.weight


def _not_finite(model):
    model.model.layers[1].self_attn.k_proj.weight[3] = torch.nan


def _quantized(model):
    model.config.quantization_config = SimpleNamespace(quant_method="bitsandbytes", to_dict=dict)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt2", None, "GPT2LMHeadModel has no rotary embedding"),
        ("bart", None, "BartForConditionalGeneration is an encoder-decoder"),
        ("llama4", None, "layers.0.self_attn: its queries are not what linear layers or norms"),
        ("llama", _one_layer_twice, "because layers share its weights"),
        ("llama", _one_weight_twice, "changed in an unexpected way; the weights of the model were restored"),
        ("llama", _not_finite, "layers.1.self_attn: queries or keys .* have NaN or infinite values"),
        ("llama", _quantized, "LlamaForCausalLM is quantized"),
        ("llama", lambda model: model.half(), "is torch.float16; load the model unquantized"),
        ("llama", lambda model: model.to("meta"), "is on the meta device"),
    ],
)
def test_an_unsupported_model_is_rejected_and_unchanged(name, change, message):
    model = _unbalanced(FAMILIES[name])
    if change is not None:
        change(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        equalize(model, _tokens())
    after = model.state_dict()
    if not any(value.is_meta for value in before.values()):
        assert all(torch.equal(after[key].nan_to_num(7), before[key].nan_to_num(7)) for key in before)


@pytest.mark.parametrize(
    ("model", "tokens", "error", "message"),
    [
        ("llama", _tokens(1000), ValueError, "at least 1,024 elements .* got 1,000"),
        ("llama", torch.rand(2000), TypeError, r"be a tensor of token ids, .*; got torch.float32 \[2000"),
        ("llama", "a text", TypeError, r"be a tensor of token ids, .*; got str"),
        (None, _tokens(), TypeError, "model must be a Transformers model, got NoneType"),
    ],
)
def test_wrong_arguments(model, tokens, error, message):
    with pytest.raises(error, match=message):
        equalize(model and DECODERS[model].build("sdpa"), tokens)


def test_weights_quantized_in_place_are_rejected():
    """Their configuration does not say so. Their channels cannot be scaled."""
    quantization = pytest.importorskip("torchao.quantization")
    model = _unbalanced(FAMILIES["llama"])
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match=r"q_proj.weight is Int8Tensor; load the model unquantized"):
        equalize(model, _tokens())


def test_adapters_are_merged_first():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    model = peft.get_peft_model(_unbalanced(FAMILIES["llama"]), settings)
    with pytest.raises(ValueError, match="its queries are not what linear layers or norms of its own put out"):
        equalize(model, _tokens())
    merged = model.merge_and_unload()
    expected = merged(_tokens()).logits
    assert any(each.any() for each in equalize(merged, _tokens()).values())
    assert torch.equal(merged(_tokens()).logits, expected)


def test_clipped_keys_are_rejected():
    """Clipping is linear only for small numbers; scaled weights would clip other values."""
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY, "max_seq_len": 1024}
    sizes |= {
        "attn_config": {"clip_qkv": 100.0, "kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 2},
    }
    model = Family("DbrxForCausalLM", "DbrxConfig", sizes).build("eager")
    with pytest.raises(ValueError, match="its queries are not what linear layers or norms of its own put out"):
        equalize(model, _tokens())

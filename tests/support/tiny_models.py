"""Tiny configurations of many architectures, for random models built in milliseconds without the Hub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 97
WINDOW = 24
ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 1024,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
SIZES: dict[str, Any] = ENCODER | {"num_key_value_heads": 2, "head_dim": 16}
HYBRID: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED: dict[str, Any] = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
"""The last two of four layers share the keys of the first two."""
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 64, "max_position_embeddings": 512,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """An architecture with a tiny configuration."""

    model: str  # name of the model class in Transformers
    config: str  # name of its configuration class
    sizes: dict[str, Any]  # arguments of the configuration
    reference: str = "sdpa"  # the implementation to compare with; ``eager`` if the model has no other
    window: bool = False  # whether any layer has a sliding window or chunks

    def build(self, implementation: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
        """Return a random model in evaluation mode; the same weights for the same seed."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**(self.sizes | changes))
        return getattr(transformers, self.model)._from_config(config, attn_implementation=implementation).eval()


DECODERS: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", SIZES),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", ENCODER | {"num_key_value_heads": 2}),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", SIZES),
    "mistral": Family("MistralForCausalLM", "MistralConfig", SIZES | {"sliding_window": WINDOW}, window=True),
    "gemma2": Family(
        "Gemma2ForCausalLM", "Gemma2Config", SIZES | HYBRID | {"attn_logit_softcapping": 5.0}, "eager", window=True
    ),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", SIZES | HYBRID, window=True),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", SIZES | {"sliding_window": WINDOW}, window=True),
    "gpt_oss": Family("GptOssForCausalLM", "GptOssConfig", SIZES | HYBRID | MOE, "eager", window=True),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "pad_token_id": 0}
        | {"bos_token_id": 1, "eos_token_id": None},
    ),
    "granite": Family("GraniteForCausalLM", "GraniteConfig", SIZES | {"attention_multiplier": 0.2}),
    "cohere2": Family("Cohere2ForCausalLM", "Cohere2Config", SIZES | HYBRID, window=True),
    "llama4": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        SIZES
        | {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": WINDOW}
        | {"intermediate_size_mlp": 64, "num_local_experts": 2, "moe_layers": [1]},
        window=True,
    ),
    "deepseek_v3": Family(  # value head dim 24, key head dim 16 + 16
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        SIZES
        | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16}
        | {"qk_nope_head_dim": 16, "v_head_dim": 24, "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1},
    ),
    "bigbird_pegasus": Family("BigBirdPegasusForCausalLM", "BigBirdPegasusConfig", BART, "eager"),
}

ENCODERS: dict[str, Family] = {
    "bert": Family("BertForMaskedLM", "BertConfig", ENCODER),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        ENCODER
        | {"local_attention": WINDOW, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
        | {"layer_types": ["full_attention", "sliding_attention"]},
        window=True,
    ),
}

SEQ2SEQ: dict[str, Family] = {
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        BART | {"num_mel_bins": 20, "max_source_positions": 150, "max_target_positions": 512},
    ),
    "bart": Family("BartForConditionalGeneration", "BartConfig", BART),
}

OTHERS: dict[str, Family] = {
    "mimo_v2_flash": Family(  # value head dim 24
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        SIZES
        | HYBRID
        | {"v_head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        window=True,
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        SIZES | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "num_key_value_heads": 1},
    ),
    "persimmon": Family("PersimmonForCausalLM", "PersimmonConfig", SIZES | {"num_key_value_heads": 4}),
    "cohere_compass": Family(
        "CohereCompassForCausalLM",
        "CohereCompassTextConfig",
        SIZES
        | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}}
        | {"layer_types": ["full_attention"] * 2},
    ),
    "moshi": Family("MoshiForCausalLM", "MoshiConfig", SIZES | {"sliding_window": WINDOW, "ffn_dim": 64}, window=True),
    "doge": Family("DogeForCausalLM", "DogeConfig", SIZES),
    "diffllama": Family("DiffLlamaForCausalLM", "DiffLlamaConfig", SIZES),
    "jetmoe": Family("JetMoeForCausalLM", "JetMoeConfig", SIZES | MOE | {"kv_channels": 16}),
    "gemma3n": Family(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        SIZES
        | SHARED
        | {"intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4}
        | {"laurel_rank": 8, "altup_num_inputs": 2},
        window=True,
    ),
    "bamba": Family(  # one layer with a recurrent state and one with attention
        "BambaForCausalLM",
        "BambaConfig",
        SIZES
        | {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1}
        | {"mamba_d_state": 16, "mamba_chunk_size": 32},
    ),
    "gemma4": Family("Gemma4ForCausalLM", "Gemma4TextConfig", SIZES | SHARED | {"global_head_dim": 16}, window=True),
}
"""Families that treat keys and values in their own way, for single tests. Old versions of Transformers lack some."""

FAMILIES = DECODERS | ENCODERS | SEQ2SEQ | OTHERS

IDENTITY = {"low": "bf16", "high": "bf16", "pv": "bf16", "smooth_k": False, "rotate": False, "shared_scale": "block"}
"""A configuration without quantization, which computes ordinary attention."""

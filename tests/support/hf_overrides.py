"""Configuration fields that no rule of ``hf_shrink`` covers: interdependent sizes, and fields that are not sizes.

Keys are the ``model_type``, or the class's name if it has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ZAMBA: Mapping[str, Any] = {
    "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4,
}  # fmt: skip

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "recurrent_gemma": {"num_hidden_layers": 3},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "moe"], "n_groups": 1},
    "zamba": {**_ZAMBA, "mamba_dt_rank": 4},
    "zamba2": _ZAMBA,
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
    "dots3_note_text": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
        "swa_head_dim": 32, "swa_v_head_dim": 16, "swa_qk_nope_head_dim": 16, "swa_qk_rope_head_dim": 16,
    },
    "videoprism_vision_model": {"image_size": 72, "num_spatial_layers": 2, "num_temporal_layers": 2},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "dots1": {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 2, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "esm": {"vocab_size": 160, "mask_token_id": 150, "pad_token_id": 1},
    "esmc": {"vocab_size": 160},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 64, "use_bottleneck": False},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [4, 6]},
    "perceiver": {"d_model": 64, "d_latents": 64, "num_latents": 8, "max_position_embeddings": 64},
    "nemotron3_diarization_audio": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_word_timestamp": {"num_key_value_heads": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "gemma3n_text": {
        "num_kv_shared_layers": 2, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "embedding_gemma2_text": {"global_head_dim": 16},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip

"""Tiny Llamas as GGUF files with llama.cpp's names and order of rotary channels."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor
from transformers import PreTrainedModel


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    tokenizer: Path | None = None,
    adds_bos: bool = False,
    quantization: GGMLQuantizationType | None = None,
) -> None:
    """Write a Llama.

    Args:
        path: The file.
        model: A Llama.
        tokenizer: A byte-pair ``tokenizer.json`` to include.
        adds_bos: Whether the tokenizer puts BOS before a text.
        quantization: Type of matrices; fp32 by default.
    """
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is not None:
        bpe = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].__getitem__))
        writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(adds_bos)
        writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        base, _, suffix = name.rpartition(".")
        for kind, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if base.endswith(kind):
                weight = _interleaved(weight, heads)
        data = weight.float().contiguous().numpy()
        full_name = f"{names.get_name(base)}.{suffix}"
        if quantization is not None and weight.ndim == 2:
            writer.add_tensor(full_name, gguf.quantize(data, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(full_name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder rotary channels: GGUF interleaves pairs, Transformers splits a head into halves."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)

"""Tiny Llamas as GGUF files with llama.cpp's names and order of rotary channels."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel


def write_gguf(
    path: Path, model: PreTrainedModel, *,
    tokenizer: Path | None = None, adds_bos: bool = False, quantization: GGMLQuantizationType | None = None,
) -> None:  # fmt: skip
    """Write a Llama. Matrices are in fp32 by default.

    ``tokenizer`` is a byte-pair ``tokenizer.json``, which with ``adds_bos`` puts BOS before a text.
    """
    config = model.config
    writer = GGUFWriter(path, "llama")
    for field, value in {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        **dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), config.head_dim),
        "rope_freq_base": 10000.0,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
    }.items():
        getattr(writer, f"add_{field}")(value)
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
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(base.split(".")[-1])
        if heads is not None:  # GGUF interleaves pairs of rotary channels, Transformers splits a head into halves
            weight = weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
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

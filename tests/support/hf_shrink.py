"""Shrink any Transformers configuration by the names of its fields, not by a list of architectures.

A configuration class is built with its defaults, and every size is replaced by a small one, also in nested
configurations. Field names identify sizes (``hidden_size``, ``d_model`` and ``n_embd`` mean the same), so a few dozen
rules cover some five hundred architectures. Some need other sizes than most: they come in several ``STYLES``, and the
first one that the model class accepts is used. ``OVERRIDES`` has the rest, fields that names alone do not relate.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hf_overrides import OVERRIDES
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

HEADS, HEAD_DIM = 4, 16
HIDDEN = HEADS * HEAD_DIM
VOCABULARY = 160
FIRST_SPECIAL = 100
"""Higher token ids may stand for images and other media; test texts use lower ones."""
WINDOW = 8
POSITIONS = 256

RULES = tuple((re.compile(pattern), value) for pattern, value in (
    (r"(.*_)?(num_)?index(er)?_(n_)?heads", HEADS),
    (r"(.*_)?index_topk", 12),
    (r"(.*_)?(attention_|attn_|mamba_n_|.*_n_)?heads|num_.*_heads|n_head|num_head|nhead|n_heads", HEADS),
    (r"(.*_)?(head_dim|head_size|kv_channels|d_kv|dim_head|d_head|kv_dim|qk_rope_dim)", HEAD_DIM),
    (r"rotary_dim", HEAD_DIM // 2),
    (r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|model_dim|word_embed_proj_dim)", HIDDEN),
    (r"(.*_)?(emb_dim|embedding_dim|attention_hidden_size|lru_width|projection_dim|dim|decoder_dim|width)", HIDDEN),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|ffn_hidden_size|n_inner|feed_forward_size)(_mlp)?", HIDDEN),
    (r"(.*_)?(dim_feedforward|feedforward_dim|dim_ff|inner_dim|linear_units|vocab_size_base)", HIDDEN),
    (r"(.*_)?(n_routed_experts|num_experts|num_local_experts|n_experts|moe_num_experts)", 4),
    (r"(.*_)?(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|num_selected_experts)", 2),
    (r"n_group|topk_group|num_expert_groups?|topk_groups?", 1),
    (r"mamba_n_?groups|n_groups|ssm_groups", 1),
    (r"(.*_)?(q_lora_rank|kv_lora_rank|o_lora_rank)", HEAD_DIM),
    (r"(.*_)?(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx|context_length)", POSITIONS),
    (r"(.*_)?(max_(source|target|text|encoder|decoder)_position(s|_embeddings))", POSITIONS),
    (r"sliding_window(_size)?|local_window|attention_window_size|local_attention|attention_chunk_size", WINDOW),
    (r"(.*_)?vocab_size(_per_layer_input)?|num_embeddings", VOCABULARY),
))  # fmt: skip

KV_HEADS = re.compile(r"(.*_)?(num_)?(key_value|kv)_heads|num_attention_groups|n_kv_heads|num_query_groups|kv_n_heads")
LAYERS = re.compile(r"(.*_)?(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_blocks)")
LAYER_COUNT = re.compile(r"num_hidden_layers|n_layers?|num_layers|text_num_hidden_layers")
TOKEN = re.compile(r"(?!num_).*(_token_id|_token_index|_token|_bos_id|_eos_id|_patch_id|newline_id|separator_id)$")
OFTEN_NONE = re.compile(r"head_dim|n_routed_experts|num_experts|num_local_experts|num_experts_per_tok|sliding_window")


@dataclass(frozen=True)
class Style:
    """Sizes that differ between architectures."""

    kv_heads: int = 2
    layers: int = 2  # unless a list of their kinds determines it
    fills: bool = (
        False  # whether to set sizes that default to ``None``, or that only the model's code has a default for
    )
    heads_expand: bool = True  # whether the heads of a state-space layer fill its expanded width


STYLES = (
    Style(),
    Style(kv_heads=HEADS),
    Style(fills=True),
    Style(kv_heads=HEADS, fills=True),
    Style(layers=4),
    Style(layers=4, kv_heads=HEADS, fills=True, heads_expand=False),
)


class CannotShrink(Exception):
    """A configuration class cannot be built or shrunk."""


def tiny_configs(model_class: type[PreTrainedModel], model_type: str) -> Iterator[PreTrainedConfig | CannotShrink]:
    """Yield tiny configurations of a model class in every style.

    For a style that the configuration class rejects, the error is yielded. Styles without effect are omitted.
    """
    config_class = model_class.config_class or CONFIG_MAPPING[model_type]
    seen: list[dict[str, Any]] = []
    for style in STYLES:
        try:
            config = _tiny(config_class, style)
            content = config.to_dict()
        except Exception as error:
            yield CannotShrink(f"{type(error).__name__}: {error}")
            continue
        if content not in seen:
            seen.append(content)
            yield config


def _tiny(cls: type[PreTrainedConfig], style: Style) -> PreTrainedConfig:
    overrides = OVERRIDES.get(cls.model_type or cls.__name__, {})
    try:
        default = cls()
    except StrictDataclassError:  # its defaults contradict each other
        default = cls(**overrides)
    return cls(**(_sizes(default, style) | overrides))


def _sizes(config: PreTrainedConfig, style: Style) -> dict[str, Any]:
    """Return arguments for a tiny configuration of this class."""
    own = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    sizes: dict[str, Any] = {}
    for name, value in own.items():
        if isinstance(value, PreTrainedConfig):
            sizes[name] = _tiny(type(value), style)
        elif name in common or isinstance(value, bool):
            continue
        elif isinstance(value, int) or (value is None and style.fills and OFTEN_NONE.fullmatch(name)):
            size = _small(name, value, style)
            if size != value:
                sizes[name] = size
    sizes.update(_fewer_layers(own, style))
    size, patch = own.get("image_size"), own.get("patch_size")
    if isinstance(size, int) and isinstance(patch, int) and size > 4 * patch:
        sizes["image_size"] = 4 * patch
    sizes.update(_heads_that_add_up(own, sizes, style))
    sizes.update(_rope(own, sizes, style))
    return sizes


def _small(name: str, value: int | None, style: Style) -> int | None:
    if TOKEN.fullmatch(name) and value is not None:
        return value if value < FIRST_SPECIAL else FIRST_SPECIAL + value % (VOCABULARY - FIRST_SPECIAL)
    rules = ((KV_HEADS, style.kv_heads), (LAYERS, style.layers), *RULES)
    for pattern, size in rules:
        if pattern.fullmatch(name):
            return size if value is None or value > size else value
    return value


def _fewer_layers(own: Mapping[str, Any], style: Style) -> dict[str, Any]:
    """Keep one layer of each kind in all per-layer lists."""
    count_name = next((name for name in own if LAYER_COUNT.fullmatch(name) and isinstance(own[name], int)), None)
    if count_name is None:
        return {}
    count = own[count_name]
    lists = {
        name: values
        for name, values in own.items()
        if isinstance(values, (list, tuple)) and len(values) == count > 1
        if all(isinstance(value, (str, int, float, type(None))) for value in values)
    }
    if not lists:
        return {}
    keys = [repr(entry) for entry in zip(*lists.values(), strict=True)]
    keep = sorted({keys.index(key) for key in keys})[:4]
    keep += [i for i in range(count) if i not in keep][: max(style.layers - len(keep), 0)]
    return {count_name: len(keep)} | {name: [value[i] for i in sorted(keep)] for name, value in lists.items()}


def _heads_that_add_up(own: dict[str, Any], sizes: dict[str, Any], style: Style) -> dict[str, Any]:
    """Make the parts of a head (latent attention) and the heads of a layer (state spaces) add up."""
    together: dict[str, Any] = {}
    if "qk_nope_head_dim" in own and "qk_rope_head_dim" in own:
        together["qk_head_dim"] = sum((own | sizes)[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    expand = own.get("mamba_expand", own.get("expand"))
    for name in ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"):
        if name in own and expand and style.heads_expand and ("mamba" in name or "state_size" in own):
            together[name] = int(expand) * HEADS
    return together


def _rope(own: Mapping[str, Any], sizes: Mapping[str, Any], style: Style) -> dict[str, Any]:
    """Fit the sections of a multimodal rotary embedding into the head."""
    rope = own.get("rope_parameters")
    if not isinstance(rope, dict) or not ("mrope_section" in rope or (style.fills and "rope_theta" in rope)):
        return {}
    head_dim = sizes.get("head_dim", own.get("head_dim")) or HEAD_DIM
    half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    others = len(rope.get("mrope_section", (1, 1, 1))) - 1
    section = [half - others * (half // (others + 1))] + [half // (others + 1)] * others
    return {"rope_parameters": rope | {"mrope_section": section}}

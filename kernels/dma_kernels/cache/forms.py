"""How kernels read the packed body of a cache on a chip, and what of a storage decides which kernel that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..numerics.formats import UNQUANTIZED, SharedScale, block_format, padded_channels
from ..numerics.recipe import Recipe
from ..runtime.chip import MIN_FP8_ARCH
from .codecs import interleaved_blocks, key_codec, value_codec
from .storage import LayerStorage


@dataclass(frozen=True)
class DecodeForms:
    """How the kernel reads a body and what it makes of low queries; see :mod:`dma_kernels.cache.decode_tiles`.

    Attributes:
        key: Form of the keys.
        query: Form of the queries.
        value: Form of the values.
        pv: ``16bit``, ``fp8`` (E4M3 units) or ``fp8_emulated`` (probabilities rounded to E4M3, 16-bit units).
    """

    key: str
    query: str
    value: str
    pv: str


def select_forms(recipe: Recipe, arch: int) -> DecodeForms:
    """Return how a chip of compute capability ``arch`` (90 is Hopper) computes the low tiles of a cache."""
    has_fp8 = arch >= MIN_FP8_ARCH
    is_shared = recipe.shared_scale != SharedScale.BLOCK
    key = _body_form(recipe.key_low, recipe.shared_scale == SharedScale.TILE)
    query = {"fp4": "halves", "int8": "split"}.get(key, "16bit")
    if is_shared and recipe.query_low == recipe.key_low and (key == "int8" or (key == "e4m3" and has_fp8)):
        query = "codes"
    value = "16bit" if recipe.low_v is None else _body_form(recipe.low_v, False)
    if recipe.pv == "fp8":
        value = "e4m3"
    pv = "16bit" if recipe.pv == "bf16" else "fp8" if has_fp8 else "fp8_emulated"
    return DecodeForms(key, query, value, pv)


def _body_form(format: str, is_tile_scaled: bool) -> str:
    if format == UNQUANTIZED:
        return "16bit"
    element = block_format(format).element.name
    if element == "E2M1":
        return "fp4"
    return {"INT8": "int8", "E4M3": "e4m3"}[element] if is_tile_scaled else f"block_{element.lower()}"


def body_constants(
    recipe: Recipe, forms: DecodeForms, kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the constexprs of every kernel over a packed body: its heads, its channels, and how they are stored."""
    # Elements of a key (of 4-bit keys: bytes), and channels of a value.
    key_stored = key_codec(recipe, head_dim, dtype).parts["data"].shape[-1]
    value = value_codec(recipe, value_dim, dtype).parts["data"].shape
    return {
        "KV_HEADS": kv_heads,
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_D": padded_channels(head_dim),
        "BLOCK_DV": padded_channels(value_dim),
        "KEY_FORM": forms.key,
        "VALUE_FORM": forms.value,
        "KEY_STORED": key_stored,
        "VALUE_STORED": value[-2 if forms.value in ("fp4", "e4m3") else -1],
        "WIDTH": interleaved_blocks(2 * key_stored) if forms.key == "fp4" else 1,
    }


def storage_tensors(storage: LayerStorage) -> tuple[Tensor, ...]:
    """Return every tensor of a storage, always in the same order."""
    return (
        *storage.key_body.values(),
        *storage.value_body.values(),
        storage.key_tail,
        storage.value_tail,
        storage.key_sink,
        storage.value_sink,
        storage.key_mean,
        storage.lengths,
    )


def storage_kind(storage: LayerStorage) -> tuple[object, ...]:
    """Return what a storage's tensors follow from, but for their addresses; they are contiguous."""
    tail = storage.key_tail
    return storage.recipe, tail.shape, storage.value_tail.shape, tail.dtype, tail.device, storage.slots


def stored_units(data: Tensor, form: str, other: str) -> Tensor:
    """Return the elements of a body as the kernel takes them: E4M3 as bytes, unless FP8 units multiply them."""
    return data if form == "e4m3" and other in ("codes", "fp8") else e4m3_as_bytes(data)


def e4m3_as_bytes(part: Tensor) -> Tensor:
    """Return a part of a body, E4M3 numbers as bytes, for chips without the cast."""
    return part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part

"""Measure what 3 to 8 bits, groups, rotations and mixed layers cost a cache in quality, on a model and its twins.

    python scripts/measure_cache_formats.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data wiki.test.raw --out FILE

With ``--draws``, ``int4`` alone is measured, several times. Each draw multiplies keys and values by random factors
before quantization and divides them after it. In exact arithmetic this changes nothing: only scales and zero points
round differently, so the spread of the draws is the noise of a measured loss.

Windows are read in one pass each, in fp32. The sink tile and the band are exact, every other tile goes through the
codes of :mod:`dma_kernels.cache.formats`. Divergence is from the twin's own exact attention. "Balanced" keys have the
factors of ``equalize``, taken from the first tile of the prompt alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from dma_eval.measures.stress import TWINS, stressed
from dma_kernels import Recipe
from dma_kernels.cache.formats import VALUE_GROUP, CacheFormat, quantize_keys, quantize_values
from dma_kernels.numerics.formats import TILE
from dma_kernels.numerics.geometry import AttentionGeometry
from dma_kernels.numerics.transforms import hadamard_rotate
from dma_kernels.reference.attention import attend_prepared
from dma_kernels.reference.operands import PreparedOperands
from study import Data, Device, Model, Out, Study, Writer
from torch import Tensor

BAND = Recipe(low="mxint8", high="bf16", smooth_k=False, rotate=False, pv="bf16")
"""A recipe for its band: operands are prepared here. A uniform one would have no high tiles."""
SENSITIVITY_TOKENS = 2048
MEASURED = ("unchanged", "keys x 32", "values x 32", "key biases")
"""The twins that are measured."""
DRAWN = ("unchanged", "values x 32")
"""The twins that are measured with random factors. Twins that only scale keys are left out: a draw does the same."""


@dataclass(frozen=True)
class Format:
    """A cache format; some layers may be in ``int8``."""

    name: str
    bits: int
    rotate: str = ""  # what is rotated: "v", "kv" or nothing
    key_group: int = TILE  # tokens of a key channel that share a scale
    value_group: int = VALUE_GROUP  # channels of a value that share a scale
    balance: bool = False  # keys, by the queries and keys of the first tile
    int8_layers: tuple[int, ...] = ()

    def mean_bits(self, layers: int) -> float:
        """Bits of a number with scales and zero points, the mean of keys and values and of all layers."""
        own = self.bits + 16 / self.key_group + 16 / self.value_group
        others = len(self.int8_layers)
        return own if not others else (own * (layers - others) + INT8.mean_bits(layers) * others) / layers


of_32 = partial(Format, key_group=32, value_group=32)
INT8 = Format("int8", 8)
UNROTATED = Format("int4, not rotated", 4)
INT4 = Format("int4, V rotated", 4, "v")
FORMATS = [
    INT8,
    Format("int8, V rotated", 8, "v"),
    UNROTATED,
    INT4,
    Format("int4, K and V rotated", 4, "kv"),
    Format("int4, K balanced and rotated, V rotated", 4, "kv", balance=True),
    of_32("int4, groups of 32, V rotated", 4, "v"),
    of_32("int4, groups of 32, K and V rotated", 4, "kv"),
    Format("int3, V rotated", 3, "v"),
    Format("int3, K and V rotated", 3, "kv"),
    of_32("int3, groups of 32, V rotated", 3, "v"),
    of_32("int3, groups of 32, K and V rotated", 3, "kv"),
]


@dataclass
class Cached:
    """Attention of whole prompts, as Transformers calls it, to what a cache of a format holds in all or one layer."""

    format: Format
    only_layer: int | None = None
    draw: int | None = None  # seed of random factors; keys must not be rotated

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        layer = module.layer_idx
        form = INT8 if layer in self.format.int8_layers else self.format
        is_exact = self.only_layer not in (None, layer)
        k_factor, v_factor = self.factors(layer, key)
        keys = key if is_exact else code_keys(query, key * k_factor, form) / k_factor
        values = value if is_exact else code_values(value * v_factor, form) / v_factor
        operands = PreparedOperands(query, query, keys, key, value, values, None, None)
        geometry = AttentionGeometry(key.shape[2], 0, 0, None, is_causal=True)
        out, _ = attend_prepared(operands, geometry, BAND, dtype=query.dtype, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    def factors(self, layer: int, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return a factor from 1 to 2 for each key channel ``[H, 1, D]``, and for the values of each head."""
        heads, dim = key.shape[1], key.shape[3]
        if self.draw is None:
            return key.new_ones(1), key.new_ones(1)
        generator = torch.Generator().manual_seed(1000 * self.draw + layer)
        k_factor, v_factor = (1 + torch.rand(heads, 1, width, generator=generator) for width in (dim, 1))
        return k_factor.to(key.device), v_factor.to(key.device)


def code_keys(query: Tensor, key: Tensor, form: Format) -> Tensor:
    """Return keys ``[B, H, T, D]`` as a cache holds them; ``T`` is a multiple of 128."""
    factor = first_tile_balance(query, key) if form.balance else torch.ones((), device=key.device)
    rotate = hadamard_rotate if "k" in form.rotate else torch.clone
    tiles = rotate(key * factor).unflatten(2, (-1, TILE))
    coded = quantize_keys(tiles, CacheFormat("", form.bits), form.key_group).dequantize().flatten(2, 3)
    return rotate(coded) / factor


def code_values(value: Tensor, form: Format) -> Tensor:
    """Return values as a cache holds them."""
    rotate = hadamard_rotate if "v" in form.rotate else torch.clone
    return rotate(quantize_values(rotate(value), CacheFormat("", form.bits), form.value_group).dequantize())


def first_tile_balance(query: Tensor, key: Tensor) -> Tensor:
    """Return the powers of two that give key channels the ranges of their queries', over the first tile."""
    group = query.shape[1] // key.shape[1]
    queries = query[:, :, :TILE].abs().amax(2).unflatten(1, (-1, group)).amax(2)
    ratio = queries / key[:, :, :TILE].abs().amax(2).clamp_min(1e-6)
    return torch.exp2((ratio.clamp_min(1e-12).log2() / 2).round())[:, :, None]


def rank_layers(study: Study) -> list[int]:
    """Return the layers in the order of what each loses by itself in ``int4``, the worst first."""
    window = study.windows[:1, :SENSITIVITY_TOKENS]
    exact = [each.log_softmax(-1) for each in study.read(windows=window)]
    losses = {}
    for layer in range(study.model.config.num_hidden_layers):
        (found,) = study.read(Cached(INT4, layer), window)
        losses[layer] = float((exact[0].exp() * (exact[0] - found.log_softmax(-1))).sum(-1).mean())
    print("KL of a single layer:", " ".join(f"{loss:.1e}" for loss in losses.values()), flush=True)
    return sorted(losses, key=lambda layer: -losses[layer])


def mixed(form: Format, worst: list[int]) -> list[Format]:
    """Return a format with some layers in ``int8``."""
    chosen = {"the first layer": (0,), "the worst layer": tuple(worst[:1])}
    for number in (3, 5):  # 5 of 30 make 5 bits, as groups of 32 do
        chosen[f"the worst {number} layers"] = tuple(sorted(worst[:number]))
    return [replace(form, name=f"{form.name}; {name} in int8", int8_layers=layers) for name, layers in chosen.items()]


def main(
    model: Model,
    data: Data,
    out: Out,
    device: Device = "auto",
    context: Annotated[int, typer.Option(help="Tokens of a window, a multiple of 128.")] = 4096,
    windows: Annotated[int, typer.Option(help="Windows to read.")] = 2,
    draws: Annotated[int, typer.Option(help="Measure int4 alone, with this many draws of random factors.")] = 0,
) -> None:
    """Measure what formats cost a cache in quality, and write a result for each twin and format."""
    study, writer = Study(model, data, device, context, windows), Writer(out, model=model, data=data)
    if draws:
        names = DRAWN
        caches = [({"format": INT4.name, "draw": draw}, Cached(INT4, draw=draw)) for draw in range(draws)]
    else:
        names, layers = MEASURED, study.model.config.num_hidden_layers
        forms = [*FORMATS, *mixed(INT4, rank_layers(study))]
        caches = [({"format": form.name, "bits": round(form.mean_bits(layers), 3)}, Cached(form)) for form in forms]
    for twin in (twin for twin in TWINS if twin.name in names):
        with stressed(study.model, study.layers, twin):
            exact = study.read()
            for about, cache in caches:
                writer.add({"twin": twin.name} | about | study.compare(study.read(cache), exact))


if __name__ == "__main__":
    typer.run(main)

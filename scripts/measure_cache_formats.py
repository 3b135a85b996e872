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

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from dma_eval.stress import TWINS, stressed
from dma_kernels import Recipe
from dma_kernels.cache.formats import CacheFormat, quantize_keys, quantize_values
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
MEASURED = ("as it is", "keys x 32", "values x 32", "key biases")
"""The twins that are measured."""
DRAWN = ("as it is", "values x 32")
"""The twins that are measured with random factors. Twins that only scale keys are left out: a draw does the same."""


@dataclass(frozen=True)
class Half:
    """How keys, or values, are coded."""

    bits: int
    group: int  # tokens of a key channel, or channels of a value, that share a scale
    rotate: bool = False
    balance: bool = False  # keys alone: by the queries and keys of the first tile

    @property
    def bits_each(self) -> float:
        """Bits of a number, scales and zero points counted."""
        return self.bits + 32 / self.group


@dataclass(frozen=True)
class Variant:
    """A cache format; some layers may be in ``int8``."""

    name: str
    keys: Half
    values: Half
    int8_layers: tuple[int, ...] = ()

    def bits(self, layers: int) -> float:
        """Bits of a number, the mean of keys and values and of all layers."""
        own = (self.keys.bits_each + self.values.bits_each) / 2
        share = len(self.int8_layers) / layers
        return own * (1 - share) + share * (INT8.keys.bits_each + INT8.values.bits_each) / 2


def variant(name: str, bits: int, rotate: str, group: int | None = None, balance: bool = False) -> Variant:
    """Return a format; ``rotate`` names what is rotated by ``k`` and ``v``."""
    keys, values = (TILE, 64) if group is None else (group, group)
    return Variant(name, Half(bits, keys, "k" in rotate, balance), Half(bits, values, "v" in rotate))


INT8 = variant("int8", 8, "")
UNROTATED = variant("int4, not rotated", 4, "")
INT4 = variant("int4, V rotated", 4, "v")
BOTH = variant("int4, K and V rotated", 4, "kv")
VARIANTS = [
    INT8,
    variant("int8, V rotated", 8, "v"),
    UNROTATED,
    INT4,
    BOTH,
    variant("int4, K balanced and rotated, V rotated", 4, "kv", balance=True),
    variant("int4, groups of 32, V rotated", 4, "v", 32),
    variant("int4, groups of 32, K and V rotated", 4, "kv", 32),
    variant("int3, V rotated", 3, "v"),
    variant("int3, K and V rotated", 3, "kv"),
    variant("int3, groups of 32, V rotated", 3, "v", 32),
    variant("int3, groups of 32, K and V rotated", 3, "kv", 32),
]


@dataclass
class Cached:
    """Attention of whole prompts, as Transformers calls it, to what a cache of a format holds in all or one layer."""

    format: Variant
    only_layer: int | None = None
    draw: int | None = None  # seed of random factors; keys must not be rotated

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        layer = module.layer_idx
        form = INT8 if layer in self.format.int8_layers else self.format
        is_exact = self.only_layer not in (None, layer)
        k_factor, v_factor = self.factors(layer, key)
        keys = key if is_exact else code_keys(query, key * k_factor, form.keys) / k_factor
        values = value if is_exact else code_values(value * v_factor, form.values) / v_factor
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


def code_keys(query: Tensor, key: Tensor, form: Half) -> Tensor:
    """Return keys ``[B, H, T, D]`` as a cache holds them; ``T`` is a multiple of 128."""
    factor = first_tile_balance(query, key) if form.balance else torch.ones((), device=key.device)
    x = key * factor
    x = hadamard_rotate(x) if form.rotate else x
    tiles = quantize_keys(x.unflatten(2, (-1, TILE)), CacheFormat("", form.bits), form.group).dequantize()
    x = tiles.flatten(2, 3)
    return (hadamard_rotate(x) if form.rotate else x) / factor


def code_values(value: Tensor, form: Half) -> Tensor:
    """Return values as a cache holds them."""
    x = hadamard_rotate(value) if form.rotate else value
    x = quantize_values(x, CacheFormat("", form.bits), form.group).dequantize()
    return hadamard_rotate(x) if form.rotate else x


def first_tile_balance(query: Tensor, key: Tensor) -> Tensor:
    """Return the powers of two that give key channels the ranges of their queries', over the first tile."""
    group = query.shape[1] // key.shape[1]
    queries = query[:, :, :TILE].abs().amax(2).unflatten(1, (-1, group)).amax(2)
    ratio = queries / key[:, :, :TILE].abs().amax(2).clamp_min(1e-6)
    return torch.exp2((ratio.clamp_min(1e-12).log2() / 2).round())[:, :, None]


def measure(study: Study, writer: Writer) -> None:
    """Measure every format on the model and its twins."""
    layers = study.model.config.num_hidden_layers
    forms = [*VARIANTS, *mixed(INT4, rank_layers(study))]
    for twin in (twin for twin in TWINS if twin.name in MEASURED):
        with stressed(study.model, study.layers, twin, 0):
            exact = study.read()
            for form in forms:
                about = {"twin": twin.name, "format": form.name, "bits": round(form.bits(layers), 3)}
                writer.add(about | study.compare(study.read(Cached(form)), exact))


def measure_draws(study: Study, writer: Writer, draws: int) -> None:
    """Measure ``int4`` with several draws of random factors."""
    for twin in (twin for twin in TWINS if twin.name in DRAWN):
        with stressed(study.model, study.layers, twin, 0):
            exact = study.read()
            for draw in range(draws):
                about = {"twin": twin.name, "format": INT4.name, "draw": draw}
                writer.add(about | study.compare(study.read(Cached(INT4, draw=draw)), exact))


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


def mixed(form: Variant, worst: list[int]) -> list[Variant]:
    """Return a format with some layers in ``int8``."""
    chosen = {"the first layer": (0,), "the worst layer": tuple(worst[:1])}
    for number in (3, 5):  # 5 of 30 make 5 bits, as groups of 32 do
        chosen[f"the worst {number} layers"] = tuple(sorted(worst[:number]))
    return [Variant(f"{form.name}; {name} in int8", form.keys, form.values, layers) for name, layers in chosen.items()]


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
        measure_draws(study, writer, draws)
    else:
        measure(study, writer)


if __name__ == "__main__":
    typer.run(main)

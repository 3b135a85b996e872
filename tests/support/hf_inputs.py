"""Inputs for any architecture, derived from the signature of its forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hf_architectures import Architecture
from hf_shrink import FIRST_SPECIAL
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

LENGTH = 24
TARGET_LENGTH = 11
BATCH = 2
OUTPUTS = ("logits", "last_hidden_state", "lm_logits", "prediction_logits")


@dataclass(frozen=True)
class Inputs:
    """The inputs of a forward pass."""

    arguments: dict[str, Tensor]
    pads_right: bool  # whether padding comes after the text

    @property
    def is_text(self) -> bool:
        """Whether the model reads token ids ``[B, T]``."""
        return "input_ids" in self.arguments and self.arguments["input_ids"].ndim == 2

    def padding_mask(self, padding: int) -> Tensor:
        """Return a mask of some tokens of the first row."""
        mask = torch.ones_like(self.arguments["input_ids"])
        mask[0, slice(-padding, None) if self.pads_right else slice(padding)] = 0
        return mask

    def output(self, result: Any) -> Tensor:
        """Return the most downstream tensor of a model's output."""
        named = [getattr(result, name, None) for name in OUTPUTS]
        values = result.to_tuple() if hasattr(result, "to_tuple") else result
        values = (values,) if isinstance(values, Tensor) else values
        others = [each for each in values if isinstance(each, Tensor) and each.is_floating_point() and each.ndim > 0]
        found = [value for value in named if isinstance(value, Tensor)] + others
        if not found:
            raise TypeError(f"{type(result).__name__} holds no floating-point tensor")
        return found[0]


def candidate_inputs(architecture: Architecture, model: PreTrainedModel) -> Iterator[Inputs]:
    """Yield random inputs, the simplest first; only a forward pass shows which ones a model accepts."""
    generator = torch.Generator().manual_seed(1)
    pads_right = architecture.kind not in ("decoder", "multimodal") or model.config.is_encoder_decoder
    parameters = inspect.signature(model.forward).parameters
    takes_text = "input_ids" in parameters
    text = {"input_ids": _ids(LENGTH, generator)} if takes_text else {}
    target = {"decoder_input_ids": _ids(TARGET_LENGTH, generator)} if "decoder_input_ids" in parameters else {}
    if takes_text:
        yield Inputs(text | target, pads_right)
        if target:
            yield Inputs(text, pads_right)
    main = model.main_input_name
    mains = (main,) if isinstance(main, str) else main
    for name in dict.fromkeys((*mains, "pixel_values", "input_features", "input_values")):
        if name == "input_ids" or name not in parameters:
            continue
        for signal in _signals(name, model.config, generator):
            yield Inputs({name: signal} | target, pads_right)
            if takes_text:
                yield Inputs(text | {name: signal} | target, pads_right)


def _ids(length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(5, FIRST_SPECIAL - 10, (BATCH, length), generator=generator)


def _signals(name: str, config: PreTrainedConfig, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield images, spectrograms and waveforms of common shapes."""
    shapes: list[tuple[int, ...]]
    if name.startswith("pixel"):
        vision = next((getattr(config, n) for n in ("vision_config", "encoder") if hasattr(config, n)), config)
        size = getattr(vision, "image_size", None) or 32
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        frames = getattr(vision, "num_frames", None) or getattr(vision, "frames_per_clip", None) or 2
        shapes = [(channels, height, width), (frames, channels, height, width), (channels, 64, 64)]
        shapes += [(channels, 224, 224), (1, channels, height, width)]
    elif name == "input_features":
        audio = next((getattr(config, n) for n in ("audio_config", "encoder_config") if hasattr(config, n)), config)
        names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim", "n_mels")
        mels = next((getattr(audio, n) for n in names if isinstance(getattr(audio, n, None), int)), 80)
        length = 2 * (getattr(audio, "max_source_positions", None) or 64)
        shapes = [(mels, length), (64, mels), (mels, 100), (100, mels)]
    elif name in ("input_values", "past_values"):
        shapes = [(4000,), (1, 4000), (512, getattr(config, "num_input_channels", 1))]
        shapes += [(getattr(config, "max_length", 100), getattr(config, "num_mel_bins", 80))]
    else:
        shapes = [(LENGTH, getattr(config, "hidden_size", 64))]
    for shape in shapes:
        yield torch.randn(BATCH, *shape, generator=generator)

"""The architectures of the installed Transformers, found in its own registries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

KINDS: dict[str, tuple[str, ...]] = {
    "decoder": ("CAUSAL_LM",),
    "encoder-decoder": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
    "multimodal": ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    "encoder": ("MASKED_LM",),
}
"""The registries that list the classes of each kind of architecture."""


@dataclass(frozen=True)
class Architecture:
    """A model class to test.

    Attributes:
        model_type: Its type, as in ``config.json``.
        name: The class's name.
        kind: A key of ``KINDS``, or ``tower`` for a class that only the registry of base models lists.
    """

    model_type: str
    name: str
    kind: str

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """The class itself."""
        model_class: type[PreTrainedModel] = getattr(transformers, self.name)
        return model_class


@cache
def architectures() -> tuple[Architecture, ...]:
    """Return every architecture, with one class per kind."""
    found: dict[tuple[str, str], Architecture] = {}
    for kind, registries in KINDS.items():
        for registry in registries:
            for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{registry}_MAPPING_NAMES").items():
                found.setdefault((model_type, kind), Architecture(model_type, _first(name), kind))
    listed = {model_type for model_type, _ in found}
    for model_type, name in modeling_auto.MODEL_MAPPING_NAMES.items():
        if model_type not in listed:
            found[model_type, "tower"] = Architecture(model_type, _first(name), "tower")
    return tuple(found.values())


def _first(name: str | tuple[str, ...] | list[str]) -> str:
    return name if isinstance(name, str) else name[0]

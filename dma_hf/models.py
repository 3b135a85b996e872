"""``configure``: set the precisions and the cache of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dma_kernels import Recipe
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from .config import DMAConfig, resolve
from .integrations.attention_name import attention_name
from .integrations.batching import InitContinuousBatching
from .masking import built_in_attention, lacks_attention, refuse_model
from .settings import IMPLEMENTATIONS, NAME, distinct_configs, is_dma, rename, settings_of


def configure(
    model: nn.Module,
    setting: str | Path | Mapping[str, Any] | Recipe | None = None,
    *,
    activate: bool = False,
    **changes: Any,
) -> DMAConfig:
    """Set the precisions of a model that runs ``dma_mxfp``.

    Writes the section ``dma_mxfp`` to the configuration of the model and of every model inside it, from where the next
    forward pass reads it and ``save_pretrained`` saves it, except for ``backend`` and ``on_unsupported``. Nothing is
    changed if anything is wrong.

    Args:
        model: A Transformers model, or a module that holds one.
        setting: A preset's name, a TOML file, a mapping of fields or a :class:`DMAConfig`. By default what the model
            has already: the preset that it was loaded with, the section of its configuration, or ``balanced``.
        activate: Also switch the model to ``dma_mxfp``, with ``set_attn_implementation``.
        changes: Fields to change in ``setting``. With ``cache="int8"`` or ``"int4"`` a new :class:`~dma_hf.DMACache` is
            the cache of every ``generate`` of this model that does not ask for another one; ``cache=None`` undoes it.

    Returns:
        The configuration that was set.

    Raises:
        OSError: The file cannot be read.
        TypeError: ``setting`` or ``model`` is not as described.
        ValueError: There is no such preset; a key or a value is wrong; or no part of the model runs ``dma_mxfp``,
            because another implementation is set, because the model class computes its attention itself, or because
            it has none.
    """
    is_module = isinstance(model, nn.Module)
    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)] if is_module else []
    if not models:
        hint = "; load a model with attn_implementation='dma_mxfp', and pass that"
        if isinstance(getattr(model, "model", None), nn.Module):
            hint = "; pass its model: configure(pipeline.model, ...)"
        elif is_module:
            hint = ", which holds no PreTrainedModel"
        raise TypeError(f"expected a Transformers model, got {type(model).__name__}{hint}")
    config = settings_of(models[0].config).config if setting is None else resolve(setting)
    config = config.with_changes(**changes)
    if all(built_in_attention(type(module.config).__module__) for module in models):
        refuse_model(models[0].config)
    if all(lacks_attention(type(module.config).__module__) for module in models):
        raise ValueError(
            f"{type(models[0]).__name__} has no attention, which is all that the settings of {NAME} are for"
        )
    if activate:
        models[0].set_attn_implementation(NAME)
    configs = distinct_configs(model)
    running = sorted({str(attention_name(each)) for each in configs})
    if not any(is_dma(name) for name in running):
        raise ValueError(
            f"{type(models[0]).__name__} runs attention {', '.join(map(repr, running))}, which the settings of {NAME} "
            f"do not reach; load it with attn_implementation={NAME!r}, or pass activate=True"
        )
    for each in configs:
        setattr(each, NAME, config.to_section())
    rename(model, lambda name: NAME if name in IMPLEMENTATIONS else name)  # a preset in it would count before that
    if isinstance(models[0], GenerationMixin):
        InitContinuousBatching.install(models[0])
    return config

"""``configure``: set the precisions and the cache of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

from dma_kernels import Recipe
from torch import nn
from transformers import PreTrainedModel

from .cache import DMACache
from .config import IMPLEMENTATIONS, NAME, DMAConfig, Settings, config_of, is_dma, settings_of
from .idle_caches import release
from .integrations.internals import attention_name, decoder_attention, distinct_configs, rename
from .support import has_attention, has_built_in_attention, refuse_model


def configure(
    model: nn.Module,
    setting: str | Path | Mapping[str, Any] | Recipe | None = None,
    *,
    cache: str | EllipsisType | None = ...,
    backend: str | EllipsisType = ...,
    on_unsupported: str | EllipsisType = ...,
    activate: bool = False,
    **numerics: Any,
) -> DMAConfig:
    """Set the precisions and the cache of a model that runs ``dma_mxfp``::

        dma_hf.configure(model, "fp4", cache="int4")

    The settings go to the section ``dma_mxfp`` of the configuration of the model and of every model inside it. The next
    forward pass reads them. ``save_pretrained`` saves the numerics and the cache. If anything is invalid, nothing
    changes.

    Args:
        model: A Transformers model, or a module that contains one.
        setting: A preset, the path of a TOML file, a mapping of fields, a :class:`DMAConfig` or a
            :class:`~dma_kernels.Recipe`. Fields that it does not have get their default. ``None`` starts from the
            current settings of the model: its preset in ``attn_implementation``, its saved section, or ``balanced``.
        cache: Format of the :class:`~dma_hf.DMACache` that ``generate`` and ``generate_batch`` use: ``"int8"``,
            ``"int4"``, or ``None`` for Transformers' own cache. ``...`` keeps what ``setting`` has. A call of
            ``generate`` that asks for another cache gets that one.
        backend: ``"auto"``, ``"reference"`` or ``"triton"``. ``...`` keeps what ``setting`` has. Not saved.
        on_unsupported: ``"error"``, or ``"sdpa"`` to run SDPA for calls that the backend cannot compute. ``...`` keeps
            what ``setting`` has. Not saved.
        activate: Whether to switch the model to ``dma_mxfp`` first.
        numerics: Other fields of :class:`DMAConfig` that differ from ``setting``.

    Returns:
        The new configuration.

    Raises:
        OSError: The file cannot be read.
        TypeError: ``setting`` or ``model`` has the wrong type.
        ValueError: The preset, a key or a value is invalid; no part of the model can run ``dma_mxfp``; or the model
            has no layer of ``high_layers``, or its language model cannot use ``cache``, or runs another attention. The
            message has the reason.
    """
    chosen = {"cache": cache, "backend": backend, "on_unsupported": on_unsupported}
    changes = numerics | {name: value for name, value in chosen.items() if value is not ...}
    is_module = isinstance(model, nn.Module)
    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)] if is_module else []
    if not models:
        hint = "; load a model with attn_implementation='dma_mxfp', and pass that"
        if isinstance(getattr(model, "model", None), nn.Module):
            hint = "; pass its model: configure(pipeline.model, ...)"
        elif is_module:
            hint = ", which contains no PreTrainedModel"
        raise TypeError(f"expected a Transformers model, got {type(model).__name__}{hint}")
    configs = distinct_configs(model)
    if setting is None:  # the decoder's, or those of another part that runs dma_mxfp
        parts = (models[0].config.get_text_config(decoder=True), *configs)
        current = next((each for each in parts if is_dma(attention_name(each))), models[0].config)
        setting = settings_of(current).config
    config = config_of(setting, **changes)
    if all(has_built_in_attention(module.config) for module in models):
        refuse_model(models[0].config)
    if not any(map(has_attention, models)):
        raise ValueError(
            f"{type(models[0]).__name__} has no attention layers, so {NAME} cannot run in it; use another model"
        )
    if activate:
        for each in models:
            each.set_attn_implementation(NAME)
    if not any(is_dma(attention_name(each)) for each in configs):
        running = sorted({str(attention_name(each)) for each in configs})
        raise ValueError(
            f"{type(models[0]).__name__} runs attention {', '.join(map(repr, running))}, not {NAME}; load it with "
            f"attn_implementation={NAME!r}, or pass activate=True"
        )
    _check_layers(model, config)
    if config.cache is not None and models[0].can_generate():
        decoder = decoder_attention(models[0])
        if is_dma(decoder):
            DMACache(models[0].config, config.cache)  # raises if the model cannot use it
        elif cache is not ...:
            raise ValueError(
                f"cache={cache!r} is for the language model, which runs attention {decoder!r}, not {NAME}; name its "
                f"part in attn_implementation, as in {{'text_config': {NAME!r}}}, or leave the cache out"
            )
    for each in configs:
        setattr(each, NAME, config.to_section())
    # A preset in the name would override the section.
    rename(model, lambda name: NAME if name in IMPLEMENTATIONS else name)
    release(model)
    return config


def _check_layers(model: nn.Module, config: DMAConfig) -> None:
    """Raise if a model lacks a layer of ``high_layers``. A preset also suits models whose layers have no numbers."""
    numbers = {index for module in model.modules() if isinstance(index := getattr(module, "layer_idx", None), int)}
    missing = sorted(set(config.high_layers) - numbers)
    if missing and (numbers or Settings.of(config).name == "custom"):
        known = f"its layers are {min(numbers)} to {max(numbers)}" if numbers else "its layers have no numbers"
        raise ValueError(f"high_layers: {type(model).__name__} has no layer {', '.join(map(str, missing))}; {known}")

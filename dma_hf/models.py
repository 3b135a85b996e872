"""What is done to a model: its settings, and the cache that its ``generate`` uses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dma_kernels import Recipe
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel

from .cache import DMACache
from .cache_layers import DMALayer
from .config import DMAConfig, resolve
from .integrations.attention_name import attention_name
from .integrations.batching import InitContinuousBatching
from .integrations.cache_argument import CACHE_ARGUMENT, CACHE_ARGUMENTS
from .masking import built_in_attention, refuse_model
from .own_method import OwnMethod
from .settings import IMPLEMENTATIONS, NAME, cache_of, distinct_configs, is_dma, rename, settings_of

IMPLEMENTATION = "dma"
"""What ``generate(cache_implementation=...)`` of a configured model takes for a ``DMACache``."""

OPEN = (None, "hybrid")
"""What leaves the cache open: Transformers takes "hybrid", which old configurations of Gemma ask for, for nothing."""


def configure(
    model: nn.Module,
    setting: str | Path | Mapping[str, Any] | Recipe | None = None,
    *,
    activate: bool = False,
    **changes: Any,
) -> DMAConfig:
    """Set the precisions of a model that runs ``dma_mxfp``.

    Writes the section ``dma_mxfp`` to the configuration of the model and of every model inside it, from where the next
    forward pass reads it and ``save_pretrained`` saves it. Nothing is changed if anything is wrong.

    Args:
        model: A Transformers model, or a module that holds one.
        setting: A preset's name, a TOML file, a mapping of fields or a :class:`DMAConfig`. By default what the model
            has already: the preset that it was loaded with, the section of its configuration, or ``balanced``.
        activate: Also switch the model to ``dma_mxfp``, with ``set_attn_implementation``.
        changes: Fields to change in ``setting``. With ``cache="int8"`` or ``"int4"`` a new :class:`~dma_hf.DMACache` is
            the cache of every ``generate`` of this object that does not ask for another one; ``cache=None`` undoes it.

    Returns:
        The configuration that was set.

    Raises:
        OSError: The file cannot be read.
        TypeError: ``setting`` or ``model`` is not as described.
        ValueError: There is no such preset; a key or a value is wrong; or no part of the model runs ``dma_mxfp``,
            because another implementation is set or because the model class computes its attention itself.
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
        setattr(each, NAME, config.to_dict())
    rename(model, lambda name: NAME if name in IMPLEMENTATIONS else name)  # a preset in it would count before that
    if isinstance(models[0], GenerationMixin):
        InitContinuousBatching.install(models[0])
        (CachedGenerate.remove if config.cache is None else CachedGenerate.install)(models[0])
    return config


class CachedGenerate(OwnMethod):
    """The ``generate`` of one model, which uses a ``DMACache`` as the model's configuration says.

    A call that asks for another cache gets it, and ``cache_implementation="dma"`` asks for a ``DMACache`` where the
    generation configuration says otherwise. Transformers has no public way to add a kind of cache.
    """

    name = "generate"

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Generate; arguments and result are those of the ``generate`` that the model had."""
        model = self.model
        asked = partial(_asked, model, arguments, options)
        wanted = options.get("cache_implementation") == IMPLEMENTATION
        if wanted:
            options["cache_implementation"] = None
        elif cache_of(model) is not None:
            wanted = asked("use_cache") is not False and asked("cache_implementation") in OPEN
        if wanted and all(options.get(name) is None for name in CACHE_ARGUMENTS):
            cache = DMACache(model.config)
            if any(isinstance(layer, DMALayer) for layer in cache.layers):  # Mamba calls its cache by another name
                if model.config.is_encoder_decoder:
                    cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
                if asked("is_assistant"):  # whose caches Transformers lets keep what it will take back
                    cache.activate_past_recording()
                for name in CACHE_ARGUMENTS:
                    options.pop(name, None)
                options[CACHE_ARGUMENT] = cache
        return self.call_wrapped(*arguments, **options)


def _asked(model: PreTrainedModel, arguments: tuple[Any, ...], options: dict[str, Any], name: str) -> Any:
    """Return what a call of ``generate`` asks for, as Transformers finds it: itself, its configuration, the model's."""
    if name in options:
        return options[name]
    given = [options.get("generation_config"), *arguments[1:2], model.generation_config]
    values = (getattr(config, name, None) for config in given)
    return next((value for value in values if value is not None), None)

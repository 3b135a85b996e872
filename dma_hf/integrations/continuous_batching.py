"""Continuous batching: ``generate_batch`` of a model that runs ``dma_mxfp``.

``generate_batch`` and Transformers' server call ``init_continuous_batching`` of the model. A configured model has its
own, :class:`InitContinuousBatching`. It returns a manager (:mod:`dma_hf.integrations.manager`) that renames the model's
attention (:mod:`dma_hf.integrations.paged_attention`) and uses packed pages if the settings name a cache. Transformers
5.17 has another paged cache: its pages hold 16 bits, and :func:`continuous_batching` renames the attention.
"""

from __future__ import annotations

import copy
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import transformers
from transformers import ContinuousBatchingConfig, PreTrainedModel

from ..config import PAGED_NAME, cache_of, is_dma
from .attention_name import attention_name
from .paged_attention import enter_batching, leave_batching
from .versions import private_imports


class OwnMethod:
    """A wrapper of a method of one model.

    It is an object, not a bound function, so that it is copied and pickled with the model. It refers to the model
    weakly, so that a dropped model is freed at once, without a garbage collection.

    Args:
        model: The model.
        wrapped: An earlier wrapper of the method, or ``None`` to wrap the method of the class.
    """

    name: ClassVar[str]

    def __init__(self, model: PreTrainedModel, wrapped: Callable[..., Any] | None = None) -> None:
        self._model = weakref.ref(model)
        self._wrapped = wrapped

    @classmethod
    def install(cls, model: PreTrainedModel) -> None:
        """Wrap the method of a model, unless it is wrapped already."""
        previous = vars(model).get(cls.name)
        if not isinstance(previous, cls):
            setattr(model, cls.name, cls(model, previous))

    @property
    def model(self) -> PreTrainedModel:
        """The model.

        Raises:
            ReferenceError: The model has been freed.
        """
        model = self._model()
        if model is None:
            raise ReferenceError(
                f"the model of this {type(self).__name__} has been freed; keep a reference to the model as long as "
                "you use its methods"
            )
        return model

    def call_wrapped(self, *arguments: Any, **options: Any) -> Any:
        """Call the wrapped method."""
        if self._wrapped is not None:
            return self._wrapped(*arguments, **options)
        return getattr(type(self.model), self.name)(self.model, *arguments, **options)

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.model, self._wrapped)


class InitContinuousBatching(OwnMethod):
    """The ``init_continuous_batching`` of one model, which returns a manager that runs ``dma_mxfp``."""

    name = "init_continuous_batching"

    def __call__(
        self,
        generation_config: Any = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> Any:
        """Return a manager. The arguments are those of ``init_continuous_batching`` of the class.

        Raises:
            UnsupportedTransformersError: This package does not support Transformers' manager.
            RuntimeError: Transformers is too old for the settings of the model, or a kept manager has another cache.
            ValueError: Packed pages do not support a kind of layer of the model.
        """
        model = self.model
        kept = getattr(model, "_cached_continuous_batching_manager", None)
        cache = cache_of(model)
        other = getattr(kept, "cache_format", cache)
        if other != cache:
            raise RuntimeError(
                f"the kept manager has pages with cache={other!r}, but the model is set to cache={cache!r}; call "
                "model.destroy_cached_continuous_batching_manager() first"
            )
        if kept is not None or not is_dma(str(attention_name(model.config))) or not has_sectors():
            _refuse_what_is_newer(model)
            return self.call_wrapped(generation_config, continuous_batching_config, workload_hints)
        with private_imports():
            from .manager import DMAManager, check_interfaces  # 5.17 cannot import it

        check_interfaces()
        settings = generation_config or model.generation_config
        batching = continuous_batching_config or getattr(settings, "continuous_batching_config", None)
        if settings.eos_token_id is None:
            settings = copy.deepcopy(settings)
            settings.eos_token_id = -1  # Transformers' managers take it as none
        return DMAManager(model, settings, batching or ContinuousBatchingConfig(), workload_hints)


def has_sectors() -> bool:
    """Return whether the paged cache of Transformers has sectors that allocators share, as in 5.18 and later."""
    spec = "transformers.generation.continuous_batching.cache_allocators"
    return importlib.util.find_spec(spec) is not None


def _refuse_what_is_newer(model: PreTrainedModel) -> None:
    """Raise if the installed Transformers is too old to batch a model with its settings."""
    cache = cache_of(model)
    name = str(attention_name(model.config))
    if has_sectors() or not is_dma(name):
        return
    if cache is not None:
        raise RuntimeError(
            f"packed pages (cache={cache!r}) need Transformers 5.18 or later, got {transformers.__version__}; update "
            "it, or call dma_hf.configure(model, cache=None) for 16-bit pages"
        )
    if not name.startswith(PAGED_NAME):
        raise RuntimeError(
            f"generate_batch needs `with dma_hf.continuous_batching(model):` on Transformers before 5.18, got "
            f"{transformers.__version__}"
        )


@contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[None]:
    """Allow continuous batching of a model that runs ``dma_mxfp`` within a ``with`` block::

        with dma_hf.continuous_batching(model):
            outputs = model.generate_batch(prompts, generation_config=settings)

    A model passed to :func:`dma_hf.configure` needs it only on Transformers 5.17. There pages hold 16 bits. On a GPU
    pass ``continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=False)``, because the lengths of the
    requests are read on the host. Blocks may overlap.

    Raises:
        ValueError: The model does not run ``dma_mxfp``.
        RuntimeError: The settings name packed pages, and Transformers is too old for them.
    """
    name = attention_name(model.config)
    if not is_dma(str(name)):
        raise ValueError(
            f"{type(model).__name__} runs attention {name!r}; continuous_batching is for models with "
            "attn_implementation='dma_mxfp'"
        )
    InitContinuousBatching.install(model)
    enter_batching(model)
    try:
        _refuse_what_is_newer(model)
        yield
    finally:
        leave_batching(model)

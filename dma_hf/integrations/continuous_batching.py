"""Continuous batching switched on: ``generate_batch`` of a model that runs ``dma_mxfp``.

A configured model has an ``init_continuous_batching`` of its own, :class:`InitContinuousBatching`, which is what
``generate_batch`` and Transformers' server call. It returns a manager (:mod:`dma_hf.integrations.manager`) that gives
the model the name it needs (:mod:`dma_hf.integrations.paged_attention`), with packed pages where the configuration
names a format of the cache. Transformers 5.17 has another paged cache: there pages hold 16 bits, and
:func:`continuous_batching` sets the name.
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
    """A method of one model, around the one that it had before.

    An object, and no bound function, so that it is copied and pickled with the model. It does not keep the model alive:
    whoever drops a model frees its memory at once, not when Python looks for cycles.

    Args:
        model: The model, of which this is an attribute.
        wrapped: Another wrapper that the model had; without one, the method of its class.
    """

    name: ClassVar[str]

    def __init__(self, model: PreTrainedModel, wrapped: Callable[..., Any] | None = None) -> None:
        self._model = weakref.ref(model)
        self._wrapped = wrapped

    @classmethod
    def install(cls, model: PreTrainedModel) -> None:
        """Give a model this method, unless it has it."""
        previous = vars(model).get(cls.name)
        if not isinstance(previous, cls):
            setattr(model, cls.name, cls(model, previous))

    @property
    def model(self) -> PreTrainedModel:
        """The model.

        Raises:
            ReferenceError: It is gone.
        """
        model = self._model()
        if model is None:
            raise ReferenceError(
                f"{type(self).__name__} was kept longer than its model; keep the model itself: model = load(), then "
                "model.generate(...)"
            )
        return model

    def call_wrapped(self, *arguments: Any, **options: Any) -> Any:
        """Call the method that the model had before."""
        if self._wrapped is not None:
            return self._wrapped(*arguments, **options)
        return getattr(type(self.model), self.name)(self.model, *arguments, **options)

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.model, self._wrapped)


class InitContinuousBatching(OwnMethod):
    """The ``init_continuous_batching`` of one model: a manager that runs ``dma_mxfp``, with the cache it is set to."""

    name = "init_continuous_batching"

    def __call__(
        self,
        generation_config: Any = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> Any:
        """Return a manager; arguments are those of the class's own ``init_continuous_batching``.

        Raises:
            UnsupportedTransformersError: Transformers' manager is not one that this package knows.
            RuntimeError: Transformers is too old for what the model is set to; or a kept manager has another cache.
            ValueError: The model has layers that packed pages do not hold.
        """
        model = self.model
        kept = getattr(model, "_cached_continuous_batching_manager", None)
        cache = cache_of(model)
        other = getattr(kept, "cache_format", cache)
        if other != cache:
            raise RuntimeError(
                f"a manager was kept whose pages are cache={other!r}, and the model is set to cache={cache!r} now; "
                "call model.destroy_cached_continuous_batching_manager() first"
            )
        if kept is not None or not is_dma(str(attention_name(model.config))) or not has_sectors():
            _refuse_what_is_newer(model)
            return self.call_wrapped(generation_config, continuous_batching_config, workload_hints)
        with private_imports():
            from .manager import DMAManager, check_interfaces  # which 5.17 cannot import

        check_interfaces()
        settings = generation_config or model.generation_config
        batching = continuous_batching_config or getattr(settings, "continuous_batching_config", None)
        if settings.eos_token_id is None:
            settings = copy.deepcopy(settings)
            settings.eos_token_id = -1  # what Transformers' managers take for none
        return DMAManager(model, settings, batching or ContinuousBatchingConfig(), workload_hints)


def has_sectors() -> bool:
    """Whether the installed Transformers pages its cache in sectors that allocators share, as 5.18 and newer do."""
    spec = "transformers.generation.continuous_batching.cache_allocators"
    return importlib.util.find_spec(spec) is not None


def _refuse_what_is_newer(model: PreTrainedModel) -> None:
    """Raise if the installed Transformers is too old to batch a model as it is set."""
    cache = cache_of(model)
    name = str(attention_name(model.config))
    if has_sectors() or not is_dma(name):
        return
    if cache is not None:
        raise RuntimeError(
            f"packed pages (cache={cache!r}) need Transformers 5.18 or newer, and this is {transformers.__version__}; "
            "update it, or call dma_hf.configure(model, cache=None) for pages of 16 bits"
        )
    if not name.startswith(PAGED_NAME):
        raise RuntimeError(
            f"on Transformers before 5.18 (this is {transformers.__version__}) generate_batch is called within "
            "dma_hf.continuous_batching(model)"
        )


@contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[None]:
    """Let a model that runs ``dma_mxfp`` batch continuously within a ``with`` block::

        with dma_hf.continuous_batching(model):
            outputs = model.generate_batch(prompts, generation_config=settings)

    A model that :func:`dma_hf.configure` was called on needs it on Transformers 5.17 only. There the cache keeps 16
    bits, and on a GPU ``continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=False)`` is needed, because
    the lengths of the requests are read on the host. Blocks may overlap.

    Raises:
        ValueError: The model does not run ``dma_mxfp``.
        RuntimeError: Its configuration asks for packed pages, and Transformers is too old for them.
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

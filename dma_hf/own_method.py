"""Methods that one model has in place of its class's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Self

from transformers import PreTrainedModel


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

"""Logits that are NaN or infinite: noticing them, and finding the layer that they come from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel


class NonFiniteLogitsError(RuntimeError):
    """A forward pass gave NaN or infinity."""


@torch.inference_mode()
def origin(model: PreTrainedModel, again: Callable[[], object]) -> str:
    """Name the module that first gives a value that is not finite, by running the same pass once more.

    Args:
        model: The model.
        again: Runs the pass.

    Returns:
        A clause to end a message with; empty if no module's output shows it.
    """
    found: list[str] = []

    def watch(name: str) -> Callable[[torch.nn.Module, tuple[object, ...], object], None]:
        def check(module: torch.nn.Module, inputs: tuple[object, ...], output: object) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if not found and isinstance(tensor, Tensor) and not tensor.isfinite().all():
                found.append(name)

        return check

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        again()
    finally:
        for hook in hooks:
            hook.remove()
    return f"; they begin in the output of {found[0]}" if found else ""

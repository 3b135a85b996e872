"""Signatures of the Triton and Gluon kernels."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import dma_kernels
import pytest


def kernels() -> Iterator[Any]:
    """Yield what the package launches."""
    for module in pkgutil.walk_packages(dma_kernels.__path__, "dma_kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            function = getattr(value, "fn", None)
            if name.endswith("_kernel") and getattr(function, "__module__", None) == module.name:
                yield pytest.param(function, id=name)


@pytest.mark.parametrize("kernel", kernels())
def test_a_kernel_has_fewer_than_40_parameters(kernel: Any) -> None:
    assert kernel.__code__.co_argcount < 40

"""Signatures of the Triton and Gluon kernels."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dma_kernels
import pytest
from dma_kernels.prefill import constants


def kernels() -> Iterator[Any]:
    """Yield the kernels of the package."""
    for module in pkgutil.walk_packages(dma_kernels.__path__, "dma_kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            function = getattr(value, "fn", None)
            if name.endswith("_kernel") and getattr(function, "__module__", None) == module.name:
                yield pytest.param(function, id=name)


@pytest.mark.parametrize("kernel", kernels())
def test_a_kernel_has_fewer_than_40_parameters(kernel: Any) -> None:
    assert kernel.__code__.co_argcount < 40


def test_string_attributes_of_constexprs_are_assigned_before_they_are_passed() -> None:
    """Triton 3.6 rejects a string attribute of a constexpr as a function argument."""
    kinds = filter(dataclasses.is_dataclass, vars(constants).values())
    strings = {field.name for kind in kinds for field in dataclasses.fields(kind) if field.type == "str"}
    assert "low_form" in strings
    for path in Path(dma_kernels.__path__[0]).rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
        for argument in (argument for call in calls for argument in call.args):
            is_constant = isinstance(argument, ast.Attribute) and ast.unparse(argument.value) == "CONFIG"
            assert not (is_constant and argument.attr in strings), f"{path}:{argument.lineno}: {ast.unparse(argument)}"

"""The reference needs no Triton, and kernels have signatures that every version of Triton takes."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dma_kernels
import pytest
import torch
from dma_kernels.prefill.config import Constants

PACKAGE = Path(dma_kernels.__file__).parent

REFERENCE = """
import torch
import dma_kernels
from dma_kernels.cache.api import cached_attention, restore
from dma_kernels.cache.storage import LayerStorage
x = torch.randn(1, 2, 140, 32, dtype=torch.float16)
storage = LayerStorage.allocate(
    "int8", batch=1, kv_heads=2, head_dim=32, value_dim=32, dtype=x.dtype, device=x.device, tiles=2
)
for backend in BACKENDS:
    new = [x[:, :, :70]] * 3
    dma_kernels.attention(x, x, x, dma_kernels.Recipe(), backend=backend)
    cached_attention(*new, storage, backend=backend)
    restore(storage, storage.lengths - 20, 20)
"""


@pytest.fixture
def loaded(python: Any) -> Callable[[str, str], list[str]]:
    """Return the modules with names in ``prefix`` that a program imports in a new process without the interpreter."""

    def find(program: str, prefix: str) -> list[str]:
        program += f"\nimport sys\nprint(*(name for name in sys.modules if name.startswith({prefix!r})))"
        result = python("-c", program, env={"TRITON_INTERPRET": "0"})
        assert result.returncode == 0, result.stderr
        return result.stdout.split()

    return find


def test_the_reference_imports_no_triton(loaded: Callable[[str, str], list[str]]) -> None:
    backends = ["reference"] if torch.cuda.is_available() else ["reference", "auto"]
    assert not loaded(REFERENCE.replace("BACKENDS", repr(backends)), "triton")


def test_portable_kernels_import_no_gluon(loaded: Callable[[str, str], list[str]]) -> None:
    """Nothing is launched, because Triton imports Gluon at its first launch."""
    assert not loaded("from dma_kernels.cache import append, chunked_prefill, restore", "triton.experimental")


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


def subclasses(kind: type) -> Iterator[type]:
    """Yield the subclasses of a class, and theirs."""
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_string_attributes_of_constexprs_are_assigned_before_they_are_passed() -> None:
    """Triton 3.6 rejects a string attribute of a constexpr as a function argument."""
    fields = [field for kind in subclasses(Constants) for field in dataclasses.fields(kind)]
    strings = {field.name for field in fields if field.type == "str"}
    assert {"low_form", "value_form", "q_form"} <= strings  # of three kernels
    for path in PACKAGE.rglob("*.py"):
        calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
        for argument in (argument for call in calls for argument in call.args):
            is_constant = isinstance(argument, ast.Attribute) and ast.unparse(argument.value) == "CONFIG"
            assert not (is_constant and argument.attr in strings), f"{path}:{argument.lineno}: {ast.unparse(argument)}"

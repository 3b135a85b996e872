"""What the modules of each package may import from each other.

``dma_kernels`` is made of layers. ``dma_eval`` is one pipeline: configure, load, measure, record, show. No room imports
a later one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import dma_eval
import dma_kernels
import pytest

import dma_hf

KERNELS, PLUGIN, EVALUATION = (Path(each.__file__).parent for each in (dma_kernels, dma_hf, dma_eval))
LAYERS = {
    "numerics": set(),
    "reference": {"numerics"},
    "runtime": {"numerics"},
    "device": {"numerics"},
    "prefill": {"numerics", "reference", "runtime", "device"},
    "cache": {"numerics", "reference", "runtime", "device", "prefill"},
}
"""Which folders a folder may import from, besides itself. ``api.py`` may import all except the cache."""
BASE = {"console", "environment", "errors", "files", "names"}
ROOMS = {
    # what every room may use
    "errors": set(),
    "environment": {"errors"},
    "files": {"errors"},
    "names": {"errors"},
    "console": {"errors"},
    "results": BASE,
    # configure: one class for each measurement, for the command line and for suites
    "config": BASE | {"results"},
    # load and measure; pieces are saved
    "load": BASE | {"config", "results"},
    "session": BASE | {"config", "load", "results"},
    "equalization": set(),
    "harness": BASE | {"load"},
    "lm_eval": {"console", "errors", "harness"},
    "measures": BASE | {"config", "equalization", "harness", "load", "results", "session"},
    # show what was recorded
    "show": BASE | {"results"},
    "run": BASE | {"config", "load", "measures", "results", "session", "show"},
}
"""Which rooms, folders or files, each may import from, besides itself. Those of the program are below."""
PROGRAM = {"__init__", "__main__", "bench", "cli", "commands", "entry"}
"""The commands, and ``bench``. Nothing in the table imports them."""


def imported(path: Path, package: Path, *, of_annotations: bool = True) -> Iterator[tuple[str, ...]]:
    """Yield what a file imports from its package, as the path of a module and a name in it."""
    folder = path.relative_to(package).parts[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not of_annotations and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = tuple(filter(None, (node.module or "").split(".")))
            if node.level or module[0] == package.name:
                base = (*folder[: len(folder) - node.level + 1], *module) if node.level else module[1:]
                yield from ((*base, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = (alias.name.split(".") for alias in node.names)
            yield from (tuple(name[1:]) for name in names if name[0] == package.name and name[1:])


def test_every_room_has_a_row_in_its_table() -> None:
    assert {path.name for path in KERNELS.iterdir() if (path / "__init__.py").exists()} == set(LAYERS)
    found = {path.stem for path in EVALUATION.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found <= set(ROOMS) | PROGRAM
    assert set(ROOMS) <= found


def test_the_tables_have_an_order() -> None:
    """Rooms can be numbered so that each imports only earlier ones: there is no way back."""
    for table in (LAYERS, ROOMS):
        assert set(TopologicalSorter(table).static_order()) == set(table)


@pytest.mark.parametrize(
    ("package", "room", "allowed"),
    [*((KERNELS, *row) for row in LAYERS.items()), *((EVALUATION, *row) for row in ROOMS.items())],
    ids=lambda value: value.name if isinstance(value, Path) else value if isinstance(value, str) else "",
)
def test_a_room_imports_only_what_its_row_allows(package: Path, room: str, allowed: set[str]) -> None:
    folder = package / room
    for path in folder.rglob("*.py") if folder.is_dir() else [package / f"{room}.py"]:
        found = {parts[0] for parts in imported(path, package, of_annotations=package is KERNELS)}
        assert found <= allowed | {room}, path


def test_the_attention_api_does_not_import_the_cache() -> None:
    for name in ("__init__", "api", "testing"):
        assert "cache" not in {parts[0] for parts in imported(KERNELS / f"{name}.py", KERNELS)}


def test_the_kernels_import_each_other_by_relative_names_and_know_no_transformers() -> None:
    for path in KERNELS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            tops = {name.partition(".")[0] for name in names}
            assert not tops & {"dma_kernels", "dma_hf", "transformers"}, f"{path}:{getattr(node, 'lineno', 0)}"


def test_the_plugin_has_no_circular_imports() -> None:
    """Not even for annotations. It depends on Triton only through ``dma_kernels``."""
    paths = [path for path in PLUGIN.rglob("*.py") if path.stem != "__init__"]
    imports = {path.relative_to(PLUGIN).with_suffix("").parts: path for path in paths}
    graph = {
        module: {parts for each in imported(path, PLUGIN) for parts in (each[:-1], each) if parts in imports}
        for module, path in imports.items()
    }
    assert any(graph.values())
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)
    for path in paths:
        assert not re.search(r"^\s*(import|from) triton", path.read_text(encoding="utf-8"), re.MULTILINE)

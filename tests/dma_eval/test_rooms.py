"""``dma_eval`` is one pipeline of rooms: configure, load, measure, record, show. No room imports a later one."""

from __future__ import annotations

import ast
from pathlib import Path

import dma_eval
import pytest

PACKAGE = Path(dma_eval.__file__).parent
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
    "lm_eval": {"harness"},
    "measures": BASE | {"config", "equalization", "harness", "load", "results", "session"},
    # show what was recorded
    "show": BASE | {"results"},
    "run": BASE | {"config", "load", "measures", "results", "session", "show"},
}
"""Which rooms, folders or files, each may import from, besides itself. Those of the program are below."""
PROGRAM = {"__init__", "__main__", "bench", "cli", "commands", "entry"}
"""The commands, and ``bench``. Nothing in the table imports them."""


def imported(path):
    """Yield the rooms that a file imports from. What only annotations need does not count."""
    own = path.relative_to(PACKAGE).parts[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").partition(".")[0] == "dma_eval"):
            module = (node.module or "").split(".")
            parts = [*own[: len(own) - node.level + 1], *filter(None, module)] if node.level else module[1:]
            yield from [parts[0]] if parts else (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("dma_eval."))


def test_every_room_has_a_row_in_the_table():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found <= set(ROOMS) | PROGRAM
    assert set(ROOMS) <= found


def test_the_table_has_an_order():
    """Rooms can be numbered so that each imports only earlier ones: there is no way back."""
    left = dict(ROOMS)
    while left:
        free = [room for room, allowed in left.items() if not allowed & left.keys()]
        assert free, f"these rooms import each other: {sorted(left)}"
        for room in free:
            del left[room]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_its_row_allows(room):
    folder = PACKAGE / room
    for path in folder.rglob("*.py") if folder.is_dir() else [PACKAGE / f"{room}.py"]:
        assert set(imported(path)) <= ROOMS[room] | {room}, path

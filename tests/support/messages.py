"""Messages in the sources and on the page of messages. Run it to list errors missing from the page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCES = (ROOT / "dma_hf", ROOT / "kernels" / "dma_kernels", ROOT / "eval" / "dma_eval")
BUILDER = ROOT / "scripts" / "build_hub_kernel.py"
ERRORS = ("ValueError", "TypeError", "RuntimeError", "ImportError", "UserError")
GAP = "…"
"""Placeholder for values formatted into a message."""


def quoted_messages() -> list[str]:
    """Return the messages in the first column of the page's tables, except those of other projects."""
    rows = [line.split(" | ")[0] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [text for row in rows if "(from Transformers)" not in row for text in re.findall(r"`([^`]+)`", row)]


def source_messages() -> set[str]:
    """Return every string of the sources except docstrings, with placeholders for formatted values."""
    found: set[str] = set()
    for tree in _trees().values():
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found |= {text for node in ast.walk(tree) if node not in docstrings and (text := as_template(node))}
    return found


def undocumented() -> Iterator[tuple[str, str]]:
    """Yield the location and message of every error that the page does not quote."""
    quoted = [text for text in quoted_messages() if len(text) > 8]
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                continue
            template = as_template(node.exc.args[0])
            is_known = not template.strip(f"{GAP}: ,") or any(text in template for text in quoted)
            if ast.unparse(node.exc.func) in ERRORS and not is_known:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", template


def as_template(node: ast.AST) -> str:
    """Return a string expression with placeholders for formatted values; empty for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (as_template(value) if isinstance(value, ast.Constant) else GAP for value in node.values)
        return re.sub(f"{GAP}+", GAP, "".join(parts))
    return ""


def _trees() -> dict[Path, ast.Module]:
    files = [*sorted(file for folder in SOURCES for file in folder.rglob("*.py")), BUILDER]
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}


if __name__ == "__main__":
    for place, message in undocumented():
        print(f"{place}: {message}")

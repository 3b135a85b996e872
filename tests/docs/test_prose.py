"""Pages and docstrings are easy to read: no sentence has more than 30 words."""

from __future__ import annotations

import ast
import re

from snippets import PAGES, ROOT

LONGEST = 30
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("*.md"))]
MODULES = [path for name in ("dma_hf", "kernels", "eval") for path in sorted((ROOT / name).rglob("*.py"))]
NO_PROSE = re.compile(
    r"^```.*?^```$|<!--.*?-->|^\|.*?$|\]\([^)]*\)|(?<=::\n)\n(?: {4}.*?\n)+(?=\n)", re.DOTALL | re.MULTILINE
)
CODE = re.compile(r"``?[^`\n]+``?")
END = re.compile(r"(?<=[.!?;])[\"')*]*\s+|\n\s*\n|\n\s*(?:[-*]|\d+\.|#+) ")
WORD = re.compile(r"\w[\w'’.,/%-]*")


def long_sentences(text):
    sentences = END.split(CODE.sub("code", NO_PROSE.sub("", text)))
    return [sentence for sentence in sentences if len(WORD.findall(sentence)) > LONGEST]


def docstrings(module):
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value.partition("\n    Examples:\n")[0]


def test_no_sentence_of_a_page_is_long():
    assert {page: long for page in TEXTS if (long := long_sentences(page.read_text(encoding="utf-8")))} == {}


def test_no_sentence_of_a_docstring_is_long():
    assert {path: long for path in MODULES for text in docstrings(path) if (long := long_sentences(text))} == {}

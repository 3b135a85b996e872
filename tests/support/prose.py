"""A linter of pages, docstrings and messages: long sentences, and expressions that are not plain English."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
PACKAGES = ("dma_hf", "eval/dma_eval", "kernels/dma_kernels")
MODULES = [path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))]
SHORTEST_MESSAGE = 4
"""Strings with fewer words count as names, not messages."""
LONGEST = 30
"""Maximum words per sentence."""
UNCLEAR = {
    r"all chips": "portable",
    r"kernel (?:of|for) (?:long|short) prompts": "warp-specialized kernel, multi-CTA kernel",
    r"multiprocessors?": "SM",
    r"lowerings?": "compute path",
    r"visited": "computed, loaded",
    r"in turns": "interleaved",
    r"each alone": "isolated",
    r"as (?:it is|they are)": "unchanged",
    r"but for": "except",
    r"what precedes": "preprocessing",
    r"of old": "earlier",
    r"behind": "after",
    r"begin to copy": "issue a load",
    r"program of (?:the|that) kernel": "CTA",
    r"taken back": "rolled back",
    r"is warned of": "triggers a warning",
    r"stands? out": "outlier",
    r"for want of": "because of too little",
    r"(?:its|the) door": "entry point",
    r"gone through": "name the step",
    r"(?:edge|inner) tiles?": "masked tile, full tile",
    r"words of a mask": "bitmask",
    r"calls? that comes? again": "launch plan cache",
    r"step's end|decode end": "split-KV combine",
    r"(?:caller's|aligned) layout": "unpadded, tile-padded",
    r"groups of warps": "warpgroups",
    r"goes on (?:after|where|at)": "resumes",
    r"(?:as|so) many times": "N times",
    r"(?:to|would) go on": "resume, continue",
    r"the others go on": "the others continue",
    r"asked for": "given, requested",
    r"come to light": "appear",
    r"the very": "the same",
    r"in silence": "silently",
    r"harder to quanti[sz]e": "larger outlier channels",
    r"quantis\w*": "quantize",
    r"(?:tokens|sums) of (?:a )?thread": "partial row sums",
    r"visible to (?:one|all)": "union range, unmasked range",
    r"pass(?:es)? by": "skip",
    r"places? of the (?:ring|pipeline)": "stage",
    r"release a place|acquire a place": "release a stage, acquire a stage",
    r"query factor": "NVFP4 global scale",
    r"written tiles": "valid tiles",
}
"""Expressions that a native engineer would not use, with what to write instead."""
FENCE = re.compile(r"^```.*?^```$|<!-- table: .*?<!-- end table -->|<!--.*?-->", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"^\|.*$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.|#+)\s+", re.MULTILINE)
END = re.compile(r"(?<=[.!?])[\"')*]*\s+")
WORD = re.compile(r"[\w][\w'’.,/%-]*")


def problems(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and a description of each problem of a page."""
    prose = FENCE.sub(_blank, text)
    readable = LINK.sub(lambda match: match[1], CODE.sub("code", prose))
    for pattern, better in UNCLEAR.items():
        for match in re.finditer(rf"\b(?:{pattern})\b", readable, re.IGNORECASE):
            yield _line(readable, match.start()), f"{match[0]!r}: write {better!r}"
    for start, paragraph in _paragraphs(TABLE.sub("", readable)):
        for sentence in END.split(paragraph):
            count = len(WORD.findall(sentence))
            if count > LONGEST:
                yield start, f"{count} words: {' '.join(sentence.split()[:12])} …"


def module_problems(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and a description of each problem of a module's docstrings and messages.

    Examples in docstrings are ignored. A semicolon ends a sentence, because messages are ``problem; way out``.
    """
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.partition("\n    Examples:\n")[0].replace("``", "`").replace("; ", ". ")
            if id(node) in docstrings or len(text.split()) >= SHORTEST_MESSAGE:
                yield from ((node.lineno + line - 1, problem) for line, problem in problems(text))


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each paragraph, heading and list item."""
    lines: list[str] = []
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if lines and (not line.strip() or ITEM.match(line)):
            yield number - len(lines), ITEM.sub("", "\n".join(lines))
            lines = []
        if line.strip():
            lines.append(line)


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


if __name__ == "__main__":
    for page in PAGES:
        for line, problem in problems(page.read_text(encoding="utf-8")):
            print(f"{page.relative_to(ROOT)}:{line}: {problem}")
    for module in MODULES:
        for line, problem in module_problems(module.read_text(encoding="utf-8")):
            print(f"{module.relative_to(ROOT)}:{line}: {problem}")

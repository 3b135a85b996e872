"""Find, parse and run the fenced code blocks of the documentation.

A block below an HTML comment ``<!-- not run: REASON -->`` is only parsed; others are run. Sybil and similar tools would
save one regular expression, but do not parse skipped blocks or run shell blocks.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dma_eval.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELLS = ("sh", "bash")
COMMAND = re.compile(r"^(dma-hf (?:\\\n|[^\n|&;<>])*)$", re.MULTILINE)
"""A line that only runs ``dma-hf``."""
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n+)?```(?P<language>\w*)[^\n]*\n(?P<source>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str  # path of its page from the root of the repository
    line: int  # zero-based line of its first line of code
    language: str  # of the fence; empty for plain text
    source: str
    reason: str | None  # why it is not run; ``None`` if it runs

    @property
    def is_code(self) -> bool:
        """Whether the block has code that can run."""
        return self.language == "python" or self.language in SHELLS

    def parse(self) -> None:
        """Raise an error if the Python, shell, TOML or JSON is not valid, or the language is unknown."""
        if self.language == "python":
            self._compile()
        elif self.language in SHELLS:
            done = subprocess.run(["bash", "-n", "-c", self.source], capture_output=True, text=True)
            if done.returncode:
                raise SyntaxError(f"{self.page}:{self.line + 1}: {done.stderr.strip()}")
        elif self.language == "toml":
            tomllib.loads(self.source)
        elif self.language == "json":
            json.loads(self.source)
        elif self.language not in ("", "text"):
            raise ValueError(f"{self.page}:{self.line + 1}: blocks of {self.language!r} are not checked")

    def run(self, namespace: dict[str, Any]) -> None:
        """Run Python code in ``namespace``, and shell code in a new process with the variables of earlier blocks.

        Lines that only run ``dma-hf`` run it in this process, because it takes seconds to import.
        """
        if self.language == "python":
            exec(self._compile(), namespace)
            return
        variables = namespace.setdefault("SHELL_VARIABLES", [])
        for index, lines in enumerate(COMMAND.split(self.source)):
            if index % 2:
                words = self._shell([*variables, f"printf '%s\\0' {lines}"]).split("\0")[1:-1]
                with pytest.raises(SystemExit) as end:
                    main(words)
                assert not end.value.code, f"{self.page}:{self.line + 1}: {lines}: exit {end.value.code}"
            elif lines.strip():
                self._shell([*variables, lines])
                variables.extend(_variables(lines))

    def _shell(self, lines: list[str]) -> str:
        """Run lines of shell code and return their output."""
        bins = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "eval"))
        changes = {"PATH": bins, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "TRITON_INTERPRET": "0"}
        command = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
        done = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True)
        assert done.returncode == 0, f"{self.page}:{self.line + 1}: exit {done.returncode}\n{done.stderr[-3000:]}"
        return done.stdout

    def note_variables(self, namespace: dict[str, Any]) -> None:
        """Record the variables that a shell block sets, for later blocks."""
        if self.language in SHELLS:
            namespace.setdefault("SHELL_VARIABLES", []).extend(_variables(self.source))

    def _compile(self) -> Any:
        return compile("\n" * self.line + self.source, str(ROOT / self.page), "exec")


def _variables(source: str) -> list[str]:
    return re.findall(r"^[A-Z_]+=.*$", source, re.MULTILINE)


def find_blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("source"))
        name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
        yield Block(name, line, match["language"], match["source"], match["reason"])

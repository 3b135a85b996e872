"""Kernels compiled ahead of time by a separate program, once per call for all test workers."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class CompiledCalls:
    """A mapping from the name of a call to its kernels.

    The program reads names, one per line, and answers each with a line of JSON. It runs without the interpreter, which
    permanently replaces the compiler in a process. The folder stores answers; the workers of a run share it.
    """

    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._errors = folder / f"errors-{os.getpid()}.txt"
        self._known: dict[str, list[dict[str, Any]]] = {}

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        if name not in self._known:
            file = self._folder / f"{name.replace(':', '-')}.json"
            with file.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not file.exists():
                    file.write_text(self._compile(name))
            self._known[name] = json.loads(file.read_text())
        return self._known[name]

    def close(self) -> None:
        """End the program."""
        if self._process is not None:
            self._process.communicate()

    def _compile(self, name: str) -> str:
        if self._process is None:
            environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            with self._errors.open("w") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, self._program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                    text=True, env=environment,
                )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(name, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{name} does not compile: {self._errors.read_text()[-4000:]}")
        return answer

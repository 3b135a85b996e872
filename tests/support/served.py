"""Run ``dma-hf serve`` in a separate process, on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "eval" / "dma_eval" / "assets" / "demo_model"
START_SECONDS = 300


@contextmanager
def served(
    model: Path, *arguments: object, log: Path, launcher: Sequence[str] = (), **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve a model at any free port. Return the process and its address.

    Args:
        model: Folder of the model.
        arguments: Further arguments of the command.
        log: File for standard error.
        launcher: Arguments of Python before the command, such as those of torchrun.
        variables: Further environment variables.
    """
    path = os.pathsep.join([*(str(ROOT / name) for name in (".", "kernels", "eval")), os.environ.get("PYTHONPATH", "")])
    # Bars of libraries are off in tests, but not for users.
    environment = {name: value for name, value in os.environ.items() if "TQDM" not in name and "PROGRESS" not in name}
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_PROXY": "*"} | variables
    command = [sys.executable, *launcher, "-m", "dma_eval", "serve", str(model), "--port", "0", "--device", "cpu"]
    command += ["--host", "127.0.0.1", *map(str, arguments)]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=file, text=True)
    assert process.stdout is not None
    watchdog = threading.Timer(START_SECONDS, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()  # ends with the process too
        assert " at http://127.0.0.1:" in line, line + log.read_text()
        watchdog.cancel()
        yield process, line.split()[-1].removesuffix("/v1")
    finally:
        watchdog.cancel()
        process.kill()  # Ray's processes end with it
        process.communicate()

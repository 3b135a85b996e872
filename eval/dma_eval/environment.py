"""Versions and devices of a measurement."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from pathlib import Path

PACKAGES = (
    *("dma-hf", "torch", "triton", "transformers", "tokenizers", "accelerate", "datasets", "gguf", "huggingface_hub"),
    *("lm-eval", "numpy", "safetensors", "torchao", "vllm", "fa3-fwd", "flash-attn-4", "flashinfer-python"),
    *("hqq", "nvidia-cudnn-frontend", "optimum-quanto", "sageattention"),
)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a measurement was made."""

    python: str  # version of Python
    packages: dict[str, str]  # version of each package; those that are not installed are missing
    system: str  # operating system and machine type
    cpu: str  # name of the processor
    threads: int  # threads that PyTorch computes with on the CPU
    gpus: list[str]  # name of each CUDA device
    cuda: str | None  # version of CUDA that PyTorch was built for; None without
    commit: str | None = None  # of the source tree, with ``-dirty`` if files differ from it; None for a package


def collect() -> Environment:
    """Describe this process and this machine."""
    import torch  # takes seconds, and reading a report needs no device

    return Environment(
        python=platform.python_version(),
        packages=versions(PACKAGES),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=f"{_cpu_name()} ({os.cpu_count()} CPUs)",
        threads=torch.get_num_threads(),
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        cuda=torch.version.cuda,
        commit=_commit(),
    )


@cache
def source_hash() -> str:
    """Return a hash of the Python files of this project, because many edits are the same commit with ``-dirty``."""
    digest = hashlib.sha256()
    for name in ("dma_kernels", "dma_hf", "dma_eval"):
        with resources.as_file(resources.files(name)) as folder:
            for file in sorted(folder.rglob("*.py")):
                digest.update(f"{name}/{file.relative_to(folder)}".encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def command_line() -> str:
    """Return the command of this process as another machine can run it, without the folders of this one."""
    program, *arguments = sys.argv
    path = Path(program).resolve()
    is_script = path.suffix == ".py" and path.name != "__main__.py"
    called = ("python", f"{path.parent.name}/{path.name}") if is_script else ("dma-hf",)
    return shlex.join([*called, *map(portable, arguments)])


def portable(argument: str) -> str:
    """Return an argument with an absolute path relative to the working folder, or only its name if it lies outside."""

    def shorten(match: re.Match[str]) -> str:
        path = Path(match[2])
        return match[1] + (str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name)

    return re.sub(r"(^|[=:])(/(?!/).+)", shorten, argument)  # also in --out=/PATH and dma_mxfp:/PATH, not in a URL


def _commit() -> str | None:
    """Return the commit of this source tree, or ``DMA_HF_COMMIT`` if the tree has no history."""
    git = ["git", "-C", str(Path(__file__).parent)]
    with suppress(OSError, subprocess.CalledProcessError):
        tracked = subprocess.check_output([*git, "ls-files", "--", __file__], stderr=subprocess.DEVNULL, text=True)
        if tracked:  # an installed package may lie in the environment of another repository
            described = subprocess.check_output([*git, "describe", "--always", "--dirty", "--exclude=*"], text=True)
            return described.strip()
    return os.environ.get("DMA_HF_COMMIT")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each installed package. A source tree has no version of ``dma-hf``."""
    found = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _cpu_name() -> str:
    """Return the processor's name, which Linux has in /proc and not in ``platform``."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"model name\s*: (.*)", text):
            return found[1].strip()
    return platform.processor() or platform.machine()

"""Build the Hub kernel, which Hugging Face's ``kernels`` loads for ``attn_implementation="org/repo:dma_mxfp"``.

The result is a repository of type ``kernel``, ready to be uploaded: a card, the licence and, under ``build/``, one
variant for each kind of machine. A variant is both packages, whole, under an ``__init__.py`` with the entry points of
:mod:`dma_hf.integrations.hub_kernel`. Two things are changed in the copies, because several versions of a kernel, and
an installed ``dma_hf``, may live in one process: imports become relative, and operators get a namespace of their own.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"dma_kernels": ROOT / "kernels" / "dma_kernels", "dma_hf": ROOT / "dma_hf"}
NAME = "dma-mxfp"
BACKENDS = ("cpu", "cuda")
"""Kinds of machine: a variant ``torch-<backend>`` each, for any release of torch, without compiled code."""
REQUIRED = ("torch", "triton", "transformers")
"""Dependencies of the project that the kernel needs; ``kernels`` installs none, and checks none of these."""

INIT = '''"""Diagonal-tiled mixed-precision attention (arXiv 2604.03950) as a Hub kernel."""

from importlib.metadata import PackageNotFoundError as _NotFound, version as _version

from packaging.specifiers import SpecifierSet as _SpecifierSet

for _name, _wanted in {requires!r}.items():
    try:
        _found = _version(_name)
    except _NotFound:
        raise ImportError(f"the Hub kernel of dma_mxfp needs {{_name}}{{_wanted}}, which is not installed") from None
    if not _SpecifierSet(_wanted).contains(_found, prereleases=True):
        raise ImportError(f"the Hub kernel of dma_mxfp needs {{_name}}{{_wanted}}, got {{_found}}")

from . import dma_hf as _dma_hf
from .dma_hf import *
from .dma_hf.integrations.hub_kernel import __getattr__, dma_mxfp, register_masks

# By these two names Transformers knows a kernel that computes attention itself.
flash_attn_forward = dma_mxfp
supports_flash_attn = True

__all__ = [*_dma_hf.__all__, "dma_mxfp", "register_masks"]
'''


def read_sources() -> dict[str, bytes]:
    """Return every file of the packages by its path in a variant."""
    return {
        f"{package}/{file.relative_to(folder).as_posix()}": file.read_bytes()
        for package, folder in PACKAGES.items()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }


def make_relative(source: str, path: str) -> str:
    """Make the imports of the packages relative to the module at ``path`` in a variant.

    Raises:
        ValueError: ``import dma_kernels`` binds a name that a relative import cannot.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names if alias.name.split(".")[0] in PACKAGES]
            if named:
                raise ValueError(
                    f"{path}:{node.lineno}: import {named[0]} cannot be made relative; write from {named[0]} import ..."
                )
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] in PACKAGES:
            line, column = lines[node.lineno - 1], node.col_offset
            dots = "." * len(Path(path).parts)
            lines[node.lineno - 1] = line[:column] + line[column:].replace(f"{node.module}", dots + f"{node.module}", 1)
    return "".join(lines)


def rename_operators(source: str, path: str, namespace: str) -> str:
    """Put the operators that a module defines or calls in ``namespace``.

    Raises:
        ValueError: The namespace is named in a way that this function does not know.
    """
    source = re.sub(r"""(["'])dma_kernels::""", rf"\1{namespace}::", source)
    source = re.sub(r"\btorch\.ops\.dma_kernels\b", f"torch.ops.{namespace}", source)
    left = re.search(r"""["']dma_kernels["']|\bops\.dma_kernels\b""", source)
    if left:
        line = source.count("\n", 0, left.start()) + 1
        raise ValueError(f"{path}:{line}: {left.group()} may name the namespace of operators; extend rename_operators")
    return source


def read_requirements() -> dict[str, str]:
    """Return the versions that ``pyproject.toml`` asks for."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    split = (re.match(r"([\w.-]+)(.*)", dependency) for dependency in dependencies)
    versions = {match[1]: match[2] for match in split if match}
    return {name: versions[name] for name in REQUIRED}


def write_variant(folder: Path, backend: str, sources: dict[str, bytes], version: int) -> None:
    """Write one variant to ``folder``; the same sources give the same files."""
    init = INIT.format(requires=read_requirements())
    files = [init.encode(), *(path.encode() + b"\0" + data for path, data in sources.items())]
    digest = hashlib.sha256(b"\0".join(files)).hexdigest()
    kernel_id = f"_{NAME.replace('-', '_')}_{backend}_{digest[:12]}"
    for path, data in sources.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".py":
            data = rename_operators(make_relative(data.decode(), path), path, kernel_id).encode()
        target.write_bytes(data)
    (folder / "__init__.py").write_text(init, encoding="utf-8")
    metadata = {
        "id": kernel_id,
        "name": NAME,
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def build(out: Path, repo: str, version: int) -> None:
    """Write the repository to ``out``, replacing an earlier build.

    Raises:
        OSError: ``out`` cannot be written.
        ValueError: ``repo`` is not a name that Transformers takes for a kernel, or would take for FlashAttention. Or
            ``out`` has a README.md that is not the card of a kernel.
    """
    if not re.fullmatch(r"[^/:@\s]+/[^/:@\s]+", repo):
        raise ValueError(f"repo must be ORG/NAME, got {repo!r}")
    if "flash" in repo:
        raise ValueError(f"repo must not contain 'flash', by which Transformers knows FlashAttention; got {repo!r}")
    readme = out / "README.md"
    if readme.exists() and "library_name: kernels" not in readme.read_text(encoding="utf-8"):
        raise ValueError(f"out must be the folder of a kernel, or a new one; {readme} would be replaced")
    sources = read_sources()
    shutil.rmtree(out / "build", ignore_errors=True)
    for backend in BACKENDS:
        write_variant(out / "build" / f"torch-{backend}", backend, sources, version)
    card = (ROOT / "scripts" / "hub_kernel_card.md").read_text(encoding="utf-8")
    requires = ", ".join(f"{name} {wanted}" for name, wanted in read_requirements().items())
    card = card.replace("{repo}", repo).replace("{version}", str(version)).replace("{requires}", requires)
    readme.write_text(card, encoding="utf-8")
    shutil.copyfile(ROOT / "LICENSE", out / "LICENSE")


def main(
    repo: Annotated[str, typer.Argument(help="ORG/NAME of the repository on the Hub; the card names it.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("build/hub_kernel"),
    version: Annotated[int, typer.Option(min=1, help="Major version of the kernel; Transformers loads 1.")] = 1,
) -> None:
    """Build the Hub kernel from the packages in this checkout."""
    try:
        build(out, repo, version)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    print(f"Wrote {out}")


if __name__ == "__main__":
    typer.run(main)

"""The layout of the repository: what is a package, and what must not look like one."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from dma_eval import entry, names
from dma_eval.load.backends import PAGED
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def _imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the modules that statements import from, except relative ones."""
    named = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    return named | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


def _of_transformers(nodes: Iterable[ast.AST]) -> set[str]:
    return {name for name in _imported(nodes) if name.partition(".")[0] == "transformers"}


def test_folders_are_no_packages():
    """A top-level package ``kernels`` would hide Hugging Face's, which Transformers looks for."""
    assert not any((ROOT / folder / "__init__.py").exists() for folder in ("kernels", "eval"))


def test_the_wheel_holds_the_three_packages(tmp_path):
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"dma_hf", "dma_kernels", "dma_eval"}
    assert {f"{top}/py.typed" for top in tops} <= set(names)
    assert not any("__pycache__" in name for name in names)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAY_STAY = {"transformers", *(f"transformers.{name}_utils" for name in ("masking", "cache", "modeling"))}
"""Modules of Transformers whose contents are documented for others to build on."""
LATER = {"integrations.manager", "integrations.paged_cache", "integrations.serving", "serving"}
"""Modules of the plugin that are imported where they are used, and so import what they like."""


def test_the_plugin_needs_what_it_computes_with_and_nothing_else():
    needed = {Requirement(each).name for each in PROJECT["dependencies"]}
    assert needed == {"torch", "triton", "transformers", "accelerate"}


def test_the_constraints_name_one_version_of_every_requirement():
    """Each within its range; Triton's is a bound, because CUDA builds of torch ask for a version of their own."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(each.name): each for each in map(Requirement, [x for x in lines if x[:1] != "#"])}
    for name, pin in pins.items():
        assert [each.operator for each in pin.specifier] == ["<=" if name == "triton" else "=="], name
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for needed in [Requirement(each) for each in itertools.chain(*lists)]:
        if needed.name != PROJECT["name"]:
            (pin,) = pins[canonicalize_name(needed.name)].specifier
            assert pin.version in needed.specifier, needed


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        *(("dma_hf", ()), ("kernels/dma_kernels", ())),
        *((folder, ("eval", "serve", "ray")) for folder in ("dma_hf/serving", "eval/dma_eval")),
    ],
)
def test_what_a_package_imports_is_a_requirement(folder, extras):
    """By its own name, and not because something else that is asked for needs it today. Only dma_eval imports itself.

    A module that is not installed here is taken to come from the package of its name.
    """
    asked = [*PROJECT["dependencies"], *(each for extra in extras for each in PROJECT["optional-dependencies"][extra])]
    known = {canonicalize_name(Requirement(each).name) for each in asked}
    paths = [path for path in (ROOT / folder).rglob("*.py") if extras or "serving" not in path.parent.parts]
    statements = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    tops = {name.partition(".")[0] for name in _imported(statements)} - sys.stdlib_module_names
    tops -= {"dma_hf", "dma_kernels", folder.partition("/")[2]}
    homes = importlib.metadata.packages_distributions()
    assert {top for top in tops if not set(map(canonicalize_name, homes.get(top, [top]))) & known} == set()


SCRIPT = """
import importlib.metadata as metadata, sys, torch, transformers
from pathlib import Path
from transformers import AttentionInterface, AttentionMaskInterface, Cache, GenerationMixin, PreTrainedModel
before = set(sys.modules)
import dma_hf
print(*set(sys.modules) - before)
# The folder ``kernels`` is not taken for Hugging Face's package.
from transformers.utils.import_utils import is_kernels_available
installed = [each for each in metadata.distributions() if each.metadata["Name"] == "kernels"]
assert installed or not is_kernels_available()
if installed:
    import kernels
    assert Path(kernels.__file__).samefile(installed[0].locate_file("kernels/__init__.py"))
from dma_eval.load.backends import implementations
print(*implementations())
"""


@pytest.fixture(scope="module")
def imported(python):
    """What a new process finds: modules that the plugin imports, and Transformers' implementations of attention.

    It runs in the root of the repository, as a user in a checkout would.
    """
    done = python("-c", SCRIPT, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_importing_the_plugin_imports_nothing_of_the_evaluation(imported):
    """What Transformers imports by itself is its own."""
    extra = [Requirement(each).name.lower().replace("-", "_") for each in PROJECT["optional-dependencies"]["eval"]]
    added, _ = imported
    assert {"dma_hf", "dma_kernels"} <= added
    assert not {name.partition(".")[0] for name in added} & {*extra, "dma_eval"}
    assert not added & {f"dma_hf.{name}" for name in LATER}


def test_the_command_knows_the_implementations_of_transformers(imported):
    """Without importing it, so that a wrong name is refused at once."""
    _, found = imported
    known = {name for name in found if not name.startswith(PAGED)}
    assert known <= set(names.IMPLEMENTATIONS)
    assert {"eager", "sdpa", "flash_attention_2", "dma_mxfp"} <= known


def test_importing_the_plugin_names_nothing_that_transformers_may_move():
    """What has no documented place is imported where it is used."""
    for path in (ROOT / "dma_hf").rglob("*.py"):
        if ".".join(path.relative_to(ROOT / "dma_hf").with_suffix("").parts) not in LATER:
            statements = ast.parse(path.read_text(encoding="utf-8")).body
            assert _of_transformers(statements) <= MAY_STAY, path


DOCUMENTED = MAY_STAY | {"transformers.utils", "transformers.generation.streamers"}
PRIVATE = {"_attn_implementation", "_commit_hash", "_supports_logits_to_keep", "_cached_continuous_batching_manager"}


@pytest.mark.parametrize("folder", ["dma_hf", "eval/dma_eval"])
def test_private_interfaces_of_transformers_are_in_the_integrations_only(folder):
    for path in (ROOT / folder).rglob("*.py"):
        if "integrations" not in path.parts:
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            assert _of_transformers(nodes) <= DOCUMENTED, path
            used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            used |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
            assert not used & PRIVATE, path


def test_the_command_says_which_extra_to_install(monkeypatch):
    """Where the plugin was installed alone."""
    requires = ["torch>=2", "rich; extra == 'eval'", "gguf>=0.17; extra == 'eval'", "mypy; extra == 'test'"]
    monkeypatch.setattr(entry.metadata, "requires", lambda name: requires)
    monkeypatch.setattr(entry, "_is_installed", lambda name: name not in ("gguf", "mypy"))
    with pytest.raises(SystemExit, match=r"^dma-hf: not installed: gguf; .*: pip install 'dma-hf\[eval\]'$"):
        entry.main()

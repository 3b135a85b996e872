"""The layout of the repository: what is a package, and what must not look like one."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _python(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in the root of the repository, as a user in a checkout would."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize("folder", ["kernels", "eval"])
def test_folders_are_no_packages(folder):
    """A top-level package ``kernels`` would hide Hugging Face's, which Transformers looks for."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_transformers_does_not_take_the_folder_for_hugging_faces_kernels():
    done = _python(
        "import dma_hf\n"
        "from transformers.integrations import hub_kernels\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "import importlib.metadata as metadata\n"
        "installed = any(each.metadata['Name'] == 'kernels' for each in metadata.distributions())\n"
        "assert installed or not is_kernels_available()\n"
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_hugging_faces_kernels_stays_importable_from_the_root():
    try:
        installed = importlib.metadata.distribution("kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package 'kernels' of Hugging Face is not installed")
    done = _python("import kernels; print(kernels.__file__)")
    assert done.returncode == 0, done.stderr[-2000:]
    assert Path(done.stdout.strip()).resolve() == Path(str(installed.locate_file("kernels/__init__.py"))).resolve()


def test_the_wheel_holds_the_three_packages(tmp_path):
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"dma_hf", "dma_kernels", "dma_eval"}
    assert {f"{top}/py.typed" for top in tops} <= set(names)
    assert not any("__pycache__" in name for name in names)

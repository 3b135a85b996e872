"""What all tests share, some of it before any test module is imported."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

# As the command line does, whose output tests read; libraries look when they are imported, tqdm with torch.
for variable in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's, for small matrices, as in one_thread below

gc.set_threshold(50_000, 20, 100)  # an interpreted kernel makes a million objects a second, which need no collector

import torch  # noqa: E402
from hypothesis import settings  # noqa: E402
from hypothesis.internal.conjecture import providers  # noqa: E402

# The same examples in every run, so that only a change of the code can cause a failure. Hypothesis also tries constants
# of all modules that are imported so far, which depend on the tests that a worker of xdist happened to run before.
settings.register_profile("dma_hf", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("dma_hf")
providers._get_local_constants = providers.Constants

# Without a CUDA device Triton kernels run in its interpreter, which has to be told before a kernel is defined: so here,
# because the folders' own conftest files, which are imported next, import kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from quick_interpreter import make_quick

    make_quick()

ROOT = Path(__file__).parents[1]
KEPT_TOGETHER = (
    *(f"tests/dma_eval/test_{name}.py" for name in ("serve", "serve_replicas", "runs", "hybrids", "bench")),
    *("tests/dma_hf/test_parallel.py", "tests/test_hub_kernel.py", "tests/test_packaging.py"),
)
"""Modules whose tests share processes, models or results that take long to make."""

GPU_STRIDE = 41
"""Distance of GPU tests that run after each other. Neighbours share a kernel, which each worker would compile."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--nan-memory``, which shows reads of memory that was not written."""
    parser.addoption("--nan-memory", action="store_true", help="Fill what torch.empty returns with NaN, or all ones.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out exhaustive tests, and those for a missing CUDA device, unless asked for; take the pages first."""
    marks = {"exhaustive"} if torch.cuda.is_available() else {"exhaustive", "gpu"}
    is_named = any("::" in argument for argument in config.args)
    left_out = set() if is_named else {name for name in marks if name not in config.option.markexpr}
    config.hook.pytest_deselected(items=[item for item in items if left_out & set(item.keywords)])
    items[:] = [item for item in items if not left_out & set(item.keywords)]
    on_gpu = [item for item in items if "gpu" in item.keywords]
    spread = [item for first in range(GPU_STRIDE) for item in on_gpu[first::GPU_STRIDE]]
    items[:] = [item for item in items if "gpu" not in item.keywords] + spread
    items.sort(key=lambda item: item.path.parent.name != "docs")  # the longest come first: no worker waits at the end
    for item in items:
        if "gpu" in set(item.keywords) & marks:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Exclude modules and tests, millions of objects that stay, from garbage collection until the end."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter collect everything when it exits."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a worker the next test when it is done, or all tests of a module in ``KEPT_TOGETHER``, which come first.

    By default the first worker would get most of the long ones. ``xdist_group`` has no effect in pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class NextTest(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.split("::")[0]
            return module if module in KEPT_TOGETHER else nodeid

        def _reschedule(self, node: Any) -> None:
            # Units that are done would be counted again after each of 6,000 tests, for seven seconds in all. And when a
            # worker dies, they would be given to another one, which would wait forever because they have no test left.
            units = self.assigned_work[node]
            self.assigned_work[node] = {scope: unit for scope, unit in units.items() if not all(unit.values())}
            super()._reschedule(node)

    return NextTest(config, log)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread costs more than it gives, above all beside other test workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for the processes that tests start
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_gradients() -> Iterator[None]:
    """Disable gradients; tests that need them enable them."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with these arguments and this project; options are those of ``subprocess.run``, and ``env`` adds."""

    def invoke(*arguments: object, env: dict[str, str] | None = None, **options: Any) -> Any:
        path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "eval")))
        variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | (env or {})
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 400} | options
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, env=os.environ | variables, check=False, **options)

    return invoke


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with bytes of 255: NaN in every floating-point format."""

    def filled(allocate: Any) -> Any:
        @wraps(allocate)
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = allocate(*args, **kwargs)
            if torch.compiler.is_compiling():  # torch.compile cannot trace what follows
                return tensor
            if type(tensor) is torch.Tensor and tensor.device.type in ("cpu", "cuda"):
                tensor.untyped_storage().fill_(255)
            return tensor

        return call

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


@pytest.fixture(autouse=True)
def nan_memory(request: pytest.FixtureRequest) -> None:
    """Poison memory in every test if ``--nan-memory`` is given."""
    if request.config.getoption("--nan-memory"):
        request.getfixturevalue("poisoned")

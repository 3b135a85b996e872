"""The Hub kernel: built to a folder, loaded from there by Hugging Face's ``kernels`` and by Transformers.

Transformers accepts one minor release of ``kernels``, which need not be the one at hand; then its check of the version
is all that is replaced here. ``LOCAL_KERNELS`` is how ``kernels`` itself takes a repository from a folder.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
import torch
import typer
from script_files import load_script
from snippets import find_blocks
from tiny_models import FAMILIES, VOCABULARY
from transformers import AutoModelForCausalLM
from transformers.integrations import hub_kernels
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dma_hf
from dma_hf.attention import dma_attention_forward
from dma_hf.integrations.internals import CACHE_ARGUMENT
from dma_hf.masks import dma_mask

kernels = pytest.importorskip("kernels", minversion="0.16")
pytestmark = pytest.mark.usefixtures("no_gradients")

ROOT = Path(__file__).parents[1]
REPO = "acme/dma"
HUB = f"{REPO}:dma_mxfp"
LENGTH = 430  # four tiles: in the last one, a query has keys of tile 1 that are neither band nor sink


builder = load_script("build_hub_kernel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The built repository."""
    out = tmp_path_factory.mktemp("hub") / "dma"
    builder.build(out, REPO, version=1)
    return out


@pytest.fixture(scope="module")
def kernel(folder):
    """The kernel as ``kernels`` loads it from a folder."""
    return kernels.get_local_kernel(folder)


@pytest.fixture
def hub(folder, monkeypatch):
    """Transformers with the repository at hand, whatever release of ``kernels`` is installed."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={folder}")
    if not hub_kernels.is_kernels_available():
        monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
        monkeypatch.setattr(hub_kernels, "get_kernel_hub", kernels.get_kernel, raising=False)


def _ids(batch, length):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def _padded(ids):
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    return mask


def _error(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def _pair(name, section):
    """Return models on the installed package and on the kernel, with the same weights and settings."""
    models = [FAMILIES[name].build(implementation) for implementation in ("dma_mxfp", HUB)]
    for model in models:
        model.config.dma_mxfp = section
    return models


def test_the_copy_uses_nothing_of_the_installed_package(kernel, folder):
    assert Path(kernel.__file__).is_relative_to(folder)
    assert set(dma_hf.__all__) <= set(dir(kernel))
    copies = {name: module for name, module in sys.modules.items() if name.startswith(kernel.__name__ + ".")}
    assert f"{kernel.__name__}.dma_kernels.api" in copies
    for module in copies.values():
        for value in vars(module).values():
            assert not str(getattr(value, "__module__", "")).startswith(("dma_hf", "dma_kernels"))


def test_every_file_of_both_packages_is_in_it(folder):
    for backend in builder.BACKENDS:
        for package, source in builder.PACKAGES.items():
            copied = folder / "build" / f"torch-{backend}" / package
            names = {file.relative_to(source) for file in source.rglob("*.py")}
            assert names == {file.relative_to(copied) for file in copied.rglob("*.py")}
        metadata = json.loads((folder / "build" / f"torch-{backend}" / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend}


def test_building_twice_gives_the_same_files(folder, tmp_path):
    builder.build(tmp_path, REPO, version=1)
    files = [file.relative_to(folder) for file in folder.rglob("*") if file.suffix in (".py", ".json", ".md")]
    assert len(files) > 40
    assert all((folder / file).read_bytes() == (tmp_path / file).read_bytes() for file in files)


def test_from_pretrained_as_a_user_calls_it(hub, tmp_path):
    FAMILIES["llama"].build("sdpa").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=HUB, allow_all_kernels=True)
    assert model.config._attn_implementation == HUB
    kernel = sys.modules[ALL_ATTENTION_FUNCTIONS[HUB].__module__.removesuffix(".dma_hf.integrations.hub_kernel")]
    assert ALL_ATTENTION_FUNCTIONS[HUB] is kernel.dma_mxfp
    assert ALL_MASK_ATTENTION_FUNCTIONS[HUB].__module__ == f"{kernel.__name__}.dma_hf.masks.mask_function"
    assert ALL_ATTENTION_FUNCTIONS["dma_mxfp"] is dma_attention_forward  # the installed package stays registered
    assert ALL_MASK_ATTENTION_FUNCTIONS["dma_mxfp"] is dma_mask
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = _ids(1, LENGTH)
    assert 0 < _error(model(ids).logits, reference(ids).logits) < 0.1


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        *(("llama", preset) for preset in (None, "fp4", "paper")),
        *((name, None) for name in ("mistral", "gemma3", "llama4", "gpt_oss", "bert")),
    ],
)
def test_it_computes_what_the_installed_package_computes(hub, name, preset):
    """To the bit, in left-padded rows too, where the tiles depend on what the mask function says of positions."""
    installed, ours = _pair(name, preset)
    ids = _ids(2, LENGTH)
    mask = _padded(ids)
    real = mask.bool()
    assert torch.equal(ours(ids, attention_mask=mask).logits[real], installed(ids, attention_mask=mask).logits[real])


def test_it_computes_packed_documents_alone(hub, kernel):
    """Through the attention function. A ``flash_attn_varlen_func`` would replace it, without the configuration."""
    assert not hasattr(kernel, "flash_attn_varlen_func")
    installed, ours = _pair("llama", None)
    arguments = {"position_ids": torch.cat((torch.arange(128), torch.arange(LENGTH - 128)))[None]}
    arguments |= {"input_ids": _ids(1, LENGTH), "attention_mask": torch.ones(1, LENGTH, dtype=torch.int64)}
    assert torch.equal(ours(**arguments).logits, installed(**arguments).logits)


@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_generate(hub, kernel, format):
    """Over its own cache it reads the packed form, as the installed package does."""
    models, tokens = _pair("llama", {"cache": format}), []
    ids = _ids(2, LENGTH)
    for model, cache_class in zip(models, (dma_hf.DMACache, kernel.DMACache), strict=True):
        options = {"attention_mask": _padded(ids), "max_new_tokens": 4, "do_sample": False}
        if format is not None:
            options[CACHE_ARGUMENT] = cache_class(model.config)
        tokens.append(model.generate(ids, **options))
    assert torch.equal(*tokens)
    assert format is None or options[CACHE_ARGUMENT].owner.reads_packed


def test_switching_back_and_forth(hub):
    model = FAMILIES["llama"].build("sdpa")
    ids = _ids(1, LENGTH)
    expected = model(ids).logits
    model.set_attn_implementation(HUB, allow_all_kernels=True)
    first = model(ids).logits
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids).logits, expected)
    model.set_attn_implementation(HUB, allow_all_kernels=True)
    assert torch.equal(model(ids).logits, first)
    assert not torch.equal(first, expected)


def test_compiled_beside_the_installed_package(hub):
    """Both define an operator; in one namespace, the second would take the place of the first."""
    ids = _ids(1, LENGTH)
    for name in ("dma_mxfp", HUB):
        model = FAMILIES["llama"].build(name)
        model.config.dma_mxfp = {"exact_until": 0}  # a compiled model passes a mask, which ignores it
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert _error(compiled(ids, use_cache=False).logits, expected) <= 1e-5


def test_another_mask_function_is_an_error(hub, monkeypatch):
    model = FAMILIES["llama"].build(HUB)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, HUB, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    with pytest.raises(RuntimeError, match=r"another mask function than dma_mask.*register_masks\(\)"):
        model(_ids(1, 5))
    sys.modules[ALL_ATTENTION_FUNCTIONS[HUB].__module__].register_masks()
    assert torch.isfinite(model(_ids(1, 5)).logits).all()


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("dma_hf/m.py", "from dma_kernels import attention\n", "from ..dma_kernels import attention\n"),
        ("dma_hf/deep/m.py", "from dma_kernels import X\n", "from ...dma_kernels import X\n"),
        ("dma_hf/m.py", "def f():\n    from dma_kernels.x import X\n", "def f():\n    from ..dma_kernels.x import X\n"),
        ("dma_hf/m.py", "from dma_hf.config import (\n    X,\n)\n", "from ..dma_hf.config import (\n    X,\n)\n"),
        ("dma_hf/m.py", '"""from dma_kernels import x"""\n', '"""from dma_kernels import x"""\n'),
        ("dma_hf/m.py", "from .config import X\n", "from .config import X\n"),
    ],
)
def test_imports_become_relative(path, source, expected):
    assert builder.make_relative(source, path) == expected


@pytest.mark.parametrize("source", ["import dma_kernels\n", "import dma_kernels.api as api\n"])
def test_an_import_that_cannot_be_relative_is_an_error(source):
    with pytest.raises(ValueError, match=r"dma_hf/m\.py:1: import dma_kernels.* write from dma_kernels"):
        builder.make_relative(source, "dma_hf/m.py")


def test_operators_are_renamed():
    source = '@custom_op("dma_kernels::f")\ndef f(): return torch.ops.dma_kernels.f\n'
    assert builder.rename_operators(source, "m.py", "_x") == '@custom_op("_x::f")\ndef f(): return torch.ops._x.f\n'


def test_an_unknown_use_of_the_operators_namespace_is_an_error():
    with pytest.raises(ValueError, match=r"m\.py:2: .*extend rename_operators"):
        builder.rename_operators('import torch\nlib = Library("dma_kernels", "DEF")\n', "m.py", "_x")


@pytest.mark.parametrize("repo", ["dma", "acme/my-flash-kernel", "acme/dma:dma_mxfp"])
def test_names_that_transformers_would_not_take_are_errors(repo, tmp_path):
    with pytest.raises(ValueError, match=r"repo must"):
        builder.build(tmp_path, repo, version=1)


@pytest.mark.parametrize("name", ["README.md", ""])
def test_other_files_are_not_replaced(name, tmp_path):
    """Neither is a folder with another README.md, nor a file in place of the folder."""
    (tmp_path / "README.md").write_text("# Mine")
    with pytest.raises(typer.BadParameter, match=r"README\.md"):
        builder.main(REPO, tmp_path / name)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("README.md", "# Mine")]


def test_another_release_of_transformers_is_an_error(folder, monkeypatch):
    versions = {name: importlib.metadata.version(name) for name in builder.REQUIRED} | {"transformers": "5.0.0"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    init = (folder / "build" / "torch-cpu" / "__init__.py").read_text()
    with pytest.raises(ImportError, match=r"needs transformers>=5\.18,<5\.25, got 5\.0\.0"):
        exec(init, {"__name__": "probe", "__package__": "probe"})


def test_the_card_names_the_repository(folder):
    card = (folder / "README.md").read_text()
    assert f'attn_implementation="{HUB}"' in card
    assert "{" not in card
    assert "transformers >=5.18,<5.25" in card


def test_the_code_of_the_card_runs(hub, folder, tmp_path, monkeypatch):
    model = tmp_path / "meta-llama" / "Llama-3.1-8B"
    model.parent.mkdir()
    model.symlink_to(ROOT / "eval" / "dma_eval" / "assets" / "demo_model")
    monkeypatch.chdir(tmp_path)
    blocks = list(find_blocks(folder / "README.md"))
    assert len(blocks) == 3
    namespace = {}
    for block in blocks:
        block.run(namespace)
    assert namespace["model"].config._attn_implementation == HUB
    assert namespace["model"].config.dma_mxfp["sink_tiles"] == 2

"""Every code block of the README and of ``docs/`` runs, or is marked and at least parses.

The blocks of a page are run in order, in one namespace (those of some long sections apart), in a folder where small
local files stand in for what the text names: the demo model for models of the Hub, a stretch of text for a data set.
Nothing may reach for the network.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import socket

import datasets
import huggingface_hub.constants
import pytest
import typer
from dma_eval.cli import make_app
from snippets import PAGES, ROOT, SHELLS, Block, find_blocks

from dma_hf import PRESETS

DEMO_MODEL = ROOT / "eval" / "dma_eval" / "assets" / "demo_model"
MODELS = ("meta-llama/Llama-3.1-8B", "HuggingFaceTB/SmolLM2-135M")
DATA = "Salesforce/wikitext:wikitext-2-raw-v1:test"
OF_THE_CHECKOUT = ("benchmarks", "configs", "eval", "scripts")
CHARACTERS = 7_000  # a little more than a window of 2,048 tokens

NOT_RUN = {
    "docs/tutorials/evaluate-your-model.md": 2,
    "docs/tutorials/serve-int4.md": 4,
    "docs/guides/serving.md": 4,
    "docs/guides/scaling.md": 4,
    "docs/guides/compile.md": 1,
    "docs/guides/evaluation.md": 4,
    "docs/guides/hub-kernel.md": 1,
    "README.md": 2,
}
"""How many blocks of a page are not run; the comment above each says why. Tests of the server run what it serves."""

LONG = ("dma-hf fidelity", "dma-hf stress")
"""Commands that compute for half a minute and more, which ``-m exhaustive`` runs one by one.

They need nothing of others but variables, and leave nothing. Tests of ``dma_eval`` run them on a tiny model.
"""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """The folder that a page's blocks are run in."""
    for name in MODELS:
        folder = shutil.copytree(DEMO_MODEL, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))  # CPUs are slow in bfloat16
    text = (DEMO_MODEL.parent / "heldout.txt").read_text(encoding="utf-8")[:CHARACTERS]
    for path in (tmp_path / DATA, tmp_path / "text.txt"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name in OF_THE_CHECKOUT:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my.toml").write_text((ROOT / "configs" / "balanced.toml").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_network(monkeypatch):
    """Have connections fail; ``HF_HUB_OFFLINE`` is also for the shells that blocks start, and for ``dma-hf``."""
    connect = socket.socket.connect

    def refuse(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            raise AssertionError(f"a snippet reached for the network: {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)


@pytest.fixture
def log_levels():
    """Restore the levels of loggers, which ``dma-hf`` changes for its process."""
    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    levels = [each.level for each in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pages
def test_blocks_parse(page):
    for block in find_blocks(page):
        block.parse()


@pages
def test_blocks_that_are_not_run_are_counted(page):
    count = sum(block.reason is not None for block in find_blocks(page))
    assert count == NOT_RUN.get(page.relative_to(ROOT).as_posix(), 0)


@pages
def test_commands_have_the_options_of_today(page):
    """Also those of blocks that are not run."""
    app = typer.main.get_command(make_app())
    for block in find_blocks(page):
        for line in block.source.replace("\\\n", "").splitlines() if block.language in SHELLS else ():
            if line.startswith("dma-hf "):
                name, *arguments = shlex.split(line, comments=True)[1:]
                app.commands[name].make_context(name, arguments)


@pages
def test_measured_contexts_have_low_tiles(page):
    """A context up to ``exact_until`` shows no loss, whatever the model and its outliers are."""
    for block in find_blocks(page):
        for line in block.source.replace("\\\n", "").splitlines() if block.language in SHELLS else ():
            words = shlex.split(line, comments=True) if line.startswith("dma-hf ") else []
            if "--context" in words and any("dma_mxfp" in word for word in words):
                assert int(words[words.index("--context") + 1]) > PRESETS["balanced"].exact_until, line


def _long(block):
    return next((command for command in LONG if command in block.source), None)


def _parts():
    """Each page, and each of its long commands, or ``None`` for all others."""
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        yield pytest.param(page, None, id=name)
        blocks = [block for block in find_blocks(page) if block.is_code and block.reason is None]
        for command in dict.fromkeys(filter(None, map(_long, blocks))):
            yield pytest.param(page, command, id=f"{name}-{command}", marks=pytest.mark.exhaustive)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), list(_parts()))
def test_blocks_run(page, command, workspace, no_network, log_levels):
    namespace = {"__name__": "__main__"}
    for block in find_blocks(page):
        if not block.is_code or block.reason is not None:
            continue
        if _long(block) == command:
            block.run(namespace)
        else:
            block.note_variables(namespace)


def test_a_failing_command_in_a_shell_block_fails(tmp_path, monkeypatch, capsys, log_levels):
    monkeypatch.chdir(tmp_path)
    source = "NAME=absent\ntouch before\ndma-hf report $NAME \\\n    --out here\ntouch after\n"
    with pytest.raises(AssertionError, match=r"(?s)page\.md:8: dma-hf report .*: exit 2"):
        Block("page.md", 7, "sh", source, None).run({})
    assert "absent" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["before"]

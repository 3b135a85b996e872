"""The demo model with a chat template, and what it says with each backend."""

from __future__ import annotations

import shutil

import pytest
from dma_eval.load.backends import activate, parse_backends
from dma_eval.load.models import load_model
from serve_requests import NEW_TOKENS, TEMPLATE
from served import DEMO_MODEL

COARSE = 'low = "mxfp4"\nhigh = "mxfp4"\nshared_scale = "block"\nscale_rounding = "floor"\npv = "bf16"\n'
"""Loses so much that its words are not SDPA's."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "coarse.toml").write_text(COARSE)
    return folder


@pytest.fixture(scope="session")
def question(folder):
    """A prompt of several tiles, after which every backend goes on in its own words."""
    return (DEMO_MODEL.parent / "heldout.txt").read_text(encoding="utf-8")[5000:7000].strip()


@pytest.fixture(scope="session")
def expected(folder, question):
    """What ``generate`` says with each backend."""
    loaded = load_model(str(folder), dtype="float32", device="cpu")
    inputs = loaded.tokenizer(question, return_tensors="pt")

    def say(name):
        activate(loaded.model, parse_backends([name])[0])
        ids = loaded.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        return loaded.tokenizer.decode(ids[0, inputs.input_ids.shape[-1] :], skip_special_tokens=True)

    said = {suffix: say(f"dma_mxfp:{folder / 'coarse.toml'}{suffix}") for suffix in ("", "+int4")}
    assert len({say("sdpa"), *said.values()}) == 3
    return said


@pytest.fixture(scope="session")
def arguments(folder):
    """Return the arguments of a server with this format of the cache."""

    def make(suffix=""):
        return (folder, "--dtype", "float32", "--attn", f"dma_mxfp:{folder / 'coarse.toml'}{suffix}")

    return make

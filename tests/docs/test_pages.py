"""What the pages say of the code, held against the code."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
from dma_kernels.prefill.config import select_compute_path
from dma_kernels.prefill.operands import DEQUANTIZED, E4M3, E4M3_VALUES, E5M2, INT8, PACKED
from dma_kernels.runtime.chip import has_block_scaled_mma
from messages import quoted_messages, source_messages
from script_files import load_script
from snippets import PAGES, ROOT

import dma_hf

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def _text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def _anchors(text):
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)  # a comment of Python is no heading
    headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), f"{link} leads nowhere"
            assert not anchor or anchor in _anchors(target.read_text(encoding="utf-8")), f"{link}: no such heading"


def test_every_preset_has_a_row():
    rows = re.findall(r"^\| `(\w+)` \|", _text("docs/guides/presets.md").split("## Presets")[1], re.MULTILINE)
    assert set(dma_hf.PRESETS) <= set(rows)


def test_sections_of_a_configuration_are_valid():
    text = _text("docs/guides/presets.md")
    (toml,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (section,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert dma_hf.DMAConfig.from_dict(tomllib.loads(toml)).low == "mxfp8"
    assert dma_hf.DMAConfig.from_dict(json.loads(section)["dma_mxfp"]) == dma_hf.PRESETS["fp4"]


LONG_RUNS = (
    "gemma3-270m-32768-fp32",
    "qwen2.5-coder-0.5b-32768-fp32",
    "qwen2.5-coder-1.5b-32768-fp32",
    "qwen2.5-coder-1.5b-32768-others-fp32",
)


def test_figures_in_the_text_are_those_of_the_files():
    """Those that no script writes."""
    script = load_script("update_docs")
    caches = script.of_case("decode-h200", "32K")
    worst = script.losses(*script.MODEL_RUNS).groupby("label")["kl_mean"].max()
    for label in (script.INT8, script.INT4):
        row = f"{caches['bytes_ratio'][label]:.2f} of 16 bits | KL at most {worst[label]:.2g} |"
        assert row in _text("docs/guides/cache.md")
    real = script.of_case("prefill-real-32k-h100", "32K")
    for name, label in (("off", script.BALANCED), *((str(t), f"dma_mxfp:t{t}") for t in (7, 6, 5))):
        speed = real["milliseconds"]["fa3"] / real["milliseconds"][label]
        skipped = 0 if name == "off" else real["skipped_share"][label]
        row = f"| {name} | {100 * skipped:.0f} % | {speed:.2f}x | {real['error'][label]:.4f} |"
        assert row in _text("docs/concepts/skipping.md")
    defaults = _text("docs/guides/presets.md")
    long = script.losses(*LONG_RUNS).groupby("label")["kl_mean"].max()
    for start, label in (("its KL is", script.BALANCED), ("`int4` has a KL of", script.INT4)):
        assert f"{start} at most {worst[label]:.2g} at 4,096 tokens, and {long[label]:.2g} at 32,768" in defaults
    qwen = script.losses("qwen2.5-coder-0.5b-2048-cpu-fp32").set_index("label")["kl_mean"]
    fp4 = f"without it, `fp4` has a KL of {qwen[script.LOW_FP4]:.2f} on Qwen2.5-Coder-0.5B, and with it of"
    assert f"{fp4} {qwen[script.FP4]:.3f}" in defaults
    faq = _text("docs/faq.md")
    gains = []
    for case in ("8K", "16K", "32K", "64K", "128K"):
        times = script.of_case("prefill-h200", case)["milliseconds"]
        gains.append(times["fa3"] / times[script.BALANCED])
    assert f"{min(gains):.1f} to {max(gains):.1f} times on an H200" in faq
    assert f"an `int4` cache is {caches['ms']['sdpa'] / caches['ms'][script.INT4]:.1f} times as fast as" in faq


UNITS = {
    INT8: "INT8",
    E4M3: "FP8",
    E5M2: "FP8 (E5M2)",
    PACKED["mxfp4"]: "block-scaled FP4",
    PACKED["nvfp4"]: "block-scaled FP4",
    DEQUANTIZED: "16 bits",
}
ARCHS = ((80, 86), (89,), (90,), (100, 103, 110, 120, 121))
"""The chips of each column of the table of units."""


def test_units_of_each_preset_are_those_of_its_path():
    """Before Triton 3.9, data-centre Blackwell has those of Hopper."""
    section = _text("docs/compatibility.md").split("### What each preset runs on")[1].split("\n## ")[0]
    rows = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            names, *cells = line.strip("| ").split(" | ")
            rows |= dict.fromkeys(re.findall(r"`(\w+)`", names), cells)
    assert set(rows) == set(dma_hf.PRESETS)
    for name, cells in rows.items():
        for cell, archs in zip(cells, ARCHS, strict=True):
            for arch in archs:
                path = select_compute_path(dma_hf.PRESETS[name].recipe, arch)
                pv = "FP8" if path.low_value is E4M3_VALUES else "16 bits"
                shown = cell if arch < 100 or has_block_scaled_mma(arch, 128) else cells[ARCHS.index((90,))]
                assert shown.replace("P·V in ", "") == f"{UNITS[path.low_key]}; {pv}", f"{name} on {arch}"


def test_files_that_are_named_exist():
    text = _text("docs/extending.md")
    named = re.findall(r"`((?:dma_hf|kernels|eval|configs|scripts|tests|docs|benchmarks)/[\w./-]+)`", text)
    assert len(named) > 15
    for path in named:
        assert (ROOT / path).exists(), path


def test_quoted_messages_are_in_the_sources():
    sources = "\n".join(source_messages())
    assert [message for message in quoted_messages() if message not in sources] == []

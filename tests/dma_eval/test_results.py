"""The files of a run: results.json, the Markdown report, the plots."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from html import escape, unescape
from pathlib import Path

import pytest
from dma_eval import environment
from dma_eval.config import PerplexityPart
from dma_eval.errors import UserError
from dma_eval.files import write_json as write
from dma_eval.load.backends import parse_backends
from dma_eval.load.data import load_text
from dma_eval.load.models import load_model
from dma_eval.measures.perplexity import measure_perplexity
from dma_eval.names import PRESETS
from dma_eval.results import BackendResult, Origin, Report, here_and_now, read_report
from dma_eval.session import Session
from dma_eval.show import plots
from dma_eval.show.card import make_card
from dma_eval.show.pages import COLUMNS, code_span, format_kl, number, perplexity_page
from dma_eval.show.plots import line_styles, plot_positions
from dma_eval.show.render import Plot, measured, to_html, to_markdown
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from PIL import Image

FAILED = BackendResult(label="broken", implementation="broken", config=None, failure="NaN | somewhere")


@pytest.fixture(scope="module")
def session(model_folder):
    loaded = load_model(str(model_folder), dtype="float32", device="cpu")
    return Session(loaded, parse_backends(["sdpa", "dma_mxfp:balanced", "dma_mxfp:paper"]))


@pytest.fixture(scope="module")
def section(session, text_file):
    """Measured once; no test changes it."""
    return measure_perplexity(session, load_text(str(text_file)), PerplexityPart(contexts=[128], max_windows=2))


@pytest.fixture
def report(session, section):
    facts = here_and_now() | {"command": "dma-hf ppl 'a|b'", "seed": 7, "model": session.loaded.info}
    section = replace(section, backends=[*section.backends, FAILED], origin=Origin(**facts))
    return Report(**facts, perplexity=[section])


@pytest.mark.parametrize(
    ("program", "arguments", "expected"),
    [
        ("/env/bin/dma-hf", ["ppl", "-m", "/models/a b", "-d", "text/x.txt"], "dma-hf ppl -m 'a b' -d text/x.txt"),
        ("/x/dma_eval/__main__.py", ["env"], "dma-hf env"),
        ("scripts/study.py", ["--out=/r.json", "--data", "../x"], "python scripts/study.py --out=r.json --data ../x"),
        ("dma-hf", ["{here}/a/r.json", "dma_mxfp:{here}/my.toml+int8"], "dma-hf a/r.json dma_mxfp:my.toml+int8"),
        ("dma-hf", ["http://h:1/v1", "NAME/MODEL", '{{"a": "/b"}}'], 'dma-hf http://h:1/v1 NAME/MODEL \'{"a": "/b"}\''),
    ],
)
def test_a_recorded_command_names_no_folder_of_this_machine(program, arguments, expected, monkeypatch):
    monkeypatch.setattr("sys.argv", [program, *(each.format(here=Path.cwd()) for each in arguments)])
    assert here_and_now()["command"] == expected


class TestJson:
    def test_holds_what_a_run_depends_on(self, report, tmp_path):
        write(report, tmp_path / "r.json")
        assert read_report(tmp_path / "r.json") == report
        values = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
        assert (values["schema_version"], values["seed"]) == (12, 7)
        assert values["environment"]["packages"].keys() >= {"torch", "transformers"}
        model = values["model"]
        assert (model["architecture"], model["parameters"] > 50_000) == ("LlamaForCausalLM", True)
        assert [model[name] for name in ("layers", "query_heads", "kv_heads", "head_dim")] == [2, 2, 1, 32]
        assert [model[name] for name in ("max_context", "dtype", "device")] == [512, "float32", "cpu"]
        data = values["perplexity"][0]["data"]
        assert data["characters"] > data["tokens"] > 0
        configs = [backend["config"] for backend in values["perplexity"][0]["backends"]]
        assert (configs[0], configs[2]["low"]) == (None, "mxfp4")

    @pytest.mark.parametrize(
        ("value", "form", "shown"),
        [
            (-0.001, "+.2f", "+0.00"), (-0.004, ".2f", "0.00"), (-0.006, "+.2f", "-0.01"), (1234.5, ",.1f", "1,234.5"),
            (None, "+.2f", "–"),
        ],
    )  # fmt: skip
    def test_what_rounds_to_zero_has_no_minus(self, value, form, shown):
        assert number(value, form) == shown

    def test_names_the_commit_of_the_source_tree(self, report, tmp_path):
        git = ["git", "-C", str(Path(environment.__file__).parent), "rev-parse", "HEAD"]
        head = subprocess.run(git, capture_output=True, text=True, check=False)
        if head.returncode:
            pytest.skip("not in a checkout of git")
        write(report, tmp_path / "r.json")
        commit = read_report(tmp_path / "r.json").environment.commit
        assert head.stdout.startswith(commit.removesuffix("-dirty"))

    def test_no_nan(self, report, tmp_path):
        broken = replace(report.perplexity[0].backends[0], nll=float("nan"))
        report.perplexity[0].backends[0] = broken
        with pytest.raises(ValueError, match="not JSON compliant"):
            write(report, tmp_path / "r.json")
        assert not (tmp_path / "r.json").exists()

    @pytest.mark.parametrize(
        ("before", "after", "message"),
        [
            ('"schema_version": 12', '"schema_version": 99', "no report of this version: schema_version: .* got 99; m"),
            ('"seed": 7', '"seed": "0"', "seed: Input should be a valid integer, got '0'"),
            ('"architecture": "L', '"kind": "L', "model.architecture: Field required"),
            (
                r'"window_nll": [',
                r'"window_nll": ["x", ',
                r"perplexity\[0\].backends\[0\].window_nll\[0\]: .* number, got 'x'",
            ),
            ('"context": 128', '"context": NaN', "no report of this version: it has NaN"),
            ('"backends": [', '"backends": [], "others": [', "backends: List should have at least 1 item"),
            ('"position_edges": [', '"position_edges": [], "edges": [', "position_edges: List should have at least 2"),
            ("{", "", "no report of this version: Extra data"),
            ("{", "[{", "no report of this version: Expecting"),
        ],
    )
    def test_a_file_that_was_edited(self, report, tmp_path, before, after, message):
        write(report, tmp_path / "r.json")
        text = (tmp_path / "r.json").read_text(encoding="utf-8")
        assert before in text
        (tmp_path / "r.json").write_text(text.replace(before, after, 1), encoding="utf-8")
        with pytest.raises(UserError, match=message):
            read_report(tmp_path / "r.json")

    def test_no_report(self, tmp_path):
        with pytest.raises(UserError, match="cannot read the report"):
            read_report(tmp_path / "r.json")
        (tmp_path / "r.json").write_text("[]", encoding="utf-8")
        with pytest.raises(UserError, match="Input should be an object"):
            read_report(tmp_path / "r.json")


class TestMarkdown:
    def test_table(self, report):
        lines = to_markdown(report).splitlines()
        start = lines.index("| backend | perplexity | change | KL / token | top-1 | tokens/s |")
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 : start + 6]]
        assert [row[0] for row in cells] == ["sdpa", "dma_mxfp:balanced", "dma_mxfp:paper", "broken"]
        assert cells == perplexity_page(report.perplexity[0]).tables[0].rows
        assert cells[0][2] == "+0.00 % ± 0.00"
        assert cells[3][1:] == ["failed", "–", "–", "–", "–"]

    def test_tables_are_rectangular(self, report):
        """As many cells in each row as in the one above, a bar within a cell being escaped."""
        blocks = [block for block in to_markdown(report).split("\n\n") if block.startswith("|")]
        assert len(blocks) == 3
        for block in blocks:
            assert len({line.replace("\\|", "").count("|") for line in block.splitlines()}) == 1

    def test_warnings(self, report):
        section = report.perplexity[0]
        section.backends[1] = replace(section.backends[1], fallbacks={"this head_dim": 3000, "a mask": 1})
        assert perplexity_page(section).warnings == [
            "broken failed: NaN | somewhere",
            "dma_mxfp:balanced fell back to other attention 3,000 times: this head_dim",
            "dma_mxfp:balanced fell back to other attention 1 time: a mask",
            "low tiles held less than 5 % of the keys at context 128 (0.00 %): its windows are too short to test low "
            "tiles",
        ]
        assert len(perplexity_page(replace(section, context=512)).warnings) == 3
        assert len(perplexity_page(replace(section, backends=section.backends[::3])).warnings) == 1  # without dma_mxfp
        assert "> **Warning**: broken failed" in to_markdown(report)

    def test_configurations_and_plots(self, report):
        text = to_markdown(report, [Plot("A plot", "plots/a.png", report.perplexity[0])])
        assert "| field | dma_mxfp:balanced | dma_mxfp:paper |" in text
        assert "| `low` | mxint8 | mxfp4 |" in text
        assert "| `smooth_k` | true | false |" in text
        assert "![A plot](plots/a.png)" in text

    @pytest.mark.parametrize(
        ("value", "shown"), [(None, "–"), (0.0, "0.00000"), (0.01234567, "0.01235"), (1.23e-7, "1.2e-07")]
    )
    def test_kl(self, value, shown):
        assert format_kl(value) == shown


def _tables(page):
    """The text of the cells of the tables of a page."""
    cell, row, table = (re.compile(rf"<{tag}\b.*?</{tag}>", re.DOTALL) for tag in ("t[hd]", "tr", "table"))
    rows = [row.findall(each) for each in table.findall(page)]
    return [[[unescape(re.sub("<[^>]*>", "", text)) for text in cell.findall(each)] for each in own] for own in rows]


def test_html(report, tmp_path):
    """It needs no other file, has the tables of the report with a button to sort by each column, and escapes text."""
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    section = report.perplexity[0]
    section.backends[1] = replace(section.backends[1], label="<b>bold</b>")
    page = to_html(report, [Plot("A plot", "a.png", section)], tmp_path)
    assert "<link" not in page
    for target in re.findall(r"""(?:src|href)=["']([^"']*)""", page):
        assert target.startswith(("#", "data:image/png;base64,"))
    first, *_ = tables = _tables(page)
    assert first[0] == [name for name in COLUMNS if name != "peak memory"]  # a CPU has none
    assert first[1:] == perplexity_page(section).tables[0].rows
    for table in tables:
        assert len({len(row) for row in table}) == 1
    assert page.count("<button") == sum(len(table[0]) for table in tables)
    assert "<b>" not in page
    assert "&lt;b&gt;bold" in page


@pytest.mark.parametrize(
    "text", ["plain", "a`b", "`a`", "``", "a``b`c", "```", " a", "a ", " ` ", "a\\`b", "*a*", "<b>", "a|b"]
)
def test_a_code_span_shows_any_text(text):
    assert MarkdownIt().renderInline(f"x {code_span(text)} y") == f"x <code>{escape(text, quote=False)}</code> y"


def test_names_with_backticks_are_code(report):
    """A model, a text, and the command that has both."""
    (section,) = report.perplexity
    origin = replace(section.origin, command="dma-hf ppl -m 'a`m' -d 'a`t'", model=replace(report.model, name="a`m"))
    section = replace(section, origin=origin, data=replace(section.data, name="a`t"))
    report = replace(report, perplexity=[section, replace(section, origin=replace(origin, seed=8))])
    card = make_card(report, base_model="me/tiny").text
    for text in (to_markdown(report), card):
        page = MarkdownIt("js-default").render(text)
        for shown in ("a`m", "a`t", origin.command):
            assert f"<code>{shown}</code>" in page


class TestMeasured:
    """What a reader must know of the weights."""

    def test_quantized_file_revision_and_positions(self, report):
        model = replace(report.model, name="m.gguf", quantization="Q4_1", revision="main", commit="abc", yarn=4.0)
        expected = "`m.gguf` at `abc`, weights in float32, quantized to Q4_1 in the file or checkpoint; "
        assert measured(model) == expected + "YaRN extends its positions 4 times; on cpu"

    def test_versions_and_commit(self, report):
        (section,) = report.perplexity
        machine = replace(report.environment, packages={"torch": "2.13"}, commit="abc-dirty")
        section = replace(section, origin=replace(section.origin, environment=machine))
        assert "| versions | torch 2.13, commit abc-dirty |" in to_markdown(replace(report, perplexity=[section]))

    def test_a_cache_that_is_named_twice_is_explained(self, section):
        """Repeats have a number after the name of the cache."""
        backends = [replace(section.backends[1], label=f"dma_mxfp+int4 #{which}") for which in (1, 2)]
        notes = perplexity_page(replace(section, backends=[section.backends[0], *backends])).notes
        assert any("every token is read through a `DMACache`" in note for note in notes)
        assert not any("through a cache of Transformers" in note for note in notes)
        peer = replace(section.backends[1], label="sdpa+hqq4")
        notes = perplexity_page(replace(section, backends=[section.backends[0], peer])).notes
        assert any("through a cache of Transformers" in note for note in notes)


@pytest.mark.usefixtures("drawn")
class TestPlots:
    def test_without_a_reference_the_losses_themselves_are_shown(self, section):
        reference, other, *_ = section.backends
        failed = replace(reference, failure="no room", position_nll=[])
        axes = plot_positions(replace(section, backends=[failed, other]), "A title").axes
        assert axes[0].get_ylabel() == "Loss, nats per token"
        assert axes[0].lines[0].get_ydata().tolist() == pytest.approx(other.position_nll, nan_ok=True)

    def test_is_a_picture(self, report, section, tmp_path):
        """With a failed backend in it, and positions without a token; and of one backend alone."""
        for shown in (report.perplexity[0], replace(section, backends=section.backends[:1])):
            plot_positions(shown, "A title").savefig(tmp_path / "p.png")
            with Image.open(tmp_path / "p.png") as image:
                assert (image.format, image.width) == ("PNG", 1650)
                assert 400 <= image.height < 1650
                assert len(image.convert("RGB").getcolors(maxcolors=2**24)) > 50, "something is drawn"

    def test_colours_belong_to_names(self):
        """In any company, whichever way they are named; and no two backends of one plot share colour and line."""
        names = ["sdpa", "sdpa:flash", "flex", "dma_mxfp:mine", "fa3", *(f"dma_mxfp:{name}" for name in PRESETS)]
        names += ["dma_mxfp:balanced+int8", "dma_mxfp:balanced+int4"]
        full, few = line_styles(names), line_styles(["sdpa", "dma_mxfp:balanced+int4", "dma_mxfp:balanced #2"])
        assert len({color for color, _ in full.values()}) == len(names)
        assert few["dma_mxfp:balanced #2"] == full["dma_mxfp:balanced"]
        assert few["dma_mxfp:balanced+int4"] == full["dma_mxfp:balanced+int4"]
        alike = ["dma_mxfp:balanced+int4", "dma_mxfp+int4", "dma_mxfp:balanced+int4-static"]
        styles = line_styles(["sdpa", *alike, "sdpa+quanto4", "sdpa+quanto2"])
        assert len(set(styles.values())) == len(styles)
        assert {styles[name][0] for name in alike} == {full["dma_mxfp:balanced+int4"][0]}
        assert styles["sdpa+quanto4"][0] == styles["sdpa+quanto2"][0]

    def test_one_large_value_does_not_squeeze_the_others(self):
        for values, scale in (([0.01, -0.02, 0.03, 0.02, 0.9], "symlog"), ([0.3, 0.4, 0.5], "linear")):
            ax = Figure().subplots()
            ax.plot(values)
            plots._fit(ax, values)
            assert ax.get_yscale() == scale

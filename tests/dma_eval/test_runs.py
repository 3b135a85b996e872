"""The folder of a run, several runs together, two runs compared, and the model card of one."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from dma_eval.errors import UserError
from dma_eval.files import parse, write_json
from dma_eval.load.models import load_model
from dma_eval.measures.stress import TWINS
from dma_eval.results import SECTIONS, Report, read_report
from dma_eval.show.card import make_card
from dma_eval.show.render import write_run
from huggingface_hub import ModelCard
from PIL import Image

import dma_hf

BENCHMARKS = Path(__file__).parents[2] / "benchmarks/quality"


SUITE = """
perplexity = {contexts = [128], max_windows = 2}
fidelity = {context = 128, max_windows = 2, new_tokens = 4}
tasks = {names = ["tiny_group"]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def report(run, folder, model_folder, text_file, tiny_tasks):
    """A report with every kind of section, of the tiny model; made once."""
    if not (folder / "all/results.json").is_file():
        (folder / "suite.toml").write_text(SUITE, encoding="utf-8")
        common = ["-m", model_folder, "--device", "cpu", "--dtype", "float32", "--attn", "sdpa", "dma_mxfp:paper"]
        given = ["--suite", folder / "suite.toml", "-d", text_file, "--include-path", tiny_tasks]
        assert run("suite", *given, *common, "--out", folder / "all").exit_code == 0
    return read_report(folder / "all/results.json")


def of_model(report, **changes):
    """The report as if another model had been measured."""
    model = replace(report.model, **changes)
    sections = {
        name: [replace(each, origin=replace(each.origin, model=model)) for each in getattr(report, name)]
        for name in SECTIONS
    }
    return replace(report, model=model, **sections)


def card_of(report, **options):
    return make_card(report, base_model="me/tiny", **options)


@pytest.mark.usefixtures("drawn")  # of the report that all tests share
class TestFolder:
    def test_holds_everything(self, report, folder):
        found = [path.relative_to(folder / "all") for path in (folder / "all").rglob("*.*")]
        names = {path.as_posix() for path in found if path.parts[0] not in ("parts", "samples")}  # what it resumes from
        plots = {"positions-128.png", "fidelity.png"}
        assert names == {"results.json", "report.md", "report.html", "configs/paper.toml", *plots}
        for plot in plots:
            with Image.open(folder / "all" / plot) as image:
                assert image.width == 1650
                assert len(image.convert("L").getcolors() or []) > 20  # something is drawn

        page = (folder / "all/report.md").read_text(encoding="utf-8")
        for heading in ("Perplexity at context 128", "Tasks", "Fidelity to SDPA in fp32", "Configurations"):
            assert f"## {heading}" in page
        assert "](positions-128.png)" in page[: page.index("## Tasks")]  # a plot is where it belongs
        assert set(re.findall(r"!\[.*\]\((.*)\)", page)) == plots

    def test_is_written_again(self, report, folder, run, tmp_path):
        assert dma_hf.DMAConfig.from_toml(folder / "all/configs/paper.toml") == dma_hf.PRESETS["paper"]
        write_json(report, tmp_path / "results.json")
        assert run("report", tmp_path).exit_code == 0
        pages = [(each / "report.md").read_text(encoding="utf-8") for each in (tmp_path, folder / "all")]
        assert pages[0] == pages[1]

    def test_keeps_an_infinite_threshold(self, ppl, run, tmp_path):
        """JSON has no infinity. The configuration and the card are those that were measured, and a run resumes."""
        config = dma_hf.DMAConfig(skip_threshold=float("inf"))
        config.to_toml(tmp_path / "mine.toml")
        command = ("--attn", "sdpa", f"dma_mxfp:{tmp_path}/mine.toml", "--out", tmp_path / "run")
        ppl(*command, code=0)
        assert "taken from the folder" in ppl(*command, code=0).stderr
        (tmp_path / "run/configs/mine.toml").unlink()
        run("report", tmp_path / "run", code=0)
        assert dma_hf.DMAConfig.from_toml(tmp_path / "run/configs/mine.toml") == config
        assert "| `skip_threshold` | inf |" in (tmp_path / "run/report.md").read_text(encoding="utf-8")
        text = card_of(read_report(tmp_path / "run")).text
        (setting,) = re.findall(r"configure\(model, (.*)\)$", text, re.MULTILINE)
        section = json.loads(text[text.index("```json\n") + 8 :].partition("```")[0])["dma_mxfp"]
        assert dma_hf.DMAConfig.from_dict(eval(setting)) == dma_hf.DMAConfig.from_dict(section) == config

    def test_needs_no_torch(self, tmp_path, python):
        """Nor the plugin: what is made of results is made at once, on any machine."""
        run = BENCHMARKS / "smollm2-4096-fp32" / "results.json"
        code = (
            "import sys, dma_eval.cli\n"
            "try:\n    dma_eval.cli.main(sys.argv[1:])\n"
            "except SystemExit as ended:\n    sys.exit(ended.code or bool({'torch', 'dma_hf'} & sys.modules.keys()))\n"
        )
        for arguments in (["report", run, "--out", tmp_path], ["card", run, "--base-model", "me/tiny"]):
            done = python("-c", code, *arguments)
            assert done.returncode == 0, done.stderr
        assert (tmp_path / "report.md").is_file()

    def test_sections_of_one_kind_have_plots_of_their_own(self, report, tmp_path):
        """Of two texts at one context, or of fidelity from two runs; each stands in its section, once."""
        (tokens,), (fidelity,) = report.perplexity, report.fidelity
        second = replace(tokens, data=replace(tokens.data, name="another text"))
        both = replace(report, perplexity=[tokens, second], fidelity=[fidelity, replace(fidelity)])
        files = write_run(both, tmp_path)
        page = (tmp_path / "report.md").read_text(encoding="utf-8")
        for stem in ("positions-128", "fidelity"):
            for file in (f"{stem}.png", f"{stem}-2.png"):
                assert file in files
                assert (tmp_path / file).is_file()
                assert page.count(f"]({file})") == 1
        one, two = page.split("## Perplexity at context 128")[1:]
        assert "](positions-128.png)" in one
        assert "](positions-128-2.png)" in two


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.json")), ids=lambda path: path.name)
def test_reads_committed_results(path):
    report = read_report(path)
    assert report.sections
    assert all(section.origin is not None for _, section in report.sections)
    names = {twin.name for section in report.stress for twin in section.twins}
    assert names <= {twin.name for twin in TWINS}


class TestCard:
    def test_round_trip(self, report, tmp_path):
        """What the Hub's library writes and reads again are the same results and the same text."""
        card = make_card(report, base_model="me/tiny", license_name="apache-2.0")
        card.validate = None  # asks the Hub
        card.save(tmp_path / "README.md")
        again = ModelCard.load(tmp_path / "README.md")
        assert again.text.strip() == card.text.strip()
        assert again.data.to_dict() == card.data.to_dict()
        assert (again.data.base_model, again.data.library_name, again.data.license) == (
            "me/tiny",
            "transformers",
            "apache-2.0",
        )
        found = {(result.dataset_name, result.metric_name): result.metric_value for result in again.data.eval_results}
        section = report.perplexity[0].backends[1]
        name = "perplexity, context 128, 2 windows, with warnings"  # the windows are too short to test low tiles
        assert found["prose.txt", name] == pytest.approx(section.perplexity, abs=1e-4)
        task = report.tasks[0].tasks[0]
        name = "acc, 0-shot, with warnings"
        assert found["tiny_choice", name] == pytest.approx(task.metrics[0].values[1].value, abs=1e-6)

    def test_results_of_all_data_without_warnings_are_not_marked(self, report):
        """Others say of how many windows or samples they are, and whether their page warns of them."""
        section, tasks = report.perplexity[0], report.tasks[0]
        long = replace(section, context=512, stride=512, data=replace(section.data, tokens=1024))
        telling = [replace(each, low_share=dict.fromkeys(each.low_share, 0.5)) for each in tasks.backends]
        good = replace(tasks, backends=telling)
        for changed, expected in (
            ({"perplexity": [long], "tasks": []}, "perplexity, context 512"),
            ({"perplexity": [replace(long, windows=1)], "tasks": []}, "perplexity, context 512, 1 window"),
            ({"perplexity": [replace(long, skip_windows=1)], "tasks": []}, "perplexity, context 512, 2 windows"),
            (
                {"perplexity": [replace(long, windows_left=1)], "tasks": []},
                "perplexity, context 512, 2 windows, with warnings",
            ),
            ({"perplexity": [], "tasks": [good]}, "acc, 0-shot"),
            ({"perplexity": [], "tasks": [replace(good, limit=7)]}, "acc, 0-shot, first 7 samples"),
            ({"perplexity": [], "tasks": [replace(good, limit=1)]}, "acc, 0-shot, first 1 sample"),
            ({"perplexity": [], "tasks": [replace(tasks, limit=7)]}, "acc, 0-shot, first 7 samples, with warnings"),
        ):
            card = card_of(replace(report, **changed))
            assert card.data.eval_results[0].metric_name == expected
            assert ("> **Warning**" in card.text.partition("### Fidelity")[0]) == ("with warnings" in expected)

    def test_several_models_or_configurations_are_refused(self, report):
        section = report.perplexity[0]
        origin = section.origin
        other = replace(section, origin=replace(origin, model=replace(origin.model, quantization="Q4_1")))
        message = r"has sections of several models \(.*Q4_1.*; measure one in another folder"
        with pytest.raises(UserError, match=message):
            card_of(replace(report, perplexity=[section, other]))
        low = [replace(each, config=each.config and each.config | {"sink_tiles": 7}) for each in section.backends]
        both = replace(report, perplexity=[section, replace(section, backends=low)])
        for backend in (None, "dma_mxfp:paper (2)"):
            with pytest.raises(UserError, match="has several configurations named 'dma_mxfp:paper'"):
                card_of(both, backend=backend)

    def test_names_every_measurement(self, report):
        """A card of two commands gives machine, date and command of both."""
        section = report.perplexity[0]
        origin = section.origin
        environment = replace(origin.environment, commit="older", threads=99)
        other = replace(origin, environment=environment, command="dma-hf ppl old", created="2001-02-03T00:00:00+00:00")
        text = card_of(replace(report, perplexity=[replace(section, origin=other)])).text
        assert "99 threads" in text
        assert "commit older;\n2001-02-03. Command: `dma-hf ppl old`." in text
        assert text.count("Command: `") == 2

    @pytest.mark.parametrize(
        ("name", "column", "expected"),
        [
            ("Salesforce/wikitext", "text", ("Salesforce/wikitext", "wikitext")),
            ("texts/rows.jsonl", "text", ("rows.jsonl", "rows.jsonl")),
            ("texts/my prose.txt", None, ("my_prose.txt", "my prose.txt")),
        ],
    )
    def test_datasets_are_named_as_on_the_hub(self, report, name, column, expected):
        """A dataset's type is its whole name there; of a file nothing is told but its own name."""
        section = report.perplexity[0]
        section = replace(section, data=replace(section.data, name=name, column=column, split=column and "test"))
        result, *_ = card_of(replace(report, perplexity=[section])).data.eval_results
        assert (result.dataset_type, result.dataset_name) == expected

    def test_text(self, report, model_folder, text_file):
        text = card_of(report).text
        assert 'attn_implementation="dma_mxfp:paper")' in text
        assert "dma_hf.configure" not in text
        assert "Cache: none." in text
        config = json.loads(text[text.index("```json\n") + 8 :].partition("```")[0])
        assert dma_hf.DMAConfig.from_dict(config["dma_mxfp"]) == dma_hf.PRESETS["paper"]
        for heading in ("## Use", "## Results", "### Tasks", "## Limits"):
            assert heading in text
        assert report.model.name == model_folder.name
        assert report.perplexity[0].data.name == text_file.name
        assert str(model_folder.parent) not in text

    def test_quantized_weights(self, report):
        text = card_of(of_model(report, name="tiny.Q4_1.gguf", quantization="Q4_1")).text
        assert "The measured weights are those of the base model in Q4_1, from `tiny.Q4_1.gguf`." in text
        assert "weights are those of the base model." not in text

    def test_shows_one_backend_and_the_reference(self, report):
        section = report.perplexity[0]
        other = replace(section.backends[1], label="another")
        report = replace(report, perplexity=[replace(section, backends=[*section.backends, other])])
        text = card_of(report).text
        assert ("| sdpa |" in text, "| dma_mxfp:paper |" in text, "another" in text) == (True, True, False)

    @pytest.mark.parametrize(
        ("label", "cache", "shown", "absent"),
        [
            (
                "dma_mxfp:paper+int4",
                "int4",
                ['attn_implementation="dma_mxfp:paper+int4")', "Cache: DMACache, int4.", "read through a `DMACache`"],
                "dma_hf.configure",
            ),
            ("dma_mxfp:paper+int4 #2", "int4", ['attn_implementation="dma_mxfp:paper+int4")'], "dma_hf.configure"),
            (
                "dma_mxfp:mine",
                None,
                ['attn_implementation="dma_mxfp")', "dma_hf.configure(model, {'low': 'mxfp4'"],
                "on_unsupported",
            ),
        ],
    )
    def test_caches_and_files(self, report, label, cache, shown, absent):
        """A configuration from a file is given as its settings."""
        text = json.dumps(asdict(report)).replace('"dma_mxfp:paper"', f'"{label}"')
        values = json.loads(text.replace('"cache": null', f'"cache": {json.dumps(cache)}'))
        text = card_of(parse(Report, values)).text
        assert [each for each in shown if each not in text] == []
        assert absent not in text.partition("## Results")[0]

    @pytest.mark.parametrize("yarn", [None, 1.5])
    def test_use_runs(self, report, model_folder, yarn):
        text = card_of(of_model(report, yarn=yarn)).text
        code = text[text.index("```python\n") + 10 :].partition("```")[0].replace("me/tiny", str(model_folder))
        names = {}
        exec(code, names)
        model = names["model"]
        model(torch.zeros(1, 8, dtype=torch.int64))
        assert {use.recipe for use in dma_hf.stats(model).uses} == {"paper"}
        measured = load_model(str(model_folder), device="cpu", yarn=yarn).model.config
        assert model.config.rope_parameters == measured.rope_parameters
        assert model.config.max_position_embeddings == measured.max_position_embeddings

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "--base-model: .* was measured from local files; give the model's Hub name"),
            ({"base_model": "a/b/c"}, "--base-model: 'a/b/c' is not a Hub name"),
            ({"base_model": "../tiny"}, "--base-model: '../tiny' is not a Hub name"),
            ({"base_model": "me/tiny.gguf"}, "--base-model: 'me/tiny.gguf' is not a Hub name"),
            ({"base_model": "me/tiny", "backend": "dma_mxfp:fp4"}, "has no 'dma_mxfp:fp4'; it has: dma_mxfp:paper"),
        ],
    )
    def test_refused(self, report, options, message):
        with pytest.raises(UserError, match=message):
            make_card(report, **options)

    def test_only_sdpa(self, report):
        with pytest.raises(UserError, match="has no dma_mxfp backend"):
            card_of(replace(report, perplexity=[], fidelity=[], tasks=[]))

    def test_command(self, run, report, folder, tmp_path, refused):
        command = ("card", folder / "all", "--base-model", "me/tiny")
        card = str(card_of(report))
        assert run(*command).stdout == card
        assert run(*command, "--out", tmp_path / "README.md").exit_code == 0
        for empty in ("", " "):
            message = f"Error: --license: expected a licence, such as apache-2.0, got {empty!r}"
            assert refused(run(*command, "--license", empty)) == message
        assert (tmp_path / "README.md").read_text(encoding="utf-8") == card
        if Path("/dev/full").exists():
            message = "Error: cannot write to /dev/full: No space left on device"
            assert refused(run(*command, "--out", "/dev/full")) == message

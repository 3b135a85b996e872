"""The generated parts of the reference pages."""

from __future__ import annotations

import re

import pytest
from script_files import load_script

ROW = re.compile(r"^\| `(.+?)` \| (.*?) \| (.*) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def script():
    return load_script("docs_reference")


@pytest.mark.parametrize("name", ["fields", "suites", "quality", "speed"])
def test_defaults_are_values_and_options_have_a_meaning(script, name):
    rows = ROW.findall(script.GENERATORS[name]())
    assert len(rows) > 10
    for field, default, meaning in rows:
        assert meaning or name != "fields", field
        assert not re.search(r"\w\(.*\)", default), f"{field}: {default} is code"


def test_keys_of_a_suite_show_the_defaults_of_their_options(script):
    assert "| `max_windows` | all | Read at most this many windows. |" in script.GENERATORS["suites"]()


def test_every_command_has_its_examples(script):
    for section in script.GENERATORS["commands"]().split("\n## ")[1:]:
        name = section.partition("\n")[0].strip("`")
        assert f"```sh\n{name}" in section or name in ("dma-hf env", "dma-hf demo", "dma-hf bench"), name


def test_every_option_has_a_meaning_and_no_help_of_the_terminal(script):
    text = script.GENERATORS["commands"]()
    assert "* `-m, --model NAME|FOLDER|FILE.gguf`: Hub name, local folder, or GGUF file." in text
    assert all(": " in line for line in text.splitlines() if line.startswith("* `-"))
    assert "## `dma-hf bench prefill`" in text or "### `dma-hf bench prefill`" in text


def test_sections_begin_with_what_a_class_is(script):
    assert "### PrefillReport\n\nWhat `dma-hf bench prefill` measured." in script.GENERATORS["speed"]()

"""The generated parts of the reference pages."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from dma_eval.config import PARTS
from script_files import load_script

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(.+?)` \| (.*?) \| (.*) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def script():
    return load_script("docs_reference")


def test_fields_have_a_default_and_a_meaning(script):
    rows = ROW.findall(script.GENERATORS["fields"]())
    assert len(rows) > 10
    for field, default, meaning in rows:
        assert meaning, field
        assert not re.search(r"\w\(.*\)", default), f"{field}: {default} is code"


def test_keys_of_suites_are_those_of_the_parts():
    page = (ROOT / "docs/reference/config.md").read_text(encoding="utf-8").split("## Suites")[1]
    rows = {part: re.findall(r"`(\w+)`", row) for part, row in re.findall(r"^\| `\[(\w+)\]` (.*)$", page, re.MULTILINE)}
    assert rows.keys() == PARTS.keys()
    for name, part in PARTS.items():
        assert {field.name for field in fields(part)} <= set(rows[name]), name


def test_commands_have_examples_and_options_a_meaning(script):
    text = script.GENERATORS["commands"]()
    for section in text.split("\n## ")[1:]:
        name = section.partition("\n")[0].strip("`")
        assert f"```sh\n{name}" in section or name in ("dma-hf env", "dma-hf demo"), name
    assert "* `-m, --model NAME|FOLDER|FILE.gguf`: Hub name, local folder, or GGUF file." in text
    assert all(": " in line for line in text.splitlines() if line.startswith("* `-"))


def test_schemas_are_the_source(script):
    firsts = {"quality": "class ModelInfo:", "speed": "class DeviceFacts:", "kernel_speed": "class ModelInputs:"}
    for name, first in firsts.items():
        text = script.GENERATORS[name]()
        assert text.startswith(f"```python\n@dataclass(frozen=True, kw_only=True)\n{first}")
        assert text.endswith("\n```")

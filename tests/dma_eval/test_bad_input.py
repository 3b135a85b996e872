"""Input that cannot work: each kind ends with exit code 2 and one line that says what came and what was expected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from gguf_files import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.mark.parametrize("content", [b"low = ", b"lwo = 'mxfp4'", b"\xff"])
def test_a_bad_configuration_is_named_once(ppl, refused, identity_file, content):
    identity_file.write_bytes(content)
    assert refused(ppl("--attn", f"dma_mxfp:{identity_file}")).count(identity_file.name) == 1


@pytest.mark.parametrize(
    ("data", "content", "message"),
    [
        ("", None, "--data: expected a file or a dataset of the Hub, got ''"),
        (".", None, "--data: . is a folder; name a file in it"),
        ("nobody/no-such-dataset", None, "'nobody/no-such-dataset' is not a readable local file, nor a dataset"),
        ("a:b:c:d", None, "--data: expected NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, got 'a:b:c:d'"),
        ("empty.txt", b"", "holds no text"),
        ("short.txt", b"the sea", "tokens, too few for one window of 128; give more text or a smaller --context"),
        ("latin.txt", "Käse".encode("latin-1"), "is not UTF-8 text (byte 1); convert it first"),
        ("empty.jsonl", b"", "holds no text"),
        ("empty.csv", b"", "is not a readable file: No columns to parse from file"),
        ("broken.jsonl", b'{"text": \n', "is not a readable file: JSON parse error"),
        ("broken.parquet", b"no parquet", "is not a readable file"),
    ],
)
def test_text(ppl, refused, tmp_path, data, content, message):
    if content is not None:
        (tmp_path / data).write_bytes(content)
        data = tmp_path / data
    text = refused(ppl("--data", data))
    assert message in text
    assert text.startswith("Error: --data: ")


def test_a_context_beyond_the_positions(ppl, refused):
    message = "takes 512 positions, got 513; lower it, or extend the positions with --yarn 2"
    assert message in refused(ppl("--context", 513))
    assert "takes 512 positions, got 100,000; lower it" in refused(ppl("--context", 100_000))  # nor has the text them


class TestModel:
    def test_no_model(self, ppl, refused, text_file, tmp_path):
        assert "has no config.json; for GGUF weights name the .gguf file" in refused(ppl("--model", tmp_path))
        assert "is a file; expected a folder, a .gguf file or a Hub name" in refused(ppl("--model", text_file))

    @pytest.mark.parametrize("content", [b"this is no GGUF file at all", b"GGUF\x03\x00\x00\x00" + b"\xff" * 40])
    def test_no_gguf(self, ppl, refused, tmp_path, content):
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        assert f"--model: cannot load '{path}': " in refused(ppl("--model", path))

    @pytest.mark.parametrize("left", [0.5, 0.99])
    def test_cut_off_gguf(self, ppl, refused, tmp_path, loaded, model_folder, left):
        path = tmp_path / "tiny.gguf"
        write_gguf(path, loaded.model, tokenizer=model_folder / "tokenizer.json")
        content = path.read_bytes()
        path.write_bytes(content[: int(left * len(content))])
        message = refused(ppl("--model", path))
        size = f"{int(left * len(content)):,}"
        assert f"--model: cannot load '{path}': the file is damaged, or was cut off at {size}" in message

    @pytest.fixture
    def copy(self, model_folder, tmp_path):
        return Path(shutil.copytree(model_folder, tmp_path / "copy"))

    @pytest.mark.parametrize("name", ["model.safetensors", "tokenizer*"])
    @pytest.mark.parametrize("is_cut", [True, False])
    def test_a_file_that_is_missing_or_cut_off(self, ppl, refused, copy, name, is_cut):
        for path in copy.glob(name):
            content = path.read_bytes()
            path.unlink()
            if is_cut:
                path.write_bytes(content[:1000])
        assert f"--model: cannot load '{copy}': " in refused(ppl("--model", copy))

    def test_lacking_weights(self, ppl, refused, copy):
        """Transformers would fill them with random numbers."""
        values = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        (copy / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 3}), encoding="utf-8")
        text = refused(ppl("--model", copy))
        assert "lacks 9 weights of LlamaForCausalLM, such as model.layers.2.input_layernorm.weight" in text

    @pytest.mark.parametrize(
        "content",
        [
            *("{", "[]", '{"model_type": "no-such-model"}', '{"model_type": "whisper"}'),
            '{"model_type": "llama", "hidden_size": "64"}',
        ],
    )
    def test_wrong_config(self, ppl, refused, copy, content):
        (copy / "config.json").write_text(content, encoding="utf-8")
        assert f"--model: cannot load '{copy}': " in refused(ppl("--model", copy))

    def test_tokenizer_of_another_model(self, run, ppl, refused, copy, text_file, tmp_path):
        values = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        LlamaForCausalLM(LlamaConfig(**(values | {"vocab_size": 200}))).save_pretrained(copy)
        common = ("-m", copy, "-d", text_file, "--device", "cpu")
        timed = run("bench", *common, "--context", 64, "--run", "sdpa+dynamic")
        equalized = run("equalize", *common, "--out", tmp_path / "out")
        for text in map(refused, (ppl("--model", copy), equalized, timed)):
            assert f"{copy}: the tokenizer gives token 2" in text
            assert "but the model's vocabulary has 200 entries" in text


class TestOutput:
    def test_what_cannot_be_written(self, run, ppl, refused, text_file, tmp_path):
        assert f"cannot write to {tmp_path}: it is a folder; name a file in it" in refused(ppl("--json", tmp_path))
        message = f"--json: cannot create the folder {text_file}/a/b: {text_file} is a file"
        assert message in refused(run("bench", "--json", text_file / "a/b/r.json"))
        for folder, what in (("/proc", "write to"), ("/proc/new", "make")):  # where root has the right, too
            assert f"--out: cannot {what} the folder {folder}: " in refused(ppl("--out", folder))

    def test_a_file_that_cannot_be_replaced(self, ppl, refused):
        """Though it may be written to; that results are lost would only show at the end."""
        assert "--json: cannot write to the folder /proc/self: " in refused(ppl("--json", "/proc/self/comm"))

    def test_refusal_leaves_no_folder(self, ppl, refused, tmp_path):
        refused(ppl("--out", tmp_path / "new", "--attn", "flash"))
        assert list(tmp_path.iterdir()) == []

    def test_path_that_may_not_be_looked_at(self, ppl, refused, tmp_path, monkeypatch):
        """In a folder without the right to search it; root, who may run the tests, always has that."""

        def refuse(path):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "is_dir", refuse)
        path = tmp_path / "r.json"
        assert refused(ppl("--json", path)) == f"Error: cannot use {path}: Permission denied"


def test_debug_shows_the_traceback(ppl):
    result = ppl("--attn", "flash", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "parse_backends" in result.stderr
    assert "Error: --attn: unknown backend 'flash'" in result.stderr

"""Input that cannot work: each kind ends with exit code 2 and one line that says what came and what was expected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dma_eval.load.models import LoadedModel
from gguf_files import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

Run = Callable[..., Any]
Refused = Callable[[Any], str]


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--attm", "sdpa"], "No such option: --attm"),
            (["--attn"], "Option '--attn' requires an argument (try: dma-hf ppl --help)"),
            (["--spread=1"], "Option '--spread' does not take a value (try: dma-hf ppl --help)"),
            (["--context", "many"], "valid integer, unable to parse string as an integer, got 'many'"),
            (["--seed", "-1"], "'--seed': Input should be greater than or equal to 0, got '-1'"),
            (["--seed", 2**32], "'--seed': Input should be less than or equal to 4294967295, got '4294967296'"),
            (["stray"], "unexpected extra argument(s) (stray) (try: dma-hf ppl --help)"),
            (["--yarn", "nan"], "--yarn: expected a finite number, got nan"),
        ],
    )
    def test_ppl(self, ppl: Run, refused: Refused, arguments: list[str], message: str) -> None:
        assert message in refused(ppl(*arguments))

    def test_missing_option(self, run: Run, refused: Refused) -> None:
        text = refused(run("ppl", "--data", "book.txt"))
        assert "Missing option '--model' / '-m'" in text
        assert text.endswith("(try: dma-hf ppl --help)")

    def test_unknown_command(self, run: Run, refused: Refused) -> None:
        assert "No such command 'pplx'. Did you mean 'ppl'?" in refused(run("pplx"))


class TestBackends:
    @pytest.mark.parametrize("content", [b"low = ", b"lwo = 'mxfp4'", b"\xff"])
    def test_a_bad_file_is_named_once(self, ppl: Run, refused: Refused, identity_file: Path, content: bytes) -> None:
        identity_file.write_bytes(content)
        assert refused(ppl("--attn", f"dma_mxfp:{identity_file}")).count(identity_file.name) == 1


class TestText:
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ("", "--data: expected a file or a dataset of the Hub, got ''"),
            ("./missing", "--data: no such file: ./missing"),
            (".", "--data: . is a folder; name a file in it"),
            ("nobody/no-such-dataset", "'nobody/no-such-dataset' is not a readable local file, nor a dataset"),
            ("a:b:c:d", "--data: expected NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, got 'a:b:c:d'"),
        ],
    )
    def test_missing(self, ppl: Run, refused: Refused, data: str, message: str) -> None:
        assert message in refused(ppl("--data", data))

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("empty.txt", b"", "holds no text"),
            ("short.txt", b"the sea", "tokens, too few for one window of 128; give more text or a smaller --context"),
            ("latin.txt", "Käse".encode("latin-1"), "is not UTF-8 text (byte 1); convert it first"),
            ("empty.jsonl", b"", "holds no text"),
            ("empty.csv", b"", "is not a readable file: No columns to parse from file"),
            ("broken.jsonl", b'{"text": \n', "is not a readable file: JSON parse error"),
            ("broken.parquet", b"no parquet", "is not a readable file"),
        ],
    )
    def test_content(self, ppl: Run, refused: Refused, tmp_path: Path, name: str, content: bytes, message: str) -> None:
        (tmp_path / name).write_bytes(content)
        text = refused(ppl("--data", tmp_path / name))
        assert message in text
        assert text.startswith("Error: --data: ")


class TestWindows:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--context", 100_000], "takes 512 positions, got 100,000; lower it"),  # also if the text is shorter
            (["--context", 513], "takes 512 positions, got 513; lower it, or extend the positions with --yarn 2"),
            (["--context", 1], "'--context' / '-c': Input should be greater than or equal to 2, got '1'"),
        ],
    )
    def test_out_of_range(self, ppl: Run, refused: Refused, arguments: list[Any], message: str) -> None:
        assert message in refused(ppl(*arguments))


class TestModel:
    def test_folder_of_nothing(self, ppl: Run, refused: Refused, tmp_path: Path) -> None:
        assert "has no config.json; for GGUF weights name the .gguf file" in refused(ppl("--model", tmp_path))

    def test_file(self, ppl: Run, refused: Refused, text_file: Path) -> None:
        assert "is a file; expected a folder, a .gguf file or a Hub name" in refused(ppl("--model", text_file))

    @pytest.mark.parametrize("content", [b"", b"this is no GGUF file at all", b"GGUF\x03\x00\x00\x00" + b"\xff" * 40])
    def test_no_gguf(self, ppl: Run, refused: Refused, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        assert f"--model: cannot load '{path}': " in refused(ppl("--model", path))

    @pytest.mark.parametrize("left", [0.5, 0.99])
    def test_cut_off_gguf(
        self, ppl: Run, refused: Refused, tmp_path: Path, loaded: LoadedModel, model_folder: Path, left: float
    ) -> None:
        path = tmp_path / "tiny.gguf"
        write_gguf(path, loaded.model, tokenizer=model_folder / "tokenizer.json")
        content = path.read_bytes()
        path.write_bytes(content[: int(left * len(content))])
        message = refused(ppl("--model", path))
        assert (
            f"--model: cannot load '{path}': the file is damaged, or was cut off at {int(left * len(content)):,}"
            in message
        )
        assert "reshape" not in message

    @pytest.fixture
    def copy(self, model_folder: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(model_folder, tmp_path / "copy"))

    @pytest.mark.parametrize("name", ["model.safetensors", "tokenizer*"])
    @pytest.mark.parametrize("is_cut", [True, False])
    def test_a_file_that_is_missing_or_cut_off(
        self, ppl: Run, refused: Refused, copy: Path, name: str, is_cut: bool
    ) -> None:
        for path in copy.glob(name):
            content = path.read_bytes()
            path.unlink()
            if is_cut:
                path.write_bytes(content[:1000])
        assert f"--model: cannot load '{copy}': " in refused(ppl("--model", copy))

    def test_lacking_weights(self, ppl: Run, refused: Refused, copy: Path) -> None:
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
    def test_wrong_config(self, ppl: Run, refused: Refused, copy: Path, content: str) -> None:
        (copy / "config.json").write_text(content, encoding="utf-8")
        assert f"--model: cannot load '{copy}': " in refused(ppl("--model", copy))

    def test_tokenizer_of_another_model(self, ppl: Run, refused: Refused, copy: Path) -> None:
        values = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        LlamaForCausalLM(LlamaConfig(**(values | {"vocab_size": 200}))).save_pretrained(copy)
        text = refused(ppl("--model", copy))
        assert "the tokenizer gives token 2" in text
        assert "but the model's vocabulary has 200 entries" in text


class TestOutput:
    def test_folder(self, ppl: Run, refused: Refused, tmp_path: Path) -> None:
        assert f"cannot write to {tmp_path}: it is a folder; name a file in it" in refused(ppl("--json", tmp_path))

    def test_below_a_file(self, run: Run, refused: Refused, text_file: Path) -> None:
        message = f"--json: cannot create the folder {text_file}: it is a file"
        assert message in refused(run("bench", "--json", text_file / "r.json"))
        message = f"--json: cannot create the folder {text_file}/a/b: {text_file} is a file"
        assert message in refused(run("bench", "--json", text_file / "a/b/r.json"))

    @pytest.mark.parametrize(("folder", "what"), [("/proc", "write to"), ("/proc/new", "make")])
    def test_folder_that_takes_no_files(self, ppl: Run, refused: Refused, folder: str, what: str) -> None:
        """Root, who may run the tests, has the right to write there."""
        assert f"--out: cannot {what} the folder {folder}: " in refused(ppl("--out", folder))

    def test_refusal_leaves_no_folder(self, ppl: Run, refused: Refused, tmp_path: Path) -> None:
        refused(ppl("--out", tmp_path / "new", "--attn", "flash"))
        assert list(tmp_path.iterdir()) == []

    def test_path_that_may_not_be_looked_at(
        self, ppl: Run, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In a folder without the right to search it; root, who may run the tests, always has that."""

        def refuse(path: Path) -> bool:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "is_dir", refuse)
        assert (
            refused(ppl("--json", tmp_path / "r.json")) == f"Error: cannot use {tmp_path / 'r.json'}: Permission denied"
        )

    def test_folder_of_an_equalized_model_before_all_else(self, run: Run, refused: Refused, text_file: Path) -> None:
        result = run("equalize", "-m", "./missing", "-d", "missing.txt", "--out", text_file)
        assert f"--out: cannot create the folder {text_file}: it is a file" in refused(result)


class TestDebug:
    def test_shows_the_traceback(self, ppl: Run) -> None:
        result = ppl("--attn", "flash", "--debug")
        assert result.exit_code == 2
        assert "Traceback" in result.stderr
        assert "parse_backends" in result.stderr
        assert "Error: --attn: unknown backend 'flash'" in result.stderr

"""The demo model's folder and excerpt, and the script that makes them."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

SCRIPTS = Path(__file__).parents[2] / "scripts"
MAX_FOLDER_BYTES = 12_000_000


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("train_demo_model")


@pytest.fixture(scope="module")
def assets() -> Path:
    return Path(str(resources.files("dma_eval"))) / "assets"


@pytest.fixture(scope="module")
def folder(assets: Path) -> Path:
    return assets / "demo_model"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def excerpt(assets: Path) -> str:
    return (assets / "heldout.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tokens(tokenizer: PreTrainedTokenizerFast, excerpt: str) -> Tensor:
    return torch.tensor(tokenizer(excerpt, verbose=False).input_ids)


class TestFolder:
    def test_size(self, folder: Path) -> None:
        assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_FOLDER_BYTES

    def test_is_what_the_kernels_are_built_for(self, model: LlamaForCausalLM) -> None:
        config = model.config
        assert config.num_attention_heads > config.num_key_value_heads > 1, "GQA"
        assert config.head_dim == 64
        assert config.max_position_embeddings == 4096

    def test_is_stored_in_bfloat16(self, folder: Path) -> None:
        assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16

    def test_says_how_it_was_made(self, script: ModuleType, folder: Path) -> None:
        """The script's recipe is that of the log, and the card shows the log's figures."""
        log = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
        assert json.loads(json.dumps(asdict(script.Recipe()))) == log["recipe"]
        card, measured = (folder / "README.md").read_text(encoding="utf-8"), log["measured"]
        for row, name, form in (
            ("perplexity per token", "perplexity", ".2f"),
            ("the same, second half of each window", "perplexity_second_half", ".2f"),
            ("copying a passage", "copy_accuracy", ".1%"),
        ):
            assert f"| {row} | {measured[name]:{form}} | {measured[f'{name}_local']:{form}} |" in card

    @pytest.mark.parametrize("text", ["", "hi", " two  spaces\n\n\ttab", "naïve – “quotes” 日本 🐋", "<|endoftext|>"])
    def test_tokenizer_round_trip(self, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        assert tokenizer.decode(tokenizer(text).input_ids) == text

    def test_special_tokens(self, tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM) -> None:
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 1)
        assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (0, 1)
        assert len(tokenizer) == model.config.vocab_size


class TestExcerpt:
    def test_is_long_enough_and_clean(self, excerpt: str, tokens: Tensor) -> None:
        assert 120_000 <= len(excerpt.encode()) <= 200_000
        assert len(tokens) > 10 * 4096
        assert "gutenberg" not in excerpt.lower()
        assert excerpt.startswith("PRIDE AND PREJUDICE\n\nBy Jane Austen\n\nChapter 1\n\nIt is a truth")

    def test_perplexity(self, script: ModuleType, model: LlamaForCausalLM, tokens: Tensor) -> None:
        """Measured 39.9; the best that token frequencies alone can do is several hundred, an untrained model 4,096."""
        assert script.token_losses(model, tokens[:2048], 2048).mean().exp() < 50

    def test_far_keys_matter(self, script: ModuleType, model: LlamaForCausalLM, tokens: Tensor) -> None:
        """A passage of 256 tokens is copied from more than 1,024 tokens back, and not when those keys are hidden."""
        windows = torch.stack([tokens[start : start + 2048] for start in (0, 9000, 21000)])
        windows[:, -256:] = windows[:, 300:556]
        right = {}
        for name, mask in {"full": None, "local": script.local_mask(2048, model.device)}.items():
            with torch.inference_mode():
                logits = model(windows, attention_mask=mask, use_cache=False).logits
            right[name] = (logits[:, -241:-1].argmax(-1) == windows[:, -240:]).float().mean().item()
        assert right["full"] > 0.75, right
        assert right["local"] < 0.45, right


class TestText:
    RAW = (
        "\ufeffThe Project Gutenberg EBook\r\n\r\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\r\n\r\n"
        "Produced by A. Volunteer\r\n\r\nOne _long_\r\nline.\r\n\r\n\r\n"
        "“Two’s”—he said,\r\nthen produced by hand.\r\n\r\n"
        "End of the Project Gutenberg EBook of X\r\n\r\n*** END OF THIS PROJECT GUTENBERG EBOOK X ***\r\nlicence"
    )

    def test_strip_and_normalise(self, script: ModuleType) -> None:
        text = script.normalize(script.strip_gutenberg(self.RAW))
        assert text == 'One long line.\n\n"Two\'s"--he said, then produced by hand.\n'

    def test_text_without_markers_stays(self, script: ModuleType) -> None:
        assert script.strip_gutenberg("a\n\nb") == "a\n\nb"

    def test_split_excerpt(self, script: ModuleType) -> None:
        text = "äb\n\ncd\n\nef\n"
        assert script.split_excerpt(text, 9) == ("äb\n\ncd\n", "ef\n")
        assert script.split_excerpt(text, 8) == ("äb\n", "cd\n\nef\n")
        with pytest.raises(ValueError, match="max_bytes must reach the end of the first paragraph; got 4"):
            script.split_excerpt(text, 4)


class TestRepeats:
    @pytest.mark.parametrize("length", [4, 41, 256, 4096])
    def test_one_passage_occurs_again(self, script: ModuleType, length: int) -> None:
        """Of a window of distinct tokens, one run is overwritten by an earlier run of the same, allowed length."""
        window = torch.arange(length)
        for seed in range(50):
            result = script.repeat_passage(window, random.Random(seed))
            changed = (result != window).nonzero().flatten()
            size = len(changed)
            assert max(1, length // 40) <= size <= length // 4
            assert changed.tolist() == list(range(changed[0], changed[0] + size))
            sources = result[changed]
            assert sources.tolist() == list(range(sources[0], sources[0] + size))
            assert sources[-1] < changed[0]
        assert window.equal(torch.arange(length)), "the corpus itself must not change"

    @pytest.mark.parametrize(("fraction", "repeated"), [(0.0, 0), (1.0, 8)])
    def test_batch(self, script: ModuleType, fraction: float, repeated: int) -> None:
        recipe = script.Recipe(batch_tokens=1024, repeat_fraction=fraction)
        batch = script.sample_batch(torch.arange(5000), 128, random.Random(0), recipe)
        assert batch.shape == (8, 128)
        assert int(((batch[:, 1:] - batch[:, :-1]) != 1).any(1).sum()) == repeated


class TestTraining:
    def test_learning_rate(self, script: ModuleType) -> None:
        recipe = script.Recipe(steps=100, warmup_steps=10, learning_rate=1.0)
        rates = [script.learning_rate(step, recipe) for step in range(101)]
        assert rates[0] == pytest.approx(0.1)
        assert max(rates) == rates[9] == rates[10] == 1.0
        assert rates[10:] == sorted(rates[10:], reverse=True)
        assert rates[100] == pytest.approx(0.1)

    def test_starts_as_a_copying_circuit(self, script: ModuleType, tokens: Tensor) -> None:
        """Before any training, a repeated passage is more likely than chance; with random weights it is not."""
        torch.manual_seed(0)
        model = script.build_model(script.Recipe(layers=2, intermediate_size=64)).eval()
        windows = tokens[: 4 * 256].view(4, 256).clone()
        windows[:, -64:] = windows[:, 32:96]
        with torch.inference_mode():
            logits = model(windows, use_cache=False).logits
        assert (logits[:, -57:-1].argmax(-1) == windows[:, -56:]).float().mean() > 0.1

    def test_same_seed_same_weights(self, script: ModuleType, tokens: Tensor) -> None:
        recipe = script.Recipe(
            vocab_size=300,
            layers=2,
            intermediate_size=32,
            context=128,
            short_contexts=(32, 64),
            batch_tokens=256,
            steps=6,
            eval_every=3,
        )
        corpus, validation = (tokens % 300).split([len(tokens) - 256, 256])
        runs = [script.train(recipe, corpus, validation, torch.device("cpu")) for _ in range(2)]
        (first, curve), (second, again) = runs
        assert curve == again
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
        assert curve[-1]["validation_loss"] < curve[0]["validation_loss"]


class TestCommandLine:
    @pytest.fixture
    def books(self, tmp_path: Path) -> list[str]:
        paths = [tmp_path / name for name in ("one.txt", "two.txt")]
        for path in paths:
            path.write_text("text\n\nmore\n", encoding="utf-8")
        return [str(path) for path in paths]

    def invoke(self, script: ModuleType, tmp_path: Path, *arguments: str) -> str:
        app = typer.Typer()
        app.command()(script.main)
        result = CliRunner().invoke(
            app, [*arguments, "--output", str(tmp_path / "m"), "--excerpt", str(tmp_path / "x")]
        )
        assert result.exit_code == 2
        return " ".join(result.output.replace("│", " ").split())

    def test_held_out_book_cannot_be_trained_on(self, script: ModuleType, tmp_path: Path, books: list[str]) -> None:
        output = self.invoke(script, tmp_path, *books, "--held-out", books[1])
        assert "two.txt is held out and cannot be trained on" in output

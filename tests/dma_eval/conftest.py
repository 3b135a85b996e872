"""A tiny random model with a tokenizer and a text, as files; and the command line run in this process."""

from __future__ import annotations

import inspect
import io
import logging
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from dma_eval.cli import main
from dma_eval.config import PerplexityPart
from dma_eval.console import Progress
from dma_eval.load.backends import parse_backends
from dma_eval.load.data import load_text
from dma_eval.load.models import load_model
from dma_eval.measures.perplexity import measure_perplexity
from dma_eval.session import Session
from gguf_files import write_gguf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dma_hf.integrations.internals import CACHE_ARGUMENT

VOCABULARY = 300
MAX_CONTEXT = 512
WORDS = ["the", "of", "and", "a", "to", "ship", "whale", "sea", "captain", "said", "upon", "white", "water", "thousand"]


@dataclass(frozen=True)
class Result:
    """What a command showed, and how it ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self):
        return self.stdout + self.stderr


Run = Callable[..., Result]
IDENTITY = 'low = "bf16"\nhigh = "bf16"\npv = "bf16"\nsmooth_k = false\nshared_scale = "block"\n'


@pytest.fixture(autouse=True)
def restored():
    """The command line owns its process and quietens libraries; here others live in it."""
    verbosity = transformers.logging.get_verbosity()
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree", "lm_eval")]
    levels = [logger.level for logger in loggers]
    yield
    transformers.logging.set_verbosity(verbosity)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test reaches the network; the libraries have read the variables already, and keep them as constants."""
    import datasets
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def drawn():
    """Draw figures in a test that looks at them."""


@pytest.fixture(autouse=True)
def quick_figures(request, monkeypatch):
    """Leave figures empty in all other tests: to draw one takes half a second."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file: Path(file).touch())


@pytest.fixture(scope="session")
def prose():
    """About 3,000 tokens of words in random order."""
    chosen = random.Random(0).choices(WORDS, k=1200)
    lines = [" ".join(chosen[i : i + 12]).capitalize() + "." for i in range(0, len(chosen), 12)]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def text_file(tmp_path_factory, prose):
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text(prose, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A Llama of two layers with GQA, and a byte-level BPE tokenizer trained on a few words."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_CONTEXT,
        initializer_range=0.2,  # ten times the usual, so that attention is not near uniform and precision shows
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def loaded(model_folder):
    return load_model(str(model_folder), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def bos_folder(model_folder, tmp_path_factory):
    """The same model, with a tokenizer that puts ``<s>`` before a text."""
    folder = tmp_path_factory.mktemp("bos") / "tiny-bos"
    shutil.copytree(model_folder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>").save_pretrained(folder)
    return folder


@pytest.fixture(params=["folder", "gguf"])
def bos_model(request, bos_folder, model_folder, tmp_path):
    """A model whose tokenizer puts BOS before a text, as a folder and as a GGUF file."""
    if request.param == "folder":
        return bos_folder
    model = LlamaForCausalLM.from_pretrained(model_folder)
    write_gguf(tmp_path / "bos.gguf", model, tokenizer=model_folder / "tokenizer.json", adds_bos=True)
    return tmp_path / "bos.gguf"


@pytest.fixture
def rows_read(monkeypatch):
    """Every row of tokens that a Llama reads from its beginning, without those of a step of ``generate``."""
    rows = []
    forward = LlamaForCausalLM.forward

    def read(model, input_ids, *arguments, **options):
        cache = options.get(CACHE_ARGUMENT)
        if cache is None or not cache.get_seq_length():
            rows.extend(input_ids.tolist())
        return forward(model, input_ids, *arguments, **options)

    read.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(LlamaForCausalLM, "forward", read)
    return rows


@pytest.fixture
def identity_file(tmp_path):
    """The configuration that quantizes nothing."""
    path = tmp_path / "identity.toml"
    path.write_text(IDENTITY, encoding="utf-8")
    return path


@pytest.fixture
def compared(loaded, text_file):
    """Compare backends, by name, on the tiny model and the text."""

    def make(*names, context=None, progress=None, **options):
        session = Session(loaded, parse_backends(names), progress=progress or Progress())
        part = PerplexityPart(contexts=[] if context is None else [context], **options)
        return measure_perplexity(session, load_text(str(text_file)), part)

    return make


@pytest.fixture
def run():
    """Run ``dma-hf`` with these arguments, in this process. If it must end with a code, check it."""

    def invoke(*arguments, code=None):
        shown, told = io.StringIO(), io.StringIO()
        with redirect_stdout(shown), redirect_stderr(told), pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        result = Result(stopped.value.code, shown.getvalue(), told.getvalue())
        assert code in (None, result.exit_code), result.output
        return result

    return invoke


@pytest.fixture
def ppl(run, model_folder, text_file):
    """Run ``dma-hf ppl`` on the tiny model with two windows of 128 tokens; later options take precedence."""

    def invoke(*arguments, code=None):
        common = ("-m", model_folder, "-d", text_file, "--device", "cpu", "-c", 128, "--max-windows", 2)
        return run("ppl", *common, *arguments, code=code)

    return invoke


@pytest.fixture
def refused():
    """Check that a command refused its input as it should, and return the message as one line."""

    def check(result):
        message = " ".join(result.stderr.split())
        assert result.exit_code == 2, result.output
        assert message.startswith("Error: ")
        assert "Traceback" not in result.output
        assert result.stdout == ""
        return message

    return check


@pytest.fixture(scope="session")
def tiny_tasks(tmp_path_factory):
    """A folder of lm-eval tasks of every kind, on made-up documents."""
    from tiny_tasks import write_tiny_tasks

    return write_tiny_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture
def broken_kernels(monkeypatch):
    """Let every call of ``dma_mxfp`` without a packed cache give NaN."""
    monkeypatch.setattr("dma_hf.attention.attention", lambda query, *_, **__: query * torch.nan)
    monkeypatch.setattr("dma_hf.attention.prompt", lambda *_, **__: None)  # which prepares a call to be repeated


@pytest.fixture
def rows_decide_alone(monkeypatch):
    """Let every query skip tiles by itself: 64 rows of a random model never agree."""
    for module in ("attention", "skipping"):
        monkeypatch.setattr(f"dma_kernels.reference.{module}.SKIP_BLOCK", 1)

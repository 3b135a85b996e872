"""Models from folders and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dma_eval import models
from dma_eval.errors import UserError
from dma_eval.models import LoadedModel, ModelSource, load_model, parse_source, without_progress_bars
from gguf import GGUFWriter
from torch import Tensor
from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging

# Names of a Llama's weights in GGUF files and in Transformers.
GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """GGUF pairs the dimensions that rotate together; Transformers splits a head into two halves."""
    return weight.view(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def gguf_file(loaded: LoadedModel, model_folder: Path, tmp_path: Path) -> Path:
    """The tiny Llama in fp32 as a GGUF file."""
    path = tmp_path / "tiny.gguf"
    config, state = loaded.model.config, loaded.model.state_dict()
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    bpe = json.loads((model_folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].__getitem__))
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    tensors = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for layer in range(config.num_hidden_layers):
        tensors |= {f"blk.{layer}.{short}": f"model.layers.{layer}.{name}" for short, name in GGUF_NAMES.items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for short, name in tensors.items():
        weight = state[f"{name}.weight"]
        kind = short.rpartition(".")[2]
        weight = _interleaved(weight, heads[kind]) if kind in heads else weight
        writer.add_tensor(f"{short}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class TestLoad:
    def test_gguf_file(
        self, gguf_file: Path, loaded: LoadedModel, prose: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """The same weights and tokens as from the folder, and no progress bars."""
        from_gguf = load_model(str(gguf_file), device="cpu")
        assert capfd.readouterr() == ("", "")
        assert (from_gguf.model.dtype, from_gguf.max_context) == (torch.float32, 512)
        ids = loaded.tokenizer(prose[:200], return_tensors="pt").input_ids
        assert from_gguf.tokenizer(prose[:200]).input_ids[-ids.shape[1] :] == ids[0].tolist()
        with torch.inference_mode():
            torch.testing.assert_close(from_gguf.model(ids).logits, loaded.model(ids).logits, rtol=1e-5, atol=1e-5)

    def test_folder(self, model_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        loaded = load_model(str(model_folder), dtype="bfloat16", device="cpu", title="tiny")
        assert capfd.readouterr() == ("", "")
        assert (loaded.name, loaded.model.dtype, loaded.model.training) == ("tiny", torch.bfloat16, False)


class TestSource:
    def test_names(self, model_folder: Path, gguf_file: Path) -> None:
        assert parse_source(str(model_folder)) == ModelSource(str(model_folder))
        assert parse_source(str(gguf_file)) == ModelSource(str(gguf_file.parent), "tiny.gguf")
        assert parse_source("owner/name") == ModelSource("owner/name")
        assert parse_source("gpt2") == ModelSource("gpt2")
        assert parse_source("owner/name/sub/file.gguf") == ModelSource("owner/name", "sub/file.gguf")

    @pytest.mark.parametrize("name", ["/a/b.gguf", "a/b.gguf", "~/a/b.gguf", "../a/b.gguf", "b.gguf"])
    def test_gguf_file_that_is_not_there(self, name: str) -> None:
        with pytest.raises(UserError, match=f"--model: no such file: {name}"):
            parse_source(name)


@pytest.mark.parametrize("shown", [True, False])
def test_progress_bars_come_back(shown: bool, request: pytest.FixtureRequest) -> None:
    was_shown = logging.is_progress_bar_enabled()
    request.addfinalizer(logging.enable_progress_bar if was_shown else logging.disable_progress_bar)
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    bar = modeling_gguf_pytorch_utils.tqdm
    with without_progress_bars():
        assert not logging.is_progress_bar_enabled()
        assert list(modeling_gguf_pytorch_utils.tqdm([1, 2])) == [1, 2]
        assert modeling_gguf_pytorch_utils.tqdm([]).disable
    assert logging.is_progress_bar_enabled() == shown
    assert modeling_gguf_pytorch_utils.tqdm is bar


class TestMemory:
    def test_what_does_not_fit_says_how_much_it_needs(
        self, model_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(models, "free_memory", lambda device: 2**16)
        with pytest.raises(
            UserError, match=r"needs 0.0 GiB for its weights in float32, and cpu has 0.0 GiB free; use ano"
        ):
            load_model(str(model_folder), dtype="float32", device="cpu")

    def test_counts_the_weights_in_their_dtype(self, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        needed = 2 * load_model(str(model_folder), device="cpu").model.num_parameters()
        monkeypatch.setattr(models, "free_memory", lambda device: needed)
        assert load_model(str(model_folder), dtype="bfloat16", device="cpu").model.dtype == torch.bfloat16
        with pytest.raises(UserError, match="for its weights in float32"):
            load_model(str(model_folder), dtype="float32", device="cpu")

    def test_everything_together(self) -> None:
        assert models.free_memory(None) >= models.free_memory(torch.device("cpu")) * 0.5

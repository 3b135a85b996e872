"""Fidelity: the reference in fp32, positions, heads that are found where they are, and greedy continuations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from dma_eval.config import FidelityPart
from dma_eval.errors import UserError
from dma_eval.load.backends import parse_backends
from dma_eval.load.data import load_text
from dma_eval.load.models import LoadedModel, load_model
from dma_eval.measures import fidelity as fidelity_module
from dma_eval.measures.fidelity import head_errors, in_fp32, measure_fidelity
from dma_eval.results import FidelitySection, read_report
from dma_eval.session import Session
from dma_eval.show.pages import fidelity_page, perplexity_page
from tiny_models import SIZES
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, HrmTextConfig, HrmTextForCausalLM, LlamaForCausalLM

from dma_hf import DMAConfig

Fidelity = Callable[..., FidelitySection]


@pytest.fixture
def windows(loaded, text_file):
    ids = loaded.tokenize(load_text(str(text_file)).content).ids
    return [ids[:512], ids[512:1024]]


@pytest.fixture
def fidelity(loaded, text_file):
    def compare(*attn, model=loaded, **options):
        common = {"context": 256, "max_windows": 2, "prompts": 2, "new_tokens": 6, "head_windows": 1}
        session = Session(model, parse_backends(attn))
        return measure_fidelity(session, load_text(str(text_file)), FidelityPart(**(common | options)))

    return compare


@pytest.fixture
def errors_of(loaded, model_folder, windows):
    """The errors of heads over some windows, of backends that are given their inputs in a dtype."""

    def measure(*attn, count=2, dtype="float32"):
        session = Session(load_model(str(model_folder), dtype=dtype, device="cpu"), ())
        return head_errors(session, loaded.model, windows[:count], parse_backends(attn))

    return measure


class TestHeads:
    def test_layers_of_two_stacks_are_two_layers(self, windows):
        """Both stacks of HRM count their layers from 0."""
        torch.manual_seed(0)
        hrm = HrmTextForCausalLM(HrmTextConfig(**SIZES | {"vocab_size": 300, "eos_token_id": 2})).eval()
        session = Session(LoadedModel("hrm", hrm, None), ())
        (errors,) = head_errors(session, hrm, windows[:1], parse_backends(["dma_mxfp:paper"]))
        assert errors.layers == [0, 1, 2, 3]
        assert np.shape(errors.relative_l1) == (4, 4)

    def test_only_quantization_is_an_error(self, errors_of, identity_file):
        sdpa, identity = errors_of("eager", "sdpa", f"dma_mxfp:{identity_file}")  # eager is left out
        assert np.shape(sdpa.relative_l1) == (2, 2)
        assert np.array(sdpa.relative_l1) == pytest.approx(0, abs=0)
        assert np.array(sdpa.cosine) == pytest.approx(1)
        assert np.max(identity.relative_l1) < 1e-5

    def test_finds_the_bad_head_and_no_echo(self, loaded, errors_of, monkeypatch):
        """A head of layer 0 whose output is tripled is off by 200 %; layer 1 knows nothing of it."""
        import dma_hf.attention

        (before,) = errors_of("dma_mxfp:paper")
        assert loaded.model.config._attn_implementation == "sdpa"
        assert getattr(loaded.model.config, "dma_mxfp", None) is None
        attend, calls = dma_hf.attention.attention, []

        def spoilt(*args, **options):
            output = attend(*args, **options)
            if len(calls) % 2 == 0:  # the layers take turns
                output = output * torch.tensor([1.0, 3.0])[:, None, None]
            calls.append(1)
            return output

        monkeypatch.setattr(dma_hf.attention, "attention", spoilt)
        (after,) = errors_of("dma_mxfp:paper")
        assert after.relative_l1[0][1] == pytest.approx(2.0, abs=0.1)
        assert after.relative_l1[0][0] == before.relative_l1[0][0]
        assert after.relative_l1[1] == before.relative_l1[1]
        assert after.cosine[0] == pytest.approx(before.cosine[0])

    def test_dtype_of_the_backends(self, errors_of):
        """SDPA in bf16 has bf16's error: about 2 ** -9."""
        (heads,) = errors_of("sdpa", dtype="bfloat16")
        assert 2**-10 < np.median(heads.relative_l1) < 2**-6

    def test_a_model_whose_indexer_chooses_keys(self, windows):
        """Its layers hand the choice to what is not called SDPA, where SDPA would attend to all keys."""
        sizes = SIZES | {"vocab_size": 300, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
        sizes |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24, "first_k_dense_replace": 2}
        sizes |= {"n_routed_experts": 4, "n_group": 1, "index_topk": 12, "index_n_heads": 2, "index_head_dim": 32}
        model = DeepseekV32ForCausalLM._from_config(DeepseekV32Config(**sizes), attn_implementation="sdpa").eval()
        loaded = LoadedModel("sparse", model, None)
        with pytest.raises(UserError, match="the heads cannot be measured: its sparse-attention indexer"):
            head_errors(Session(loaded, ()), model, [windows[0][:64]], parse_backends(["dma_mxfp"]))
        assert model.config._attn_implementation == "sdpa"

    def test_layers_may_have_different_numbers_of_heads(self, fidelity, model_folder, tmp_path):
        module = pytest.importorskip("transformers.models.laguna", reason="a later version of Transformers has it")
        sizes = SIZES | {"vocab_size": 300, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads_per_layer": [4, 2]}
        config = module.LagunaConfig(**sizes)
        model = module.LagunaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
        tokenizer = load_model(str(model_folder), device="cpu").tokenizer
        DMAConfig(skip_threshold=6.0).to_toml(tmp_path / "skipping.toml")
        attn = ("dma_mxfp:paper", f"dma_mxfp:{tmp_path}/skipping.toml")
        section = fidelity(*attn, model=LoadedModel("mixed", model, tokenizer), prompts=0)
        paper, skipping = section.heads
        assert [len(heads) for heads in paper.relative_l1] == [len(heads) for heads in skipping.skipped] == [4, 2]
        worst, skipped = (table for table in fidelity_page(section).tables if "layer" in " ".join(table.headers))
        errors = {(layer, head): e for layer, heads in enumerate(paper.relative_l1) for head, e in enumerate(heads)}
        layer, head = max(errors, key=errors.__getitem__)
        assert worst.rows[0][-1].startswith(f"{layer}.{head} ({100 * errors[layer, head]:.2f} %), ")
        assert len(skipped.rows) == 1


class TestComparison:
    def test_sdpa_of_an_fp32_model_is_the_reference(self, fidelity, monkeypatch):
        """Continuations are compared token by token, over each horizon that they reach. One window has two prompts."""
        monkeypatch.setattr(fidelity_module, "HORIZONS", (2, 6, 100))
        section = fidelity("sdpa", "dma_mxfp:paper", max_windows=1)
        reference, sdpa, paper = section.tokens.backends
        assert (reference.label, section.dtype) == ("sdpa, fp32", "float32")
        assert sdpa.kl_max == pytest.approx(0, abs=1e-6)
        assert paper.kl_mean > 1e-5
        same, other = section.divergence
        assert (same.same_tokens, same.equal_share) == ([6, 6], {"2": 1.0, "6": 1.0})
        assert np.mean([min(each, 6) / 6 for each in other.same_tokens]) <= other.equal_share["6"] <= 1
        table = next(table for table in fidelity_page(section).tables if "equal of 6" in table.headers)
        assert table.rows[0][1:] == ["6", "6", "2 of 2", "100.0 %", "100.0 %"]

    def test_tokens_that_are_equal_again_later_count_for_the_share_alone(self, fidelity, monkeypatch):
        tokens = iter([torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]]), torch.tensor([[1, 9, 3, 4], [1, 2, 3, 9]])])
        monkeypatch.setattr(fidelity_module, "HORIZONS", (2, 4))
        monkeypatch.setattr(fidelity_module, "continued", lambda *_, **__: next(tokens))
        (divergence,) = fidelity("sdpa", new_tokens=4).divergence
        assert (divergence.same_tokens, divergence.equal_share) == ([1, 3], {"2": 0.75, "4": 0.75})

    def test_a_model_that_cannot_generate_is_refused_by_name(self, fidelity, monkeypatch):
        monkeypatch.setattr(LlamaForCausalLM, "generate", Mock(side_effect=ValueError("no such cache")))
        message = "LlamaForCausalLM cannot generate with sdpa, fp32: no such cache; --prompts 0 leaves out the conti"
        with pytest.raises(UserError, match=message):
            fidelity("sdpa", max_windows=1)

    @pytest.mark.usefixtures("broken_kernels")
    def test_failed_backend(self, fidelity):
        section = fidelity("dma_mxfp:paper", "sdpa")
        assert "model.layers.0.self_attn" in section.tokens.backends[1].failure
        assert [heads.label for heads in section.heads] == ["sdpa"]
        assert positions(section).rows[0][1:] == ["–"] * 8
        assert fidelity_page(section).warnings

    def test_continuations_beyond_the_positions_are_refused(self, fidelity):
        with pytest.raises(UserError, match=r"half of --context with --new-tokens: .* takes 512 positions, got 513"):
            fidelity("sdpa", context=128, prompts=1, new_tokens=449)


def positions(section):
    """The table of changes by position."""
    return next(table for table in fidelity_page(section).tables if table.headers[0] == "position")


def test_pages_explain_their_columns(fidelity):
    """Readers of a model card have no other page of ours."""
    section = fidelity("sdpa", max_windows=1, prompts=0, head_windows=0)
    for page, also in ((perplexity_page(section.tokens), ()), (fidelity_page(section), ("KL p99", "KL max"))):
        notes = " ".join(page.notes)
        assert all(f"{name} " in notes for name in ("KL is", "in nats.", "Top-1 is", "± is", *also)), notes


def test_changes_by_position(fidelity):
    """Position 0 is not scored."""
    section = fidelity("sdpa")
    assert [cell.removeprefix("-").removeprefix("+") for cell in positions(section).rows[0][1:]] == ["0.00 %"] * 8
    losses = [None, *[1.0] * 15], [None, 1.5, *[1.1] * 14]
    backends = [replace(each, position_nll=nll) for each, nll in zip(section.tokens.backends, losses, strict=True)]
    edges = [*range(0, 64, 4), 62]
    table = positions(replace(section, tokens=replace(section.tokens, position_edges=edges, backends=backends)))
    assert table.headers == ("position", "0–7", *(f"{8 * i}–{8 * i + 7}" for i in range(1, 7)), "56–61")
    assert table.rows == [["sdpa", "+64.87 %", *["+10.52 %"] * 7]]


@pytest.mark.filterwarnings("error")
def test_a_range_without_a_scored_position(fidelity):
    """Of windows so short that position 0 is a range of its own."""
    section = fidelity("sdpa", context=4, prompts=0, head_windows=0)
    assert (section.heads, section.divergence) == ([], [])
    assert [cell.strip("+-") for cell in positions(section).rows[0]] == ["sdpa", "–", *["0.00 %"] * 3]


def test_caches_are_compared_with_fp32_too(fidelity, model_folder):
    """Also if the 16-bit cache of the model's own dtype is among the backends."""
    model, options = load_model(str(model_folder), dtype="bfloat16", device="cpu"), {"head_windows": 0, "prompts": 0}
    alone, beside = (
        fidelity(*names, "dma_mxfp+int8", model=model, **options).tokens.backends[-1]
        for names in (("sdpa",), ("sdpa", "sdpa+dynamic"))
    )
    assert (beside.reference, beside.kl_mean) == (None, alone.kl_mean)


@pytest.mark.parametrize("is_from_gguf", [True, False])
def test_in_fp32(loaded, model_folder, is_from_gguf):
    """Transformers marks what it loads from GGUF as quantized, and will not convert it; its weights are plain."""
    assert in_fp32(loaded.model) is loaded.model
    half = load_model(str(model_folder), dtype="float16", device="cpu").model
    half.is_quantized = is_from_gguf
    assert in_fp32(half).dtype == torch.float32
    assert half.dtype == torch.float16


def test_in_fp32_of_packed_weights(model_folder):
    half = load_model(str(model_folder), dtype="float16", device="cpu").model
    projection = half.model.layers[0].self_attn.q_proj
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight are packed"):
        in_fp32(half)


def test_command(run, model_folder, text_file, tmp_path):
    """In bf16 SDPA has a loss of its own, against the same weights in fp32."""
    arguments = ["-m", model_folder, "-d", text_file, "--device", "cpu", "--dtype", "bfloat16", "-c", 256]
    arguments += ["--max-windows", 2, "--new-tokens", 4, "--attn", "sdpa", "dma_mxfp:fp4", "--out", tmp_path / "run"]
    result = run("fidelity", *arguments, code=0)
    assert "worst heads" in result.stdout
    assert "2 windows of 256 tokens (non-overlapping), 510 tokens predicted by every backend" in result.stdout
    assert "Greedy continuations of 4 tokens after prompts of 128" in result.stdout
    section = read_report(tmp_path / "run/results.json").fidelity[0]
    assert section.dtype == "bfloat16"
    assert section.tokens.backends[1].kl_mean > 1e-6
    assert [heads.label for heads in section.heads] == ["sdpa", "dma_mxfp:fp4"]
    for name in ("fidelity.png", "report.md", "configs/fp4.toml"):
        assert (tmp_path / "run" / name).is_file()


@pytest.mark.usefixtures("rows_decide_alone")
def test_skipped_tiles_are_shown(run, model_folder, text_file, tmp_path):
    DMAConfig(skip_threshold=0.01, exact_until=0).to_toml(tmp_path / "skipping.toml")
    arguments = ["-m", model_folder, "-d", text_file, "--device", "cpu", "-c", 512, "--max-windows", 2, "--prompts", 0]
    arguments += ["--attn", "dma_mxfp:paper", f"dma_mxfp:{tmp_path}/skipping.toml", "--out", tmp_path / "run"]
    result = run("fidelity", *arguments, code=0)
    paper, skipping = read_report(tmp_path / "run/results.json").fidelity[0].heads
    assert paper.skipped is None
    shares = np.array(skipping.skipped)
    assert shares.shape == (2, 2)
    assert 0 < shares.mean() < 1
    assert "Share of low tiles skipped" in result.stdout

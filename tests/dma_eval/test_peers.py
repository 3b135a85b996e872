"""Other packages' attention in benchmarks: what they are called with, seen through a module that stands for theirs."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from dma_eval.bench.inputs import Inputs, exact_rows
from dma_eval.bench.peers import (
    FLASH_3,
    FLASH_4_MODULE,
    FLASHINFER_MODULE,
    MODULE,
    PREQUANTIZED,
    SAGE_MODULE,
    document_block_mask,
    flash_attention_3,
    flash_attention_3_step,
    flash_attention_4,
    flashinfer,
    sage_attention,
)
from dma_eval.bench.prefill import PEERS
from dma_eval.bench.results import PrefillShape
from torch import Tensor
from torch.nn import functional as F

Run = Callable[..., Any]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = False,
    cache_seqlens: Tensor | None = None,
    softmax_scale: float | None = None,
    **scales: Tensor,
) -> Tensor:
    """Do what FlashAttention-3 says that it does."""
    assert query.dtype == key.dtype == value.dtype
    assert all(x.is_contiguous() for x in (key, value))
    assert cache_seqlens is None or cache_seqlens.tolist() == [key.shape[1]] * len(key)
    wide = [x.transpose(1, 2).float() for x in (query, key, value)]
    for i, name in enumerate(("q_descale", "k_descale", "v_descale")):
        if scales:
            assert scales[name].shape == (len(key), key.shape[2])
            wide[i] *= scales[name].repeat_interleave(wide[i].shape[1] // key.shape[2], 1)[:, :, None, None]
    out = F.scaled_dot_product_attention(*wide, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(MODULE)
    module.flash_attn_func = module.flash_attn_with_kvcache = _attend
    module.flash_attn_varlen_func = _attend_packed
    monkeypatch.setitem(sys.modules, MODULE, module)


def _tensors(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, heads, length, 32) for heads, length in ((4, queries), (2, keys), (2, keys)))  # type: ignore[return-value]


def _exact(inputs: Inputs) -> Tensor:
    mask, is_causal = inputs.mask, inputs.is_causal and inputs.mask is None
    return F.scaled_dot_product_attention(
        *inputs.tensors, attn_mask=mask, is_causal=is_causal, scale=inputs.scale, enable_gqa=True
    )


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, softmax_scale: float, **sizes: Any
) -> Tensor:
    """Do what FlashAttention says that its function for sequences of varying lengths does."""
    ends = sizes["cu_seqlens_q"].tolist()
    assert ends == sizes["cu_seqlens_k"].tolist()
    assert sizes["max_seqlen_q"] == sizes["max_seqlen_k"] == max(b - a for a, b in itertools.pairwise(ends))
    parts = [
        _attend(query[None, a:b], key[None, a:b], value[None, a:b], causal, softmax_scale=softmax_scale)[0]
        for a, b in itertools.pairwise(ends)
    ]
    return torch.cat(parts)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", [*FLASH_3, f"fa3:fp8{PREQUANTIZED}"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_prefill_is_attention_to_the_precision_of_the_numbers(name: str, is_causal: bool) -> None:
    query, key, value = _tensors(50, 50)
    inputs = Inputs(query, 8.0 * key, value, 0.1, is_causal)
    call = flash_attention_3(name, inputs)
    out = call.read(call.run())
    assert (call.quantize is not None) == (name == "fa3:fp8")
    exact = _exact(inputs)
    assert out.shape == query.shape
    assert (out - exact).norm() / exact.norm() < (1e-6 if name == "fa3" else 0.2)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("name", FLASH_3)
def test_a_step_is_attention_and_reads_what_is_stored(name: str) -> None:
    query, key, value = _tensors(1, 70)
    run, stored = flash_attention_3_step(name, query, key, 8.0 * value)
    exact = F.scaled_dot_product_attention(query, key, 8.0 * value, enable_gqa=True)
    out = run()
    assert (out - exact).norm() / exact.norm() < (0.1 if FLASH_3[name] else 1e-6)
    assert stored == (1 if FLASH_3[name] else 4) * (key.numel() + value.numel())


def test_a_bench_without_the_package_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    done = run(
        "bench", "decode", "--device", "cpu", "--size", "1x40", "--head-dim", 32, "--heads", "2/1", "--seconds", 0.0,
        "--cache", "sdpa", "fa3",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "pip install fa3-fwd" in " ".join(done.stderr.split())


def test_sage_attention_gets_unchanged_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(SAGE_MODULE)
    module.sageattn = lambda q, k, v, is_causal, sm_scale: F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=sm_scale, enable_gqa=True
    )
    monkeypatch.setitem(sys.modules, SAGE_MODULE, module)
    inputs = Inputs(*_tensors(50, 50), 0.1)
    assert torch.equal(sage_attention(inputs).run(), _exact(inputs))


class _DslError(Exception):
    pass


@pytest.fixture
def flash_4(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType(FLASH_4_MODULE)
    module.flash_attn_func = lambda *tensors, **options: (_attend(*tensors, **options), None)
    module.flash_attn_varlen_func = lambda *tensors, **options: (_attend_packed(*tensors, **options), None)
    common: Any = ModuleType("cutlass.base_dsl.common")
    common.DSLBaseError = _DslError
    monkeypatch.setitem(sys.modules, FLASH_4_MODULE, module)
    monkeypatch.setitem(sys.modules, "cutlass.base_dsl.common", common)
    return module


@pytest.mark.usefixtures("flash_4")
@pytest.mark.parametrize("is_causal", [True, False])
def test_flash_attention_4_is_attention(is_causal: bool) -> None:
    inputs = Inputs(*_tensors(50, 50), 0.1, is_causal)
    torch.testing.assert_close(flash_attention_4(inputs).run(), _exact(inputs))


def test_what_flash_attention_4_cannot_compile_is_a_failure_of_the_call(flash_4: Any) -> None:
    def fails(*_: object, **__: object) -> None:
        raise _DslError("no such tile")

    flash_4.flash_attn_func = fails
    with pytest.raises(RuntimeError, match="no such tile"):
        flash_attention_4(Inputs(*_tensors(50, 50), 0.1)).run()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("threshold", [None, 6.0])
def test_flashinfer_takes_the_threshold_as_a_factor_over_the_length(
    threshold: float | None, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prefill(
        qkv: tuple[Tensor, ...], layout: str, workspace: Tensor, seq_lens: Tensor, *positional: Any, **options: Any
    ) -> Tensor:
        max_q_len, max_kv_len, bmm1_scale, bmm2_scale, batch, q_ends, kv_ends = positional
        assert layout == "SEPARATE_Q_K_V"
        assert seq_lens.tolist() == [max_q_len, max_kv_len] == [50, 50]
        assert q_ends.tolist() == kv_ends.tolist() == [0, 50, 100]
        factor = options["skip_softmax_threshold_scale_factor"]
        assert factor == (0.0 if threshold is None else pytest.approx(50 * math.exp(-6.0)))
        query, key, value = (x.unflatten(0, (batch, max_q_len)) for x in qkv)
        out = _attend(query, key, value, causal=options["mask_mode"] == "causal", softmax_scale=bmm1_scale)
        return bmm2_scale * out.flatten(0, 1)

    module: Any = ModuleType(FLASHINFER_MODULE)
    module.trtllm_fmha_v2_prefill = prefill
    monkeypatch.setitem(sys.modules, FLASHINFER_MODULE, module)
    inputs = Inputs(*_tensors(50, 50), 0.1, is_causal)
    torch.testing.assert_close(flashinfer(threshold, inputs).run(), _exact(inputs))


class TestPackedDocuments:
    @pytest.mark.usefixtures("_installed", "flash_4")
    @pytest.mark.parametrize("is_causal", [True, False])
    @pytest.mark.parametrize("prepare", [partial(flash_attention_3, "fa3"), flash_attention_4], ids=["fa3", "fa4"])
    def test_are_sequences_of_their_own(self, prepare: Callable[[Inputs], Any], is_causal: bool) -> None:
        inputs = Inputs(*_tensors(50, 50), 0.1, is_causal, documents=3)
        assert inputs.document_lengths == [16, 17, 17]
        torch.testing.assert_close(prepare(inputs).run(), _exact(inputs))

    def test_the_mask_hides_other_documents(self) -> None:
        inputs = Inputs(*_tensors(7, 7), 0.1, documents=2)
        assert inputs.mask is not None
        visible = [[key for key in range(7) if inputs.mask[query, key]] for query in range(7)]
        assert visible == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5], [3, 4, 5, 6]]
        assert Inputs(*_tensors(7, 7), 0.1).mask is None

    def test_exact_rows_see_their_own_document(self) -> None:
        inputs = Inputs(*_tensors(50, 50), 0.1, documents=3)
        rows = torch.tensor([0, 15, 16, 49])
        torch.testing.assert_close(exact_rows(inputs, rows).float(), _exact(inputs)[:, :, rows])

    @pytest.mark.parametrize("is_causal", [True, False])
    def test_blocks_of_flex_attention_cover_what_is_visible(self, is_causal: bool) -> None:
        inputs = Inputs(*_tensors(600, 600), 0.1, is_causal, documents=2)
        assert inputs.mask is not None
        blocks = document_block_mask(inputs)
        padded = torch.nn.functional.pad(inputs.mask, (0, 40, 0, 40)).unflatten(0, (5, 128)).unflatten(2, (5, 128))
        assert torch.equal(blocks.to_dense()[0, 0].bool(), padded.any(3).any(1))

    @pytest.mark.usefixtures("_installed")
    @pytest.mark.parametrize("name", ["fa3:fp8", "cudnn:fp8", "sage", "flashinfer"])
    def test_others_refuse_them(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
        with pytest.raises(NotImplementedError, match="is not timed on packed documents"):
            PEERS[name](Inputs(*_tensors(50, 50), 0.1, documents=2))

    def test_are_measured_by_name(self, run: Run, tmp_path: Path) -> None:
        common = ("--device", "cpu", "--attn", "sdpa", "dma_mxfp", "--seconds", 0.0, "--json", tmp_path / "r.json")
        done = run("bench", "prefill", *common, "--shape", "1x160:2/1:16:documents")
        assert done.exit_code == 0, done.output
        assert "causal, 8 packed documents, dense random inputs" in done.stdout
        results = json.loads((tmp_path / "r.json").read_text())["results"]
        assert [each["error"] < 0.05 for each in results] == [True, True]
        assert PrefillShape(**results[0]["shape"]).flops == 4 * 2 * 8 * 20 * 20 // 2 * 16

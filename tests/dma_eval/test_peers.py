"""FlashAttention-3, its copy in vLLM and FlashInfer, through modules in their place; and the FP8 quantizer."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from kernel_bench import peers
from kernel_bench.fp8_quantizer import dequantize_fp8, quantize_fp8
from kernel_bench.inputs import Inputs
from kernel_bench.peers import FLASH_3, FLASHINFER, PREQUANTIZED, STEPS, VLLM, VLLM_PAGE
from torch.nn import functional as F


def tensors(queries, keys):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, h, t, 32, generator=generator) for h, t in ((4, queries), (2, keys), (2, keys)))


def exact(inputs):
    wide = (x.float() for x in inputs.tensors)
    return F.scaled_dot_product_attention(*wide, is_causal=inputs.is_causal, scale=inputs.scale, enable_gqa=True)


def attend(query, key, value, causal=False, cache_seqlens=None, softmax_scale=None, **scales):
    """Do what FlashAttention-3 says that it does, on token-major tensors."""
    assert query.dtype == key.dtype == value.dtype
    assert cache_seqlens is None or cache_seqlens.tolist() == [key.shape[1]] * len(key)
    wide = [x.transpose(1, 2).float() for x in (query, key, value)]
    for i, name in enumerate(("q_descale", "k_descale", "v_descale")):
        if scales:
            wide[i] *= scales[name].repeat_interleave(wide[i].shape[1] // key.shape[2], 1)[:, :, None, None]
    out = F.scaled_dot_product_attention(*wide, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


def paged_attend(query, key, value, *, seqused_k, block_table, scheduler_metadata, fa_version, **options):
    """Do what vLLM's FlashAttention-3 says that it does for steps of decoding: keys and values are in pages."""
    assert fa_version == 3
    assert options["max_seqlen_q"] == 1
    assert options["causal"]
    assert options["cu_seqlens_q"].tolist() == [*range(len(query) + 1)]
    assert scheduler_metadata == (len(query), options["max_seqlen_k"], key.dtype)
    pages = block_table.long()
    scales = {name: options[name] for name in ("q_descale", "k_descale", "v_descale") if name in options}
    return attend(
        query[:, None], key[pages].flatten(1, 2), value[pages].flatten(1, 2), cache_seqlens=seqused_k, **scales
    )[:, 0]


def schedule(*, batch_size, max_seqlen_k, qkv_dtype, page_size, headdim, **options):
    assert page_size == VLLM_PAGE
    assert headdim == 32
    assert (options["num_heads_q"], options["num_heads_kv"]) == (4, 2)
    return batch_size, max_seqlen_k, qkv_dtype


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    """Put modules that compute on the CPU in the place of FlashAttention-3 and vLLM's copy."""
    module = SimpleNamespace(flash_attn_func=attend, flash_attn_with_kvcache=attend)
    monkeypatch.setitem(sys.modules, peers.MODULE, module)
    vllm = SimpleNamespace(flash_attn_varlen_func=paged_attend, get_scheduler_metadata=schedule)
    monkeypatch.setitem(sys.modules, peers.VLLM_MODULE, vllm)


@pytest.mark.parametrize(("name", "limit"), [("fa3", 1e-6), ("fa3:fp8", 0.2), (f"fa3:fp8{PREQUANTIZED}", 0.2)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_prefill_is_attention_to_the_precision_of_the_numbers(name, limit, is_causal):
    query, key, value = tensors(50, 50)
    inputs = Inputs(query, 8.0 * key, value, 0.1, is_causal)
    prepared = peers.flash_attention_3(name, inputs)
    out, expected = prepared.read(prepared.run()), exact(inputs)
    assert out.shape == query.shape
    assert (out - expected).norm() / expected.norm() < limit


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_attention_and_reads_what_is_stored(name):
    query, key, value = tensors(1, 2 * VLLM_PAGE)
    run, stored = STEPS[name](query, key, 8.0 * value)
    expected = F.scaled_dot_product_attention(query, key, 8.0 * value, enable_gqa=True)
    is_fp8 = {**FLASH_3, **VLLM}[name]
    out = run()
    assert out.shape == query.shape
    assert (out - expected).norm() / expected.norm() < (0.1 if is_fp8 else 1e-6)
    assert stored == (1 if is_fp8 else 4) * (key.numel() + value.numel())


def test_importing_a_peer_leaves_sdpa_its_backends(monkeypatch, tmp_path):
    (tmp_path / "greedy_peer.py").write_text("import torch\n\ntorch.backends.cuda.enable_cudnn_sdp(False)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(peers.PACKAGES, "greedy_peer", ("a peer", "greedy-peer"))
    assert torch.backends.cuda.cudnn_sdp_enabled()
    peers.import_peer("greedy_peer")
    assert torch.backends.cuda.cudnn_sdp_enabled()


def flashinfer_attend(
    qkv,
    input_layout,
    workspace_buffer,
    seq_lens,
    max_q_len,
    max_kv_len,
    bmm1_scale,
    bmm2_scale,
    batch_size,
    cum_seq_lens_q,
    cum_seq_lens_kv,
    *,
    out_dtype=None,
    mask_mode,
    skip_softmax_threshold_scale_factor,
):
    """Do what FlashInfer says that FMHA v2 does, but with single logits in place of tiles."""
    is_fp8 = qkv[0].dtype == torch.float8_e4m3fn
    assert input_layout == ("CONTIGUOUS_Q_KV" if is_fp8 else "SEPARATE_Q_K_V")
    assert all(x.is_contiguous() and x.dtype == qkv[0].dtype for x in qkv)
    assert type(bmm1_scale) is type(bmm2_scale) is float  # the binding takes no tensors
    assert seq_lens.tolist() == [max_kv_len] * batch_size
    separate = (qkv[0], *qkv[1].unbind(1)) if is_fp8 else qkv
    outs = []
    for query, key, value in zip(*(x.tensor_split(cum_seq_lens_q.tolist()[1:-1]) for x in separate), strict=True):
        states = (x.float().transpose(0, 1)[None] for x in (query, key, value))
        factor = skip_softmax_threshold_scale_factor
        threshold = math.log(max_kv_len / factor) if factor else None
        out = skipping(Inputs(*states, bmm1_scale, mask_mode == "causal"), threshold)[0]
        outs.append((bmm2_scale * out).transpose(0, 1))
    assert cum_seq_lens_q.tolist() == cum_seq_lens_kv.tolist()
    assert max(map(len, outs)) == max_q_len
    return torch.cat(outs).to(out_dtype or qkv[0].dtype)


def skipping(inputs, threshold):
    """Return attention without the logits that lie more than the threshold below the largest of their row."""
    wide = [x.repeat_interleave(inputs.query.shape[1] // x.shape[1], 1) for x in inputs.tensors]
    scores = inputs.scale * wide[0] @ wide[1].mT
    if inputs.is_causal:
        scores += torch.full_like(scores[0, 0], -math.inf).triu(1)
    below = scores < scores.amax(-1, keepdim=True) - (math.inf if threshold is None else threshold)
    return scores.masked_fill(below, -math.inf).softmax(-1) @ wide[2]


@pytest.mark.parametrize("is_causal", [True, False])
class TestFlashInfer:
    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch):
        module = SimpleNamespace(trtllm_fmha_v2_prefill=flashinfer_attend)
        monkeypatch.setitem(sys.modules, peers.FLASHINFER_MODULE, module)

    @pytest.fixture
    def inputs(self, is_causal):
        query, key, value = tensors(50, 50)
        return Inputs(query, 8.0 * key, 4.0 * value, 0.1, is_causal)

    @pytest.mark.parametrize("name", [name for name in FLASHINFER if "fp8" not in name])
    def test_skips_what_lies_the_threshold_below_the_maximum(self, name, inputs):
        prepared = peers.flashinfer(name, inputs)
        torch.testing.assert_close(prepared.read(prepared.run()), skipping(inputs, FLASHINFER[name]))

    @pytest.mark.parametrize("name", [name for name in FLASHINFER if "fp8" in name])
    def test_takes_codes_and_scales_in_fp8(self, name, inputs):
        prepared = peers.flashinfer(name, inputs)
        made = quantize_fp8(*inputs.token_major, per_head=False)
        codes = (made.query, made.key, made.value)
        restored = (x.float().transpose(1, 2) * scale for x, scale in zip(codes, made.descales.flatten(), strict=True))
        rounded = Inputs(*restored, inputs.scale, inputs.is_causal)
        out = prepared.read(prepared.run())
        torch.testing.assert_close(out, skipping(rounded, FLASHINFER[name]))
        assert (out - exact(inputs)).norm() / exact(inputs).norm() < 0.2


class TestQuantizer:
    @pytest.mark.parametrize("per_head", [True, False])
    @pytest.mark.parametrize("tokens", [1, 64, 130])
    def test_scales_the_largest_magnitude_to_448_and_rounds_to_nearest(self, tokens, per_head):
        given = [x.transpose(1, 2).bfloat16().contiguous() for x in tensors(tokens, tokens)]
        made = quantize_fp8(*given, per_head=per_head)
        for index, (x, codes) in enumerate(zip(given, (made.query, made.key, made.value), strict=True)):
            by_head = x.float().unflatten(2, (2, -1))
            largest = by_head.abs().amax((1, 3, 4) if per_head else None, keepdim=True)
            scaled = (by_head * (448.0 / largest)).flatten(2, 3)
            half_step = torch.ldexp(torch.tensor(1.0), scaled.abs().log2().floor().clamp_min(-6) - 4)
            assert ((codes.float() - scaled).abs() <= half_step * (1 + 1e-5)).all()
            assert codes.float().abs().max() == 448.0
            torch.testing.assert_close(made.descales[index].flatten(), (largest / 448.0).flatten())
            torch.testing.assert_close(made.scales[index].flatten(), (448.0 / largest).flatten())

    @pytest.mark.parametrize("tokens", [1, 130])
    def test_packs_the_keys_and_values_of_a_token_side_by_side(self, tokens):
        given = [x.transpose(1, 2).bfloat16().contiguous() for x in tensors(tokens, tokens)]
        made = quantize_fp8(*given, per_head=False, pack_kv=True)
        separate = quantize_fp8(*given, per_head=False)
        assert made.key_value is not None
        assert made.key_value.is_contiguous()
        expected = torch.stack((separate.key, separate.value), 2)
        assert torch.equal(made.key_value.view(torch.uint8), expected.view(torch.uint8))
        for name in ("query", "key", "value"):
            assert torch.equal(getattr(made, name).float(), getattr(separate, name).float())

    def test_keeps_zeros(self):
        zeros = torch.zeros(1, 3, 1, 16, dtype=torch.bfloat16)
        made = quantize_fp8(zeros, zeros, zeros, per_head=True)
        assert made.value.float().abs().max() == 0.0
        assert made.descales.isfinite().all()

    def test_needs_as_many_queries_as_keys(self):
        query, key, value = (x.transpose(1, 2).bfloat16() for x in tensors(7, 8))
        with pytest.raises(ValueError, match="query and key must have as many tokens, got 7 and 8"):
            quantize_fp8(query, key, value, per_head=True)

    def test_has_an_inverse(self):
        codes = torch.randn(3, 1700).to(torch.float8_e4m3fn)
        out = dequantize_fp8(codes, torch.tensor([[0.5]]), torch.bfloat16)
        assert torch.equal(out, (0.5 * codes.float()).bfloat16())

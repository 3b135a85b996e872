"""Attention of PyTorch and of other packages, which benchmarks compare with where they are installed.

None of the packages is a dependency. Functions here raise an ``ImportError`` if theirs is missing.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from dma_eval.bench.timing import Run
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .fp8_quantizer import Fp8Operands, dequantize_fp8, quantize_fp8
from .inputs import Inputs

MODULE, SAGE_MODULE = "fa3_fwd_interface", "sageattention"
FLASHINFER_MODULE, CUDNN_MODULE = "flashinfer.prefill", "cudnn"
VLLM_MODULE = "vllm.vllm_flash_attn"
PACKAGES = {
    MODULE: ("FlashAttention-3", "fa3-fwd"),
    CUDNN_MODULE: ("cuDNN's frontend", "nvidia-cudnn-frontend"),
    FLASHINFER_MODULE: ("FlashInfer", "flashinfer-python"),
    SAGE_MODULE: ("SageAttention", "sageattention"),
    VLLM_MODULE: ("vLLM's FlashAttention-3", "vllm"),
}
"""By the module that is imported, the name of what it has, and its package on PyPI."""
CUDNN = "sdpa:cudnn"
SDPA = {"sdpa": None, "sdpa:flash": SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}
"""PyTorch's attention by its name in results. ``sdpa`` is PyTorch's own choice of a backend."""
FLASH_3 = {"fa3": False, "fa3:fp8": True}
"""FlashAttention-3 by its name in results, and whether it takes E4M3."""
VLLM = {"vllm": False, "vllm:fp8": True}
"""vLLM's FlashAttention-3 by its name in results, and whether its cache holds E4M3."""
VLLM_PAGE = 128
"""Tokens of a page (vLLM's ``--block-size``). With its default, 16, the FP8 kernel is slower."""
PREQUANTIZED = ":prequantized"
"""Suffix of FP8 attention whose operands are given in E4M3: quantizing them is not counted."""
THRESHOLDS = {"": None, **{f":t{nats}": float(nats) for nats in (5, 6, 7, 8)}}
FLASHINFER = {f"flashinfer{kind}{suffix}": nats for kind in ("", ":fp8") for suffix, nats in THRESHOLDS.items()}
FLASHINFER |= {f"flashinfer:fp8{PREQUANTIZED}": None}
"""FlashInfer by its name in results, and the threshold below which it skips tiles, in nats."""
FLASHINFER_WORKSPACE = 16 << 20
PROBABILITY_SCALE = 256.0
"""Scale of cuDNN's FP8 probabilities."""


def import_peer(name: str) -> Any:
    """Import a module of :data:`PACKAGES`. An ``ImportError`` says what to install.

    SDPA keeps its backends: importing vLLM switches cuDNN's off.
    """
    title, package = PACKAGES[name]
    has_cudnn = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{title} is not installed: pip install {package} ({error})") from error
    finally:
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)


@dataclass(frozen=True)
class Prepared:
    """A call that is timed."""

    run: Run
    read: Callable[[Any], Tensor] = lambda out: out  # gets [B, Hq, T, D] from what ``run`` returned, untimed


def sdpa(name: str, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Run:
    """Return a call of PyTorch's attention, on the backend that :data:`SDPA` has for the name."""
    run = partial(F.scaled_dot_product_attention, query, key, value, enable_gqa=True, **options)
    chosen = SDPA[name]
    return run if chosen is None else sdpa_kernel(chosen)(run)


def _prefill_sdpa(name: str, inputs: Inputs) -> Prepared:
    return Prepared(sdpa(name, *inputs.tensors, **inputs.options))


def flash_attention_3(name: str, inputs: Inputs) -> Prepared:
    """Return a call of FlashAttention-3.

    Its operands are in its own layout, so that no 16-bit number is copied in the call. In FP8 every kv head of a row
    has a scale, and a fused kernel quantizes unless the operands are given. ``name`` is one of :data:`FLASH_3`, or
    ``fa3:fp8:prequantized``.
    """
    attend = partial(import_peer(MODULE).flash_attn_func, causal=inputs.is_causal, softmax_scale=inputs.scale)
    if not FLASH_3[name.removesuffix(PREQUANTIZED)]:
        return Prepared(lambda: attend(*inputs.token_major).transpose(1, 2))

    def run(operands: Fp8Operands) -> Tensor:
        out: Tensor = attend(operands.query, operands.key, operands.value, **_descales(operands))
        return out.transpose(1, 2)

    return fp8_call(name, inputs, run, per_head=True)


def fp8_call(
    name: str,
    inputs: Inputs,
    attend: Callable[[Fp8Operands], Tensor],
    restore: Callable[[Fp8Operands, Tensor], Tensor] = lambda _, out: out,
    *,
    per_head: bool,
    pack_kv: bool = False,
) -> Prepared:
    """Return a call of FP8 attention that quantizes first, and ``restore`` what it returns.

    If the name ends in ``:prequantized`` only ``attend`` is timed.
    """
    quantize = partial(quantize_fp8, *inputs.token_major, per_head=per_head, pack_kv=pack_kv)

    def run() -> Tensor:
        operands = quantize()
        return restore(operands, attend(operands))

    if not name.endswith(PREQUANTIZED):
        return Prepared(run)
    given = quantize()
    return Prepared(partial(attend, given), read=partial(restore, given))


def cudnn_fp8(name: str, inputs: Inputs) -> Prepared:
    """Return a call of cuDNN's FP8 attention, ``sdpa_fp8`` of ``nvidia-cudnn-frontend``, with one scale per tensor.

    On Hopper its output is E4M3 too. Probabilities are scaled by 256, and the output by the scale of the values, which
    no output exceeds: with the defaults, scales of 1, small ones would be lost. ``cudnn:fp8`` counts a fused
    quantization and the conversion of the output. ``cudnn:fp8:prequantized`` is the attention alone, from E4M3 to E4M3.

    Raises:
        RuntimeError: cuDNN has no such attention for this shape or chip.
    """
    cudnn, device = import_peer(CUDNN_MODULE), inputs.query.device
    handle = _cudnn_handle(device)
    one = torch.ones(1, 1, 1, 1, device=device)
    constants = {"scale_s": PROBABILITY_SCALE * one, "descale_s": one / PROBABILITY_SCALE}

    def given(operands: Fp8Operands) -> dict[str, Tensor]:
        """Return what cuDNN reads, by its names: operands ``[B, H, T, D]``, and scales."""
        tensors = (operands.query, operands.key, operands.value)
        found = {name: x.transpose(1, 2) for name, x in zip("qkv", tensors, strict=True)}
        found |= {f"descale_{name}": x.view_as(one) for name, x in zip("qkv", operands.descales, strict=True)}
        return found | constants | {"scale_o": operands.scales[2].view_as(one)}

    example = given(quantize_fp8(*inputs.token_major, per_head=False))
    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
    read = {name: graph.tensor_like(x) for name, x in example.items()}
    options = {"attn_scale": inputs.scale, "use_causal_mask": inputs.is_causal, "is_inference": True}
    out, _, *largest = graph.sdpa_fp8(**read, **options, name="sdpa")
    for tensor, like, kind in ((out, example["q"], e4m3), *((each, one, fp32) for each in largest)):
        tensor.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride())).set_data_type(kind)
    try:
        graph.build([cudnn.heur_mode.A])
    except cudnn.cudnnGraphNotSupportedError as error:
        raise RuntimeError(f"cuDNN has no FP8 attention for this: {error}") from error
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=device)
    unused = {each: one.clone() for each in largest}

    def attend(operands: Fp8Operands) -> Tensor:
        codes = torch.empty_like(operands.query)
        tensors = {read[name]: x for name, x in given(operands).items()}
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph.execute(tensors | unused | {out: codes.transpose(1, 2)}, workspace, handle=handle)
        return codes

    def restore(operands: Fp8Operands, codes: Tensor) -> Tensor:
        return dequantize_fp8(codes, operands.descales[2], inputs.query.dtype).transpose(1, 2)

    return fp8_call(name, inputs, attend, restore, per_head=False)


@functools.lru_cache(maxsize=1)
def _cudnn_handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return import_peer(CUDNN_MODULE).create_handle()


def sage_attention(inputs: Inputs) -> Prepared:
    """Return a call of SageAttention, which quantizes queries and keys itself."""
    attend = import_peer(SAGE_MODULE).sageattn
    return Prepared(lambda: attend(*inputs.tensors, is_causal=inputs.is_causal, sm_scale=inputs.scale))


def flashinfer(name: str, inputs: Inputs) -> Prepared:
    """Return a call of FlashInfer's FMHA v2 for Hopper, in 16 bits or in E4M3. ``name`` is one of :data:`FLASHINFER`.

    In E4M3, a tensor has one scale, and outputs have 16 bits. FlashInfer takes the scales as numbers on the host, so
    that no call can wait for them: they are computed once, before anything is timed, as calibration does.
    ``flashinfer:fp8`` counts a fused quantization, which stores keys and values in the one tensor that FlashInfer
    expects.
    """
    fmha_v2 = _fmha_v2(inputs, FLASHINFER[name])
    if not name.startswith("flashinfer:fp8"):
        operands = tuple(each.flatten(0, 1) for each in inputs.token_major)
        return Prepared(lambda: fmha_v2(operands, "SEPARATE_Q_K_V", bmm1_scale=inputs.scale, bmm2_scale=1.0))
    q_descale, k_descale, v_descale = quantize_fp8(*inputs.token_major, per_head=False).descales.flatten().tolist()

    def attend(operands: Fp8Operands) -> Tensor:
        assert operands.key_value is not None
        return fmha_v2(
            (operands.query.flatten(0, 1), operands.key_value.flatten(0, 1)),
            "CONTIGUOUS_Q_KV",
            bmm1_scale=inputs.scale * q_descale * k_descale,
            bmm2_scale=v_descale,
            out_dtype=inputs.query.dtype,
        )

    return fp8_call(name, inputs, attend, per_head=False, pack_kv=True)


def _fmha_v2(inputs: Inputs, threshold: float | None) -> Callable[..., Tensor]:
    """Return FlashInfer's FMHA v2 as a function of operands, their layout and scales, to ``[B, Hq, T, D]``.

    It can skip softmax and values of tiles (arXiv 2512.12087): a tile is skipped if no row of its block has a logit
    within ``threshold`` of the row's largest logit so far. ``None`` skips nothing. FlashInfer's own parameter is
    ``exp(-threshold)`` times the length. The first call compiles the kernels, which takes minutes.
    """
    batch, tokens, _, _ = inputs.token_major[0].shape
    device = inputs.query.device
    ends = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=device)
    attend = partial(
        import_peer(FLASHINFER_MODULE).trtllm_fmha_v2_prefill,
        workspace_buffer=torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device),
        seq_lens=torch.full((batch,), tokens, dtype=torch.int32, device=device),
        max_q_len=tokens,
        max_kv_len=tokens,
        batch_size=batch,
        cum_seq_lens_q=ends,
        cum_seq_lens_kv=ends,
        mask_mode="causal" if inputs.is_causal else "padding",
        skip_softmax_threshold_scale_factor=0.0 if threshold is None else tokens * math.exp(-threshold),
    )

    def call(operands: tuple[Tensor, ...], layout: str, **options: Any) -> Tensor:
        out: Tensor = attend(operands, layout, **options).unflatten(0, (batch, tokens))
        return out.transpose(1, 2)

    return call


def flash_attention_3_step(name: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Run, int]:
    """Return a decoding step of FlashAttention-3 over stored keys and values, and the bytes of what is stored.

    ``query`` is ``[B, Hq, 1, D]``, ``key`` and ``value`` are ``[B, Hkv, N, D]``. With ``fa3:fp8`` the cache holds E4M3
    numbers with a scale for each row's kv head, and the step converts its query, whose scale is 1. How the keys are
    split over the chip is FlashAttention-3's own choice.
    """
    attend = import_peer(MODULE).flash_attn_with_kvcache
    keys, values, scales = _stored(key, value, in_fp8=FLASH_3[name])
    query = query.transpose(1, 2)
    lengths = torch.full((len(query),), key.shape[2], dtype=torch.int32, device=query.device)

    def step() -> Tensor:
        out: Tensor = attend(query.to(keys.dtype), keys, values, cache_seqlens=lengths, **scales)
        return out.transpose(1, 2)

    return step, keys.nbytes + values.nbytes


def vllm_step(name: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Run, int]:
    """Return a decoding step of vLLM's FlashAttention-3 over pages, and the bytes of what is stored.

    Arguments and scales are those of :func:`flash_attention_3_step`; the number of keys is a multiple of
    :data:`VLLM_PAGE`. As in vLLM, how the keys are split over the chip is planned once a step for all layers, so that
    it is not timed.
    """
    vllm = import_peer(VLLM_MODULE)
    keys, values, scales = _stored(key, value, in_fp8=VLLM[name])
    batch, tokens, kv_heads, head_dim = keys.shape
    options = {
        "max_seqlen_q": 1,
        "max_seqlen_k": tokens,
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=key.device),
        "causal": True,
    }
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=key.device)
    plan = vllm.get_scheduler_metadata(
        batch_size=batch, num_heads_q=query.shape[1], num_heads_kv=kv_heads, headdim=head_dim, cache_seqlens=lengths,
        qkv_dtype=keys.dtype, page_size=VLLM_PAGE, **options,
    )  # fmt: skip
    pages = [each.view(-1, VLLM_PAGE, kv_heads, head_dim) for each in (keys, values)]
    table = torch.arange(len(pages[0]), dtype=torch.int32, device=key.device).view(batch, -1)
    query = query[:, :, 0]

    def step() -> Tensor:
        out: Tensor = vllm.flash_attn_varlen_func(
            query.to(keys.dtype), *pages, seqused_k=lengths, block_table=table, scheduler_metadata=plan, fa_version=3,
            **options, **scales,
        )  # fmt: skip
        return out[:, :, None]

    return step, keys.nbytes + values.nbytes


def _stored(key: Tensor, value: Tensor, *, in_fp8: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return keys and values as a cache ``[B, N, Hkv, D]``, and the scales of an FP8 cache; that of queries is 1."""
    keys, values = (x.transpose(1, 2).contiguous() for x in (key, value))
    if not in_fp8:
        return keys, values, {}
    operands = quantize_fp8(keys, keys, values, per_head=True)  # a step converts its own query
    scales = _descales(operands)
    return operands.key, operands.value, scales | {"q_descale": torch.ones_like(scales["q_descale"])}


def _descales(operands: Fp8Operands) -> dict[str, Tensor]:
    return dict(zip(("q_descale", "k_descale", "v_descale"), operands.descales.unbind(), strict=True))


PEERS: dict[str, Callable[[Inputs], Prepared]] = {
    **{name: partial(_prefill_sdpa, name) for name in SDPA},
    **{name: partial(flash_attention_3, name) for name in (*FLASH_3, f"fa3:fp8{PREQUANTIZED}")},
    **{name: partial(cudnn_fp8, name) for name in ("cudnn:fp8", f"cudnn:fp8{PREQUANTIZED}")},
    **{name: partial(flashinfer, name) for name in FLASHINFER},
    "sage": sage_attention,
}
"""What prefill with ``dma_mxfp`` is compared with, by name in results."""
STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Run, int]]] = {
    **{name: partial(flash_attention_3_step, name) for name in FLASH_3},
    **{name: partial(vllm_step, name) for name in VLLM},
}
"""What decoding is compared with beside PyTorch's attention, by name in results."""

"""cuDNN's FP8 attention, ``sdpa_fp8`` of the package ``nvidia-cudnn-frontend``, as a peer.

On Hopper its output is E4M3 too. Probabilities are scaled by 256, and the output by the scale of the values, which no
output exceeds: with the defaults, scales of 1, small ones would be lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .fp8_quantizer import Fp8Operands, dequantize_fp8
from .inputs import Inputs
from .peers import CUDNN_MODULE, Prepared, fp8_call, import_peer, refuse_documents

PROBABILITY_SCALE = 256.0


def cudnn_fp8(name: str, inputs: Inputs) -> Prepared:
    """Return a call of cuDNN's FP8 attention, with one scale per tensor.

    ``cudnn:fp8`` counts a fused quantization and the conversion of the output. ``cudnn:fp8:prequantized`` is the
    attention alone, from E4M3 to E4M3.

    Raises:
        RuntimeError: cuDNN has no such attention for this shape or chip.
    """
    cudnn = import_peer(CUDNN_MODULE)
    refuse_documents(inputs, "cuDNN's FP8 attention")
    query, key, _ = inputs.token_major
    try:
        execute = _plan(query.shape, key.shape[2], query.device, inputs.scale, is_causal=inputs.is_causal)
    except cudnn.cudnnGraphNotSupportedError as error:
        raise RuntimeError(f"cuDNN has no FP8 attention for this: {error}") from error

    def attend(operands: Fp8Operands) -> Tensor:
        out = torch.empty_like(operands.query)
        descales = {f"descale_{name}": x.view(1, 1, 1, 1) for name, x in zip("qkv", operands.descales, strict=True)}
        scale_o = operands.scales[2].view(1, 1, 1, 1)
        execute(q=operands.query, k=operands.key, v=operands.value, o=out, scale_o=scale_o, **descales)
        return out

    def restore(operands: Fp8Operands, codes: Tensor) -> Tensor:
        return dequantize_fp8(codes, operands.descales[2], inputs.query.dtype).transpose(1, 2)

    return fp8_call(name, inputs, attend, restore, per_head=False)


@functools.lru_cache(maxsize=1)
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return import_peer(CUDNN_MODULE).create_handle()


@functools.lru_cache(maxsize=1)
def _plan(
    shape: torch.Size, kv_heads: int, device: torch.device, scale: float, *, is_causal: bool
) -> Callable[..., None]:
    """Build the graph for queries ``[B, T, Hq, D]`` and so many kv heads; all layers of a model share it.

    Return what executes it on tensors by their names.
    """
    cudnn, handle = import_peer(CUDNN_MODULE), _handle(device)
    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
    batch, tokens, q_heads, head_dim = shape

    def layout(heads: int) -> dict[str, list[int]]:
        strides = [tokens * heads * head_dim, head_dim, heads * head_dim, 1]
        return {"dim": [batch, heads, tokens, head_dim], "stride": strides}

    scalar = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}
    tensors = {
        name: graph.tensor(name=name, data_type=e4m3, **layout(heads))
        for name, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads))
    }
    scales = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    tensors |= {name: graph.tensor(name=name, data_type=fp32, **scalar) for name in scales}
    out, _, largest_s, largest_o = graph.sdpa_fp8(
        **tensors, attn_scale=scale, use_causal_mask=is_causal, is_inference=True, name="sdpa"
    )
    outputs = {"o": (out, layout(q_heads), e4m3)}
    outputs |= {"amax_s": (largest_s, scalar, fp32), "amax_o": (largest_o, scalar, fp32)}
    for tensor, where, kind in outputs.values():
        tensor.set_output(True).set_dim(where["dim"]).set_stride(where["stride"]).set_data_type(kind)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=device)

    numbers = {"scale_s": PROBABILITY_SCALE, "descale_s": 1.0 / PROBABILITY_SCALE, "amax_s": 0.0, "amax_o": 0.0}
    constants = {name: torch.full((1, 1, 1, 1), number, device=device) for name, number in numbers.items()}
    tensors |= {name: tensor for name, (tensor, _, _) in outputs.items()}

    def execute(**given: Tensor) -> None:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        pack = {tensors[name]: tensor for name, tensor in (constants | given).items()}
        graph.execute(pack, workspace, handle=handle)

    return execute

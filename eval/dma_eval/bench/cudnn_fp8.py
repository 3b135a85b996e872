"""cuDNN's FP8 attention, ``sdpa_fp8`` of the package ``nvidia-cudnn-frontend``, as a peer.

On Hopper its output is E4M3 too. Probabilities are scaled by 256, and the output by the scale of the values, which no
output exceeds: with the defaults, scales of 1, small ones would be lost.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .fp8_quantizer import Fp8Operands, dequantize_fp8
from .inputs import Inputs
from .peers import CUDNN_MODULE, Prepared, fp8_call, import_peer, refuse_documents

PROBABILITY_SCALE = 256.0


@dataclass(frozen=True)
class _Plan:
    """A built graph, its tensors by name, and its workspace."""

    graph: Any
    tensors: dict[str, Any]
    workspace: Tensor
    constants: dict[str, Tensor]


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
        plan = _plan(query.shape, key.shape[2], query.device, inputs.scale, is_causal=inputs.is_causal)
    except cudnn.cudnnGraphNotSupportedError as error:
        raise RuntimeError(f"cuDNN has no FP8 attention for this: {error}") from error

    def attend(operands: Fp8Operands) -> Tensor:
        out = torch.empty_like(operands.query)
        named = plan.constants | {"q": operands.query, "k": operands.key, "v": operands.value, "o": out}
        for index, tensor in enumerate(("q", "k", "v")):
            named[f"descale_{tensor}"] = operands.descales[index].view(1, 1, 1, 1)
        named["scale_o"] = operands.scales[2].view(1, 1, 1, 1)
        handle = _handle(query.device)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(query.device).cuda_stream)
        pack = {tensor: named[tensor_name] for tensor_name, tensor in plan.tensors.items()}
        plan.graph.execute(pack, plan.workspace, handle=handle)
        return out

    def restore(operands: Fp8Operands, codes: Tensor) -> Tensor:
        return dequantize_fp8(codes, operands.descales[2], inputs.query.dtype).transpose(1, 2)

    return fp8_call(name, inputs, attend, restore, per_head=False)


@functools.lru_cache(maxsize=1)
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return import_peer(CUDNN_MODULE).create_handle()


@functools.lru_cache(maxsize=1)
def _plan(shape: torch.Size, kv_heads: int, device: torch.device, scale: float, *, is_causal: bool) -> _Plan:
    """Build the graph for queries ``[B, T, Hq, D]`` and so many kv heads; all layers of a model share it."""
    cudnn = import_peer(CUDNN_MODULE)
    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=_handle(device)
    )
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

    def constant(number: float) -> Tensor:
        return torch.full((1, 1, 1, 1), number, dtype=torch.float32, device=device)

    constants = {"scale_s": constant(PROBABILITY_SCALE), "descale_s": constant(1.0 / PROBABILITY_SCALE)}
    constants |= {"amax_s": constant(0.0), "amax_o": constant(0.0)}
    return _Plan(graph, tensors | {name: tensor for name, (tensor, _, _) in outputs.items()}, workspace, constants)

"""One process of several: run a saved model under the launcher that started this, and write what it computes.

Usage: torchrun --nproc-per-node 2 parallel_worker.py MODEL_DIR OUT_DIR tensor
       torchrun --nproc-per-node 2 parallel_worker.py MODEL_DIR OUT_DIR data
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import dma_hf

NEW_TOKENS = 6


def token_ids() -> torch.Tensor:
    """Return the prompts ``[4, 300]``: more than two tiles long."""
    return torch.randint(3, 97, (4, 300), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def compute(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return logits and generated tokens."""
    ids = ids.to(next(model.parameters()).device)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return {"logits": model(ids).logits.float().cpu(), "tokens": tokens.cpu()}


def run_tensor_parallel(source: Path, out: Path) -> None:
    """Split every layer over the processes."""
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation=dma_hf.NAME, tp_plan="auto").eval()
    results = compute(model, token_ids())
    weight = model.model.layers[0].self_attn.q_proj.weight
    rows = (weight.to_local() if hasattr(weight, "to_local") else weight).shape[0]
    rank = torch.distributed.get_rank()
    torch.save(results | {"q_proj_rows": rows}, out / f"tensor{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_data_parallel(source: Path, out: Path) -> None:
    """Give every process its share of the batch, as a script does that ``accelerate launch`` starts."""
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation=dma_hf.NAME).to(state.device).eval()
    with state.split_between_processes(token_ids()) as share:
        torch.save(compute(model, share), out / f"data{state.process_index}.pt")
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    source, out, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    {"tensor": run_tensor_parallel, "data": run_data_parallel}[mode](source, out)

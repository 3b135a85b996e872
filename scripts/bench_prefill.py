"""Time prefill attention side by side: SDPA's backends and `dma_kernels.attention`, on one CUDA device.

Every time is the median of repeated runs with the quantisation of queries, keys and values counted. SDPA's default runs
before and after the others, so that a drift of the machine shows. The error is against fp64 attention of the same
inputs, on sampled rows. Results go to a JSON file.
"""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import triton
import typer
from dma_kernels import attention
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dma_hf

SDPA_BACKENDS = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
SAMPLED_ROWS = 64


@dataclass(frozen=True)
class Shape:
    """A call: batch 1, bf16."""

    length: int
    head_dim: int
    q_heads: int = 32
    kv_heads: int = 8
    is_causal: bool = True

    @property
    def flops(self) -> int:
        """Floating-point operations of both products."""
        pairs = self.length * self.length // (2 if self.is_causal else 1)
        return 4 * self.q_heads * pairs * self.head_dim


SHAPES = (
    Shape(2048, 128),
    Shape(8192, 128),
    Shape(32768, 128),
    Shape(131072, 128),
    Shape(16384, 64),
    Shape(16384, 128, is_causal=False),
    Shape(16384, 128, q_heads=32, kv_heads=32),
)


def main(
    out: Annotated[Path, typer.Argument(help="The JSON file to write.")],
    presets: Annotated[list[str] | None, typer.Option("--preset", help="Presets to time.", show_default="all")] = None,
    longest: Annotated[int, typer.Option(help="Leave out longer sequences.")] = 131072,
) -> None:
    """Time every shape and write the results."""
    device = torch.device("cuda")
    results = [
        result
        for shape in SHAPES
        if shape.length <= longest
        for result in time_shape(shape, presets or list(dma_hf.PRESETS))
    ]
    environment = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"environment": environment, "results": results}, indent=1) + "\n")
    show(results)


def time_shape(shape: Shape, presets: list[str]) -> list[dict[str, object]]:
    """Time all implementations on one shape."""
    torch.manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(1, heads, shape.length, shape.head_dim, device="cuda", dtype=torch.bfloat16)

    query, key, value = normal(shape.q_heads), normal(shape.kv_heads), normal(shape.kv_heads)

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=shape.is_causal, enable_gqa=True)

    def forced(backend: SDPBackend) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return sdpa()

        return run

    def dma(preset: str) -> Callable[[], Tensor]:
        recipe = dma_hf.PRESETS[preset].recipe
        return lambda: attention(query, key, value, recipe, is_causal=shape.is_causal, backend="triton")

    runs = {"sdpa": sdpa, **{name: forced(backend) for name, backend in SDPA_BACKENDS.items()}}
    runs |= {f"dma:{preset}": dma(preset) for preset in presets}
    results: list[dict[str, object]] = []
    rows = torch.randperm(shape.length)[:SAMPLED_ROWS].sort().values.cuda()
    exact = exact_rows(query, key, value, rows, shape)
    for name, run in [*runs.items(), ("sdpa again", sdpa)]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            out = run()
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            results.append({**asdict(shape), "name": name, "failure": str(error).splitlines()[0]})
            continue
        error = ((out[0, :, rows].double() - exact).norm() / exact.norm()).item()
        memory = torch.cuda.max_memory_allocated() - before - out.nbytes
        del out
        milliseconds = triton.testing.do_bench(run, warmup=50, rep=300, return_mode="median")
        results.append(
            {
                **asdict(shape),
                "name": name,
                "milliseconds": milliseconds,
                "tflops": shape.flops / milliseconds / 1e9,
                "error": error,
                "extra_bytes": memory,
                "input_bytes": query.nbytes + key.nbytes + value.nbytes,
            }
        )
    reference = results[0]["milliseconds"]
    assert isinstance(reference, float)
    for result in results:
        if isinstance(result.get("milliseconds"), float):
            result["speedup"] = reference / result["milliseconds"]  # type: ignore[operator]
    return results


def exact_rows(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, shape: Shape) -> Tensor:
    """Return attention in fp64 for some query rows, ``[Hq, rows, D]``."""
    group = shape.q_heads // shape.kv_heads
    outputs = []
    for head in range(shape.q_heads):
        scores = query[0, head, rows].double() @ key[0, head // group].double().T * shape.head_dim**-0.5
        if shape.is_causal:
            hidden = torch.arange(shape.length, device=rows.device)[None] > rows[:, None]
            scores = scores.masked_fill(hidden, -torch.inf)
        outputs.append(scores.softmax(-1) @ value[0, head // group].double())
    return torch.stack(outputs)


def show(results: list[dict[str, object]]) -> None:
    """Print the results as a table."""
    table = Table("shape", "implementation", "ms", "TFLOP/s", "of SDPA", "error", "extra / QKV")
    for r in results:
        shape = (
            f"{r['length']} d{r['head_dim']} {r['q_heads']}/{r['kv_heads']}{'' if r['is_causal'] else ' bidirectional'}"
        )
        if "failure" in r:
            table.add_row(shape, str(r["name"]), str(r["failure"])[:40])
            continue
        ratio = r["extra_bytes"] / r["input_bytes"]  # type: ignore[operator]
        table.add_row(
            shape,
            str(r["name"]),
            f"{r['milliseconds']:.4f}",
            f"{r['tflops']:.0f}",
            f"{r['speedup']:.2f}x",
            f"{r['error']:.4f}",
            f"{ratio:.2f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)

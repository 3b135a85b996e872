"""Write the table of measured times in docs/hardware.md from benchmarks/prefill-*h200.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = tuple(ROOT / "benchmarks" / name for name in ("prefill-h200.json", "prefill-shapes-h200.json"))
PAGE = ROOT / "docs" / "hardware.md"
SHAPE = ("length", "head_dim", "query_heads", "kv_heads", "is_causal")
SECTION = re.compile(r"(?<=<!-- prefill-h200\.json -->\n).*?(?=<!-- end -->)", re.DOTALL)


def read_results() -> list[dict[str, Any]]:
    """Return the results of all files."""
    return [result for path in RESULTS for result in json.loads(path.read_text(encoding="utf-8"))["results"]]


def describe(length: int, head_dim: int, q_heads: int, kv_heads: int, is_causal: bool) -> str:
    """Return how a row names its call: the length, and what differs from the page's usual one."""
    parts = [f"{length // 1024}K"]
    if head_dim != 128:
        parts.append(f"head_dim {head_dim}")
    if (q_heads, kv_heads) != (32, 8):
        parts.append(f"{q_heads}/{kv_heads} heads")
    return ", ".join(parts if is_causal else [*parts, "bidirectional"])


def _departure(_length: int, head_dim: int, q_heads: int, kv_heads: int, is_causal: bool) -> tuple[bool, ...]:
    return head_dim != 128, (q_heads, kv_heads) != (32, 8), not is_causal


def make_table(results: list[dict[str, Any]]) -> str:
    """Return the table, a row for each shape: the usual ones, then those that depart from them, each by length."""
    shapes: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for result in results:
        shapes.setdefault(tuple(result["shape"][name] for name in SHAPE), {})[result["label"]] = result
    lines = [
        "| `balanced` | TFLOP/s | over SDPA | over FlashAttention-2 | extra memory over Q, K, V |",
        "|---|---|---|---|---|",
    ]
    for shape, named in sorted(shapes.items(), key=lambda item: (*_departure(*item[0]), item[0][0])):
        ours = named["dma_mxfp:balanced"]
        times = (named[name]["milliseconds"] / ours["milliseconds"] for name in ("sdpa", "sdpa:flash"))
        ratios = " | ".join(f"{ratio:.2f}x" for ratio in times)
        memory = ours["extra_bytes"] / ours["input_bytes"]
        lines.append(f"| {describe(*shape)} | {ours['tflops']:.0f} | {ratios} | {memory:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replace the table between the page's marks."""
    table = make_table(read_results())
    page, count = SECTION.subn(table.replace("\\", r"\\"), PAGE.read_text(encoding="utf-8"))
    if count != 1:
        raise typer.BadParameter(f"{PAGE} must have the marks <!-- prefill-h200.json --> and <!-- end --> once")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

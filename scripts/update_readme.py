"""Write the README's table of results and draw its chart, both from the result files in benchmarks.

python scripts/update_readme.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dma_eval.render import table
from dma_eval.results import read_report
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
README = ROOT / "README.md"
FIGURE = ROOT / "docs/figures/speed-loss.png"
MARKS = "<!-- results -->", "<!-- end results -->"

PREFILL, DECODE, PEERS = "prefill-h200.json", "decode-h200.json", "decode-peers-h200.json"
SERVE = ("serve-h200.json", "serve-packed-h200.json")
REAL = "prefill-real-32k-h100.json"
QUALITY, QUALITY_CPU = "quality/smollm2-4096-fp32", "quality/smollm2-4096-cpu-fp32"
BALANCED = "dma_mxfp:balanced"
INT8, INT4 = f"{BALANCED}+int8", f"{BALANCED}+int4"
SHORT_LABELS = {"dma_mxfp+int8": INT8, "dma_mxfp+int4": INT4}
"""Labels without the preset, which is ``balanced``."""
OURS, THEIRS, BASE = "#0072B2", "#777777", "#222222"

Result = dict[str, Any]


def read(*names: str, **shape: int) -> dict[str, Result]:
    """Return the results of one shape by label; of a label that several files have, the last one."""
    found: dict[str, Result] = {}
    for name in names:
        for result in json.loads((BENCHMARKS / name).read_text(encoding="utf-8"))["results"]:
            if all(result["shape"][key] == value for key, value in shape.items()) if shape else True:
                found[SHORT_LABELS.get(result["label"], result["label"])] = result
    return found


def losses() -> dict[str, Any]:
    """Return what each backend loses on the unchanged model, by label."""
    found: dict[str, Any] = {}
    for folder in (QUALITY_CPU, QUALITY):
        (twin,) = (each for each in read_report(BENCHMARKS / folder).stress[0].twins if each.name == "as it is")
        assert twin.tokens is not None
        found |= {SHORT_LABELS.get(each.label, each.label): each for each in twin.tokens.backends if not each.failure}
    return found


def milliseconds(result: Result) -> float:
    """Return the time of a call without the host's work, where that was measured."""
    return float(result["graph_milliseconds"] or result["milliseconds"])


def results_table() -> str:
    """Return six rows: prefill, short prompts, decoding, memory, serving and loss."""
    heads = {"head_dim": 128, "query_heads": 32, "kv_heads": 8}
    long = read(PREFILL, length=32768, batch=1, **heads)
    short = read(PREFILL, length=1024, batch=1, **heads)
    step = read(DECODE, length=131072, batch=1, **heads)
    cache = read(DECODE, length=32768, batch=1, **heads)
    serve = {label: each["tokens_per_second"] for label, each in read(*SERVE).items()}
    loss = losses()

    def faster(results: dict[str, Result], ours: str, base: str) -> str:
        return f"{milliseconds(results[base]) / milliseconds(results[ours]):.2f}x as fast"

    isolated = long["fa3"]["sustained_milliseconds"] / long[BALANCED]["sustained_milliseconds"]
    changes = ", ".join(f"{loss[label].change_percent:+.2f} %" for label in (BALANCED, INT4))
    prefill, decode, serving, quality = (
        f"](benchmarks/{page}.md)" for page in ("prefill", "decode", "serving", "quality")
    )
    flash, plain = "FlashAttention-3, bf16", "SDPA, 16-bit cache"
    rows = [
        [
            f"[Prefill of 32K tokens{prefill}",
            "`balanced`",
            flash,
            f"{faster(long, BALANCED, 'fa3')}; isolated {isolated:.2f}x",
        ],
        [f"[Prefill of 1K tokens{prefill}", "`balanced`", flash, faster(short, BALANCED, "fa3")],
        [f"[Decoding step over 128K keys{decode}", "`balanced+int4`", plain, faster(step, INT4, "sdpa")],
        [f"[Cache size at 32K tokens{decode}", "`balanced+int4`", plain, f"{cache[INT4]['bytes_ratio']:.2f}x"],
        [
            f"[32 requests of 2,048 + 64 tokens, 8B model{serving}",
            "`balanced+int4`",
            "SDPA in `generate_batch`",
            f"{serve[INT4] / serve['sdpa']:.1f}x the tokens/s",
        ],
        [f"[Perplexity{quality}", "`balanced`, `balanced+int4`", "SDPA", changes],
    ]
    return table(["measured", "with", "compared with", "result"], rows)


def draw() -> Figure:
    """Draw speed against loss: of prefill attention on a model's own inputs, and of decoding steps over caches."""
    figure = Figure(figsize=(10, 3.9), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    prefill = read(REAL, head_dim=128)
    base = prefill["fa3"]["milliseconds"]

    def point(label: str) -> tuple[float, float]:
        return prefill[label]["error"], base / prefill[label]["milliseconds"]

    _dot(left, *point("fa3"), "FlashAttention-3\nbf16", BASE, (6, -22))
    _dot(left, *point("fa3:fp8"), "FlashAttention-3 FP8", THEIRS, (-52, 10))
    _dot(left, *point("cudnn:fp8"), "cuDNN FP8", THEIRS, (-24, -16))
    skipping = [point(label) for label in ("dma_mxfp:balanced", *(f"dma_mxfp:t{t}" for t in (8, 7, 6, 5)))]
    left.plot(*zip(*skipping, strict=True), color=OURS, linewidth=1.2, zorder=1)
    for (error, speed), name in zip(skipping[1:], (8, 7, 6, 5), strict=True):
        _dot(left, error, speed, f"skip_threshold {name}", OURS, (8, -4), size=28)
    _dot(left, *skipping[0], "dma-hf balanced (default)", OURS, (-62, -17))
    left.set(xscale="log", xlim=(0.001, 0.13), ylim=(0.9, 1.65), ylabel="speed, times FlashAttention-3 bf16")
    left.set_xlabel("error of the attention output, relative to fp64")
    left.set_title("Prefill, 32K tokens, H100", fontsize=11)

    heads = {"length": 32768, "batch": 1, "head_dim": 128, "query_heads": 32, "kv_heads": 8}
    steps = {**read(PEERS, **heads), **read(DECODE, **heads)}
    peers = read(PEERS, **heads)
    loss = losses()
    shown = {
        INT8: ("dma-hf int8", INT8, OURS, (8, -4)),
        INT4: ("dma-hf int4", INT4, OURS, (8, -4)),
        "sim_fp8_cache": ("FlashAttention-3, FP8 cache", "fa3:fp8", THEIRS, (-98, -17)),
        "sdpa+hqq8": ("HQQ 8 bits", "sdpa+hqq8", THEIRS, (-10, 10)),
        "sdpa+hqq4": ("HQQ 4 bits", "sdpa+hqq4", THEIRS, (-24, 24)),
        "sdpa+quanto4": ("quanto 4 bits", "sdpa+quanto4", THEIRS, (-24, 10)),
    }
    for label, (name, step, color, shift) in shown.items():
        base_step = milliseconds((peers if step.startswith("sdpa+") else steps)["sdpa"])
        _dot(right, loss[label].kl_mean, base_step / milliseconds(steps[step]), name, color, shift)
    right.axhline(1, color=BASE, linewidth=1, linestyle=":")
    right.annotate("SDPA, 16-bit cache", (5.5e-6, 1), xytext=(0, -13), textcoords="offset points", fontsize=9)
    right.set(xscale="log", xlim=(5e-6, 0.06), ylim=(0, 1.8), ylabel="speed of a step, times SDPA")
    right.set_xlabel("KL per token, SmolLM2-135M (nats)")
    right.set_title("Decoding, 32K keys, H200", fontsize=11)
    for axes in (left, right):
        axes.grid(True, color="#e5e5e5", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _dot(axes: Axes, x: float, y: float, name: str, color: str, shift: tuple[int, int], *, size: int = 55) -> None:
    axes.scatter([x], [y], color=color, s=size, zorder=2)
    axes.annotate(name, (x, y), xytext=shift, textcoords="offset points", fontsize=9, color=color)


def updated(text: str) -> str:
    """Return the README's text with the table made anew.

    Raises:
        ValueError: The README has not one pair of marks.
    """
    start, end = MARKS
    pattern = re.compile(rf"{re.escape(start)}\n.*?{re.escape(end)}", re.DOTALL)
    text, count = pattern.subn(lambda _: f"{start}\n\n{results_table()}\n{end}", text)
    if count != 1:
        raise ValueError(f"README.md must have the marks {start} and {end} once")
    return text


def main() -> None:
    """Write the table and the chart."""
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
    draw().savefig(FIGURE)


if __name__ == "__main__":
    main()

"""The page ``docs/support.md``: every architecture and the outcome of each feature."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from hf_architectures import Architecture
from hf_outcomes import FAILS, FALLBACK, REFUSED, UPSTREAM, WORKS, Outcome, Record

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
KIND_TITLES = {
    "decoder": "Causal language models",
    "encoder-decoder": "Encoder-decoders",
    "multimodal": "Vision-language and other composite models",
    "encoder": "Encoders",
    "tower": "Vision, audio and other base models",
}
OF_CACHES = ("packed cache", "generate_batch", "packed pages")
FEATURES = ("forward", "padded batch", "chunked prefill", "static cache", "generate", *OF_CACHES)
CELLS = {WORKS: "yes", FALLBACK: "sdpa", REFUSED: "refused", UPSTREAM: "upstream", FAILS: "FAILS"}

REASONS: tuple[tuple[str, str], ...] = (
    ("which chooses its layers from", "it looks up attention layers in a table of its own"),
    ("does not reach", "its attention is built in"),
    ("this model computes its attention itself", "its attention is built in"),
    ("position_bias", "adds a position bias to its scores"),
    ("an additive bias", "adds a bias to its scores"),
    ("needs additive ones", "needs an additive mask"),
    ("this head_dim", "has a head wider than 256"),
    ("caches latents", "no packed cache: it caches latents (multi-head latent attention)"),
    ("that share keys and values", "no packed pages: layers share keys and values"),
    ("an attention_mask of its own", "passes a mask of its own in `generate_batch`"),
    ("as eager attention", "equals eager attention; SDPA differs from it"),
)

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3_moe", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "gpt2"),
    *("gpt_bigcode", "phi3", "cohere2", "exaone4", "smollm3", "llama4_text", "qwen3_next", "jamba", "nemotron_h"),
    *("deepseek_v3", "opt", "whisper", "t5gemma", "bert", "modernbert", "qwen2_5_vl", "llava", "mllama"),
    *("clip", "vit", "wav2vec2"),
)
"""Popular architectures, which continuous integration tests even if others have the same cells."""

HEADER = """# Tested architectures

`python scripts/support_table.py` writes this page; do not edit it. It uses the same code as the tests in `tests/hf/`.
Every architecture in the registries of Transformers {version} is built as a tiny random model.

The model runs twice with the same weights: with Transformers' own attention, and with `dma_mxfp` without quantization.
The logits must be equal to fp32 rounding, and the generated tokens must be equal.

| cell | meaning |
|---|---|
| yes | equal |
| sdpa | refused with an error that names the reason; equal with `on_unsupported="sdpa"`, which runs SDPA |
| refused | refused with an error that names the reason |
| upstream | Transformers' own attention fails with this model, too |
| (empty) | models of this kind lack the feature, or the tiny model cannot use it |

The last columns are `generate` with `cache="int8"`, and `generate_batch` over 16-bit pages and over packed pages. The
numbers below do not count them.

A padded batch of a decoder is padded on the left, and of other models on the right. The chunks of a prompt have 9, 14
and 1 tokens. Windows are 8 tokens wide, so that they have an effect. Composite models get text only if they accept it.
The last table has their towers.

"""


def page(records: Sequence[Record], version: str) -> str:
    """Return the page."""
    parts = [HEADER.format(version=version), _summary(records)]
    for kind, title in KIND_TITLES.items():
        of_kind = sorted((r for r in records if r.architecture.kind == kind), key=lambda r: r.architecture.model_type)
        names = [name for name in FEATURES if any(name in record.features for record in of_kind)]
        parts.append(f"## {title}\n\n| architecture | class | {' | '.join(names)} | |\n|{'---|' * (len(names) + 3)}\n")
        for record in (record for record in of_kind if not record.skipped):
            cells = [cells_of(record).get(name, "") for name in names]
            own = f"`{record.architecture.model_type}`", f"`{record.architecture.name}`"
            parts.append(f"| {' | '.join((*own, *cells))} | {_reasons(record)} |\n")
        skipped = [f"- `{each.architecture.model_type}`: {_plain(each.skipped)}\n" for each in of_kind if each.skipped]
        parts += ["\nNot tested:\n\n", *skipped, "\n"]
    return "".join(parts).rstrip() + "\n"


def cells_on(text: str) -> dict[tuple[str, str], dict[str, str]]:
    """Return the cells of a page by table title and class name: feature to cell."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    title, names = "", []
    for line in text.splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif line.startswith("| architecture |"):
            names = [cell.strip() for cell in line.split("|")[3:-2]]
        elif line.startswith("| `") and title:
            parts = [cell.strip() for cell in line.split("|")]
            found[title, parts[1] + parts[2]] = dict(zip(names, parts[3:], strict=False))
    return found


def sample(text: str) -> Callable[[Architecture], bool]:
    """Return whether an architecture is in the sample: a popular one, or the first with its cells and reasons."""
    chosen: dict[tuple[str, str], str] = {}
    for table in text.split("\n## ")[1:]:
        title, *lines = table.splitlines()
        for line in lines:
            if line.startswith("| `"):
                _, model_type, _, name, cells = line.split("`", 4)
                chosen.setdefault((title, cells.replace(name, "")), model_type)
    firsts = {(title, model_type) for (title, _), model_type in chosen.items()}
    return lambda each: each.model_type in FAMILIES or (KIND_TITLES[each.kind], each.model_type) in firsts


def cells_of(record: Record) -> dict[str, str]:
    """Return the cells that the page must have for a record."""
    return {name: CELLS[outcome.status] for name, outcome in record.features.items()}


def key_of(record: Record) -> tuple[str, str]:
    """Return the key of a record's cells."""
    architecture = record.architecture
    return KIND_TITLES[architecture.kind], f"`{architecture.model_type}``{architecture.name}`"


def _summary(records: Sequence[Record]) -> str:
    lines = ["| | listed | tested | all equal | refused, at least in part | not tested |\n|---|---|---|---|---|---|\n"]
    for kind, title in KIND_TITLES.items():
        counts = Counter(_verdict(record) for record in records if record.architecture.kind == kind)
        equal, refused, skipped = (counts[each] for each in ("equal", "refused", "not tested"))
        lines.append(f"| {title} | {counts.total()} | {equal + refused} | {equal} | {refused} | {skipped} |\n")
    return "".join(lines) + "\n"


def _verdict(record: Record) -> str:
    if record.skipped:
        return "not tested"
    statuses = {outcome.status for name, outcome in record.features.items() if name not in OF_CACHES}
    return "refused" if statuses & {REFUSED, FALLBACK} else "equal"


def _reasons(record: Record) -> str:
    shown = (x for name, x in record.features.items() if x.detail and not (name in OF_CACHES and x.status == UPSTREAM))
    return "; ".join(dict.fromkeys(map(_reason, shown)))


def _reason(outcome: Outcome) -> str:
    for part, reason in REASONS:
        if part in outcome.detail:
            return reason
    why = re.search(r"cannot use a packed cache, because ([^;]*)", outcome.detail)
    if why:
        return f"no packed cache: {why[1]}"
    argument = re.search(r"the argument '(\w+)'", outcome.detail)
    if argument:
        return f"passes `{argument[1]}` to its attention"
    prefix = "upstream: " if outcome.status == UPSTREAM else ""
    return f"{prefix}{_plain(outcome.detail)}"


def _plain(text: str) -> str:
    """Return an error's text, escaped for Markdown."""
    text = re.sub(r"\(?requires the (\w+) library.*", r"requires the \1 library", " ".join(text.split()))
    return text.replace("|", "/").replace("<", "").replace(">", "")[:140]

"""Write the tables of results into the pages, from the files in benchmarks.

    python scripts/update_docs.py

A page has a table between the lines ``<!-- table: NAME FILE... -->`` and ``<!-- end table -->``. The names are those of
:data:`TABLES`, functions of the result files. ``files`` is the index of all of them, in benchmarks/README.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import typer
from dma_eval.results import read_report
from dma_eval.show.pages import MISSING, divergence_table, format_kl, number
from dma_eval.show.render import table

from dma_hf.config import PRESETS

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
BLOCK = re.compile(r"(<!-- table: (\S+)(.*?) -->\n)(.*?)(<!-- end table -->)", re.DOTALL)
BALANCED, INT8, INT4 = "dma_mxfp:balanced", "dma_mxfp:balanced+int8", "dma_mxfp:balanced+int4"
REQUESTS = "32 requests of 2,048 + 64 tokens, 8B model"
RETIRED = {
    "1606881e": ("python scripts/measure_host_time.py",),
    "b2abba9": ("python scripts/study_static_steps.py", "python scripts/study_split_kv.py"),
    "372515d": ("python scripts/study_product_skipping.py",),
    "36ef2e6": ("python benchmarks/rings_probe.py",),
    "5ae510b": (
        *(f"dma-hf bench {name}" for name in ("prefill", "decode", "generate", "serve")),
        *(f"python scripts/{name}.py" for name in ("compare_cache_speed", "measure_cache_formats")),
        *(f"python scripts/{name}.py" for name in ("measure_skipping", "profile_vote")),
    ),
}
"""Commands that only an earlier commit has, by the last one."""
UNCHANGED = "unchanged"
SHORT = tuple(f"smollm2-{run}-fp32" for run in ("4096-thresholds", "4096", "4096-cpu", "int4-4096-cpu"))
"""Runs on windows of 4,096 tokens. Later ones replace earlier ones, and the first one has no twins."""
MODELS = {
    "SmolLM2-135M": "smollm2",
    "Gemma 3 270M": "gemma3-270m",
    "Qwen2.5-Coder-0.5B": "qwen2.5-coder-0.5b",
    "Qwen2.5-Coder-1.5B": "qwen2.5-coder-1.5b",
}
"""Models that are compared, and how the folders of their runs begin."""
MODEL_RUNS = (
    *(f"{folder}-4096-thresholds-fp32" for folder in MODELS.values()),
    *("smollm2-4096-more-fp32", "gemma3-270m-4096-more-cpu-fp32"),
    *("qwen2.5-coder-0.5b-4096-more-fp32", "qwen2.5-coder-1.5b-4096-more-cpu-fp32"),
)
"""The runs that the README shows."""
FP4, LOW_FP4 = "dma_mxfp:fp4", "dma_mxfp:all-low"
"""The preset, and as it was before it had a layer in high precision."""
NAMES = {
    "sdpa": "SDPA",
    "sdpa, fp32": "SDPA in fp32",
    "sim_sage": "SageAttention 1 (simulated)",
    "sim_fa3_fp8": "FlashAttention-3 in FP8 (simulated)",
    "sim_fp8_cache": "FP8, one scale (simulated)",
    "sdpa+fp8": "FP8, Transformers",
    **{f"sdpa+hqq{bits}": f"HQQ, {bits} bits" for bits in (8, 4, 2)},
    **{f"sdpa+quanto{bits}": f"quanto, {bits} bits" for bits in (4, 2)},
    LOW_FP4: "`fp4`, `high_layers = []`",
    **{f"dma_mxfp:d{tiles}": f"`balanced`, `diagonal_tiles = {tiles}`" for tiles in (0, 2)},
    "dma_mxfp:off": "`balanced`, nothing skipped",
    "dma_mxfp:block": "`balanced`, scales of blocks",
    "dma_mxfp:pv16": "`balanced`, 16-bit P·V",
    "dma_mxfp:mxfp8": '`low = "mxfp8"`, not rotated',
    "dma_mxfp:unrotated": "`balanced`, not rotated",
    "dma_mxfp:block-unrotated": "`balanced`, scales of blocks, not rotated",
    "dma_mxfp:paper-no-sink": "`paper` without a sink",
}
ORDER = ["sdpa, fp32", "sdpa", BALANCED, FP4, LOW_FP4, "dma_mxfp:paper", INT8, INT4, *NAMES]


def name(label: str) -> str:
    """Return what tables call something."""
    threshold = re.fullmatch(r"dma_mxfp:t(\d+)", label)  # a file with a threshold alone
    if threshold:
        return f"`balanced`, `skip_threshold = {threshold[1]}`"
    return NAMES.get(label) or (label if label.startswith("`") else f"`{label.removeprefix('dma_mxfp:')}`")


def read(path: Path | str) -> Any:
    """Return the content of a file in benchmarks."""
    return json.loads((BENCHMARKS / path).read_text(encoding="utf-8"))


def show(values: pd.Series, form: str, unit: str = "") -> pd.Series:
    """Return cells; what is missing is a dash."""
    return values.map(lambda value: number(None if pd.isna(value) else value, form, unit))


def pivot(frame: pd.DataFrame, values: str, rows: str = "case", columns: str = "label") -> pd.DataFrame:
    """Return a row and a column for each value of two columns, in the order of the frame. Later values replace."""
    found = frame.drop_duplicates([rows, columns], keep="last").pivot(index=rows, columns=columns, values=values)
    return found.loc[frame[rows].unique(), frame[columns].unique()].rename_axis(index=None)


def named(cells: pd.DataFrame, labels: pd.Series | None = None) -> pd.DataFrame:
    """Return cells with the names of labels as their index; by default the index has the labels."""
    return cells.set_axis([name(label) for label in (cells.index if labels is None else labels)])


# Speed: one row for each result, in a frame.


def load(*files: str) -> pd.DataFrame:
    """Return the results of all files. ``case`` describes a shape, ``ms`` is a time without the host's work."""
    frames = []
    for file in files:
        report = read(f"{file}.json")
        facts = {key: report.get(key) for key in ("weights", "copy_bytes_per_second")}
        facts["device"] = re.sub(r"NVIDIA (\w+).*", r"\1", report["device"]["name"])
        frames.append(pd.json_normalize(report["results"]).assign(**facts))
    frame = pd.concat(frames, ignore_index=True)
    frame["label"] = frame["label"].str.replace(r"^dma_mxfp(?=\+|$)", BALANCED, regex=True)
    if "shape.length" in frame:
        frame["case"] = [describe(row) for row in frame.to_dict("records")]
    if "graph_milliseconds" in frame:  # of a case all or none
        whole = frame.groupby("case")["graph_milliseconds"].transform(lambda column: column.notna().all())
        frame["ms"] = frame["graph_milliseconds"].where(whole, frame["milliseconds"])
    return frame


def describe(row: Mapping[str, Any]) -> str:
    """Return how a shape is called: batch, length, and what differs from 32/8 causal heads of 128 channels."""
    batch, length, dim = (int(row[f"shape.{key}"]) for key in ("batch", "length", "head_dim"))
    heads = f"{row['shape.query_heads']}/{row['shape.kv_heads']}"
    parts = [f"{length // 1024}K" if batch == 1 else f"{batch} x {length // 1024}K"]
    parts += [f"head_dim {dim}"] if dim != 128 else []
    parts += [f"{heads} heads"] if heads not in ("32/8", "9/3") else []
    parts += [] if row.get("shape.is_causal", True) else ["bidirectional"]
    return ", ".join(parts)


def of_case(file: str, case: str) -> pd.DataFrame:
    """Return the results of one case, by their labels."""
    return load(file).query("case == @case").set_index("label")


def times_faster(frame: pd.DataFrame, base: str, values: str = "ms") -> pd.DataFrame:
    """Return the time of a label over those of the others."""
    times = pivot(frame, values)
    return times.rdiv(times[base], axis=0)


def prefill(*files: str) -> pd.DataFrame:
    """The time of FlashAttention-3, and how many times faster others are, quantization counted."""
    frame = load(*files)
    frame["is_special"] = frame["case"].str.contains(",")  # other heads, or bidirectional
    frame = frame.sort_values(["is_special", "shape.batch", "shape.length"], kind="stable")
    cells = times_faster(frame, "fa3").apply(show, form=".2f", unit="x").rename(columns=name)
    cells.insert(0, "`fa3`, ms", show(pivot(frame, "ms")["fa3"], ".3g"))
    cells["`balanced`, isolated"] = show(times_faster(frame, "fa3", "sustained_milliseconds")[BALANCED], ".2f", "x")
    return cells.drop(columns="`fa3`")


def prefill_errors(file: str) -> pd.DataFrame:
    """Errors against fp64 at 8K and 32K, with outlier key channels too, and memory."""
    cells = {}
    for case in ("8K", "32K"):
        rows = of_case(file, case)
        cells[f"error, {case}"] = show(rows["error"], ".3f")
        cells[f"with outlier key channels, {case}"] = show(rows["error_with_outliers"], ".3f")
        cells[f"memory beside Q, K, V, {case}"] = show(rows["extra_bytes"] / rows["input_bytes"], ".2f")
    return named(pd.DataFrame(cells))


def prefill_real(*files: str) -> pd.DataFrame:
    """Speed over FlashAttention-3 on a model's own inputs: interleaved, isolated, share of low tiles skipped."""
    frame = load(*files)
    cells = times_faster(frame, "fa3", "milliseconds").T.apply(show, form=".2f", unit="x")
    isolated = times_faster(frame, "fa3", "sustained_milliseconds").T
    skipped = pivot(frame, "skipped_share").T
    for case in cells:
        cells[case] += isolated[case].map(lambda value: "" if pd.isna(value) else f", {value:.2f}x")
        cells[case] += skipped[case].map(lambda value: "" if pd.isna(value) else f", {100 * value:.0f} %")
    cells["error"] = show(pivot(frame, "error").T.iloc[:, 0], ".4f")
    return named(cells)


def decode(*files: str) -> pd.DataFrame:
    """The time of a step over SDPA's cache of 16 bits, and how many times faster others are.

    Also the bytes of the caches, and what steps over ours read per second, as a share of a copy's bandwidth.
    """
    frame = load(*files)
    ran = frame[frame["failure"].isna()].sort_values(["shape.head_dim", "shape.batch", "shape.length"], kind="stable")
    cells = times_faster(ran, "sdpa").apply(show, form=".2f", unit="x").rename(columns=name)
    cells.insert(0, "SDPA, us", show(1e3 * pivot(ran, "ms")["sdpa"], ".0f"))
    for label, ratios in pivot(ran, "bytes_ratio").items():
        if "+" in str(label):  # other caches hold numbers of one size
            cells[f"bytes of {name(str(label))}"] = show(ratios, ".2f")
    ran["of_copy"] = 100 * ran["bytes_per_second"] / ran["copy_bytes_per_second"]
    for label, shares in pivot(ran, "of_copy").items():
        if label in (INT8, INT4):
            cells[f"{name(str(label))}, of copy bandwidth"] = show(shares, ".0f", " %")
    return cells.drop(columns="SDPA")


def triton_versions() -> pd.DataFrame:
    """Each version of Triton: how many times faster than FlashAttention-3 in the same run, and host time over its."""
    rows = {}
    for version in ("3.6", "3.7", "3.8", "3.9"):
        speed, steps = (times_faster(load(f"triton/{kind}-{version}-h100"), "fa3") for kind in ("prefill", "decode"))
        cells = {f"prefill, {case}": speed.loc[case, BALANCED] for case in ("8K", "32K", "16K, head_dim 64")}
        cells |= {f"step of {name(label)}, 8 x 32K": steps.loc["8 x 32K", label] for label in (INT8, INT4)}
        report = read(f"triton/host-time-{version}-h100.json")
        host = next(row for row in report["results"] if row["shape"].startswith("2,048 tokens"))
        row = show(pd.Series(cells), ".2f", "x")
        row["host time"] = f"{host[f'{BALANCED}_us'] / host['fa3_us']:.2f}x"
        rows[report["environment"]["packages"]["triton"]] = row
    return pd.DataFrame(rows).T.rename_axis(index="Triton")


STEPS = ("eager", "CUDA graphs", "compiled", "compiled, CUDA graphs")
"""How steps ran. The index is 1 for CUDA graphs, plus 2 for the compiler."""


def generate(*files: str) -> pd.DataFrame:
    """First token, step, memory.

    Steps over static caches are compiled: those of Transformers, and in older files packed ones.
    """
    order = ["device", "weights", "context"]
    frame = load(*files).sort_values(order, kind="stable", na_position="first")
    cells = {
        "GPU, weights": frame["device"] + ", " + frame["weights"].fillna("bf16"),
        "tokens of the prompt": show(frame["context"], ",.0f"),
        "steps": np.take(STEPS, 2 * frame["label"].str.endswith("static") + (frame["graph_steps"] > 0)),
        "first token": show(frame["first_token_seconds"], ".2f", " s"),
        "step": show(frame["step_milliseconds"], ".2f", " ms"),
        "cache": show(frame["cache_bytes"] / 2**30, ".2f", " GiB"),
        "peak beside weights": show(frame["peak_bytes"] / 2**30, ".2f", " GiB"),
    }
    return named(pd.DataFrame(cells), frame["label"].str.replace(r"(int\d)-static$", r"\1", regex=True))


def first_token(file: str) -> pd.DataFrame:
    """Time to the first token of ``generate`` with a real model, and how many times faster than SDPA's."""
    times = pivot(load(file), "first_token_seconds", "label", "context").rename(columns="{:,}".format)
    faster = (times.loc["sdpa+dynamic"] / times).apply(show, form=".2f", unit="x")
    return named(times.apply(show, form=".3f", unit=" s, ") + faster)


def interleaved(values: str, *files: str) -> pd.DataFrame:
    """Medians in ms of interleaved calls of ``generate``, and their ratio to SDPA's. Later files replace columns.

    Newer files have medians of the ratios in one round.
    """
    cells = {}
    rows = [row for file in files for row in read(f"{file}.json")["results"]]
    for row in sorted(rows, key=lambda row: (row["shape"], row["context"])):
        results = {run: result for run, result in row.items() if isinstance(result, dict)}
        medians = {run: result[values][1] for run, result in results.items()}
        ratios = {run: each / medians["sdpa"] for run, each in medians.items()}
        of_rounds = values.replace("_ms", "_over_first_run")
        ratios |= {run: result[of_rounds][1] for run, result in results.items() if of_rounds in result}
        shortest = f"{row['shortest']:,} to " if "shortest" in row else ""
        case = f"{row['shape'].rsplit('-', 1)[1].upper()}, {shortest}{row['context']:,} tokens"
        cells[case] = {run: f"{each:.1f} ms, {ratios[run]:.2f}x" for run, each in medians.items()}
    return named(pd.DataFrame(cells))


SERVER_OPTIONS = ("--compile", "--kv-cache-dtype fp8")
"""Options by which servers of the same attention differ in the table of :func:`under_load`."""


def under_load(*files: str) -> pd.DataFrame:
    """What ``benchmarks/serving.py`` measured of each server, by load. Other tables call attention the same."""
    frames = []
    for report in (read(f"{file}.json") for file in files):
        attention = re.search(r"--attn (\S+)", report["server"])
        server = name(attention[1]) if attention else f"`{report['server'].split(' serve ')[0]} serve`"
        server = ", ".join((server, *(f"`{each}`" for each in SERVER_OPTIONS if each in report["server"])))
        frames.append(pd.DataFrame(report["results"]).assign(server=server))
    frame = pd.concat(frames).sort_values(["prefix_tokens", "streams"], kind="stable").set_index("server")
    prefix = show(frame["prefix_tokens"], ",.0f", " shared + ").where(frame["prefix_tokens"] > 0, "")
    cells = {"clients": show(frame["streams"], ".0f"), "prompt": prefix + show(frame["prompt_tokens"], ",.0f")}
    cells["new tokens/s"] = show(frame["tokens_per_second"], ",.0f")
    for each, title, form in (("first_token", "first token", ",.0f"), ("between_tokens", "between tokens", ",.1f")):
        times = (show(frame[f"{each}_milliseconds{end}"], form, " ms") for end in ("", "_p99"))
        cells[f"{title}, median (99 %)"] = next(times) + " (" + next(times) + ")"
    cells["requests in time/s"] = show(frame["goodput"], ".1f")
    return pd.DataFrame(cells).rename_axis(index=None)


# Quality: reports of runs.


def sections(kind: str, *folders: str) -> list[Any]:
    """Return the sections of a kind of some runs."""
    return [each for folder in folders for each in getattr(read_report(BENCHMARKS / "quality" / folder), kind)]


def label_of(result: Any) -> str:
    """Return the label of a result; for a file that changes ``fp4``, the name with what it changes.

    Before it had ``high_layers``, the preset ``fp4`` was another one.
    """
    label, config = str(result.label), result.config
    if label == FP4:
        return FP4 if "high_layers" in config else LOW_FP4
    if label == LOW_FP4 or config is None or config["low"] != "nvfp4":
        return label
    preset = PRESETS["fp4"].to_dict()
    return ", ".join(["`fp4`", *(f"`{key} = {json.dumps(x)}`" for key, x in config.items() if x != preset[key])])


def losses(*folders: str) -> pd.DataFrame:
    """Return what each backend loses on each model and twin: numbers, and the cells ``kl`` and ``change``.

    In place of a change, the first one has its perplexity. Later runs are newer, or run what failed.
    """
    rows = []
    for folder in folders:
        report = read_report(BENCHMARKS / "quality" / folder)
        model = next(model for model, prefix in MODELS.items() if folder.startswith(prefix))
        compared = [(UNCHANGED, each) for each in (*report.perplexity, *(each.tokens for each in report.fidelity))]
        compared += [(twin.name, twin.tokens) for stress in report.stress for twin in stress.twins if twin.tokens]
        for twin, section in compared:
            run = {"twin": twin, "run": f"{model}, {section.context // 1024}K, {report.model.dtype}"}
            base = next(each for each in section.backends if each.failure is None)
            for each in section.backends:
                kl, change = format_kl(each.kl_mean), number(each.perplexity, ".3f")
                if each is base:
                    kl = ""
                elif each.failure is not None:
                    kl, change = "failed", ""
                else:
                    change = number(100 * (each.perplexity / base.perplexity - 1), "+.2f", " %")
                rows.append(vars(each) | run | {"label": label_of(each), "kl": kl, "change": change})
    return pd.DataFrame(rows)


def of_backends(frame: pd.DataFrame, values: str, columns: str) -> pd.DataFrame:
    """Return a row for each backend, in the order of :data:`ORDER`, others last."""
    cells = pivot(frame, values, "label", columns)
    order = sorted(cells.index, key=lambda label: ORDER.index(label) if label in ORDER else len(ORDER))
    return named(cells.loc[order])


def quality_runs(*folders: str) -> pd.DataFrame:
    """KL per token, change of the perplexity and share of equal most likely tokens, for each model and context."""
    frame = losses(*folders).query("twin == @UNCHANGED")
    top1 = show(100 * frame["top1_agreement"].where(frame["kl"] != ""), ".1f", " %")
    parts = zip(frame["kl"], frame["change"], top1, strict=True)
    frame["cell"] = [", ".join(part for part in each if part not in ("", MISSING)) for each in parts]
    return of_backends(frame, "cell", "run")


def quality_twins(*folders: str) -> pd.DataFrame:
    """KL per token on the model and its twins."""
    frame = losses(*folders)
    return of_backends(frame[frame["kl"] != ""], "kl", "twin")


def cache_layers(*files: str) -> pd.DataFrame:
    """KL per token of a packed cache with some layers in ``int8``, which are named, and the others in ``int4``."""
    rows = {}
    for file in files:
        *found, _ = read(f"{file}.json")["results"]
        model = next(model for model, prefix in MODELS.items() if f"-{prefix}-" in file)
        none, *worst, every, first = ((format_kl(each["kl"]), ", ".join(map(str, each["in_int8"]))) for each in found)
        cells = {"all in `int4`": none[0], "layer 0 in `int8`": first[0]}
        for (kl, layers), count in zip(worst, ("the worst", "two", "three", "five"), strict=True):
            cells[f"{count} in `int8`"] = f"{kl} ({layers})"
        rows[model] = cells | {"all in `int8`": every[0]}
    return pd.DataFrame(rows).T


def accuracies(*folders: str) -> pd.DataFrame:
    """Score of each task, and the right answers that backends after the first lose and gain against it."""
    rows: dict[str, dict[str, str]] = {}
    for task in (each for section in sections("tasks", *folders) for each in section.tasks):
        label, _, length = task.name.partition(", ")
        row = rows.setdefault(f"`{label}`{length and f', {int(length.split()[0]):,}'}", {"answers": f"{task.samples}"})
        flips = task.accuracy or task.metrics[0]
        for each, flip in zip(task.metrics[0].values, flips.values, strict=True):
            row[name(each.label)] = number(each.value, ".1f", " %", factor=100)
            row[name(each.label)] += "" if flip.lost is None else f", -{flip.lost} +{flip.gained}"
    return pd.DataFrame(rows).T


def continuations(folder: str) -> pd.DataFrame:
    """How many tokens of greedy continuations equal the reference's."""
    (section,) = sections("fidelity", folder)
    shown = divergence_table(section)
    return named(pd.DataFrame(shown.rows, columns=shown.headers).set_index(shown.headers[0]))


# All of it: the README's rows, and the index.


def results() -> pd.DataFrame:
    """Prefill, short prompts, decoding, generation, memory, serving, and loss."""
    prefills, decodes = load("prefill-h200"), load("decode-h200")
    prefill, isolated = (times_faster(prefills, "fa3", key)[BALANCED] for key in ("ms", "sustained_milliseconds"))
    short = times_faster(load("prefill-to-32k-h100"), "fa3", "ms")[BALANCED]
    size = pivot(decodes, "bytes_ratio")[INT4]
    peers = load("serve-vllm-h200").set_index("label")["tokens_per_second"]
    models = losses(*MODEL_RUNS).groupby("label")
    flash, plain, ours = "FlashAttention-3, bf16", "SDPA, 16-bit cache", "`balanced+int4`"
    peer_names = "SDPA, static cache, compiled; SDPA, eager; FlashAttention-3, eager"
    long = f"{prefill['32K']:.2f}x as fast; isolated {isolated['32K']:.2f}x"
    step = "; ".join(f"{times_faster(decodes, peer)[INT4]['128K']:.2f}x" for peer in ("vllm:fp8", "sdpa"))
    typed = load("generate-h100").query("context == 8192").set_index("label")["step_milliseconds"].dropna()
    typed_peers = "sdpa+static", "sdpa+dynamic", "flash_attention_3+dynamic"
    token = "; ".join(f"{typed[peer] / typed[INT4]:.1f}x" for peer in typed_peers)
    compared = "; ".join(f"{peers[INT4] / peers[peer]:.2f}x" for peer in ("vllm:fp8", "vllm"))
    servers = (pd.DataFrame(read(f"load-{server}-h200.json")["results"]) for server in ("int4-random", "vllm-random"))
    packed, strong = (each.query("prefix_tokens == 0").set_index("streams")["tokens_per_second"] for each in servers)
    loaded = "; ".join(f"{packed[clients] / strong[clients]:.2f}x" for clients in (32, 128))
    changes = ", ".join(show(models["change_percent"].max()[[BALANCED, INT4]], "+.2f", " %"))
    reasoning = accuracies("qwen2.5-coder-1.5b-gsm8k-bf16").iloc[0, 1:].str.split(",").str[0]
    solved = f"{', '.join(reasoning[1:])} right; SDPA {reasoning.iloc[0]}"
    rows = [
        ["Prefill of 32K tokens", "prefill", "`balanced`", flash, long],
        ["Prefill of 2K tokens, H100", "prefill", "`balanced`", flash, f"{short['2K']:.2f}x as fast"],
        ["Decoding step over 128K keys", "decode", ours, f"vLLM's kernel, FP8 cache; {plain}", f"{step} as fast"],
        ["Token of `generate` after 8K, 8B model, H100", "serving", ours, peer_names, f"{token} as fast"],
        ["Cache size at 32K tokens", "decode", ours, plain, f"{size['32K']:.2f}x"],
        [f"{REQUESTS}, compiled", "serving", ours, "vLLM 0.26, FP8 cache; bf16 cache", f"{compared} the tokens/s"],
        ["Server, 32; 128 clients, 1.5B model", "serving", ours, "vLLM 0.26, bf16 cache", f"{loaded} the tokens/s"],
        ["GSM8K, 400 problems, 1.5B model", "quality", "`balanced`, `int8`, `int4`", "SDPA", solved],
        [f"Perplexity, worst of {len(MODELS)} models", "quality", f"`balanced`, {ours}", "SDPA", changes],
    ]
    linked = [[f"[{what}](benchmarks/{page}.md)", *others] for what, page, *others in rows]
    return pd.DataFrame(linked, columns=["measured", "with", "compared with", "result"]).set_index("measured")


def files() -> pd.DataFrame:
    """The index: every result file with its device, versions, date, commit and command."""
    rows = []
    for path in sorted(BENCHMARKS.rglob("*.json")):
        report, where = read(path), path.relative_to(BENCHMARKS)
        where = where.parent if path.name == "results.json" else where
        machine, (command, *others) = report["environment"], report["command"].split(" && ")
        packages = (f"{each} {machine['packages'].get(each, MISSING)}" for each in ("torch", "triton", "transformers"))
        row = {
            "file": f"[`{where}`]({where})",
            "device": ", ".join(dict.fromkeys(machine["gpus"])).removeprefix("NVIDIA ") or "CPU",
            "versions": ", ".join(packages),
            "date": report["created"][:10],
            "commit": machine.get("commit"),
            "command": f"`{command}`" + (f" and {len(others)} more, in the file" if others else ""),
            "last commit with the command": retired_at(command),
        }
        rows.append(row)
    return pd.DataFrame(rows).set_index("file")


def retired_at(command: str) -> str | None:
    """Return the last commit that has a command; ``None`` if this one has it."""
    return next((commit for commit, gone in RETIRED.items() if command.startswith(gone)), None)


SPEED = (prefill, prefill_errors, prefill_real, decode, triton_versions, generate, first_token, interleaved, under_load)
QUALITY = (quality_runs, quality_twins, cache_layers, accuracies, continuations)
TABLES: dict[str, Callable[..., pd.DataFrame]] = {
    each.__name__.replace("_", "-"): each for each in (results, *SPEED, *QUALITY, files)
}


def markdown(name: str, *files: str) -> str:
    """Return a table by its name. The index is its first column; what is missing is a dash."""
    cells = TABLES[name](*files).fillna(MISSING)
    return table([cells.index.name or "", *cells.columns], [[str(row[0]), *row[1:]] for row in cells.itertuples()])


def updated(text: str, page: str = "the page") -> str:
    """Return a page with its tables made anew.

    Raises:
        ValueError: A mark names no table, or has no end.
    """
    names = [block[1] for block in BLOCK.findall(text)]
    if {text.count("<!-- table: "), text.count("<!-- end table -->")} != {len(names)}:
        raise ValueError(f"{page}: every <!-- table: NAME --> needs one <!-- end table --> after it, got {names}")
    unknown = [each for each in names if each not in TABLES]
    if unknown:
        raise ValueError(f"{page}: unknown tables {', '.join(unknown)}; valid: {', '.join(TABLES)}")
    return BLOCK.sub(lambda block: f"{block[1]}\n{markdown(block[2], *block[3].split())}\n{block[5]}", text)


def pages() -> Iterable[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(BENCHMARKS.glob("*.md"))]


def main() -> None:
    """Write the tables of results into the pages."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        page.write_text(updated(text, page.name), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)  # which refuses arguments

"""Study whether tile skipping could leave out the product of queries and keys, too, and what that would lose.

    python scripts/study_product_skipping.py --model MODEL.gguf --data TEXT --out FILE.json

The rule of today computes the product of every low tile and then skips what is small. The rules here decide on an
estimate, such as the scores of a few queries of a block of 64. Nothing is quantized, so only skipping loses something.
Products are TF32 on a GPU and fp32 on a CPU; all else is fp32. Rows of the result have a ``part``:

- ``heads``: what seven layers of the unchanged model lose, for many rules.
- ``model``: divergence of the model with every layer skipping from exact attention, for a few rules; ``balanced`` is
  the loss of quantization alone.
- ``needle``, ``kv``: log-probability of eight answers that stand at eight depths of a prompt. Each question fills the
  prompt's last block of 64 tokens, because incomplete blocks skip nothing.
- ``ruler``: answers to two tasks of RULER, as lm-eval makes them. The rule reads a prompt of complete blocks; prose
  before the task fills the first one. Decoding is exact.

A rule is written ``ESTIMATE[COUNT][~SLACK][+group][+heads]:FAR[/NEAR]``. A tile whose estimate lies more than FAR nats
below the high tiles' maximum has no product. With NEAR, the others are decided by today's rule at that threshold.
"""

from __future__ import annotations

import importlib
import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import torch
import typer
from dma_eval.load.data import leading_tokens, load_text, tokenize
from dma_eval.load.models import load_model
from dma_eval.measures.retrieval import DIGITS, NEEDLE, PLACES
from dma_eval.results import here_and_now
from dma_kernels.numerics.formats import TILE
from dma_kernels.numerics.geometry import SKIP_BLOCK
from dma_kernels.reference import attention as torch_attention
from dma_kernels.reference.skipping import is_high_tile
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import dma_hf
from dma_hf.integrations.internals import CACHE_ARGUMENT

NAME = "product_skipping"
BALANCED = dma_hf.PRESETS["balanced"].recipe
SKIPPED_COST = 0.47
"""Time of a skipped tile over that of a kept one, measured on an H100: its product."""
TAIL = 0.1
"""Rows that lose more of their probability count as a tail."""
PROTECTED = 1e-4
"""``+heads`` leaves a head to today's rule if a larger share of its rows on another text is a tail."""


@dataclass(frozen=True)
class Rule:
    """Which low tiles a block of 64 queries skips.

    The estimate is ``all`` (today's rule), or the scores of COUNT queries: ``even`` (evenly spaced), ``norm`` (the
    largest), ``far`` (farthest from the block's mean), ``mixed`` (half even, half far) or ``spread`` (each farthest
    from those before). ``pivot`` estimates every query as a combination of COUNT queries. ``axes`` keeps 1/COUNT of
    the channels, in a basis that is learned from the head. SLACK adds this share of the largest error possible: the
    distance of a query from its estimate times the radius of the tile's keys. With ``+group``, all query heads of a
    key head must agree. ``+heads`` leaves heads that have tails on another text to ``all:7``.
    """

    text: str
    estimate: str
    count: int
    slack: float | None
    is_group: bool
    spares_heads: bool
    far: float
    near: float | None

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read a rule."""
        match = re.fullmatch(r"([a-z]+)(\d*)(?:~([\d.]+))?(\+group)?(\+heads)?:([\d.]+)(?:/([\d.]+))?", text)
        if match is None or match[1] not in ("all", *SAMPLES, "pivot", "axes"):
            raise typer.BadParameter(f"expected ESTIMATE[COUNT][~SLACK][+group][+heads]:FAR[/NEAR], got {text!r}")
        slack, near = (None if each is None else float(each) for each in (match[3], match[7]))
        return cls(text, match[1], int(match[2] or 64), slack, bool(match[4]), bool(match[5]), float(match[6]), near)

    @property
    def base(self) -> str:
        """The rule without ``+heads``."""
        return self.text.replace("+heads", "")

    def cost(self, chunk: Chunk) -> float:
        """Return the share of the product that the estimate computes."""
        channels = chunk.key.shape[-1]
        shares = {"all": 0.0, "axes": 1 / self.count, "pivot": self.count / SKIP_BLOCK + self.count / channels}
        return shares.get(self.estimate, self.count / SKIP_BLOCK)


def even(query: Tensor, count: int) -> Tensor:
    """Return evenly spaced rows."""
    step = SKIP_BLOCK // count
    return torch.arange(step // 2, SKIP_BLOCK, step, device=query.device).expand(*query.shape[:2], -1)


def far(query: Tensor, count: int) -> Tensor:
    """Return the rows farthest from the mean."""
    return (query - query.mean(2, keepdim=True)).norm(dim=-1).topk(count).indices


def spread(query: Tensor, count: int) -> Tensor:
    """Return rows each of which is farthest from those before it, beginning with the one farthest from the mean."""
    rows = [far(query, 1)]
    distance = torch.full(query.shape[:3], math.inf, device=query.device)
    while len(rows) < count:
        distance = distance.minimum((query - take(query, rows[-1])).norm(dim=-1))
        rows.append(distance.argmax(-1, keepdim=True))
    return torch.cat(rows, -1)


SAMPLES = {
    "even": even,
    "norm": lambda query, count: query.norm(dim=-1).topk(count).indices,
    "far": far,
    "mixed": lambda query, count: torch.cat((even(query, count // 2), far(query, count - count // 2)), -1),
    "spread": spread,
}
"""Rows ``[H, N, count]`` by which a rule samples blocks of queries ``[H, N, 64, D]``."""


def take(blocks: Tensor, rows: Tensor) -> Tensor:
    """Take rows ``[H, N, S]`` of ``[H, N, 64, X]``."""
    return blocks.gather(2, rows[..., None].expand(-1, -1, -1, blocks.shape[-1]))


def by_pivots(query: Tensor, count: int) -> Tensor:
    """Project the queries of each block onto ``count`` of them, each the farthest from the span of those before."""
    rest = query.clone()
    for _ in range(count):
        axis = take(rest, rest.norm(dim=-1).argmax(-1, keepdim=True))
        axis = axis / axis.norm(dim=-1, keepdim=True).clamp_min(1e-20)
        rest -= (rest * axis).sum(-1, keepdim=True) * axis
    return query - rest


def best_axes(query: Tensor, key: Tensor, count: int) -> Tensor:
    """Return the map ``[H, D, D]`` of rank D / count of queries ``[H, G, T, D]`` that keeps scores of keys best."""
    rows, keys = query.flatten(1, 2).double(), (key - key.mean(1, keepdim=True)).double()
    values, vectors = torch.linalg.eigh(rows.mT @ rows / rows.shape[1])
    values = values.clamp_min(1e-9 * values[:, -1:])
    root, inverse = ((vectors * values[:, None] ** power) @ vectors.mT for power in (0.5, -0.5))
    kept = torch.linalg.eigh(root @ (keys.mT @ keys) @ root).eigenvectors[..., -query.shape[-1] // count :]
    return (root @ kept @ kept.mT @ inverse).to(query.dtype)


@dataclass
class Chunk:
    """Scores of complete blocks of queries: heads ``H``, blocks ``N``, key tiles ``J``."""

    query: Tensor  # scaled, [H, N, 64, D]
    key: Tensor  # [H / group, J * 128, D]
    scores: Tensor  # [H, N * 64, J * 128], -inf where a query does not see a key
    is_low: Tensor  # [N, J]
    axes: dict[int, Tensor]  # maps of rank D / count, [H / group, D, D]
    gaps: dict[tuple[str, int, float | None], Tensor] = field(default_factory=dict)

    @cached_property
    def tile_max(self) -> Tensor:
        """Largest score of each tile, ``[H, N, 64, J]``."""
        return self._by_tile(self.scores)

    @cached_property
    def high_max(self) -> Tensor:
        """Largest score in high tiles, ``[H, N, 64, 1]``."""
        return self.tile_max.masked_fill(self.is_low[:, None], -math.inf).amax(-1, keepdim=True)

    @cached_property
    def _tiles(self) -> tuple[Tensor, Tensor]:
        """Mean key ``[H / group, J, D]`` and radius ``[H / group, J]`` of each tile."""
        tiles = self.key.unflatten(1, (-1, TILE))
        mean = tiles.mean(2)
        return mean, (tiles - mean[:, :, None]).norm(dim=-1).amax(-1)

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return len(self.query) // len(self.key)

    def _by_tile(self, scores: Tensor) -> Tensor:
        return scores.view(len(self.query), -1, SKIP_BLOCK, self.is_low.shape[1], TILE).amax(-1)

    def _product(self, query: Tensor, key: Tensor) -> Tensor:
        """Multiply ``[H, N, 64, D]`` by ``[H / group, X, D]``: ``[H, N, 64, X]``."""
        return (query.reshape(len(key), -1, query.shape[-1]) @ key.mT).view(*query.shape[:3], -1)

    def gap(self, rule: Rule) -> Tensor:
        """Return how far a block's estimate lies above the maximum of its high tiles, ``[H, N, J]``."""
        name = rule.estimate, rule.count, rule.slack
        if name not in self.gaps:
            self.gaps[name] = self._gap(*name)
        return self.gaps[name]

    def _gap(self, estimate: str, count: int, slack: float | None) -> Tensor:
        if estimate == "all":
            return (self.tile_max - self.high_max).amax(2)
        if estimate in SAMPLES:
            rows = SAMPLES[estimate](self.query, count)
            if slack is None:
                return (take(self.tile_max, rows) - take(self.high_max, rows)).amax(2)
            nearest = rows.gather(2, torch.cdist(self.query, take(self.query, rows)).argmin(-1))
            rest, found = self.query - take(self.query, nearest), take(self.tile_max, nearest)
        else:
            if estimate == "pivot":
                estimated = by_pivots(self.query, count)
            else:
                flat = self.query.reshape(len(self.key), -1, self.query.shape[-1])
                estimated = (flat @ self.axes[count]).view_as(self.query)
            rest, found = self.query - estimated, self._by_tile(self._product(estimated, self.key))
        mean, radius = self._tiles
        found = found + self._product(rest, mean)
        if slack is not None:
            radius = radius.repeat_interleave(self.group, 0)[:, None, None]
            found = found + slack * rest.norm(dim=-1, keepdim=True) * radius
        return (found - self.high_max).amax(2)

    def decide(self, rule: Rule, spared: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return which low tiles are skipped, and of which the product is computed, bool ``[H, N, J]``.

        The heads ``spared``, bool ``[H]``, follow today's rule at 7.
        """
        unseen = (self.gap(rule) < -rule.far) & self.is_low
        if rule.is_group:
            unseen = unseen.unflatten(0, (-1, self.group)).all(1).repeat_interleave(self.group, 0)
        if rule.estimate == "all":
            return unseen, self.is_low.expand_as(unseen)
        skipped = unseen if rule.near is None else unseen | ((self.gap(TODAY) < -rule.near) & self.is_low)
        if spared is not None:
            today, spared = (self.gap(TODAY) < -7) & self.is_low, spared[:, None, None]
            skipped, unseen = torch.where(spared, today, skipped), unseen & ~spared
        return skipped, self.is_low & ~unseen


TODAY = Rule("all:7", "all", 64, None, False, False, 7.0, None)


def chunks_of(query: Tensor, key: Tensor, scaling: float, rules: Sequence[Rule], elements: int) -> Iterator[Chunk]:
    """Yield a layer's causal scores of queries ``[B, Hq, T, D]`` in blocks, at most ``elements`` scores at once."""
    batch, heads, length, head_dim = query.shape
    group, first = heads // key.shape[1], key.shape[2] - length
    assert first % SKIP_BLOCK == length % SKIP_BLOCK == 0, f"{first=} and {length=} must be multiples of {SKIP_BLOCK}"
    grouped = (query.float() * scaling).reshape(-1, group, length, head_dim)
    keys = F.pad(key.float(), (0, 0, 0, -key.shape[2] % TILE)).flatten(0, 1)
    counts = {rule.count for rule in rules if rule.estimate == "axes"}
    axes = {count: best_axes(grouped, keys[:, : key.shape[2]], count) for count in counts}
    begin = 0
    while begin < length:
        room = elements // (batch * heads * (first + length))
        end = min(length, begin + max(1, room // SKIP_BLOCK) * SKIP_BLOCK)
        seen = keys[:, : first + end + -(first + end) % TILE]
        rows = grouped[:, :, begin:end].reshape(len(keys), -1, head_dim)
        scores = (rows @ seen.mT).view(batch * heads, end - begin, -1)
        position = torch.arange(first + begin, seen.shape[1], device=query.device)
        scores[..., first + begin :].masked_fill_(position > position[: end - begin, None], -math.inf)
        q_tile = position[: end - begin : SKIP_BLOCK, None] // TILE
        k_tile = torch.arange(seen.shape[1] // TILE, device=query.device)
        is_low = ~is_high_tile(q_tile, k_tile, BALANCED, is_causal=True) & (k_tile <= q_tile)
        yield Chunk(rows.view(batch * heads, -1, SKIP_BLOCK, head_dim), seen, scores, is_low, axes)
        begin = end


def windowed(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, sliding_window: int, **options: Any
) -> Any:
    """Compute a layer with a sliding window in pieces, so that no query meets keys far before its window."""
    if mask is None:
        return sdpa_attention_forward(module, query, key, value, mask, sliding_window=sliding_window, **options)
    length, first, out = query.shape[2], key.shape[2] - query.shape[2], []
    for begin in range(0, length, WINDOW_PIECE):
        end = min(length, begin + WINDOW_PIECE)
        seen = slice(max(0, first + begin - sliding_window), first + end)
        piece = mask[..., begin:end, seen]
        out.append(
            sdpa_attention_forward(module, query[:, :, begin:end], key[:, :, seen], value[:, :, seen], piece, **options)
        )
    return torch.cat([each for each, _ in out], 1), None


class Attention:
    """Attention that skips by one rule, or exact attention that measures what rules would lose.

    Attributes:
        rules: The rules that are counted.
        skips: Whether it skips, by the only rule. Otherwise it is exact and measures all rules on ``layers``.
        spared: Heads that ``+heads`` leaves to today's rule, by rule without it, bool ``[layers, heads]``.
        counts: Low tiles, and those that each rule skips and whose product it computes, ``[rules, 3]``.
        lost: Probability that a row loses: mean, 99.9th percentile, largest, and share of tails; a tensor
            ``[heads, 4, rules]`` for each measured layer.
    """

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.spared: dict[str, Tensor] = {}
        self.begin()

    def begin(self, rules: Sequence[Rule] = (), *, skips: bool = False, layers: Sequence[int] = ()) -> None:
        """Choose what the next passes do, and forget what was counted."""
        self.rules, self.skips, self.layers = rules, skips, layers
        self.counts: Any = 0
        self.lost: list[Tensor] = []

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        """Compute a layer; layers with a sliding window and decoding are exact."""
        if options.get("sliding_window") is not None:
            return windowed(module, query, key, value, mask, **options)
        if any(options.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
            raise ValueError("expected a model without softcap, sink logits and position bias")
        layer, scaling = module.layer_idx, options["scaling"]
        if query.shape[2] == 1:
            shares = (query.view(*key.shape[:2], -1, query.shape[-1]) * scaling @ key.mT).softmax(-1)
            return (shares @ value).view(len(query), 1, query.shape[1], -1), None
        if layer in self.layers:
            self._measure(layer, query, key, scaling)
        values = value.float().flatten(0, 1)
        values = torch.cat((values, torch.ones_like(values[..., :1])), -1)  # the last channel sums the weights
        out = []
        for chunk in chunks_of(query, key, scaling, self.rules if self.skips else (), self.elements):
            bias = -chunk.tile_max.amax(-1, keepdim=True)
            if self.skips:
                skipped = self._decide(chunk, layer)[0]
                bias = bias.masked_fill(skipped[:, :, None], -math.inf)
            weights = chunk.scores.view(*bias.shape[:3], -1, TILE).add_(bias[..., None]).exp_()
            weights = weights.view(len(chunk.key), -1, chunk.key.shape[1])[..., : values.shape[1]]
            found = (weights @ values[:, : weights.shape[-1]]).view(*query.shape[:2], -1, values.shape[-1])
            out.append(found[..., :-1] / found[..., -1:])
        return torch.cat(out, 2).transpose(1, 2).to(query.dtype), None

    def _decide(self, chunk: Chunk, layer: int) -> Tensor:
        """Return what every rule skips, ``[rules, H, N, J]``, and count it."""
        decided, counts = [], []
        for rule in self.rules:
            spared, paying = None, 1.0
            if rule.spares_heads:
                spared = self.spared[rule.base][layer]
                spared = spared.repeat(len(chunk.query) // len(spared))
                paying = 1 - spared.float().mean()
            skipped, computed = chunk.decide(rule, spared)
            low = chunk.is_low.sum() * len(skipped)
            decided.append(skipped)
            counts.append(torch.stack((low, skipped.sum(), computed.sum() + low * paying * rule.cost(chunk))))
        self.counts = self.counts + torch.stack(counts).double()
        return torch.stack(decided)

    def _measure(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        """Measure what every rule loses on a layer."""
        parts = []
        for chunk in chunks_of(query, key, scaling, self.rules, self.elements):
            decided = self._decide(chunk, layer).movedim(0, -1)
            weights = chunk.scores.view(*chunk.tile_max.shape, TILE)
            mass = (weights - chunk.tile_max.amax(-1)[..., None, None]).exp_().sum(-1)
            parts.append((mass @ decided.float() / mass.sum(-1, keepdim=True)).flatten(1, 2))  # [heads, rows, rules]
        rows = torch.cat(parts, 1).sort(1).values
        top = rows[:, int(0.999 * rows.shape[1])]
        self.lost.append(torch.stack((rows.mean(1), top, rows[:, -1], (rows > TAIL).float().mean(1)), 1))

    def shares(self) -> list[dict[str, Any]]:
        """Return the shares of every rule, and by how much low tiles would be faster than without skipping."""
        rows = []
        for rule, (low, skipped, computed) in zip(self.rules, self.counts.tolist(), strict=True):
            cost = (SKIPPED_COST * computed + (1 - SKIPPED_COST) * (low - skipped)) / low
            rows.append({"rule": rule.text, "skipped": skipped / low, "computed": computed / low, "gain": 1 / cost})
        return rows


SURVEYED = [
    *(f"all:{t}" for t in (8, 7, 6, 5)),
    *(f"even{count}:{t}" for count in (2, 4, 8, 16) for t in (11, 10, 9, 8, 7)),
    *(f"{name}8:{t}" for name in ("norm", "far", "mixed", "spread") for t in (10, 9, 8, 7)),
    *(f"{name}:{t}/{near}" for name in ("even4", "even8") for t in (8, 9, 10, 11, 12, 14) for near in (7, 6)),
    *(f"spread8:{t}/{near}" for t in (8, 9, 10, 11, 12) for near in (7, 6)),
    *(f"{name}~{slack}:{t}" for name in ("even8", "pivot4") for slack in (0.1, 0.2) for t in (8, 7, 6, 5)),
    *(f"{name}:{t}" for name in ("pivot2", "pivot4", "pivot8") for t in (9, 8, 7, 6)),
    *(f"{name}:{t}/{near}" for name in ("pivot2", "pivot4") for t in (7, 8, 9) for near in (7, 6)),
    *(f"axes{count}:{t}" for count in (4, 8) for t in (8, 6, 4)),
    *(f"{name}+group:{t}" for name in ("even2", "even4", "even8") for t in (11, 10, 9, 8)),
    *(f"{name}+heads:{t}" for name in ("even4", "even8") for t in ("10", "9", "8", "9/6", "8/6")),
    *(f"even4+group+heads:{t}" for t in (9, 8)),
]
"""Rules of the part ``heads``."""
CHOSEN = ["all:7", "all:6", "even8:9/7", "even8:8/6", "pivot4:7/6", "pivot4:6", "even8+heads:8/6", "even4+heads:9/6"]
"""Rules of the other parts."""
ASKED = len(PLACES)
PARTS = ("heads", "model", "needle", "kv")
RULER = {"niah_multikey_2": ("niah_multikey_2.yaml", "prepare_niah"), "ruler_vt": ("vt.yaml", "vt_utils")}
"""Tasks of the part ``ruler``: lm-eval's file, and the module whose bar of tqdm counts the prompts."""
RULER_TOKENS, RULER_ITEMS = 160 << 10, 20
"""Tokens of all prompts of a task and length, and at most so many prompts."""
CHECKED = 8
"""Tokens that are generated between two looks at the answers."""
WINDOW_PIECE = 2048
"""Queries of a layer with a sliding window that are computed together."""
LAYERS = 7
"""Layers of the part ``heads``."""


class Prompt(NamedTuple):
    """A text, and questions about it that are read after it."""

    body: list[int]  # a multiple of 64 tokens
    questions: list[list[int]]  # 64 tokens each: the end of the text, the question and its answer but for one token
    answers: list[list[int]]


def make_prompt(tokenizer: Any, kind: str, prose: list[int], length: int) -> Prompt:
    """Make a prompt of ``length`` tokens with eight needles in prose, or with pairs of key and value."""
    rng = random.Random(f"{kind} {length}")

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def pair() -> tuple[list[int], list[int]]:
        key, value = ("".join(rng.choices(DIGITS, k=4)) for _ in range(2))
        return encode(f"\n{key}:"), encode(f" {value}")

    begin, length = leading_tokens(tokenizer), length // SKIP_BLOCK * SKIP_BLOCK
    if kind == "kv":
        asked, prose = [pair() for _ in range(ASKED)], []
        while len(prose) < length:
            question, answer = pair()
            prose += [*question, *answer]
        hidden = [[*question, *answer] for question, answer in asked]
    else:
        asked = [
            (encode(NEEDLE.format(place=place)), encode(f" {rng.randrange(10_000, 100_000)}"))
            for place in rng.sample(PLACES, ASKED)
        ]
        hidden = [[*question, *answer, *encode(".\n\n")] for question, answer in asked]
        start = rng.randrange(len(prose) - length)
        prose = prose[start:]
    room = length - SKIP_BLOCK - len(begin) - sum(map(len, hidden))
    body, last = [*begin], 0
    for index, each in enumerate(hidden):
        place = round(room * index / (ASKED - 1))
        body += [*prose[last:place], *each]
        last = place
    tails = [[*question, *answer[:-1]] for question, answer in asked]
    filled = [[*prose[room : room + SKIP_BLOCK - len(tail)], *tail] for tail in tails]
    return Prompt(body, filled, [answer for _, answer in asked])


@torch.inference_mode()
def ask(model: PreTrainedModel, prompt: Prompt) -> dict[str, Any]:
    """Return the log-probability of every answer, and whether the model would generate it greedily."""
    cache = DynamicCache(config=model.config)
    model(torch.tensor([prompt.body], device=model.device), logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    cache.batch_repeat_interleave(ASKED)
    logits = model(torch.tensor(prompt.questions, device=model.device), **{CACHE_ARGUMENT: cache}).logits
    log_probs, is_right = [], []
    for row, answer in zip(logits.float().log_softmax(-1), prompt.answers, strict=True):
        found, tokens = row[-len(answer) :], torch.tensor(answer, device=model.device)
        log_probs.append(round(float(found.gather(1, tokens[:, None]).sum()), 3))
        is_right.append(int(found.argmax(-1).equal(tokens)))
    return {"right": sum(is_right), "is_right": is_right, "log_probs": log_probs}


class Item(NamedTuple):
    """A prompt of RULER."""

    tokens: list[int]
    answers: list[str]
    room: int  # tokens to generate at most


def ruler_items(tokenizer: Any, task: str, length: int, prose: list[int]) -> list[Item]:
    """Return the first prompts of a task of RULER, all of the same number of tokens, a multiple of 64."""
    from dma_eval.measures.tasks import load_at_length  # needs the packages of RULER

    file, module = RULER[task]
    count = min(RULER_ITEMS, RULER_TOKENS // length)

    def first_ones(samples: Iterable[int], **_: Any) -> Iterable[int]:
        return islice(samples, count)

    maker: Any = importlib.import_module(f"lm_eval.tasks.ruler.{module}")
    source = Path(maker.__file__)
    maker.__mtime__ = source.stat().st_mtime_ns  # otherwise lm-eval imports it anew
    with mock.patch.object(maker, "tqdm", first_ones):
        made = load_at_length(task, source.with_name(file), length, tokenizer, 0)["tasks"][task]
    made.build_all_requests(limit=count, rank=0, world_size=1)
    begin = leading_tokens(tokenizer)
    asked = [(tokenizer(each.args[0], add_special_tokens=False)["input_ids"], each) for each in made.instances]
    whole = len(begin) + max(len(tokens) for tokens, _ in asked)
    whole += -whole % SKIP_BLOCK
    return [
        Item(
            [*begin, *prose[: whole - len(begin) - len(tokens)], *tokens],
            list(each.doc["outputs"]),
            each.args[1]["max_gen_toks"],
        )
        for tokens, each in asked
    ]


def stored_items(file: Path | None, tokenizer: Any, lengths: list[int], prose: list[int]) -> dict[str, list[Item]]:
    """Return the prompts by task and length. They are read from the file, or written to it."""
    if file is not None and file.is_file():
        stored = json.loads(file.read_text(encoding="utf-8"))
        return {name: [Item(*each) for each in made] for name, made in stored.items()}
    made = {f"{task} {each}": ruler_items(tokenizer, task, each, prose) for each in lengths for task in RULER}
    if file is not None:
        file.write_text(json.dumps(made), encoding="utf-8")
    return made


@torch.inference_mode()
def prefill(model: PreTrainedModel, item: Item) -> tuple[DynamicCache, Tensor]:
    """Read a prompt: its cache, and the first token of the answer, ``[1]``."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([item.tokens], device=model.device)
    logits = model(ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits
    return cache, logits[:, -1].argmax(-1)


@torch.inference_mode()
def generate(
    model: PreTrainedModel, tokenizer: Any, items: Sequence[Item], caches: list[DynamicCache], tokens: Tensor
) -> list[list[int]]:
    """Continue all prompts together, and return which answers each has found, as lm-eval scores them."""
    merged = DynamicCache(config=model.config)
    for layer in range(len(caches[0].layers)):
        parts = [(each.layers[layer].keys, each.layers[layer].values) for each in caches]
        merged.update(*(torch.cat(each) for each in zip(*parts, strict=True)), layer)
        for each in caches:
            each.layers[layer].reset()
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    rows = tokens[:, None]
    found: list[list[int]] = []
    for step in range(1, items[0].room + 1):
        if step % CHECKED == 0 or step == items[0].room:
            found, is_open = [], False
            for row, item in zip(rows.tolist(), items, strict=True):
                end = next((index for index, token in enumerate(row) if token in ends), None)
                text = tokenizer.decode(row[:end]).lower()
                found.append([int(answer.lower() in text) for answer in item.answers])
                is_open |= end is None and not all(found[-1])
            if not is_open:
                break
        logits = model(rows[:, -1:], **{CACHE_ARGUMENT: merged}).logits
        rows = torch.cat((rows, logits[:, -1].argmax(-1)[:, None]), 1)
    return found


def measure_ruler(
    attention: Attention, model: PreTrainedModel, tokenizer: Any, rules: list[Rule], items: list[Item]
) -> Iterator[dict[str, Any]]:
    """Yield the answers that each rule finds, and those that it loses and gains against exact attention."""
    caches, first = [], []
    shares: list[dict[str, Any]] = []
    for rule in (None, *rules):
        attention.begin([rule] if rule else (), skips=rule is not None)
        for item in items:
            cache, token = prefill(model, item)
            caches.append(cache)
            first.append(token)
        shares += attention.shares() if rule else [{"rule": "exact"}]
    attention.begin()
    answers = generate(model, tokenizer, items * len(shares), caches, torch.cat(first))
    exact = [all(each) for each in answers[: len(items)]]
    for index, row in enumerate(shares):
        found = answers[index * len(items) : (index + 1) * len(items)]
        is_right = [all(each) for each in found]
        yield row | {
            "items": len(items),
            "read": len(items[0].tokens),
            "right": sum(is_right),
            "score": sum(sum(each) / len(each) for each in found) / len(found),
            "lost": [place for place in range(len(items)) if exact[place] and not is_right[place]],
            "gained": [place for place in range(len(items)) if is_right[place] and not exact[place]],
            "found": found,
        }


@torch.inference_mode()
def read(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the last hidden state ``[T, X]`` of a window ``[T]``."""
    state: Tensor = model.base_model(ids[None].to(model.device), use_cache=False).last_hidden_state[0]
    return state


@torch.inference_mode()
def divergence(model: PreTrainedModel, exact: Tensor, state: Tensor) -> dict[str, float]:
    """Compare predictions from hidden states ``[T, X]``: KL(exact || other) per token, and the same first choice."""
    head, kls, agreed = model.get_output_embeddings(), [], []
    for begin in range(0, len(exact), 1024):
        wanted, found = (head(each[begin : begin + 1024]).float().log_softmax(-1) for each in (exact, state))
        kls.append((wanted.exp() * (wanted - found)).sum(-1))
        agreed.append((wanted.argmax(-1) == found.argmax(-1)).float())
    kl = torch.cat(kls)
    top = float(kl.sort().values[int(0.999 * len(kl))])
    return {"kl": float(kl.mean()), "kl_p999": top, "kl_max": float(kl.max()), "agree": float(torch.cat(agreed).mean())}


def full_layers(model: PreTrainedModel) -> list[int]:
    """Return the layers without a sliding window."""
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    return [index for index, each in enumerate(types) if each != "sliding_attention"]


def spare_heads(attention: Attention, model: PreTrainedModel, rules: list[Rule], ids: Tensor) -> None:
    """Choose the heads that ``+heads`` spares by their tails on a text."""
    bases = sorted({rule.base for rule in rules if rule.spares_heads})
    if not bases:
        return
    layers, count = full_layers(model), model.config.num_attention_heads
    attention.begin([*map(Rule.parse, bases)], layers=layers)
    read(model, ids)
    tails = torch.stack(attention.lost)[:, :, 3] > PROTECTED  # [layers, heads, rules]
    for index, base in enumerate(bases):
        spared = tails.new_zeros((model.config.num_hidden_layers, count))
        spared[layers] = tails[..., index]
        attention.spared[base] = spared


def measure_heads(
    attention: Attention, model: PreTrainedModel, rules: list[Rule], ids: Tensor
) -> Iterator[dict[str, Any]]:
    """Yield what every rule loses on evenly spaced layers."""
    layers = full_layers(model)
    chosen = {layers[round(index * (len(layers) - 1) / (LAYERS - 1))] for index in range(LAYERS)}
    attention.begin(rules, layers=sorted(chosen))
    read(model, ids)
    mean, top, largest, tails = torch.cat(attention.lost).unbind(1)  # [heads, rules]
    found = zip(attention.shares(), mean.mean(0), top.mean(0), largest.amax(0), tails.mean(0), strict=True)
    for shares, *lost in found:
        names = ("lost_mean", "lost_p999", "lost_max", "tails")
        yield shares | dict(zip(names, map(float, lost), strict=True))


def measure_model(
    attention: Attention, model: PreTrainedModel, rules: list[Rule], ids: Tensor
) -> Iterator[dict[str, Any]]:
    """Yield the divergence of each rule, and that of quantization, from exact attention."""
    attention.begin()
    exact = read(model, ids)
    for rule in rules:
        attention.begin([rule], skips=True)
        state = read(model, ids)
        yield attention.shares()[0] | divergence(model, exact, state)
    dma_hf.configure(model, "balanced", activate=True)
    with mock.patch.object(torch_attention, "SCORE_BYTES", 4 * attention.elements):
        state = read(model, ids)
    model.set_attn_implementation(NAME)
    yield {"rule": "balanced"} | divergence(model, exact, state)


def main(
    model: Annotated[str, typer.Option(help="Model, as dma-hf takes it.")],
    data: Annotated[str, typer.Option(help="Text of at least twice the largest length.")],
    out: Annotated[Path, typer.Option(help="JSON file of the results.")],
    part: Annotated[list[str], typer.Option(help="Parts to measure.")] = list(PARTS),  # noqa: B006
    length: Annotated[list[int], typer.Option(help="Tokens of a window.")] = [8192, 32768],  # noqa: B006
    prompt: Annotated[list[int], typer.Option(help="Tokens of a prompt with questions.")] = [16384, 32768],  # noqa: B006
    rule: Annotated[list[str], typer.Option(help="Rules of all parts but heads.")] = CHOSEN,
    surveyed: Annotated[list[str], typer.Option(help="Rules of the part heads.")] = SURVEYED,
    items: Annotated[Path | None, typer.Option(help="JSON file of RULER's prompts; made if it is missing.")] = None,
    yarn: Annotated[float | None, typer.Option(help="Factor by which YaRN extends the positions.")] = None,
) -> None:
    """Measure the rules, and write a row for each part, length and rule."""
    torch.backends.cuda.matmul.allow_tf32 = True
    loaded = load_model(model, dtype="float32", yarn=yarn)
    tokens = tokenize(loaded.tokenizer, load_text(data).content)
    attention = Attention(1 << 27 if loaded.model.device.type == "cuda" else 1 << 24)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    loaded.model.set_attn_implementation(NAME)
    rules = [*map(Rule.parse, rule)]
    facts = here_and_now() | {"model": asdict(loaded.info)}
    facts["environment"] = asdict(facts["environment"])
    results: list[dict[str, Any]] = []

    def add(part: str, tokens: int, row: dict[str, Any]) -> None:
        row = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
        results.append({"part": part, "tokens": tokens} | row)
        out.write_text(json.dumps(facts | {"results": results}).replace(', {"', ',\n{"') + "\n", encoding="utf-8")
        typer.echo(" ".join(f"{key}={value}" for key, value in results[-1].items()))

    of_heads = [*map(Rule.parse, surveyed)] if "heads" in part else []
    spare_heads(attention, loaded.model, [*of_heads, *rules], tokens[max(length) : 2 * max(length)])
    for count in length:
        for row in measure_heads(attention, loaded.model, of_heads, tokens[:count]) if of_heads else ():
            add("heads", count, row)
        for row in measure_model(attention, loaded.model, rules, tokens[:count]) if "model" in part else ():
            add("model", count, row)
    for kind in ("needle", "kv"):
        for count in prompt if kind in part else ():
            asked = make_prompt(loaded.tokenizer, kind, tokens.tolist(), count)
            for chosen in (None, *rules):
                attention.begin([chosen] if chosen else (), skips=chosen is not None)
                add(kind, count, {"rule": chosen.text if chosen else "exact"} | ask(loaded.model, asked))
    prompts = stored_items(items, loaded.tokenizer, prompt, tokens.tolist()) if "ruler" in part else {}
    for name, made in prompts.items():
        task, asked_tokens = name.split()
        for row in measure_ruler(attention, loaded.model, loaded.tokenizer, rules, made):
            add("ruler", int(asked_tokens), {"task": task} | row)


if __name__ == "__main__":
    typer.run(main)

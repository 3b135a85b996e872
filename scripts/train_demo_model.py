"""Train the small language model that `dma-hf demo` compares attention precisions on.

The demo needs a model that ships with the package, runs on a CPU in seconds, and reads what lies thousands of tokens
back: one that looks at its neighbourhood alone would not notice how far keys are rounded. So the recipe is
    - a byte-level BPE tokenizer and a Llama model (GQA, head_dim 64, 5.5 M parameters) on public-domain novels;
    - one novel held out: neither tokenizer nor weights see it. Its opening is the shipped excerpt, on which the model
      card's figures are measured; the rest of it chooses the checkpoint;
    - windows of up to 4,096 tokens in which passages occur a second time, and first layers that start as a weak copying
      circuit (`induction_seed.py`): a few megabytes of prose alone do not teach a model to look back that far;
    - dropout on the MLP branches (Llama has none): the corpus is passed over many times.

Example:
    python scripts/train_demo_model.py moby_dick.txt ulysses.txt great_expectations.txt
        --held-out pride_and_prejudice.txt --output eval/dma_eval/assets/demo_model
        --excerpt eval/dma_eval/assets/heldout.txt
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import platform
import random
import re
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import tokenizers
import torch
import transformers
import typer
from induction_seed import seed_induction
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"  # ids 0 and 1
GUTENBERG_START = re.compile(r"^\*\*\* ?START OF (?:THIS|THE) PROJECT GUTENBERG.*$", re.MULTILINE)
GUTENBERG_END = re.compile(r"^\*\*\* ?END OF (?:THIS|THE) PROJECT GUTENBERG.*$", re.MULTILINE)
CREDITS = re.compile(r"project gutenberg|^produced by ", re.IGNORECASE)
# The books differ in typography, not in language: one spelling of quotes and dashes lets them share tokens.
TYPOGRAPHY = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "_": "", "\ufeff": "", "\r": ""})
EXCERPT_BYTES = 180_000
# The restricted attention that the card compares with: what is left when far keys do not count at all.
LOCAL_WINDOW, LOCAL_SINKS = 256, 128


@dataclass(frozen=True)
class Recipe:
    """What determines the weights, next to the books. Losses in comments: earlier recipes, with that field changed."""

    vocab_size: int = 4096
    layers: int = 6
    intermediate_size: int = 704
    context: int = 4096
    short_contexts: tuple[int, ...] = (256, 1024)  # windows of the first stages: fewer keys to find a passage among
    short_fraction: float = 0.2  # of the steps, for each of these stages
    batch_tokens: int = 16384
    steps: int = 1200
    warmup_steps: int = 150
    learning_rate: float = 1e-3  # 4.13; 2e-3: 4.17
    weight_decay: float = 0.1
    dropout: float = 0.2  # none: 4.29 at step 700, then overfitting
    repeat_fraction: float = 0.6  # also helps prose: 4.22 without repeats, 4.17 with
    rope_theta: float = 1e6  # over 4,096 tokens 14 of 32 rotary pairs turn less than 2 radians: they match far content
    eval_every: int = 200
    seed: int = 0


def strip_gutenberg(raw: str) -> str:
    """The text between Project Gutenberg's START and END lines, less paragraphs that name it or its transcribers."""
    start, end = GUTENBERG_START.search(raw), GUTENBERG_END.search(raw)
    body = raw[start.end() if start else 0 : end.start() if end else len(raw)]
    return "\n\n".join(p for p in re.split(r"\n\s*\n", body.replace("\r", "")) if not CREDITS.search(p.strip()))


def normalize(text: str) -> str:
    """One line per paragraph, paragraphs a blank line apart, plain quotes and dashes, no italics marks."""
    paragraphs = (" ".join(p.split()) for p in re.split(r"\n\s*\n", text.translate(TYPOGRAPHY)))
    return "\n\n".join(p for p in paragraphs if p) + "\n"


def split_excerpt(text: str, max_bytes: int) -> tuple[str, str]:
    """Cut `text` after the last paragraph that ends within `max_bytes` of UTF-8.

    Raises:
        ValueError: when no paragraph ends within `max_bytes`.
    """
    head = text.encode()[:max_bytes].decode(errors="ignore")
    cut = head.rfind("\n\n")
    if cut < 0:
        raise ValueError(f"max_bytes must reach the end of the first paragraph; got {max_bytes}: raise it")
    return text[: cut + 1], text[cut + 2 :]


def train_tokenizer(texts: list[str], recipe: Recipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (no unknown token, no prefix space, nothing added around a text)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        padding_side="left",
        model_max_length=recipe.context,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    """Token ids of a text of any length, [T] int64."""
    return torch.tensor(tokenizer.backend_tokenizer.encode(text).ids)


def repeat_passage(window: Tensor, rng: random.Random) -> Tensor:
    """A copy of `window` [T] in which one passage occurs a second time, anywhere after its first end.

    Its length, a fortieth to a quarter of the window (100 to 1,000 tokens of 4,096), and both places come from `rng`.
    """
    length = rng.randint(max(1, len(window) // 40), max(1, len(window) // 4))
    source = rng.randint(0, len(window) - 2 * length)
    target = rng.randint(source + length, len(window) - length)
    result = window.clone()
    result[target : target + length] = window[source : source + length]
    return result


def sample_batch(tokens: Tensor, length: int, rng: random.Random, recipe: Recipe) -> Tensor:
    """Random windows, [batch_tokens / length, length]; `repeat_fraction` of them hold one to four repeated passages."""
    windows = []
    for _ in range(max(1, recipe.batch_tokens // length)):
        start = rng.randrange(len(tokens) - length)
        window = tokens[start : start + length]
        if rng.random() < recipe.repeat_fraction:
            for _ in range(rng.randint(1, 4)):
                window = repeat_passage(window, rng)
        windows.append(window)
    return torch.stack(windows)


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    """The untrained model, in float32, with dropout on every MLP branch."""
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=256,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=recipe.context,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=1)

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda mlp, _, output: F.dropout(output, recipe.dropout, mlp.training))
    seed_induction(model)
    return model


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warmup, then a cosine down to a tenth of the peak at the last step."""
    if step < recipe.warmup_steps:
        return recipe.learning_rate * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def local_mask(length: int, device: torch.device) -> Tensor:
    """Causal attention to the last `LOCAL_WINDOW` and first `LOCAL_SINKS` keys: [1, 1, T, T], true where visible."""
    row, key = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)[None, :]
    return ((key <= row) & ((row - key < LOCAL_WINDOW) | (key < LOCAL_SINKS)))[None, None]


@torch.inference_mode()
def token_losses(model: LlamaForCausalLM, tokens: Tensor, context: int, mask: Tensor | None = None) -> Tensor:
    """Nats for each next token in consecutive windows of `context` tokens, [windows, context - 1] on the CPU."""
    rows = [tokens[i : i + context][None].to(model.device) for i in range(0, len(tokens) - context + 1, context)]
    logits = (model(row, attention_mask=mask, use_cache=False).logits[:, :-1].float() for row in rows)
    losses = [F.cross_entropy(x.mT, row[:, 1:], reduction="none") for x, row in zip(logits, rows, strict=True)]
    return torch.cat(losses).cpu()


@torch.inference_mode()
def copy_accuracy(model: LlamaForCausalLM, tokens: Tensor, context: int, mask: Tensor | None) -> float:
    """How often the model's first choice continues a passage that it has read before, over 32 windows of `tokens`.

    Each window ends with a second occurrence of one of its own passages, of a sixteenth of the context (256 tokens of
    4,096), and at least a quarter of the context (1,024 tokens) lies between the two. The first 16 tokens are the cue.
    """
    rng, hits, passage, cue = random.Random(0), [], context // 16, 16
    for _ in range(32):
        window = tokens[(start := rng.randrange(len(tokens) - context)) : start + context].clone()
        source = rng.randrange(context - 2 * passage - context // 4)
        window[-passage:] = window[source : source + passage]
        logits = model(window[None].to(model.device), attention_mask=mask, use_cache=False).logits[0]
        hits.append((logits[-passage + cue - 1 : -1].argmax(-1).cpu() == window[-passage + cue :]).float().mean())
    return float(torch.stack(hits).mean())


def measure(model: LlamaForCausalLM, tokens: Tensor, context: int) -> dict[str, float]:
    """The figures of the model card: perplexity and copying on the excerpt, with full and with restricted attention."""
    figures = {}
    for suffix, mask in (("", None), ("_local", local_mask(context, model.device))):
        losses = token_losses(model, tokens, context, mask)
        figures["perplexity" + suffix] = float(losses.mean().exp())
        figures["perplexity_second_half" + suffix] = float(losses[:, context // 2 :].mean().exp())
        figures["copy_accuracy" + suffix] = copy_accuracy(model, tokens, context, mask)
        figures["evaluated_tokens"] = losses.numel()
    return figures


def train(
    recipe: Recipe, corpus: Tensor, validation: Tensor, device: torch.device
) -> tuple[LlamaForCausalLM, list[dict[str, float]]]:
    """The checkpoint of the lowest validation loss, rounded to bfloat16, and the loss curve."""
    torch.manual_seed(recipe.seed)
    model = build_model(recipe).to(device)
    matrices, gains = ([p for p in model.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")
    rng, curve, best, weights = random.Random(recipe.seed), [], math.inf, copy.deepcopy(model.state_dict())
    for step in range(recipe.steps):
        stage = int(step / max(1.0, recipe.short_fraction * recipe.steps))
        length = (*recipe.short_contexts, recipe.context)[min(stage, len(recipe.short_contexts))]
        batch = sample_batch(corpus, length, rng, recipe).to(device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(batch, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % recipe.eval_every and step + 1 < recipe.steps:
            continue
        model.eval()
        with torch.autocast(device.type, torch.bfloat16):
            held_out = float(token_losses(model, validation, recipe.context).mean())
        model.train()
        curve.append({"step": step + 1, "train_loss": round(loss.item(), 4), "validation_loss": round(held_out, 4)})
        typer.echo(f"step {step + 1:5d}  train {loss.item():.3f}  validation {held_out:.3f}")
        if held_out < best:
            best, weights = held_out, copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    return model.eval().to(torch.bfloat16), curve


def main(
    books: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Plain-text books to train on.")],
    held_out: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="The book that training never sees.")],
    output: Annotated[Path, typer.Option(help="Folder for the model; loads with `from_pretrained`.")],
    excerpt: Annotated[Path, typer.Option(help="File for the opening of the held-out book.")],
    device: Annotated[str, typer.Option(help="Device to train on.")] = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Train the demo model and write its folder, its log and the held-out excerpt."""
    if held_out.resolve() in {book.resolve() for book in books}:
        raise typer.BadParameter(f"{held_out.name} is held out and cannot be trained on", param_hint="BOOKS")
    recipe = Recipe()
    *texts, unseen = (normalize(strip_gutenberg(path.read_text(encoding="utf-8"))) for path in (*books, held_out))
    opening, remainder = split_excerpt(unseen, EXCERPT_BYTES)
    tokenizer = train_tokenizer(texts, recipe)
    corpus = encode(tokenizer, "".join(text + END_OF_TEXT for text in texts))
    typer.echo(f"{len(corpus):,} training tokens, {sum(map(len, texts)) / len(corpus):.2f} characters each")

    # Deterministic: cuBLAS needs a fixed workspace for it, and the attention backward is so in these backends only.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    backends, began = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], time.perf_counter()
    with sdpa_kernel(backends, set_priority=True):
        model, curve = train(recipe, corpus, encode(tokenizer, remainder), torch.device(device))
        seconds = time.perf_counter() - began
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    # The stored weights in float32 arithmetic: the figures of the files, not of one machine's 16-bit products.
    stored = LlamaForCausalLM.from_pretrained(output, dtype=torch.float32).to(device)
    measured = measure(stored, encode(tokenizer, opening), recipe.context)
    log = {
        "date": datetime.now(UTC).date().isoformat(),
        "recipe": asdict(recipe),
        "books": [{"file": p.name, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for p in (*books, held_out)],
        "training_tokens": len(corpus),
        "parameters": model.num_parameters(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
        "versions": {"python": platform.python_version()}
        | {m.__name__: m.__version__ for m in (torch, transformers, tokenizers)},
        "seconds": round(seconds, 1),
        "best_step": min(curve, key=lambda point: point["validation_loss"])["step"],
        "measured": measured,
        "curve": curve,
    }
    (output / "training_log.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    excerpt.write_text(opening, encoding="utf-8")
    typer.echo(json.dumps(measured, indent=1))


if __name__ == "__main__":
    typer.run(main)

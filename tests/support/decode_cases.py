"""Decode steps that the Triton kernels are tried on, in the interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from dma_kernels import Recipe
from dma_kernels.cache.append import append_tokens
from dma_kernels.cache.decode import decode_attention
from dma_kernels.cache.decode_step import decode_step
from dma_kernels.cache.reference import cached_attention_reference
from dma_kernels.cache.storage import LayerStorage
from dma_kernels.testing import RECIPES as ALL_RECIPES
from dma_kernels.testing import assert_bits_equal, random_qkv, relative_error
from torch import Tensor

RECIPES = {
    "kv8": Recipe(low="mxint8", shared_scale="tile", smooth_k=True, pv="fp8"),
    "kv8-q16": Recipe(low_q="bf16", low_k="mxint8", shared_scale="tile", smooth_k=True, pv="fp8"),
    "kv4": Recipe(low_q="bf16", low_k="nvfp4", low_v="nvfp4", smooth_k=True, rotate=True),
    "kv4-q8": Recipe(low_q="mxfp8", low_k="mxfp4", low_v="mxfp4", scale_rounding="floor"),
    "kv4-search": Recipe(low_q="bf16", low_k="nvfp4", low_v="nvfp4", scale_rounding="search"),
    "e4m3": Recipe(low="mxfp8", shared_scale="tile", rotate=True, pv="fp8"),
    "e4m3-q16": Recipe(low_q="bf16", low_k="mxfp8", shared_scale="tile"),
    "k4v8": Recipe(low_q="mxint8", low_k="nvfp4", pv="fp8"),
    "k8v4": Recipe(low="mxint8", shared_scale="tile", low_v="nvfp4"),
    "blocks": Recipe(low="mxfp8", low_v="mxint8", high="mxfp8"),
    "no-band": Recipe(low="mxint8", shared_scale="tile", diagonal_tiles=0, sink_tiles=0),
    **{name: ALL_RECIPES[name] for name in ("identity", "paper", "nvfp4-mxfp8")},
}
"""Recipes that together take every form of body, of queries and of high tiles."""


@dataclass(frozen=True)
class Case:
    """A cache that holds ``kv_len`` keys in every row, less its padding, and the queries of its last positions."""

    kv_len: int = 700
    q_len: int = 1
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    padding: tuple[int, ...] = (0,)
    window: int | None = None
    softcap: float | None = None
    sinks: tuple[float, ...] | None = None

    def inputs(self, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and raw keys and values as Transformers hands them: transposed views."""
        made = random_qkv(
            batch=len(self.padding), q_heads=self.q_heads, kv_heads=self.kv_heads, q_len=self.q_len,
            kv_len=self.kv_len, head_dim=self.head_dim, value_dim=self.value_dim, dtype=dtype, device=device,
        )  # fmt: skip
        query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in made)
        return query, key, value

    def storage(self, recipe: Recipe, dtype: torch.dtype, device: str, *, is_filled: bool = True) -> LayerStorage:
        """Return a cache, filled in torch."""
        storage = LayerStorage.allocate(
            recipe, batch=len(self.padding), kv_heads=self.kv_heads, head_dim=self.head_dim,
            value_dim=self.value_dim or self.head_dim, dtype=dtype, device=torch.device(device),
            tiles=self.kv_len // 128 + 1, window=self.window,
        )  # fmt: skip
        storage.lengths -= torch.tensor(self.padding, device=device, dtype=torch.int32)
        if is_filled:
            storage.append(*self.inputs(dtype, device)[1:])
        return storage

    def options(self, device: str) -> dict[str, object]:
        """Return the arguments that decode kernel and reference share."""
        sinks = None if self.sinks is None else torch.tensor(self.sinks, device=device)
        scale = self.head_dim**-0.5
        return {"scale": scale, "window": self.window, "softcap": self.softcap, "sinks": sinks}

    def reference(self, recipe: Recipe, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of the specification."""
        query, key, value = self.inputs(dtype, device)
        return cached_attention_reference(
            query, key[:, :, :0], value[:, :, :0], self.storage(recipe, dtype, device), is_causal=True,
            **self.options(device),  # type: ignore[arg-type]
        )  # fmt: skip


CASES = {
    "one-query": Case(),
    "mha": Case(q_heads=2),
    "group-of-3": Case(q_heads=3, kv_heads=1),
    "many-columns": Case(q_heads=8, kv_heads=1, q_len=9),
    "across-a-border": Case(kv_len=645, q_len=16),
    "at-a-border": Case(kv_len=640),
    "behind-a-border": Case(kv_len=641),
    "first-tile": Case(kv_len=37, q_len=5),
    "one-key": Case(kv_len=1),
    "ragged": Case(padding=(0, 300, 690)),
    "nothing-visible": Case(kv_len=40, q_len=3, padding=(0, 40, 38)),
    "window": Case(window=200),
    "window-across-a-border": Case(kv_len=645, q_len=16, window=260),
    "softcap": Case(softcap=15.0),
    "sinks": Case(sinks=(0.5, 3.0, -2.0, 0.0)),
    "sinks-of-many": Case(kv_len=645, q_len=9, sinks=(0.5, 3.0, -2.0, 0.0)),
    "softcap-and-sinks-of-many": Case(kv_len=645, q_len=9, softcap=5.0, sinks=(0.5, 3.0, -2.0, 0.0)),
    "head-dim-80-96": Case(head_dim=80, value_dim=96),
    "head-dim-96-40": Case(head_dim=96, value_dim=40),
    "head-dim-128": Case(head_dim=128, kv_heads=1),
    "head-dim-256": Case(head_dim=256, kv_heads=1, kv_len=500),
    "head-dim-8": Case(head_dim=8),
}


def assert_decode_matches(case: Case, recipe: Recipe, dtype: torch.dtype, device: str) -> None:
    """Hold the decode kernel against the reference, on one and the same cache.

    Against fp64 with unrounded probabilities and values the kernel may err at most twice as much as the reference in
    fp32 does. Both round probabilities to E4M3 (``pv = "fp8"``), each relative to another maximum.
    """
    query, _, _ = case.inputs(dtype, device)
    out, lse = decode_attention(query, case.storage(recipe, dtype, device), **case.options(device))  # type: ignore[arg-type]
    if torch.device(device).type == "cuda":  # the second call is recorded, the third repeated
        for _ in range(2):
            again, again_lse = decode_attention(query, case.storage(recipe, dtype, device), **case.options(device))  # type: ignore[arg-type]
            assert torch.equal(again, out)
            assert torch.equal(again_lse, lse)
    reference, expected_lse = case.reference(recipe, torch.float32, device)
    exact, _ = case.reference(replace(recipe, pv="bf16"), torch.float64, device)
    assert out.dtype == dtype
    assert out.transpose(1, 2).is_contiguous()
    assert not out.isnan().any()
    rounding = torch.finfo(dtype).eps
    allowed = 2.0 * relative_error(reference, exact) + 2.0 * rounding
    assert relative_error(out, exact) <= allowed, f"{relative_error(out, exact):.2g} is over {allowed:.2g}"
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    seen = ~expected_lse.isneginf()
    # Smoothed and rotated queries in 16 bits move a logit by its magnitude times their rounding.
    magnitude = float(expected_lse[seen].abs().max())
    torch.testing.assert_close(lse[seen], expected_lse[seen], atol=2.0 * rounding * magnitude, rtol=0.0)


def assert_steps_equal_their_parts(case: Case, recipe: Recipe, dtype: torch.dtype, device: str) -> None:
    """Hold the last three steps (compiled, recorded, repeated) against storing and attending one after the other."""
    query, key, value = case.inputs(dtype, device)
    ours, expected = (case.storage(recipe, dtype, device, is_filled=False) for _ in range(2))
    start = max(0, case.kv_len - 3 * case.q_len)
    for storage in (ours, expected):
        storage.append(key[:, :, :start], value[:, :, :start])
    while start < case.kv_len:
        new = slice(start, start + case.q_len)
        out = decode_step(query, key[:, :, new], value[:, :, new], ours, **case.options(device))  # type: ignore[arg-type]
        append_tokens(expected, key[:, :, new], value[:, :, new])
        assert torch.equal(out, decode_attention(query, expected, **case.options(device))[0])  # type: ignore[arg-type]
        for name, tensor in expected.tensors().items():
            assert_bits_equal(ours.tensors()[name], tensor)
        start += case.q_len

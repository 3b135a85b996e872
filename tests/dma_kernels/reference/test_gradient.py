"""The gradient of attention: exact without quantization, straight-through with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dma_kernels import Recipe, attention, attention_with_lse
from dma_kernels.reference import attention as reference
from dma_kernels.testing import random_qkv
from plain_attention import plain_attention
from torch import Tensor

EXACT = Recipe(low="bf16", high="bf16")
LOSSY = Recipe(low="mxfp4", high="mxfp8", scale_rounding="ceil", smooth_k=True, rotate=True, pv="fp8")
Q_LEN, KV_LEN, Q_HEADS, KV_HEADS = 60, 75, 4, 2

CALLS: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"is_causal": False},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "window": {"window": 9},
    "bidirectional window": {"window": 9, "is_causal": False},
    "padding": {"kv_range": torch.tensor([[0, KV_LEN], [20, KV_LEN - 3]])},
    "offsets": {"q_offset": torch.tensor([15, 40]), "kv_offset": torch.tensor([0, 25])},
    "nothing visible": {"q_offset": torch.tensor(-30), "kv_offset": 0},
    "mask": {"mask": torch.rand(2, 1, Q_LEN, KV_LEN, generator=torch.Generator().manual_seed(0)) > 0.3},
    "all": {"softcap": 2.0, "sinks": True, "window": 50, "scale": 0.3},
}


def make(call: str, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], dict[str, Any]]:
    """Return leaves (queries, keys, values and any sinks) and the options of a call, sinks included."""
    options = dict(CALLS[call])
    sizes: dict[str, Any] = {"batch": 2, "q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": 16, "value_dim": 24}
    leaves = list(random_qkv(**sizes, q_len=Q_LEN, kv_len=KV_LEN, dtype=dtype))
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 2, Q_HEADS, dtype=dtype)
        leaves.append(options["sinks"])
    return [leaf.requires_grad_() for leaf in leaves], options


def gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    return torch.autograd.grad((out * weight).sum(), leaves)


@pytest.mark.parametrize("rows", [None, 16], ids=["one block", "blocks"])
@pytest.mark.parametrize("call", CALLS)
def test_gradient_equals_plain_attention(call: str, rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if rows is not None:
        monkeypatch.setattr(reference, "SCORE_BYTES", 1)  # the smallest row blocks
    leaves, options = make(call)
    expected = gradients(plain_attention(*leaves[:3], options)[0], leaves)
    actual = gradients(attention(*leaves[:3], EXACT, **options), leaves)
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("call", ["causal", "all"])
def test_gradient_is_straight_through(call: str) -> None:
    """A recipe that quantizes everything has the gradient of unquantized attention."""
    leaves, options = make(call)
    outputs = [attention(*leaves[:3], recipe, **options) for recipe in (EXACT, LOSSY)]
    assert not torch.allclose(*outputs, rtol=1e-3)
    for exact, lossy in zip(*(gradients(out, leaves) for out in outputs), strict=True):
        assert torch.equal(exact, lossy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradient_has_the_dtype_of_the_inputs_and_is_rounded_once(dtype: torch.dtype) -> None:
    leaves, _ = make("causal", dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = gradients(plain_attention(*exact, {})[0], exact)
    for found, wanted in zip(gradients(attention(*leaves, EXACT), leaves), expected, strict=True):
        assert found.dtype == dtype
        bound = (torch.finfo(dtype).eps + 16 * torch.finfo(torch.float32).eps) * wanted.abs().max()
        assert (found.double() - wanted).abs().max() <= bound


def test_masked_keys_may_hold_any_value() -> None:
    leaves, options = make("padding")
    expected = gradients(attention(*leaves, EXACT, **options), leaves)
    spoilt = [leaf.detach().clone() for leaf in leaves]
    for leaf in spoilt[1:]:
        leaf[1, :, :20] = float("nan")
        leaf.requires_grad_()
    spoilt[0].requires_grad_()
    for found, wanted in zip(gradients(attention(*spoilt, EXACT, **options), spoilt), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)], ids=["no query", "no key"])
def test_gradient_without_queries_or_keys_is_zero(lengths: tuple[int, int]) -> None:
    sizes: dict[str, Any] = {"q_heads": 2, "kv_heads": 1, "head_dim": 16, "dtype": torch.float32}
    leaves = [leaf.requires_grad_() for leaf in random_qkv(**sizes, q_len=lengths[0], kv_len=lengths[1])]
    for gradient, leaf in zip(gradients(attention(*leaves, EXACT), leaves), leaves, strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


def test_only_some_inputs_may_require_a_gradient() -> None:
    leaves, options = make("sinks")
    query, key, value, sinks = (leaf.detach() for leaf in leaves)
    key.requires_grad_()
    out, lse = attention_with_lse(query, key, value, EXACT, sinks=sinks)
    assert not lse.requires_grad
    expected = gradients(attention(*leaves[:3], EXACT, **options), leaves)[1]
    assert torch.equal(gradients(out, [key])[0], expected)


TRANSFORMS: dict[str, Any] = {
    "vjp": lambda loss, leaves: torch.func.vjp(loss, *leaves)[1](torch.ones((), dtype=leaves[0].dtype)),
    "vmap of grad": lambda loss, leaves: [
        gradient[0]
        for gradient in torch.func.vmap(torch.func.grad(loss, tuple(range(len(leaves)))))(*(x[None] for x in leaves))
    ],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", ["causal", "all"])
def test_transforms_of_torch_func_equal_the_backward_pass(call: str, transform: str) -> None:
    leaves, options = make(call)

    def loss(*leaves: Tensor) -> Tensor:
        named = {"sinks": leaves[3]} if len(leaves) > 3 else {}
        return attention(*leaves[:3], EXACT, **(options | named)).square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    ours = TRANSFORMS[transform](loss, [leaf.detach() for leaf in leaves])
    for each, gradient in zip(ours, expected, strict=True):
        torch.testing.assert_close(each, gradient)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_compiled_transforms_of_torch_func_equal_eager(transform: str) -> None:
    leaves, options = make("all", torch.float32)
    given = [leaf.detach() for leaf in leaves]

    def loss(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        return attention(query, key, value, LOSSY, **(options | {"sinks": sinks})).square().sum()

    def transformed(leaves: list[Tensor]) -> Any:
        return TRANSFORMS[transform](loss, leaves)

    compiled = torch.compile(transformed, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(given), transformed(given), strict=True):
        torch.testing.assert_close(found, wanted)


def test_vmap_is_exported() -> None:
    query, key, value = (leaf.detach() for leaf in make("causal", torch.float32)[0])

    class Model(torch.nn.Module):
        def forward(self, queries: Tensor) -> Any:
            return torch.func.vmap(lambda query: attention(query, key, value, LOSSY))(queries)

    exported = torch.export.export(Model(), (query[None],)).module()
    assert torch.equal(exported(query[None]), Model()(query[None]))


def test_the_output_may_be_changed_in_place() -> None:
    leaves, _ = make("causal")
    expected = gradients(attention(*leaves, EXACT) * 2, leaves)
    out = attention(*leaves, EXACT)
    for found, wanted in zip(gradients(out.mul_(2), leaves), expected, strict=True):
        assert torch.equal(found, wanted)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("call", ["padding", "offsets", "mask"])
def test_masks_and_positions_may_be_made_in_inference_mode(call: str) -> None:
    leaves, options = make(call)
    with torch.inference_mode():
        cloned = {name: x.clone() if isinstance(x, Tensor) else x for name, x in options.items()}
    expected = gradients(attention(*leaves, EXACT, **options), leaves)
    for found, wanted in zip(gradients(attention(*leaves, EXACT, **cloned), leaves), expected, strict=True):
        assert torch.equal(found, wanted)


def test_second_derivatives_are_rejected() -> None:
    leaves, _ = make("causal")
    (first,) = torch.autograd.grad(attention(*leaves, EXACT).sum(), leaves[:1], create_graph=True)
    message = (
        "attention has no second derivative; differentiate once, without create_graph, or use PyTorch's "
        r"scaled_dot_product_attention under sdpa_kernel\(SDPBackend.MATH\)"
    )
    with pytest.raises(RuntimeError, match=message):
        first.sum().backward()
    query, key, value = (leaf.detach() for leaf in leaves)

    def slope(query: Tensor) -> Tensor:
        return torch.func.grad(lambda query: attention(query, key, value, EXACT).sum())(query).sum()

    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(slope)(query)


@pytest.mark.parametrize("call", ["causal", "sinks"])
def test_the_backward_operator_passes_opcheck(call: str) -> None:
    leaves, _ = make(call, torch.float32)
    query, key, value, *sinks = (leaf.detach() for leaf in leaves)
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    grad_out = torch.randn(2, Q_HEADS, Q_LEN, 24)
    arguments = (0, 0, None, None, None, None, sinks[0] if sinks else None, True, None, 0.25, None)
    torch.library.opcheck(torch.ops.dma_kernels.attention_backward.default, (grad_out, query, key, value, *arguments))


def test_compiled_gradient_equals_eager() -> None:
    leaves, options = make("all", torch.float32)

    def loss(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        return attention(query, key, value, LOSSY, **(options | {"sinks": sinks})).square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        torch.testing.assert_close(found, wanted)

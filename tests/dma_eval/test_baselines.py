"""Simulated kernels round as their schemes say, and are attention in all else; caches of Transformers are read."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from dma_eval.errors import UserError
from dma_eval.load.backends import activate, parse_backends
from dma_eval.load.baselines import SCHEMES, Scheme, e4m3, int8
from dma_eval.load.reading import read
from torch import nn
from torch.nn import functional as F

LAYER = nn.Module()
LAYER.is_causal = True


def states(length=700, heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, length, 16, generator=generator)
    key, value = torch.randn(2, 2, kv_heads, length, 16, generator=generator)
    return query, key + torch.arange(16), value


def exact(query, key, value, **options):
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)


class TestScheme:
    @pytest.mark.parametrize("length", [1, 300, 700])
    def test_without_rounding_is_sdpa(self, length):
        """Also where queries are the last of more keys."""
        query, key, value = states()
        mask = torch.ones(700, 700, dtype=torch.bool).tril()[-length:]
        output, _ = Scheme().attend(LAYER, query[:, :, -length:], key, value, None)
        torch.testing.assert_close(output.transpose(1, 2), exact(query[:, :, -length:], key, value, attn_mask=mask))

    @pytest.mark.parametrize("additive", [False, True])
    def test_masks(self, additive):
        query, key, value = states()
        mask = torch.ones(2, 1, 700, 700, dtype=torch.bool).tril()
        mask[1, :, :, :100] = False
        mask[:, :, range(100), range(100)] = True
        expected = exact(query, key, value, attn_mask=mask)
        if additive:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        output, _ = Scheme().attend(LAYER, query, key, value, mask)
        torch.testing.assert_close(output.transpose(1, 2), expected)

    def test_what_they_do_not_know_is_refused(self):
        with pytest.raises(ValueError, match="no sink logits, position bias or sparse-attention indexer"):
            Scheme().attend(LAYER, *states(), None, s_aux=torch.zeros(4))

    def test_sage(self):
        """Keys lose their mean, which the softmax does not see; blocks are of one head's 128 queries and 64 keys."""
        query, key, value = states()
        key = key - key.mean(2, keepdim=True)
        rounded = []
        for states_of, block in ((query, 128), (key, 64)):
            parts = [
                (part / (scale := part.abs().amax((2, 3), keepdim=True) / 127)).round() * scale
                for part in torch.split(states_of, block, 2)
            ]
            rounded.append(torch.cat(parts, 2))
        output, _ = SCHEMES["sim_sage"].attend(LAYER, *states(), None)
        torch.testing.assert_close(output.transpose(1, 2), exact(rounded[0], rounded[1], value, is_causal=True))

    def test_an_fp8_cache_has_one_scale(self):
        query, key, value = states()
        rounded = [(x * 448 / x.max()).to(torch.float8_e4m3fn).float() * x.max() / 448 for x in (key, value.abs())]
        output, _ = SCHEMES["sim_fp8_cache"].attend(LAYER, query, key, value.abs(), None)
        torch.testing.assert_close(output.transpose(1, 2), exact(query, rounded[0], rounded[1], is_causal=True))

    def test_fa3_has_a_scale_for_each_key_head(self):
        """So another head's size changes nothing; and small probabilities are held as large ones are."""
        query, key, value = states()
        attend = SCHEMES["sim_fa3_fp8"].attend
        output, _ = attend(LAYER, query, key, value, None)
        larger = torch.tensor([1.0, 100.0])[:, None, None]
        other, _ = attend(LAYER, query, key, value * larger, None)
        torch.testing.assert_close(other[:, :, :2], output[:, :, :2], rtol=0, atol=0)
        error = (output.transpose(1, 2) - exact(query, key, value, is_causal=True)).norm() / output.norm()
        assert 0.01 < error < 0.3
        probability = SCHEMES["sim_fa3_fp8"].probability
        assert ((probability(weights := torch.logspace(-14, 0, 99, base=2)) / weights - 1).abs() <= 2**-4).all()


def test_roundings():
    x = torch.tensor([[448.0, 17.0, -0.0011], [3.5, 0.0, 1.0]])
    assert e4m3(x, (0, 1)).tolist() == [[448.0, 16.0, -(2**-9)], [3.5, 0.0, 1.0]]
    x = torch.tensor([[[[127.0], [1.4], [63.5], [-0.3]]]])
    assert int8(x, 2).flatten().tolist() == pytest.approx([127.0, 1.0, 63.5, -0.5])


class TestModels:
    @pytest.fixture
    def ids(self, loaded, prose):
        return loaded.tokenize(prose).ids[:900].view(2, 450)

    def logits(self, loaded, name, ids):
        (backend,) = parse_backends([name])
        activate(loaded.model, backend)
        return read(loaded.model, backend, ids)

    @pytest.mark.parametrize("name", SCHEMES)
    def test_simulations(self, loaded, ids, name):
        expected, found = self.logits(loaded, "sdpa", ids), self.logits(loaded, name, ids)
        assert 1e-4 < (found - expected).norm() / expected.norm() < 0.2

    @pytest.mark.parametrize(
        ("name", "least", "most"),
        [("hqq8", 1e-3, 0.03), ("hqq4", 0.05, 0.4), ("quanto4", 0.05, 0.4), ("fp8", 0.02, 0.2)],
    )
    def test_caches(self, loaded, ids, name, least, most):
        """The first tile is raw where it is read; what comes after reads it as it is stored."""
        package = {"hqq": "hqq", "qua": "optimum"}.get(name[:3])
        if package is not None and importlib.util.find_spec(package) is None:
            with pytest.raises(UserError, match=rf"LlamaForCausalLM cannot run 'sdpa\+{name}': .*pip install"):
                self.logits(loaded, f"sdpa+{name}", ids)
            return
        expected, found = self.logits(loaded, "sdpa", ids), self.logits(loaded, f"sdpa+{name}", ids)
        torch.testing.assert_close(found[:, :128], expected[:, :128])
        assert least < (found[:, 128:] - expected[:, 128:]).norm() / expected[:, 128:].norm() < most

"""Training steps: recomputed layers, and what training libraries do around a model."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import dma_hf
from dma_hf.masks import dma_mask

LENGTH = 600  # some tiles are low
LENGTHS = {"of tokens": [LENGTH], "of documents": [250, LENGTH - 250]}


def _step(model, ids, **arguments):
    """Return the loss of a training step and its gradients."""
    with torch.enable_grad():
        loss = model(ids, labels=ids, use_cache=False, **arguments).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


class _Operations(TorchDispatchMode):
    """Records the operations within a ``with`` block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(str(function))
        return function(*arguments, **options or {})


@pytest.fixture
def model(llama):
    dma_hf.configure(llama, "balanced", exact_until=0)
    return llama.train()


class TestSelectiveCheckpointing:
    @pytest.fixture
    def save(self, model):
        """Return a function that lets checkpoints of the model save an operation in place of recomputing it."""

        def enable(saved):
            def policy(_, op, *args, **kwargs):
                is_saved = saved == "all" or op is torch.ops.dma_kernels.attention.default
                return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

            contexts = partial(create_selective_checkpoint_contexts, policy)
            model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})

        return enable

    @pytest.mark.parametrize("saved", ["attention", "all"])
    @pytest.mark.parametrize("positions", LENGTHS)
    def test_a_step_is_unchanged(self, saved, positions, model, save, token_ids):
        ids = token_ids(1, LENGTH)
        arguments = {"position_ids": torch.cat([torch.arange(length) for length in LENGTHS[positions]])[None]}
        arguments["attention_mask"] = torch.ones_like(ids)  # so that layers read the positions
        expected = _step(model, ids, **arguments)
        save(saved)
        for actual, value in zip(_step(model, ids, **arguments), expected, strict=True):
            assert torch.equal(actual, value)

    def test_a_saved_call_is_counted_once(self, model, save, token_ids):
        save("attention")
        dma_hf.reset_stats(model)
        _step(model, token_ids(1, LENGTH))
        uses = dma_hf.stats(model).uses
        assert sum(uses.values()) == model.config.num_hidden_layers
        assert {use.kernel for use in uses} == {"reference"}

    def test_a_mask_is_computed_in_each_layer(self):
        """A layer that is recomputed needs the same operations, although an earlier one has computed the mask."""
        mask = dma_mask(batch_size=1, q_length=4, kv_length=4)
        with _Operations() as first:
            mask.dense()
        with _Operations() as second:
            mask.dense()
        assert first.names == second.names != []


def test_arguments_of_the_loss_do_not_reach_attention(families, token_ids):
    """Transformers passes all keyword arguments of a forward pass to every layer."""
    ids = token_ids(2, 20)
    losses = []
    for implementation in ("sdpa", "dma_mxfp"):
        model = families["llama"].build(implementation)
        losses.append(model(ids, labels=ids, ignore_index=int(ids[0, 3]), return_token_accuracy=True).loss)
    torch.testing.assert_close(*losses)

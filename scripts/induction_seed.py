"""An initialization from which a small Llama model learns to copy from far back.

Copying what followed an earlier occurrence takes two attention layers that work together (induction heads,
arXiv 2209.11895), which large models find by themselves. The demo model's corpus is too small for that. Four recipes
with random weights, repeated passages and 25 M tokens each (rope_theta 1e4, windows from 1,024 tokens on) continued a
repeated passage as badly (23 to 26 % of tokens right) as when its first occurrence was hidden. Started here, with the
recipe of `train_demo_model.py`, the model gets 89 % right after 20 M tokens, 29 % when the first occurrence is hidden.
Structure at initialization in place of more data is the idea of arXiv 2305.09828.
"""

from __future__ import annotations

import math

import torch
from transformers import LlamaForCausalLM


@torch.no_grad()
def seed_induction(model: LlamaForCausalLM) -> None:
    """Start the first two layers as a weak induction circuit (arXiv 2209.11895), which training then sharpens.

    - Residual channel 0 carries a constant, hidden from the logits by the final norm. On it, RoPE lets the first query
      head of each of two kv groups in layer 0 attend one and two tokens back and write a code of that token.
    - The first head of layer 1 matches (token here, token before) with each key's (token before, token two before), in
      the rotary pairs that hardly turn over the context, and copies the token found there.

    Args:
        model: untrained, `initializer_range` 0.02, at least two layers and two kv heads; changed in place.
    """
    config, constant, fast_pairs, first_slow_pair = model.config, 0.32, 8, 18
    # back: the wanted distance scores 10 nats above any other; match: a full match scores about 30 nats, six deviations
    # of a chance match; write, copied: three times and fifteen times the embedding's 0.02, so that both are heard.
    back, match, write, copied = 0.86, 2.9, 0.06, 0.3
    dim, half = config.head_dim, config.head_dim // 2
    group = config.num_attention_heads // config.num_key_value_heads * dim
    for layer in model.model.layers:  # quiet branches, as in GPT-2, so that the codes stand out
        layer.mlp.down_proj.weight /= math.sqrt(2 * config.num_hidden_layers)
        layer.self_attn.o_proj.weight /= math.sqrt(2 * config.num_hidden_layers)
    model.model.embed_tokens.weight[:, 0], model.model.norm.weight[0] = constant, 0.0

    code, back_one, back_two, found = (
        torch.nn.init.orthogonal_(torch.empty(dim, config.hidden_size)) for _ in range(4)
    )
    for rows in (code, back_one, back_two, found):
        rows[:, 0] = 0
    angles, first = model.model.rotary_emb.inv_freq[:fast_pairs], model.model.layers[0].self_attn
    for index, (offset, written) in enumerate(((1, back_one), (2, back_two))):
        query, key = first.q_proj.weight[index * group :][:dim], first.k_proj.weight[index * dim :][:dim]
        query[:], key[:] = 0, 0
        query[:fast_pairs, 0] = back * torch.cos(offset * angles)
        query[half : half + fast_pairs, 0] = -back * torch.sin(offset * angles)
        key[:fast_pairs, 0] = back
        first.v_proj.weight[index * dim :][:dim] = code
        first.o_proj.weight[:, index * group :][:, :dim] = write * written.T
    second, slow = model.model.layers[1].self_attn, [*range(first_slow_pair, half), *range(half + first_slow_pair, dim)]
    size = len(slow)
    second.q_proj.weight[:dim], second.k_proj.weight[:dim] = 0, 0
    # 0.57: a written code is louder than the embedding by 1 / 0.57.
    second.q_proj.weight[slow] = match * (code[:size] + 0.57 * back_one[-size:])
    second.k_proj.weight[slow] = match * (back_one[:size] + back_two[-size:])
    second.v_proj.weight[:dim] = found
    second.o_proj.weight[:, :dim] = copied * found.T

"""The recipe `attnlrp` at a small Llama, compared with its rules written as a forward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import gradsurg as gs

transformers = pytest.importorskip("transformers")

HEADS, GROUPS, WIDTH = 4, 2, 4


def llama(attention: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=HEADS * WIDTH,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        attn_implementation=attention,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model


def part(value: Tensor, share: float) -> Tensor:
    """Return the value, of whose gradient a share passes."""
    return share * value + (1 - share) * value.detach()


def normed(norm: Any, x: Tensor) -> Tensor:
    factor = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt().detach()
    return norm.weight * x * factor


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def attended(attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def heads(layer: nn.Module) -> Tensor:
        return layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)

    q = rotated(heads(attention.q_proj), cos, sin)
    k = rotated(heads(attention.k_proj), cos, sin).repeat_interleave(HEADS // GROUPS, 1)
    v = heads(attention.v_proj).repeat_interleave(HEADS // GROUPS, 1)
    scores = part(q @ k.mT, 0.5) / WIDTH**0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    mixed = part(scores.masked_fill(future, -torch.inf).softmax(-1) @ v, 0.5)
    return attention.o_proj(mixed.transpose(1, 2).flatten(2))


def by_hand(model: Any, x: Tensor) -> Tensor:
    """Return the logits, whose gradient follows the rules of AttnLRP (equations 7 to 9, 15)."""
    cos, sin = model.model.rotary_emb(x, torch.arange(x.shape[1])[None])
    for layer in model.model.layers:
        x = x + attended(layer.self_attn, normed(layer.input_layernorm, x), cos[:, None], sin)
        inner = normed(layer.post_attention_layernorm, x)
        gate = layer.mlp.gate_proj(inner)
        gate = gate * (silu(gate) / gate).detach()
        x = x + layer.mlp.down_proj(part(gate * layer.mlp.up_proj(inner), 0.5))
    return model.lm_head(normed(model.model.norm, x))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_relevance_of_the_embeddings_is_that_of_the_rules(attention: str) -> None:
    model = llama(attention)
    tokens = torch.tensor([[1, 5, 3, 7, 2, 2], [4, 4, 9, 0, 8, 6]])
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
    with gs.load("attnlrp").attach(model):
        logits = model(inputs_embeds=embedded).logits
        (result,) = torch.autograd.grad(logits[:, -1].amax(-1).sum(), embedded)
    logits_by_hand = by_hand(model, embedded)
    torch.testing.assert_close(logits, logits_by_hand, rtol=1e-4, atol=1e-5)
    (expected,) = torch.autograd.grad(logits_by_hand[:, -1].amax(-1).sum(), embedded)
    scale = expected.abs().max().item()
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5 * scale)
    (plain,) = torch.autograd.grad(
        model(inputs_embeds=embedded).logits[:, -1].amax(-1).sum(), embedded
    )
    assert (plain - expected).abs().max() > 0.1 * scale

"""LLaMA models small enough to test with."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import moh
from moh.heads import routers

VOCAB, HEADS, DIM = 61, 4, 8
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HEADS * DIM,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
    # Large, so that heads and tokens differ enough for a wrong gate to show.
    "initializer_range": 0.3,
}
ROUTERS = {
    "two_stage": moh.RouterOptions(),
    "query_norm": moh.RouterOptions(kind="query_norm"),
}


def plan_of(num_shared=1, top_k=2, depth=2):
    return moh.HeadPlan((moh.LayerPlan(HEADS, DIM, num_shared, top_k),) * depth)


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()


def moh_llama(kind="two_stage", plan=None, **changes):
    model = moh.convert(llama(**changes), plan or plan_of(), ROUTERS[kind])
    for _, router in routers(model):
        for weight in router.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    return model


def tokens(*shape):
    return torch.randint(1, VOCAB, shape)


def close(ours, theirs, tolerance=1e-5):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)

"""Bits per byte: every token once, with the context promised."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from made_up_benchmarks import VOCAB, make_llama, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from moh.data.text import encode_documents
from moh.evaluation.language import bits_per_byte, unigram_bits_per_byte


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def model():
    return make_llama().train()


def test_bits_per_byte_of_a_uniform_model_count_every_token_once(model):
    torch.nn.init.zeros_(model.lm_head.weight)
    tokens = np.arange(101, dtype=np.uint16)
    for seq_len, stride in (
        (16, None),
        (16, 15),
        (16, 1),
        (500, None),
        (101, 7),
        (2, 1),
        (3, None),
    ):
        bits = bits_per_byte(model, tokens, 50, seq_len, stride, batch_size=4)
        assert bits == pytest.approx(100 * math.log2(VOCAB) / 50)
    assert model.training


def test_bits_per_byte_scores_each_token_with_the_context_promised(model):
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40).astype(np.uint16)
    seq_len, stride = 12, 5
    nats = 0.0
    model.eval()
    for position in range(1, len(tokens)):
        start = 0
        while start + seq_len <= position and start + stride <= len(tokens) - seq_len:
            start += stride
        if start + seq_len <= position:
            start = len(tokens) - seq_len
        window = torch.from_numpy(tokens[start : position + 1].astype(np.int64))
        assert start == 0 or position - start >= seq_len - stride
        logits = model(window[None, :-1]).logits[0, -1]
        nats -= float(logits.log_softmax(-1)[window[-1]].detach())
    ours = bits_per_byte(model, tokens, 100, seq_len, stride, batch_size=3)
    assert ours == pytest.approx(nats / math.log(2) / 100, rel=1e-5)


def test_bits_per_byte_refuses_what_it_cannot_score(model):
    with pytest.raises(ValueError, match="needs two tokens"):
        bits_per_byte(model, np.zeros(1, dtype=np.uint16), 1, 16)
    with pytest.raises(ValueError, match="stride below seq_len"):
        bits_per_byte(model, np.zeros(40, dtype=np.uint16), 1, 16, stride=16)


def test_unigram_bits_by_hand(tokenizer):
    train, validation = np.array([0, 1, 1, 2]), np.array([0, 1, 3])
    # Counts plus one: 2, 3, 2, 1 of 8. Token 0 begins the text and is not scored.
    expected = -(math.log2(3 / 8) + math.log2(1 / 8)) / 10
    assert unigram_bits_per_byte(train, validation, 10, 4) == pytest.approx(expected)


def test_a_trained_bigram_beats_unigrams_on_text_that_has_order(tokenizer):
    documents = ["abcabcabcabc" * 20] * 3
    tokens = encode_documents(documents, tokenizer)
    torch.manual_seed(0)
    small = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.from_numpy(tokens[:256].astype(np.int64)).view(-1, 32)
    for _ in range(60):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    num_bytes = len("".join(documents))
    unigram = unigram_bits_per_byte(tokens, tokens, num_bytes, VOCAB)
    assert bits_per_byte(model, tokens, num_bytes, 32) < 0.7 * unigram

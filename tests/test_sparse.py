"""Sparse execution computes what dense execution does, and only what was selected."""

from __future__ import annotations

import math
from types import SimpleNamespace

import naive
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moh.heads import (
    LayerPlan,
    RouterOptions,
    Routing,
    attend,
    build_router,
    sparse_attention,
    sparse_flash,
    sparse_math,
)
from moh.heads.one_query import attend_once
from moh.heads.pairs import KeyHeads, Pairs
from moh.heads.slots import Load


def select(B, N, E, k, load="even", seed=0):
    """Which of E heads each token selects: evenly, mostly the same ones, or always the same."""
    scores = torch.rand(B, N, E, generator=torch.Generator().manual_seed(seed))
    if load != "even":
        scores = scores + torch.arange(E) * (0.3 if load == "skewed" else 1.0)
    index = scores.topk(k, dim=-1).indices
    return torch.zeros(B, N, E, dtype=torch.bool).scatter(-1, index, True)


def inputs(B, N, M, H, G, K, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, H, N, K), (B, G, M, K), (B, G, M, K)]
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in drawn], torch.randn(B, N, H, K, generator=generator)


def dense_attention(q, k, v, selected, mask=None, is_causal=False, scale=None):
    active = F.pad(selected, (q.shape[1] - selected.shape[-1], 0), value=True)
    y = F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    return y.transpose(1, 2) * active.unsqueeze(-1)


def compare(arguments, weight, selected, atol=1e-6, grad_atol=1e-5, rtol=1e-6, **options):
    """Outputs and gradients of sparse against dense execution."""
    ours = sparse_attention(*arguments, selected, **options)
    options["mask"] = options.pop("attn_mask", None)
    dense = dense_attention(*arguments, selected, **options)
    torch.testing.assert_close(ours, dense, atol=atol, rtol=rtol)
    weight = weight.to(ours.dtype)
    wanted = [x for x in [*arguments, options["mask"]] if x is not None and x.requires_grad]
    for one, other in zip(
        torch.autograd.grad(ours, wanted, weight),
        torch.autograd.grad(dense, wanted, weight),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=grad_atol, rtol=1e-5)


@st.composite
def problems(draw):
    """Any shape, plan, load and mask that a layer can meet."""
    group = draw(st.sampled_from([1, 1, 2, 3]))
    G = draw(st.integers(1, 4))
    H = G * group
    E = draw(st.integers(1, H))
    k = draw(st.integers(1, E))
    B = draw(st.integers(1, 3))
    N = draw(st.one_of(st.integers(1, 5), st.integers(20, 40), st.integers(250, 400)))
    kind = draw(st.sampled_from(["none", "causal", "padding", "padded causal", "rows", "bias"]))
    M = N if "causal" in kind else draw(st.sampled_from([N, N + 3, 2 * N]))
    return {
        "shape": (B, N, M, H, G, draw(st.sampled_from([1, 3, 8, 16]))),
        "plan": (E, k),
        "load": draw(st.sampled_from(["even", "skewed", "fixed"])),
        "kind": kind,
        "seed": draw(st.integers(0, 2**20)),
    }


def mask_of(kind, shape, seed):
    """Options of a kind of mask."""
    B, N, M, H, _, _ = shape
    generator = torch.Generator().manual_seed(seed)
    if kind == "none":
        return {}
    if kind == "causal":
        return {"is_causal": True}
    if kind == "bias":
        return {"attn_mask": torch.randn(1, H, N, M, generator=generator)}
    if kind == "rows":
        return {"attn_mask": torch.rand(N, M, generator=generator) > 0.4}
    length = torch.randint(1, M + 1, (B, 1), generator=generator)
    padding = (torch.arange(M) >= M - length)[:, None, None]
    if kind == "padding":
        return {"attn_mask": padding}
    return {"attn_mask": padding & torch.ones(N, M, dtype=torch.bool).tril()}


@given(problem=problems())
@settings(deadline=None, max_examples=60)
def test_sparse_equals_dense_with_gradients(problem):
    shape, (E, k) = problem["shape"], problem["plan"]
    arguments, weight = inputs(*shape, seed=problem["seed"])
    selected = select(shape[0], shape[1], E, k, problem["load"], problem["seed"])
    compare(arguments, weight, selected, **mask_of(problem["kind"], shape, problem["seed"]))


@pytest.fixture
def two_threads():
    """Keys are dealt out to threads where queries or heads are too few."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("B", [1, 4])
def test_long_sequences_equal_dense(B, is_causal):
    """Several blocks of queries, several chunks of keys, a number of keys that is no multiple."""
    arguments, weight = inputs(B, 1033, 1033, 6, 3, 16)
    compare(arguments, weight, select(B, 1033, 5, 2, "skewed"), is_causal=is_causal)


def test_a_head_that_none_and_a_head_that_all_select():
    arguments, weight = inputs(2, 300, 300, 4, 4, 8)
    selected = torch.zeros(2, 300, 3, dtype=torch.bool)
    selected[:, :, 1] = True
    selected[0, 7, 2] = True
    for is_causal in (False, True):
        compare(arguments, weight, selected, is_causal=is_causal)
    y = sparse_attention(*arguments, selected)
    assert not y[:, :, 1].any()
    assert y[:, :, 2].all()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("keys", [1, 5, 3001])
def test_one_query_with_cached_keys(keys):
    arguments, weight = inputs(3, 1, keys, 8, 4, 16)
    compare(arguments, weight, select(3, 1, 6, 3))


@pytest.mark.parametrize("is_causal", [False, True])
def test_sparse_equals_the_naive_loop(is_causal):
    B, N, H, E, K = 2, 6, 4, 3, 5
    (q, k, v), _ = inputs(B, N, N, H, H, K)
    selected = select(B, N, E, 2)
    y = sparse_attention(q, k, v, selected, is_causal=is_causal)
    for b in range(B):
        for n in range(N):
            seen = n + 1 if is_causal else N
            gates = [[1.0] + [float(chosen) for chosen in selected[b, n]]]
            expected = naive.attention(q[b, :, n : n + 1], k[b, :, :seen], v[b, :, :seen], gates)
            torch.testing.assert_close(y[b, n], expected[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-14), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)]
)
def test_other_precisions(dtype, atol, is_causal):
    arguments, weight = inputs(2, 290, 290, 6, 3, 16, dtype)
    selected = select(2, 290, 4, 2)
    y = sparse_attention(*arguments, selected, is_causal=is_causal)
    assert y.dtype == dtype
    grads = torch.autograd.grad(y, arguments, weight.to(dtype))
    exact = [x.detach().double().requires_grad_() for x in arguments]
    expected = dense_attention(*exact, selected, is_causal=is_causal)
    torch.testing.assert_close(y.double(), expected, atol=atol, rtol=atol)
    for one, other in zip(
        grads, torch.autograd.grad(expected, exact, weight.double()), strict=True
    ):
        torch.testing.assert_close(one.double(), other, atol=4 * atol, rtol=4 * atol)


def test_autocast_reaches_the_routed_heads():
    arguments, _ = inputs(1, 20, 20, 4, 4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = sparse_attention(*arguments, select(1, 20, 3, 1))
    assert y.dtype == torch.bfloat16


def test_a_bias_learns():
    """The position bias of a layer gets the gradient that dense execution gives it."""
    arguments, weight = inputs(2, 70, 70, 5, 5, 8)
    for heads, rows in ((1, 70), (5, 70), (5, 1)):
        bias = torch.randn(1, heads, rows, 70, requires_grad=True)
        compare(arguments, weight, select(2, 70, 4, 2), attn_mask=bias)


def test_a_query_that_sees_no_key_gives_zero():
    arguments, weight = inputs(1, 9, 9, 4, 4, 8)
    mask = torch.ones(9, 9, dtype=torch.bool).tril(-1)
    compare(arguments, weight, select(1, 9, 3, 2), attn_mask=mask)
    biased = torch.zeros(9, 9).masked_fill(~mask, -math.inf).requires_grad_()
    y = sparse_attention(*arguments, select(1, 9, 3, 2), biased)
    assert not y[:, 0].any()
    (grad,) = torch.autograd.grad(y, biased, weight)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout_of_weights_is_unbiased_and_its_gradient_exact(is_causal):
    B, N, H, K, p = 1, 40, 4, 8, 0.25
    (q, k, v), weight = inputs(B, N, N, H, H, K, torch.float64)
    selected = select(B, N, H, 2)

    def attention(seed):
        torch.manual_seed(seed)
        return sparse_attention(q, k, v, selected, None, is_causal, p)

    draws = torch.stack([attention(seed).detach() for seed in range(150)])
    expected = dense_attention(q, k, v, selected, is_causal=is_causal)
    error = (draws.mean(0) - expected).abs() / (draws.std(0) / 150**0.5 + 1e-9)
    assert error[selected].max() < 6
    assert torch.equal(attention(3), attention(3))
    assert not torch.equal(attention(3), attention(4))
    # Values enter linearly, so their gradient is exact however large the step.
    (grad,) = torch.autograd.grad(attention(5), v, weight.double())
    step = torch.randn_like(v)
    before = (attention(5) * weight).sum()
    with torch.no_grad():
        v += step
    after = (attention(5) * weight).sum()
    torch.testing.assert_close(after - before, (grad * step).sum())
    grads = torch.autograd.grad(attention(6), (q, k), weight.double())
    for x, grad in zip((q, k), grads, strict=True):
        step = 1e-6 * torch.randn_like(x)
        values = []
        for sign in (1, -2):
            with torch.no_grad():
                x += sign * step
            values.append((attention(6) * weight).sum())
        torch.testing.assert_close(
            (values[0] - values[1]) / 2, (grad * step).sum(), rtol=1e-4, atol=1e-12
        )


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // 4 for x in tree_leaves(out) if torch.is_tensor(x)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("masked", ["no", "causal", "mask"])
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_nothing_of_tokens_by_tokens_by_heads_is_built(backend, masked):
    B, N, E, K = 1, 2048, 8, 4
    (q, k, v), grad = inputs(B, N, N, E, E, K)
    q, selected = q.detach().transpose(1, 2), select(B, N, E, 4)
    keys, causal = KeyHeads(k.detach(), v.detach(), 1, 0), masked == "causal"
    mask = torch.ones(1, 1, N, N, dtype=torch.bool).tril() if masked == "mask" else None
    y, lse = torch.zeros(B, N, E, K), torch.zeros(B, N, E)
    with LargestTensor() as largest:
        if backend == "flash":
            sparse_flash.forward(q, keys, selected, mask, causal, 0.5, y, lse)
            sparse_flash.backward(grad, y, lse, q, keys, selected, mask, causal, 0.5)
        else:
            pairs, none = Pairs(selected), sparse_math.Dropout(0.0, 0)
            sparse_math.forward(q, keys, pairs, mask, causal, 0.5, none, y)
            sparse_math.backward(grad, q, keys, pairs, mask, causal, 0.5, none, False)
    assert N * K <= largest.elements < N * N


def test_the_operator_keeps_its_contract_with_pytorch():
    """Schema, shapes without data, autograd: what torch.compile relies on."""
    (q, k, v), _ = inputs(2, 12, 12, 4, 4, 8)
    q = q.transpose(1, 2).detach().requires_grad_()
    shared = torch.randn(2, 12, 1, 8, requires_grad=True)
    selected = select(2, 12, 4, 2)
    bias = torch.randn(1, 4, 12, 12, requires_grad=True)
    seed = torch.tensor(5)
    for mask, drawn, p, backend in (
        (None, None, 0.0, "flash"),
        (None, seed, 0.1, "math"),
        (bias, None, 0.0, "math"),
    ):
        torch.library.opcheck(
            torch.ops.moh.active_heads,
            (shared, q, k, v, selected, mask, drawn, False, 0.3, p, 1, 0, True, backend),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


def test_impossible_arguments_are_refused():
    arguments, _ = inputs(1, 4, 4, 2, 2, 4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="exclude each other"):
        sparse_attention(*arguments, select(1, 4, 2, 1), mask, is_causal=True)
    with pytest.raises(ValueError, match="3 routed heads of 2"):
        sparse_attention(*arguments, select(1, 4, 3, 1))


@settings(deadline=None, max_examples=60)
@given(problems(), st.booleans())
def test_gated_inference_equals_dense(problem, causal):
    """Without gradients the gates are multiplied as outputs are written, where slots pay."""
    B, N, M, H, _, K = problem["shape"]
    E, k = problem["plan"]
    selected = select(B, N, E, k, problem["load"], problem["seed"])
    M = N if causal else M
    (q, key, value), gates = inputs(B, N, M, H, H, K, seed=problem["seed"])
    # A gate may be as small as it likes, and some tokens may select no head at all.
    gates = gates[..., 0].abs() * F.pad(selected, (H - E, 0), value=True)
    gates[:, ::7, H - E :] = 0
    routing = Routing(gates, gates[..., H - E :] > 0, gates)
    plan = LayerPlan(H, K, H - E, k)
    with torch.no_grad():
        sparse, dense = (
            attend(
                build_router(8, plan, RouterOptions(kind="query_norm", execution=execution), None),
                routing,
                q,
                key,
                value,
                is_causal=causal,
            )
            for execution in ("sparse", "dense")
        )
    assert sparse.is_contiguous()
    torch.testing.assert_close(sparse, dense, atol=2e-6, rtol=1e-5)


@settings(deadline=None, max_examples=60)
@given(problems(), st.sampled_from([None, "padding", "rows", "bias"]))
def test_one_query_with_cached_keys_equals_dense(problem, kind):
    B, _, M, H, G, K = problem["shape"]
    E, k = problem["plan"]
    (q, key, value), gates = inputs(B, 1, M, H, G, K, seed=problem["seed"])
    selected = select(B, 1, E, k, problem["load"], problem["seed"])
    gates = gates[..., 0].abs() * F.pad(selected, (H - E, 0), value=True)
    generator = torch.Generator().manual_seed(problem["seed"])
    mask = None
    if kind == "padding":
        mask = torch.arange(M) >= torch.randint(M, (B, 1, 1, 1), generator=generator)
    elif kind == "rows":
        mask = torch.rand(1, M, generator=generator) < 0.7
        mask[:, 0] = True
    elif kind == "bias":
        mask = torch.randn(B, H, 1, M, generator=generator)
    plan = LayerPlan(H, K, H - E, k)
    with torch.no_grad():
        sparse, dense = (
            attend(
                build_router(8, plan, RouterOptions(kind="query_norm", execution=execution), None),
                Routing(gates, selected, gates),
                q,
                key,
                value,
                attn_mask=mask,
            )
            for execution in ("sparse", "dense")
        )
    torch.testing.assert_close(sparse, dense, atol=2e-6, rtol=1e-5)


def test_one_query_reads_the_keys_of_active_heads_alone(monkeypatch):
    """Neighbours in one call, two that stand alone in one, and no more."""
    H, M = 9, 5
    taken = []

    def counted(q, k, v, **options):
        taken.append((q.shape[1], k.shape[1], k.data_ptr()))
        return F.scaled_dot_product_attention(q, k, v, **options)

    active = torch.tensor([1, 1, 0, 1, 0, 0, 1, 0, 1], dtype=torch.float32)
    load = Load(active[2:].view(1, 1, -1))
    q, k, v = torch.randn(1, H, 1, 4), torch.randn(1, H, M, 4), torch.randn(1, H, M, 4)
    k[:, active == 0] = v[:, active == 0] = torch.nan
    ours = SimpleNamespace(scaled_dot_product_attention=counted)
    monkeypatch.setattr("moh.heads.one_query.F", ours)
    y = attend_once(q, k, v, load, None, None)
    assert y.isfinite().all()
    assert [(heads, keys) for heads, keys, _ in taken] == [(2, 2), (2, 2), (1, 1)]
    firsts = [(pointer - k.data_ptr()) // (4 * M * 4) for *_, pointer in taken]
    assert firsts == [0, 3, 8]

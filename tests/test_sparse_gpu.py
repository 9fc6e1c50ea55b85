"""The GPU path of sparse execution: on a GPU, and what can be known of it without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F

import moh
from moh.heads import sparse_attention
from moh.heads.sparse import backend_for

TESTS = Path(__file__).parent
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def test_the_kernels_equal_pytorchs_attention_in_tritons_interpreter():
    """Outputs and gradients: causal, grouped keys, masks, queries that see no key."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(
        [sys.executable, TESTS / "triton_cases.py"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward_kernel", "query_kernel", "key_kernel"])
@pytest.mark.parametrize(
    ("dtype", "width", "causal", "mask", "capability"),
    [("bf16", 64, True, 0, 90), ("fp16", 128, True, 1, 80), ("fp32", 72, False, 2, 86)],
)
def test_the_kernels_compile_for_gpus(name, dtype, width, causal, mask, capability):
    """To machine code of a card that need not be there, within its shared memory."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moh.heads import sparse_triton, triton_kernels

    kernel = getattr(triton_kernels, name)
    element = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    sizes = sparse_triton._sizes(torch.empty(1, 1, 1, width, dtype=element), causal, mask)
    kinds = {"lse": "fp32", "delta": "fp32", "token": "i32", "count": "i32", "before": "i32"}
    kinds["mask"] = "u8" if mask == 1 else dtype
    signature = {}
    for argument in kernel.arg_names:
        if argument in sizes:
            signature[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            signature[argument] = "*" + kinds.get(argument.removesuffix("_ptr"), dtype)
        else:
            signature[argument] = "fp32" if argument == "scale" else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= {80: 163, 86: 99, 90: 227}[capability] * 1024


def problem(tokens, dtype, causal, key_heads=4, heads=8, shared=2, top_k=3, width=64):
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(2, n, tokens, width, generator=generator) for n in (heads, key_heads, key_heads)
    ]
    arguments = [x.cuda().to(dtype).requires_grad_() for x in drawn]
    scores = torch.rand(2, tokens, heads - shared, generator=generator)
    index = scores.topk(top_k, dim=-1).indices
    selected = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, index, True).cuda()
    grad = torch.randn(2, tokens, heads, width, generator=generator).cuda().to(dtype)
    ours = sparse_attention(*arguments, selected, is_causal=causal)
    grads = torch.autograd.grad(ours, arguments, grad)
    active = F.pad(selected, (shared, 0), value=True).unsqueeze(-1)
    exact = [x.detach().double().requires_grad_() for x in arguments]
    y = F.scaled_dot_product_attention(*exact, is_causal=causal, enable_gqa=True)
    y = y.transpose(1, 2) * active
    return (ours, *grads), (y, *torch.autograd.grad(y, exact, grad.double()))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens", [1, 77, 1025])
def test_sparse_equals_dense_on_a_gpu(tokens, dtype, causal):
    assert backend_for(torch.empty(1, 1, 1, 64, device="cuda"), None, 0.0) == "triton"
    scale = TOLERANCE[dtype]
    for one, other in zip(*problem(tokens, dtype, causal), strict=True):
        torch.testing.assert_close(one.double(), other, atol=4 * scale, rtol=4 * scale)


@pytest.mark.gpu
def test_a_training_step_waits_for_nothing_on_a_gpu():
    """No copy to the host, no size that depends on the selection: dense and sparse."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).cuda()
    plan = moh.HeadPlan.from_ratio(*zip(*moh.head_shapes(model), strict=True), ratio=0.7)
    moh.convert(model, plan)
    images = torch.randn(4, 3, 64, 64, device="cuda")
    results = {}
    for execution in ("dense", "sparse"):
        moh.set_execution(model, execution)
        for waiting in ("default", "error"):  # the first time, kernels are compiled
            torch.cuda.set_sync_debug_mode(waiting)
            try:
                model.zero_grad(set_to_none=True)
                loss = model(images).square().mean() + 0.01 * moh.balance_loss(model)
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results[execution] = [p.grad for p in model.parameters()]
    for one, other in zip(results["sparse"], results["dense"], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("execution", ["dense", "sparse"])
def test_compiled_sparse_training_on_a_gpu(execution):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1).cuda()
    plan = moh.HeadPlan.from_ratio(*zip(*moh.head_shapes(model), strict=True), ratio=0.7)
    moh.convert(model, plan, moh.RouterOptions(execution=execution))
    images = torch.randn(4, 3, 64, 64, device="cuda")
    expected = model(images)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(images), expected, atol=1e-3, rtol=1e-3)

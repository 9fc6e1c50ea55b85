"""Parity of DiT and MoH-DiT: attention layers, models, guidance and diffusion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from moh import HeadPlan, LayerPlan, balance_loss, convert
from moh.backbones.dit import DiT
from moh.backbones.published.dit import from_published, to_published
from moh.evaluation.sampling import guide
from moh.tasks.diffusion import GaussianDiffusion

Comparison = tuple[str, Tensor, Tensor]
_LAYER = "blocks.0.attn."
_INPUTS = ("weights/", "input/", "cfg/input_", "diffusion/noise")
_RESPACED = re.compile(r"diffusion/respaced(\d+)_(\w+)")


def check(case: dict, tensors: dict[str, Tensor]) -> Iterator[Comparison]:
    """Yield (name, expected, ours) for each expected tensor of a ``dit`` file."""
    compute = _layer if "layer" in case else _model
    outputs = compute(case, tensors)
    for name, expected in tensors.items():
        if not name.startswith(_INPUTS) and not name.endswith("_index"):
            yield name, expected, outputs(name).detach().reshape(expected.shape)


def _weights(tensors: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The file's weights under our names; a lone layer is converted as part of block 0."""
    published = {
        prefix + name.removeprefix("weights/"): value
        for name, value in tensors.items()
        if name.startswith("weights/")
    }
    return {name.removeprefix(prefix): value for name, value in from_published(published).items()}


def _per_layer(value: int | list[int], depth: int) -> list[int]:
    return [value] * depth if isinstance(value, int) else value


def _layer(case: dict, tensors: dict[str, Tensor]) -> Callable[[str], Tensor]:
    heads = case["num_heads"]
    head_dim = case.get("head_dim") or case["dim"] // heads
    layer = Attention(case["dim"], heads=heads, dim_head=head_dim, bias=True)
    if case.get("attention") != "mha":
        plan = LayerPlan(heads, head_dim, case["shared_heads"], case["routed_active_heads"])
        convert(layer, HeadPlan((plan,)))
    layer.load_state_dict(_weights(tensors, _LAYER), strict=True)
    return _layer_outputs(layer, tensors["input/x"])


def _layer_outputs(layer: nn.Module, x: Tensor) -> Callable[[str], Tensor]:
    with torch.no_grad():
        outputs = {"output/y": layer.eval()(x)}
    x = x.clone().requires_grad_()
    loss = torch.square(layer.train()(x)).mean()
    balance = balance_loss(layer)
    if balance is not None:
        outputs["train/balance_loss"] = balance
        loss = loss + 0.01 * balance
    loss.backward()
    assert x.grad is not None
    outputs["train/grad_x"] = x.grad
    gradients = {
        _LAYER + name: weight.grad
        for name, weight in layer.named_parameters()
        if weight.grad is not None
    }
    for name, gradient in to_published(gradients).items():
        outputs["train/grad/" + name.removeprefix(_LAYER)] = gradient
    return outputs.__getitem__


def _model(case: dict, tensors: dict[str, Tensor]) -> Callable[[str], Tensor]:
    depth, num_heads = case["depth"], _per_layer(case["num_heads"], case["depth"])
    dims = [case.get("head_dim") or case["hidden_size"] // heads for heads in num_heads]
    model = DiT(
        input_size=case["input_size"],
        patch_size=case["patch_size"],
        in_channels=case["in_channels"],
        hidden_size=case["hidden_size"],
        depth=depth,
        num_heads=num_heads,
        head_dim=case.get("head_dim"),
        mlp_ratio=case["mlp_ratio"],
        num_classes=case["num_classes"],
    )
    if case.get("attention") != "mha":
        shared = _per_layer(case["shared_head"], depth)
        top_k = _per_layer(case["routed_head"], depth)
        convert(model, HeadPlan.from_groups([1] * depth, num_heads, dims, shared, top_k))
    model.load_state_dict(_weights(tensors), strict=True)
    model.eval()
    stated_steps = re.match(r"\d+", case.get("diffusion", ""))
    diffusion = GaussianDiffusion(int(stated_steps.group()) if stated_steps else 1000)

    @torch.no_grad()
    def outputs(name: str) -> Tensor:
        x, t, labels = (tensors.get(f"input/{key}") for key in ("x", "t", "class"))
        if name == "output/y":
            return model(x, t, labels)
        if name == "cfg/output":
            return _guided(
                case, model, *(tensors[f"cfg/input_{key}"] for key in ("x", "t", "class"))
            )
        if name.startswith("diffusion/train_"):
            losses = diffusion.training_losses(model, x, t, labels, tensors["diffusion/noise"])
            return getattr(losses, name.removeprefix("diffusion/train_"))
        respaced = _RESPACED.fullmatch(name)
        if respaced is None:
            raise ValueError(f"{name} is not an expected tensor of a dit file")
        steps, quantity = respaced.groups()
        index = tensors.get(f"diffusion/respaced{steps}_index")
        return _respaced(diffusion, model, int(steps), quantity, index, x, labels)

    return outputs


def _guided(case: dict, model: DiT, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    half = x[: len(x) // 2]
    output = model(torch.cat([half, half]), t, labels)
    return guide(output, case["cfg_scale"], case.get("cfg_channels", 3))


def _respaced(
    diffusion: GaussianDiffusion,
    model: DiT,
    steps: int,
    quantity: str,
    index: Tensor | None,
    x: Tensor,
    labels: Tensor,
) -> Tensor:
    diffusion = diffusion.respace(steps)
    if quantity == "timestep_map":
        return torch.tensor(diffusion.timesteps)
    return getattr(diffusion.p_mean_variance(model, x, index, labels), quantity)

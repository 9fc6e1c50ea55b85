"""DiT (arXiv 2212.09748) from diffusers' parts, with heads that may differ by layer.

diffusers' own ``DiTTransformer2DModel`` is another model: an embedder and a label dropout in every
block, other timestep frequencies, other initialisation. :func:`moh.convert` takes both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import (
    PatchEmbed,
    TimestepEmbedding,
    Timesteps,
    get_2d_sincos_pos_embed,
)
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.normalization import AdaLayerNormZero
from torch import Tensor, nn

import moh.backbones.dit_attention  # noqa: F401  (registers the wiring)
from moh.backbones.convert import ModelHooks, convert, register_hooks
from moh.heads import HeadPlan, RouterOptions

TIMESTEP_CHANNELS = 256
NORM_EPS = 1e-6


class DiTBlock(nn.Module):
    """Attention and MLP, each modulated and gated by the conditioning (adaLN-zero).

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K; H * K need not be D.
        mlp_hidden: width inside the MLP.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, mlp_hidden: int) -> None:
        super().__init__()
        self.norm1 = AdaLayerNormZero(hidden_size)
        self.attn = Attention(hidden_size, heads=num_heads, dim_head=head_dim, bias=True)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=NORM_EPS)
        self.ff = FeedForward(hidden_size, activation_fn="gelu-approximate", inner_dim=mlp_hidden)

    def forward(self, x_BND: Tensor, active_c_BD: Tensor) -> Tensor:
        """One block.

        Args:
            x_BND: (B, N, D).
            active_c_BD: SiLU of the conditioning (B, D), the same in all blocks.

        Returns:
            (B, N, D).
        """
        # norm1 is diffusers' module for its parameters' names; here each modulation and each
        # gated sum is one operation, one pass over the tokens.
        conditions = self.norm1.linear(active_c_BD).unsqueeze(1).chunk(6, dim=-1)
        shift_B1D, scale_B1D, gate_B1D, mlp_shift_B1D, mlp_scale_B1D, mlp_gate_B1D = conditions
        y_BND = modulate(self.norm1.norm(x_BND), shift_B1D, scale_B1D)
        x_BND = torch.addcmul(x_BND, gate_B1D, self.attn(y_BND))
        y_BND = modulate(self.norm2(x_BND), mlp_shift_B1D, mlp_scale_B1D)
        return torch.addcmul(x_BND, mlp_gate_B1D, self.ff(y_BND))


def modulate(x_BND: Tensor, shift_B1D: Tensor, scale_B1D: Tensor) -> Tensor:
    """``x (1 + scale) + shift``, shift and scale of each sample (B, 1, D)."""
    return torch.addcmul(shift_B1D, x_BND, 1 + scale_B1D)


class FinalLayer(nn.Module):
    """Modulated norm and the projection of tokens to patches.

    Args:
        hidden_size: D.
        out_features: values in a patch of the output.
    """

    def __init__(self, hidden_size: int, out_features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=NORM_EPS)
        self.modulation = nn.Linear(hidden_size, 2 * hidden_size)
        self.linear = nn.Linear(hidden_size, out_features)

    def forward(self, x_BND: Tensor, active_c_BD: Tensor) -> Tensor:
        """(B, N, D) and SiLU of the conditioning (B, D) -> (B, N, out_features)."""
        conditions = self.modulation(active_c_BD).unsqueeze(1).chunk(2, dim=-1)
        return self.linear(modulate(self.norm(x_BND), *conditions))


class DiT(ModelMixin, ConfigMixin):
    """Class-conditional diffusion transformer; predicts noise and variance.

    ``forward(x, t, labels)`` drops no labels: training replaces a label by ``num_classes``, the
    null class, once a sample. ``enable_gradient_checkpointing()`` recomputes the blocks in the
    backward pass.

    Args:
        input_size: height and width of the input.
        patch_size: height and width of a patch.
        in_channels: C; the output has 2C channels, noise then variance.
        hidden_size: D.
        depth: layers.
        num_heads: heads of every layer, or a list with those of each layer.
        head_dim: K of every layer; None for ``hidden_size // num_heads`` of the layer.
        mlp_ratio: width inside the MLP over D.
        num_classes: classes without the null class.
        head_plan: ``HeadPlan.to_dict()``; None for MHA. Written by :func:`moh.convert`, so that
            ``save_pretrained`` and ``from_pretrained`` keep a converted model.
        router: fields of :class:`moh.RouterOptions` with ``head_plan``; None for the defaults.

    Raises:
        ValueError: sizes that do not divide, a list of the wrong length, an impossible plan.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ("DiTBlock",)
    _repeated_blocks = ("DiTBlock",)

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        input_size: int = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int | Sequence[int] = 16,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        num_classes: int = 1000,
        head_plan: Sequence[dict[str, int]] | None = None,
        router: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if input_size % patch_size:
            raise ValueError(f"input_size {input_size} is no multiple of patch_size {patch_size}")
        shapes = _attention_shapes(hidden_size, depth, num_heads, head_dim)
        mlp_hidden = int(hidden_size * mlp_ratio)
        self.patch_size = patch_size
        self.input_shape = (in_channels, input_size, input_size)
        self.gradient_checkpointing = False
        self.patch_embed = PatchEmbed(
            input_size, input_size, patch_size, in_channels, hidden_size, pos_embed_type=None
        )
        self.pos_embed = nn.Parameter(
            _sincos_positions(hidden_size, input_size // patch_size), requires_grad=False
        )
        self.timesteps = Timesteps(TIMESTEP_CHANNELS, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.timestep_embed = TimestepEmbedding(TIMESTEP_CHANNELS, hidden_size)
        self.label_embed = nn.Embedding(num_classes + 1, hidden_size)
        self.blocks = nn.ModuleList(
            DiTBlock(hidden_size, heads, width, mlp_hidden) for heads, width in shapes
        )
        self.final_layer = FinalLayer(hidden_size, patch_size**2 * 2 * in_channels)
        self._initialise()
        if head_plan is not None:
            convert(self, HeadPlan.from_dict(head_plan), RouterOptions(**(router or {})))

    def _initialise(self) -> None:
        """DiT's initialisation: every block starts as the identity, the output at zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Attention):
                _initialise_as_fused(module)
            elif isinstance(module, AdaLayerNormZero):
                nn.init.zeros_(module.linear.weight)
        nn.init.xavier_uniform_(self.patch_embed.proj.weight.detach().flatten(1))
        nn.init.zeros_(self.patch_embed.proj.bias)
        for weight in (
            self.label_embed.weight,
            self.timestep_embed.linear_1.weight,
            self.timestep_embed.linear_2.weight,
        ):
            nn.init.normal_(weight, std=0.02)
        nn.init.zeros_(self.final_layer.modulation.weight)
        nn.init.zeros_(self.final_layer.linear.weight)

    def forward(self, x_BCHW: Tensor, t_B: Tensor, labels_B: Tensor) -> Tensor:
        """Predict the noise and the variance.

        Args:
            x_BCHW: noised inputs (B, C, input_size, input_size).
            t_B: timesteps (B,).
            labels_B: classes (B,), int64; ``num_classes`` is the null class.

        Returns:
            (B, 2C, input_size, input_size).

        Raises:
            ValueError: inputs of another size than the model's.
        """
        if tuple(x_BCHW.shape[1:]) != self.input_shape:
            raise ValueError(f"inputs {tuple(x_BCHW.shape[1:])} are not {self.input_shape}")
        t_freq = self.timesteps(t_B).to(self.timestep_embed.linear_1.weight.dtype)
        active_c_BD = F.silu(self.timestep_embed(t_freq) + self.label_embed(labels_B))
        x_BND = self.patch_embed(x_BCHW) + self.pos_embed
        for block in self.blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x_BND = self._gradient_checkpointing_func(block, x_BND, active_c_BD)
            else:
                x_BND = block(x_BND, active_c_BD)
        return self._unpatchify(self.final_layer(x_BND, active_c_BD))

    def _unpatchify(self, x: Tensor) -> Tensor:
        """(B, N, patch * patch * channels) -> (B, channels, H, W)."""
        patch, side = self.patch_size, self.input_shape[-1] // self.patch_size
        x = x.reshape(x.shape[0], side, side, patch, patch, -1)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], -1, side * patch, side * patch)


def _attention_shapes(
    hidden_size: int, depth: int, num_heads: int | Sequence[int], head_dim: int | None
) -> list[tuple[int, int]]:
    """(num_heads, head_dim) of each layer."""
    heads = [num_heads] * depth if isinstance(num_heads, int) else list(num_heads)
    if len(heads) != depth:
        raise ValueError(f"num_heads has {len(heads)} entries for {depth} layers")
    for layer, count in enumerate(heads):
        if count < 1 or (head_dim is None and hidden_size % count):
            raise ValueError(
                f"num_heads {count} in layer {layer} does not divide hidden_size {hidden_size}; "
                "set head_dim for heads whose widths do not add up to it"
            )
    return [(count, head_dim or hidden_size // count) for count in heads]


def _sincos_positions(hidden_size: int, side: int) -> Tensor:
    """Fixed two-dimensional sine-cosine positions (1, side * side, hidden_size)."""
    return get_2d_sincos_pos_embed(hidden_size, side, base_size=side).float().unsqueeze(0)


def _initialise_as_fused(attn: Attention) -> None:
    """Draw query, key and value as the one (3 * H * K, D) matrix that DiT has for them.

    Xavier's bound depends on the rows: three matrices of their own would start larger.
    """
    linears = (attn.to_q, attn.to_k, attn.to_v)
    fused = torch.cat([linear.weight.detach() for linear in linears])
    nn.init.xavier_uniform_(fused)
    with torch.no_grad():
        for linear, rows in zip(linears, fused.chunk(3), strict=True):
            linear.weight.copy_(rows)


def _write_plan(model: DiT, plan: HeadPlan, options: RouterOptions) -> None:
    _register(model, head_plan=plan.to_dict(), router=asdict(options))


def _erase_plan(model: DiT) -> None:
    _register(model, head_plan=None, router=None)


def _register(model: DiT, **entries: Any) -> None:
    # diffusers lists the arguments left at their defaults, and from_config ignores their values.
    defaults = [key for key in model.config.get("_use_default_values", []) if key not in entries]
    model.register_to_config(**entries, _use_default_values=defaults)


register_hooks(ModelHooks(model=DiT, convert=_write_plan, revert=_erase_plan))

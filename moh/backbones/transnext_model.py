"""TransNeXt (arXiv 2311.17132) as a timm model; parameter names are the published checkpoints'."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from timm.layers import calculate_drop_path_rates, get_device_dtype, to_2tuple
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from moh.backbones.transnext_attention import (
    AggregatedAttention,
    PositionBiasedAttention,
    TransNeXtAttention,
)
from moh.backbones.transnext_layers import Block, ConvGLU, PatchEmbed
from moh.backbones.transnext_positions import Size, on_grid

NO_WEIGHT_DECAY = ("query_embedding", "relative_pos_bias_local", "cpb", "temperature")


class TransNeXt(nn.Module):
    """Hierarchical vision transformer; stage i works at image / (patch_size * 2^(i - 1)).

    Lists have an entry a stage. Stages of ``sr_ratio`` 1 attend to the whole grid, the others to
    a local window and the pooled grid. Modules are named as the published checkpoints name them:
    ``patch_embed1``, ``block1``, ``norm1``, ``patch_embed2``, ...

    Args:
        img_size: pixels, or (height, width).
        patch_size: stride of the stem; its kernel is ``2 * patch_size - 1`` wide.
        global_pool: ``avg``, or empty for the feature map.
        window_size: side of the local window, odd; in a list, the entry of a stage of
            ``sr_ratio`` 1 does not count.
        pretrain_size: image size that sets the scale of relative coordinates, None for
            ``img_size``. Give it to use weights at another size than they were trained at.
        fixed_pool_size: side of every pooled grid, instead of ``grid // sr_ratio``.
        drop_rate: dropout before the classifier.
        proj_drop_rate: dropout in MLPs and after attention.
        attn_drop_rate: dropout of attention weights.
        drop_path_rate: stochastic depth of the last block, rising from 0 over all blocks.
        norm_eps: of the norms in and after blocks; the others have LayerNorm's own.
        device: of the parameters; likewise ``dtype``.

    Raises:
        ValueError: lists of different lengths, or a size that cannot be.
    """

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dims: Sequence[int] = (72, 144, 288, 576),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        depths: Sequence[int] = (5, 5, 22, 5),
        sr_ratios: Sequence[int] = (8, 4, 2, 1),
        window_size: int | Sequence[int | None] = 3,
        qkv_bias: bool = True,
        pretrain_size: int | Sequence[int] | None = None,
        fixed_pool_size: int | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_eps: float = 1e-6,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        windows = [window_size] * len(embed_dims) if isinstance(window_size, int) else window_size
        for key, values in (
            ("num_heads", num_heads),
            ("mlp_ratios", mlp_ratios),
            ("depths", depths),
            ("sr_ratios", sr_ratios),
            ("window_size", windows),
        ):
            if len(values) != len(embed_dims):
                raise ValueError(
                    f"{key} {list(values)} has {len(values)} entries for {len(embed_dims)} stages"
                )
        self.num_stages = len(embed_dims)
        self.img_size: Size = to_2tuple(img_size)
        self.patch_size = patch_size
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.global_pool = _known_pool(global_pool)
        self.num_features = self.head_hidden_size = embed_dims[-1]
        self.grad_checkpointing = False
        self.feature_info: list[dict[str, Any]] = []
        grids = self.grids(self.img_size)
        self.pretrain_size = to_2tuple(pretrain_size or img_size)
        pretrain_grids = self.grids(self.pretrain_size)
        drop_paths = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)

        def attention(stage: int) -> PositionBiasedAttention:
            shape = (embed_dims[stage], num_heads[stage], grids[stage])
            options = {
                "pretrain_grid": pretrain_grids[stage],
                "qkv_bias": qkv_bias,
                "attn_drop": attn_drop_rate,
                "proj_drop": proj_drop_rate,
                **dd,
            }
            if sr_ratios[stage] == 1:
                return TransNeXtAttention(*shape, **options)
            options |= {"window_size": windows[stage], "fixed_pool_size": fixed_pool_size}
            return AggregatedAttention(*shape, sr_ratios[stage], **options)

        before, kernel, stride = in_chans, 2 * patch_size - 1, patch_size
        for stage, dim in enumerate(embed_dims):
            norm = partial(nn.LayerNorm, dim, eps=norm_eps, **dd)
            blocks = nn.ModuleList(
                Block(
                    attention(stage),
                    ConvGLU(dim, mlp_ratios[stage], proj_drop_rate, **dd),
                    norm,
                    drop_path,
                )
                for drop_path in drop_paths[stage]
            )
            number = stage + 1
            self.add_module(f"patch_embed{number}", PatchEmbed(before, dim, kernel, stride, **dd))
            self.add_module(f"block{number}", blocks)
            self.add_module(f"norm{number}", norm())
            self.feature_info.append(
                {"num_chs": dim, "reduction": patch_size * 2**stage, "module": f"norm{number}"}
            )
            before, kernel, stride = dim, 3, 2
        self.head_drop = nn.Dropout(drop_rate)
        self.head = self._classifier(num_classes, **dd)
        self.apply(_init_weights)

    def _classifier(self, num_classes: int, **dd: Any) -> nn.Module:
        return nn.Linear(self.num_features, num_classes, **dd) if num_classes else nn.Identity()

    def grids(self, img_size: Size) -> list[Size]:
        """Tokens (height, width) of each stage for an image size in pixels."""
        height, width = img_size
        strides = [self.patch_size * 2**stage for stage in range(self.num_stages)]
        # The padded convolutions round up, and so does this, whatever the size.
        return [(math.ceil(height / stride), math.ceil(width / stride)) for stride in strides]

    def set_input_size(self, img_size: int | Sequence[int]) -> None:
        """Take images of another size from now on; relative coordinates keep their scale."""
        self.img_size = to_2tuple(img_size)
        for stage, grid in enumerate(self.grids(self.img_size)):
            for block in self.get_submodule(f"block{stage + 1}").children():
                assert isinstance(block, Block)
                block.attn.set_grid(grid)
        update_model_input_size(self, self.img_size)

    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay, besides biases and others of one dimension."""
        names = [name for name, _ in self.named_parameters()]
        return {name for name in names if any(part in name for part in NO_WEIGHT_DECAY)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """How timm orders parameters into layers: by stage, or by block."""
        if coarse:
            return {"stem": r"^patch_embed1\.", "blocks": r"^(?:patch_embed|block|norm)(\d+)\."}
        return {
            "stem": r"^patch_embed1\.",
            "blocks": [
                (r"^patch_embed(\d+)\.", (0,)),
                (r"^block(\d+)\.(\d+)\.", None),
                (r"^norm(\d+)\.", (99999,)),
            ],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of keeping their activations."""
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """The last linear layer."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; 0 classes leave the pooled features."""
        if global_pool is not None:
            self.global_pool = _known_pool(global_pool)
        self.num_classes = num_classes
        self.head = self._classifier(num_classes, **get_device_dtype(self))
        self.head.apply(_init_weights)

    def _stage(self, stage: int, image: Tensor) -> Tensor:
        """Run one stage: a map (B, C, height, width) to the next one."""
        number = stage + 1
        tokens = self.get_submodule(f"patch_embed{number}")(image)
        for block in self.get_submodule(f"block{number}").children():
            if self.grad_checkpointing:
                tokens = checkpoint(block, tokens, use_reentrant=False)
            else:
                tokens = block(tokens)
        tokens = self.get_submodule(f"norm{number}")(tokens)
        return on_grid(tokens, self.grids(self.img_size)[stage]).permute(0, 3, 1, 2)

    def _check_input(self, image: Tensor) -> None:
        if tuple(image.shape[2:]) != self.img_size:
            raise ValueError(
                f"image of {tuple(image.shape[2:])} pixels for a model of {self.img_size}; "
                "build it with img_size, or call set_input_size"
            )

    def forward_features(self, image: Tensor) -> Tensor:
        """Images (B, C, height, width) to the normalised map of the last stage."""
        self._check_input(image)
        for stage in range(self.num_stages):
            image = self._stage(stage, image)
        return image

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Map of the last stage to class logits (B, num_classes); before them if asked."""
        if self.global_pool:
            features = features.mean(dim=(2, 3))
        features = self.head_drop(features)
        return features if pre_logits else self.head(features)

    def forward(self, image: Tensor) -> Tensor:
        """Images (B, C, height, width) to class logits (B, num_classes)."""
        return self.forward_head(self.forward_features(image))

    def forward_intermediates(
        self,
        image: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps of some stages, as timm's hierarchical models return them.

        Args:
            indices: stages; the last ones for an int, all for None.
            norm: no effect, the maps of all stages are normalised.
            stop_early: leave out the stages after the last one asked for.
            output_fmt: ``NCHW`` or ``NHWC``.
            intermediates_only: return the maps without the last stage's.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt {output_fmt!r} is not one of NCHW, NHWC")
        self._check_input(image)
        take, last = feature_take_indices(self.num_stages, indices)
        maps = []
        for stage in range(last + 1 if stop_early else self.num_stages):
            image = self._stage(stage, image)
            if stage in take:
                maps.append(image if output_fmt == "NCHW" else image.permute(0, 2, 3, 1))
        return maps if intermediates_only else (image, maps)

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Remove the stages after the last one in ``indices``, and the classifier."""
        take, last = feature_take_indices(self.num_stages, indices)
        pruned = last < self.num_stages - 1
        for number in range(last + 2, self.num_stages + 1):
            for part in ("patch_embed", "block", "norm"):
                delattr(self, f"{part}{number}")
        self.num_stages = last + 1
        self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
        if prune_head or pruned:
            self.reset_classifier(0, "")
        return take


def _known_pool(global_pool: str) -> str:
    if global_pool not in ("avg", ""):
        raise ValueError(f"global_pool {global_pool!r} is not one of 'avg', ''")
    return global_pool


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Conv2d):
        fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
    else:
        return
    if module.bias is not None:
        nn.init.zeros_(module.bias)

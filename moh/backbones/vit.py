"""MoH in timm: any model built on ``timm.layers.Attention`` (VisionTransformer, DeiT, ...)."""

from __future__ import annotations

import torch
from timm.layers import Attention
from torch import Tensor, nn

from moh.backbones.convert import Wiring, register_wiring
from moh.heads import Router, attend


class MoHAttention(Attention):
    """timm's attention with a router; gates weight the heads before ``norm`` and ``proj``.

    Made by :func:`moh.convert`, never constructed.
    """

    router: Router

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """As timm's: (B, N, D) -> (B, N, D)."""
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q_BHNK, k_BHNK, v_BHNK = qkv.unbind(0)
        q_BHNK, k_BHNK = self.q_norm(q_BHNK), self.k_norm(k_BHNK)
        routing = self.router(x, q_BHNK)
        y_BNHK = attend(
            self.router,
            routing,
            q_BHNK,
            k_BHNK,
            v_BHNK,
            attn_mask=attn_mask,
            dropout_p=self.attn_drop.p if self.training else 0.0,
            is_causal=is_causal,
        )
        y = self.norm(y_BNHK.reshape(B, N, self.attn_dim))
        if self.gate is not None:
            y = y * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(y))


def trunc_normal_init(weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The released MoH-ViT's router initialisation: truncated normal, std 0.02."""
    return nn.init.trunc_normal_(weight, std=0.02, generator=generator)


register_wiring(
    Wiring(
        mha=Attention,
        moh=MoHAttention,
        shape=lambda attn: (attn.qkv.in_features, attn.num_heads, attn.head_dim),
        init=trunc_normal_init,
    )
)

"""MoH in diffusers: self-attention of class ``diffusers.models.attention_processor.Attention``."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor, nn

from moh.backbones.convert import Wiring, register_wiring
from moh.heads import Router, attend


class MoHAttention(Attention):
    """diffusers' self-attention with a router; gates weight the heads before ``to_out``.

    Computes what the default processor does, operation by operation. Made by
    :func:`moh.convert`, never constructed.
    """

    router: Router

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **cross_attention_kwargs: Any,
    ) -> Tensor:
        """As diffusers': (B, N, D) -> (B, N, D).

        Raises:
            ValueError: an argument of cross-attention, a mask, or anything but (B, N, D).
        """
        extra = {
            "encoder_hidden_states": encoder_hidden_states,
            "attention_mask": attention_mask,
            **cross_attention_kwargs,
        }
        given = [name for name, value in extra.items() if value is not None]
        if given or hidden_states.ndim != 3:
            raise ValueError(
                "MoH self-attention takes hidden_states (batch, tokens, width) alone, got "
                f"shape {tuple(hidden_states.shape)}" + "".join(f" and {name}" for name in given)
            )
        B, N, _ = hidden_states.shape
        q_BHNK = self._split_heads(self.to_q(hidden_states))
        k_BHNK = self._split_heads(self.to_k(hidden_states))
        v_BHNK = self._split_heads(self.to_v(hidden_states))
        if self.norm_q is not None:
            q_BHNK = self.norm_q(q_BHNK)
        if self.norm_k is not None:
            k_BHNK = self.norm_k(k_BHNK)
        routing = self.router(hidden_states, q_BHNK)
        y_BNHK = attend(self.router, routing, q_BHNK, k_BHNK, v_BHNK)
        y = y_BNHK.reshape(B, N, self.inner_dim).to(q_BHNK.dtype)
        return self.to_out[1](self.to_out[0](y))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.heads, self.inner_dim // self.heads).transpose(1, 2)

    def set_processor(self, processor: Any) -> None:
        """Refused: the gates would be lost.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"MoH attention cannot use the processor {type(processor).__name__}; "
            "call moh.revert(model) first"
        )


def is_plain_self_attention(attn: Attention) -> bool:
    """True if :class:`MoHAttention` computes exactly what this instance computes.

    Cross-attention, grouped key and value heads, extra projections or norms, a residual inside
    the layer, and processors other than the default one are left alone.
    """
    return (
        type(attn.processor) is AttnProcessor2_0
        and not attn.is_cross_attention
        and attn.to_out is not None
        and attn.group_norm is None
        and attn.spatial_norm is None
        and attn.added_kv_proj_dim is None
        and attn.inner_kv_dim == attn.inner_dim
        and not attn.residual_connection
        and attn.rescale_output_factor == 1.0
    )


def xavier_init(weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The released MoH-DiT's router initialisation: xavier uniform."""
    return nn.init.xavier_uniform_(weight, generator=generator)


register_wiring(
    Wiring(
        mha=Attention,
        moh=MoHAttention,
        shape=lambda attn: (attn.to_q.in_features, attn.heads, attn.inner_dim // attn.heads),
        init=xavier_init,
        eligible=is_plain_self_attention,
    )
)

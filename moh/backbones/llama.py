"""MoH in transformers' LLaMA, and LLaMA classes that save and load with a head plan.

A MoH LLaMA is made in either of two ways, and both end in the same classes:
``moh.convert(llama, plan)`` on a built model, or ``MoHLlamaForCausalLM(config)`` with a
``head_plan`` in its config. Importing this module makes ``AutoConfig``, ``AutoModel`` and
``AutoModelForCausalLM`` know them; elsewhere ``trust_remote_code=True`` does.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from moh.backbones.convert import ModelHooks, Wiring, convert, register_hooks, register_wiring
from moh.backbones.llama_cache import make_room
from moh.heads import (
    HeadPlan,
    Router,
    RouterOptions,
    attend,
    gate_heads,
)


class MoHLlamaAttention(LlamaAttention):
    """transformers' attention with a router; gates weight the heads before ``o_proj``.

    Routing is per query head: with grouped keys and values all of these are computed and cached.
    Made by :func:`moh.convert`, never constructed.
    """

    router: Router

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        token_mask_BN: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As transformers': (B, N, D) -> (B, N, D) and attention weights where there are any.

        Args:
            token_mask_BN: true for tokens that count in the routing statistics; None for all.
        """
        x_BND = hidden_states
        q_BHNK, k_BHNK, v_BHNK = (
            proj(x_BND).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        # Before rotary, which keeps norms only up to rounding: the same bits at any position.
        routing = self.router(x_BND, q_BHNK, token_mask_BN)
        q_BHNK, k_BHNK = apply_rotary_pos_emb(q_BHNK, k_BHNK, *position_embeddings)
        if cache is not None:
            make_room(cache, self.layer_idx)
            k_BHNK, v_BHNK = cache.update(k_BHNK, v_BHNK, self.layer_idx, kwargs=kwargs)
        dropout = self.attention_dropout if self.training else 0.0

        def library() -> tuple[Tensor, Tensor | None]:
            interface = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
            y, weights = interface(
                self,
                q_BHNK,
                k_BHNK,
                v_BHNK,
                attention_mask,
                dropout=dropout,
                scaling=self.scaling,
                **kwargs,
            )
            return y, weights

        if self.config._attn_implementation != "sdpa":
            self._refuse_sparse()
            y_BNHK, weights = library()
            y_BNHK = gate_heads(y_BNHK, routing.gates_BNH, in_place=not torch.is_grad_enabled())
            return self.o_proj(y_BNHK.flatten(-2)), weights
        # As the library decides it for PyTorch's attention. A static cache's first pass has more
        # keys than queries, and no mask: what lies behind the queries' own keys is not written.
        wanted, N = kwargs.get("is_causal"), q_BHNK.shape[2]
        causal = bool(self.is_causal if wanted is None else wanted)
        causal = causal and attention_mask is None and N > 1
        if causal and k_BHNK.shape[2] > N:
            k_BHNK, v_BHNK = k_BHNK[:, :, :N], v_BHNK[:, :, :N]
        y_BNHK = attend(
            self.router,
            routing,
            q_BHNK,
            k_BHNK,
            v_BHNK,
            attention_mask,
            causal,
            dropout,
            self.scaling,
            dense=lambda: library()[0],
        )
        return self.o_proj(y_BNHK.flatten(-2)), None

    def _refuse_sparse(self) -> None:
        """Sparse execution replaces PyTorch's attention alone.

        Raises:
            ValueError: it is asked for, and the library is set to another.
        """
        if self.router.options.execution == "sparse":
            raise ValueError(
                "execution sparse needs attn_implementation='sdpa', not "
                f"{self.config._attn_implementation!r}"
            )


_CODE = Path(__file__).with_name("modeling_moh_llama.py")
_AUTO_CLASSES = {
    "AutoConfig": "MoHLlamaConfig",
    "AutoModel": "MoHLlamaModel",
    "AutoModelForCausalLM": "MoHLlamaForCausalLM",
}


class MoHLlamaConfig(LlamaConfig):
    """A LLaMA config with heads.

    Attributes:
        head_plan: ``HeadPlan.to_dict()``, a dict a layer; None for plain MHA.
        router: the fields of :class:`moh.RouterOptions` as a dict; None for its defaults.
    """

    model_type = "moh_llama"

    head_plan: list[dict[str, int]] | None = None
    router: dict[str, Any] | None = None

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        """As transformers', with a file by which ``trust_remote_code=True`` finds these classes.

        So the folder loads in a process that has not imported this module, such as lm-eval's.
        """
        os.makedirs(save_directory, exist_ok=True)
        shutil.copyfile(_CODE, Path(save_directory) / _CODE.name)
        self.auto_map = {auto: f"{_CODE.stem}.{name}" for auto, name in _AUTO_CLASSES.items()}
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing to note, so that no other file is saved than that of :meth:`save_pretrained`."""


class _MoHLlama(LlamaPreTrainedModel):
    """What both model classes share."""

    config_class = MoHLlamaConfig

    def _convert_from_config(self) -> None:
        """Put the config's heads into the plain LLaMA that the library has just built.

        The routers' seed is the process's own, read without drawing from its stream, so that the
        original parameters equal those of a LLaMA built at the same seed.
        """
        if self.config.head_plan is not None:
            plan = HeadPlan.from_dict(self.config.head_plan)
            convert(self, plan, _router_options(self.config.router), seed=torch.initial_seed())

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """As transformers', for the non-reentrant form alone.

        Raises:
            ValueError: ``use_reentrant=True``, whose first pass runs without gradients, so that
                the balance loss would train nothing and nobody would notice.
        """
        checkpointing = {"use_reentrant": False, **(activation_checkpointing_kwargs or {})}
        if checkpointing["use_reentrant"]:
            raise ValueError(
                "activation checkpointing with use_reentrant=True gives the balance loss no "
                "gradient; use use_reentrant=False"
            )
        super().activation_checkpointing_enable(checkpointing, **kwargs)


class MoHLlamaModel(_MoHLlama, LlamaModel):
    """The decoder without its output layer."""

    def __init__(self, config: MoHLlamaConfig) -> None:
        super().__init__(config)
        self._convert_from_config()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As ``LlamaModel.forward``; padding is left out of the routing statistics.

        A 2-D ``attention_mask`` (B, past + N) says which tokens are padding. From a mask that is
        already 4-D nothing is known of padding, and every token counts.
        """
        # A mask may also be a BlockMask (FlexAttention).
        if (
            isinstance(attention_mask, Tensor)
            and attention_mask.dim() == 2
            and self.config.head_plan is not None
        ):
            length = (input_ids if input_ids is not None else kwargs["inputs_embeds"]).shape[1]
            kwargs["token_mask_BN"] = attention_mask[:, -length:].bool()
        return super().forward(input_ids, attention_mask, *args, **kwargs)


class MoHLlamaForCausalLM(_MoHLlama, LlamaForCausalLM):
    """The language model."""

    def __init__(self, config: MoHLlamaConfig) -> None:
        super().__init__(config)
        self._convert_from_config()


_MOH_OF: dict[type[nn.Module], type[nn.Module]] = {
    LlamaModel: MoHLlamaModel,
    LlamaForCausalLM: MoHLlamaForCausalLM,
}
_MHA_OF = {moh: mha for mha, moh in _MOH_OF.items()}


def normal_init(weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """LLaMA's own initialisation: normal, std 0.02."""
    return nn.init.normal_(weight, std=0.02, generator=generator)


def _router_options(options: Mapping[str, Any] | None) -> RouterOptions:
    """The config's ``router`` entry as options."""
    known = [field.name for field in fields(RouterOptions)]
    for key in options or {}:
        if key not in known:
            raise ValueError(f"router option {key!r} is not one of {', '.join(known)}")
    return RouterOptions(**options or {})


def _set_classes(
    model: nn.Module, class_of: Mapping[type[nn.Module], type[nn.Module]], config: LlamaConfig
) -> None:
    """Give a model and its inner decoder other classes, and all of its parts another config.

    A LLaMA with another head (classification) keeps its class: it is MoH in memory, and only the
    decoder inside it can be saved and loaded as such.
    """
    old = model.config
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config
        if type(module) in class_of:
            module.__class__ = class_of[type(module)]
            # The library fills this when a model is constructed; output_attentions needs it.
            _CAN_RECORD_REGISTRY[module] = module._can_record_outputs


def _after_convert(model: LlamaPreTrainedModel, plan: HeadPlan, options: RouterOptions) -> None:
    """Make a converted LLaMA one that saves and loads with its heads."""
    config = model.config
    if getattr(config, "head_plan", None) is None:
        # A copy, since a baseline may have been built from the same object.
        config = copy.deepcopy(config)
        config.__class__ = MoHLlamaConfig
        config.head_plan, config.router = plan.to_dict(), asdict(options)
    _set_classes(model, _MOH_OF, config)


def _after_revert(model: LlamaPreTrainedModel) -> None:
    """Give back the library's classes and a config without heads."""
    config = copy.deepcopy(model.config)
    config.__class__ = LlamaConfig
    del config.head_plan, config.router
    if hasattr(config, "auto_map"):
        del config.auto_map
    _set_classes(model, _MHA_OF, config)
    if config.architectures:
        config.architectures = [type(model).__name__]


register_wiring(
    Wiring(
        mha=LlamaAttention,
        moh=MoHLlamaAttention,
        shape=lambda attn: (
            attn.q_proj.in_features,
            attn.q_proj.out_features // attn.head_dim,
            attn.head_dim,
        ),
        init=normal_init,
    )
)
register_hooks(ModelHooks(model=LlamaPreTrainedModel, convert=_after_convert, revert=_after_revert))
AutoConfig.register(MoHLlamaConfig.model_type, MoHLlamaConfig, exist_ok=True)
AutoModel.register(MoHLlamaConfig, MoHLlamaModel, exist_ok=True)
AutoModelForCausalLM.register(MoHLlamaConfig, MoHLlamaForCausalLM, exist_ok=True)

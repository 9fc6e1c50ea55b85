"""Routers: from an attention layer's input to the gates of its heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moh.heads.draws import draw
from moh.heads.plan import LayerPlan

RouterKind = Literal["two_stage", "query_norm"]
GateScale = Literal["released", "paper"]
Selection = Literal["learned", "random", "fixed"]
Execution = Literal["auto", "dense", "sparse"]

WIDE = 256  # width of an input from which on a router's layers are computed as one


class Routing(NamedTuple):
    """What a router decided for each token.

    Whoever gets it may write to the gates in place, but not to the other two, which the router's
    statistics are summed from later.

    Attributes:
        gates_BNH: weight of each head's output, float32; 0 for a head that is not active.
        selected_BNE: whether each routed head is active.
        probs_BNE: softmax over the routed heads, float32.
    """

    gates_BNH: Tensor
    selected_BNE: Tensor
    probs_BNE: Tensor


class InferredRouting(Routing):
    """The same without gradients, of which dense execution needs the gates alone.

    Its second and third entry are found when they are asked for by name.
    """

    @classmethod
    def of(cls, gates_BNH: Tensor, logits_BNE: Tensor, index_BNk: Tensor) -> InferredRouting:
        """From the logits of the routed heads and the numbers of the selected ones."""
        return cls(gates_BNH, index_BNk, logits_BNE)

    @property
    def selected_BNE(self) -> Tensor:  # noqa: N802 (dimensions)
        """Whether each routed head is active."""
        return torch.zeros_like(self[2], dtype=torch.bool).scatter_(-1, self[1], True)

    @property
    def probs_BNE(self) -> Tensor:  # noqa: N802 (dimensions)
        """Softmax over the routed heads, float32."""
        return self[2].softmax(dim=-1)


class RoutingStatistics(NamedTuple):
    """Sums over the tokens of the last forward pass, padding left out.

    Attributes:
        probs_sum_E: summed probabilities, float32, with gradient.
        selected_sum_E: how many tokens selected each routed head, float32.
        num_tokens: tokens counted, float32 scalar.
    """

    probs_sum_E: Tensor
    selected_sum_E: Tensor
    num_tokens: Tensor


@dataclass(frozen=True)
class RouterOptions:
    """How gates are formed and heads computed; the defaults are the released models'.

    Attributes:
        kind: ``two_stage`` (learned) or ``query_norm`` (parameter-free, continue-tuned LLaMA).
        gate_scale: ``released`` rescales and renormalises as the published checkpoints need;
            ``paper`` follows equations 5-7 as printed. Two-stage router only.
        two_stage: whether the shared and the routed heads are weighted against each other (W_h).
        selection: ``learned`` takes the top-k; ``random`` and ``fixed`` are controls that draw the
            k heads anew for each token, or always take the first k. They have no balance loss: it
            could not change what is selected. See :mod:`moh.heads.draws` for the draws.
        straight_through: whether ``query_norm`` passes gradients to its softmax (equation 10).
        execution: ``dense`` computes all heads and then weights them, ``sparse`` the active ones
            alone; ``auto`` takes what was measured to be faster for the shape at hand.

    Raises:
        ValueError: an unknown word; the message lists the known ones.
    """

    kind: RouterKind = "two_stage"
    gate_scale: GateScale = "released"
    two_stage: bool = True
    selection: Selection = "learned"
    straight_through: bool = True
    execution: Execution = "auto"

    def __post_init__(self) -> None:
        for key, choices in (
            ("kind", RouterKind),
            ("gate_scale", GateScale),
            ("selection", Selection),
            ("execution", Execution),
        ):
            value = getattr(self, key)
            if value not in get_args(choices):
                raise ValueError(f"{key} {value!r} is not one of {', '.join(get_args(choices))}")


class Router(nn.Module):
    """Base of the routers: selection, and the statistics that the balance loss needs.

    ``statistics`` holds the last forward pass and nothing else: each forward overwrites it, so a
    forward repeated by activation checkpointing or accumulation cannot count twice. It is None
    in a layer without routed heads. Of a forward without gradients it is summed when it is read.
    """

    def __init__(self, plan: LayerPlan, options: RouterOptions) -> None:
        super().__init__()
        self.plan = plan
        self.options = options
        self._statistics: RoutingStatistics | None = None
        self._unsummed: tuple[Routing, Tensor | None] | None = None
        self.draws: Tensor | None = None  # keys of the next tokens; set_draws

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles start without statistics: these belong to a graph."""
        return {**self.__dict__, "_statistics": None, "_unsummed": None, "draws": None}

    @property
    def statistics(self) -> RoutingStatistics | None:
        """Sums over the tokens of the last forward pass; None before it."""
        if self._unsummed is not None:
            self._statistics, self._unsummed = _sums(*self._unsummed), None
        return self._statistics

    @statistics.setter
    def statistics(self, value: RoutingStatistics | None) -> None:
        self._statistics, self._unsummed = value, None

    def select(self, scores_BNE: Tensor) -> Tensor:
        """Choose ``top_k`` routed heads for each token.

        Returns:
            Bool tensor (B, N, E) with exactly ``top_k`` true a token.
        """
        if self.options.selection == "random":
            scores_BNE = self._draw(scores_BNE)
        if self.options.selection == "fixed":
            index_BNk = torch.arange(self.plan.top_k, device=scores_BNE.device)
            index_BNk = index_BNk.expand(*scores_BNE.shape[:-1], -1)
        else:
            index_BNk = scores_BNE.topk(self.plan.top_k, dim=-1).indices
        selected_BNE = torch.zeros_like(scores_BNE, dtype=torch.bool)
        return selected_BNE.scatter(-1, index_BNk, True)

    def _draw(self, scores_BNE: Tensor) -> Tensor:
        """Random numbers in place of scores: from the keys, else from PyTorch's global stream."""
        if self.draws is None:
            return torch.rand_like(scores_BNE)
        return draw(self.draws.to(scores_BNE.device), *scores_BNE.shape)

    def record(self, routing: Routing, mask_BN: Tensor | None) -> Routing:
        """Overwrite ``statistics``; tokens where ``mask_BN`` is false do not count.

        Returns:
            ``routing``.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            self.statistics = _sums(routing, mask_BN)
        else:
            # The mask is the caller's, who may write the next batch's into it before that.
            mask_BN = None if mask_BN is None else mask_BN.clone()
            self._statistics, self._unsummed = None, (routing, mask_BN)
        return routing

    def balance_loss(self) -> Tensor:
        """Balance loss of this layer in the last forward pass, a float32 scalar."""
        assert self.statistics is not None, "no forward pass yet, or no routed heads"
        probs_sum_E, selected_sum_E, num_tokens = self.statistics
        num_tokens = num_tokens.clamp_min(1)
        loss = ((probs_sum_E / num_tokens) * (selected_sum_E / num_tokens)).sum()
        return loss if self.options.gate_scale == "paper" else self.plan.num_routed * loss

    def extra_repr(self) -> str:
        plan = self.plan
        return f"{plan.num_shared} shared + top {plan.top_k} of {plan.num_routed}, {self.options}"


def _sums(routing: Routing, mask_BN: Tensor | None) -> RoutingStatistics:
    probs_BNE = routing.probs_BNE
    selected_BNE = routing.selected_BNE.to(probs_BNE.dtype)
    if mask_BN is None:
        # Filled where it is needed: a tensor made of a Python number is copied there, and the
        # device waited for.
        num_tokens = probs_BNE.new_full((), probs_BNE.shape[:-1].numel())
    else:
        weight_BN1 = mask_BN.to(probs_BNE.dtype).unsqueeze(-1)
        probs_BNE, selected_BNE = probs_BNE * weight_BN1, selected_BNE * weight_BN1
        num_tokens = weight_BN1.sum()
    return RoutingStatistics(probs_BNE.sum(dim=(0, 1)), selected_BNE.sum(dim=(0, 1)), num_tokens)


class TwoStageRouter(Router):
    """The learned router: which routed heads, how much of each head, shared against routed.

    With ``p = softmax(W_r x)``, ``a = 2 softmax(W_h x)``, S shared and E routed heads:
    shared gates ``a[0] * S * softmax(W_s x)`` (1 instead of the softmax term for S = 1), routed
    gates ``a[1] * k * p / sum(p selected)`` on the k largest, 0 elsewhere. Without routed or
    without shared heads there is no ``a``. ``gate_scale="paper"`` leaves out the factors S, k and
    2 and the division. Paper, equations 5 and 6.

    Args:
        dim: D, width of the attention input.
        plan: head budget of the layer.
        options: see :class:`RouterOptions`.
    """

    def __init__(self, dim: int, plan: LayerPlan, options: RouterOptions) -> None:
        super().__init__(plan, options)
        both = plan.num_shared > 0 and plan.num_routed > 0
        self.routed = nn.Linear(dim, plan.num_routed, bias=False) if plan.num_routed else None
        self.stage = nn.Linear(dim, 2, bias=False) if both and options.two_stage else None
        self.shared = nn.Linear(dim, plan.num_shared, bias=False) if plan.num_shared > 1 else None

    def forward(
        self, x_BND: Tensor, q_BHNK: Tensor | None = None, mask_BN: Tensor | None = None
    ) -> Routing:
        """Route each token.

        Args:
            x_BND: the attention input, after its norm.
            q_BHNK: not used; the argument keeps one call for both routers.
            mask_BN: true for tokens that count in the statistics; None for all.
        """
        # Softmax and top-k of half-precision logits tie often: float32 whatever autocast says.
        with no_autocast(x_BND.device.type):
            return self._route(x_BND.float(), mask_BN)

    def _route(self, x_BND: Tensor, mask_BN: Tensor | None) -> Routing:
        plan, released = self.plan, self.options.gate_scale == "released"
        if self._is_usual and x_BND.shape[-1] >= WIDE and not torch.is_grad_enabled():
            return self._infer(x_BND, mask_BN)
        layers = {"shared": self.shared, "routed": self.routed, "stage": self.stage}
        weights = {
            name: layer.weight.float() for name, layer in layers.items() if layer is not None
        }
        logits = dict(zip(weights, _linear(x_BND, list(weights.values())), strict=True))
        gates: list[Tensor] = []
        if plan.num_shared:
            gates.append(_shared_gates(x_BND, logits.get("shared")))
            if released and plan.num_shared > 1:
                gates[0] = plan.num_shared * gates[0]
        if self.routed is None:
            selected_BNE = probs_BNE = x_BND.new_zeros((*x_BND.shape[:-1], 0))
            return Routing(gates[0], selected_BNE.bool(), probs_BNE)
        probs_BNE = logits["routed"].softmax(dim=-1)
        selected_BNE = self.select(probs_BNE)
        active_BNE = selected_BNE.to(probs_BNE.dtype)
        routed_BNE = probs_BNE * active_BNE
        if released:
            total_BN1 = routed_BNE.sum(-1, keepdim=True)
            floor = torch.finfo(total_BN1.dtype).eps
            routed_BNE = plan.top_k * routed_BNE / total_BN1.clamp_min(floor)
        gates.append(routed_BNE)
        if "stage" in logits:
            stage_BN2 = logits["stage"].softmax(dim=-1)
            if released:
                stage_BN2 = 2 * stage_BN2
            gates = [gate * stage_BN2[..., i : i + 1] for i, gate in enumerate(gates)]
        return self.record(Routing(torch.cat(gates, dim=-1), selected_BNE, probs_BNE), mask_BN)

    @property
    def _is_usual(self) -> bool:
        """True for the released models' own options, with shared and routed heads."""
        options = self.options
        learned = options.selection == "learned" and options.gate_scale == "released"
        return learned and self.stage is not None

    def _infer(self, x_BND: Tensor, mask_BN: Tensor | None) -> Routing:
        """The same gates in half the operations: at a few hundred tokens their number is the cost.

        No gradient can pass, since gates are written in place.
        """
        plan, S = self.plan, self.plan.num_shared
        layers = [layer for layer in (self.shared, self.routed, self.stage) if layer is not None]
        *shared, logits_BNE, stage_BN2 = _linear(x_BND, [layer.weight.float() for layer in layers])
        top_BNk, index_BNk = logits_BNE.topk(plan.top_k, dim=-1)
        stage_BN2 = stage_BN2.softmax(dim=-1)
        shared_BN1, routed_BN1 = stage_BN2.narrow(-1, 0, 1), stage_BN2.narrow(-1, 1, 1)
        gates_BNH = logits_BNE.new_zeros((*logits_BNE.shape[:-1], plan.num_heads))
        gates_BNS = gates_BNH.narrow(-1, 0, S)
        if shared:
            gates_BNS.addcmul_(shared[0].softmax(dim=-1), shared_BN1, value=2 * S)
        else:
            gates_BNS.add_(shared_BN1, alpha=2)
        # Probabilities over the sum of the selected ones: the softmax of these logits alone.
        active_BNk = top_BNk.softmax(dim=-1)
        zero = active_BNk.new_zeros(())
        torch.addcmul(zero, active_BNk, routed_BN1, value=2 * plan.top_k, out=active_BNk)
        gates_BNH.narrow(-1, S, plan.num_routed).scatter_(-1, index_BNk, active_BNk)
        return self.record(InferredRouting.of(gates_BNH, logits_BNE, index_BNk), mask_BN)


def _linear(x_BND: Tensor, weights: list[Tensor]) -> Sequence[Tensor]:
    """``W x`` for each weight, of a wide input as one product.

    Each layer has few outputs, so that a product of its own is spent on reading ``x``, and its
    gradient of ``x`` is as large as that of a real layer. Narrow inputs have little to gain, and
    keep the rounding that the recorded scores of narrow models have. One token is read at no cost,
    and putting the layers together would be the cost.
    """
    if len(weights) < 2 or x_BND.shape[-1] < WIDE or x_BND.shape[:-1].numel() == 1:
        return [F.linear(x_BND, weight) for weight in weights]
    return F.linear(x_BND, torch.cat(weights)).split([len(weight) for weight in weights], dim=-1)


def _shared_gates(x_BND: Tensor, logits_BNS: Tensor | None) -> Tensor:
    """Softmax over the shared heads; ones where a single head leaves nothing to learn."""
    if logits_BNS is None:
        return x_BND.new_ones((*x_BND.shape[:-1], 1))
    return logits_BNS.softmax(dim=-1)


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Autocast switched off, where it is on and the device knows it (``meta`` does not)."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


class QueryNormRouter(Router):
    """The parameter-free router of continue-tuned models (paper, equations 9 and 10).

    The score of a routed head is the l2 norm of its query over the unbiased standard deviation
    of those norms among the token's routed heads. Selected heads get gate 1, shared heads 1.
    Backward, a selected gate passes its gradient to the softmax of the scores.
    """

    def forward(
        self, x_BND: Tensor, q_BHNK: Tensor | None = None, mask_BN: Tensor | None = None
    ) -> Routing:
        """Route each token.

        Args:
            x_BND: not used; the argument keeps one call for both routers.
            q_BHNK: queries, before or after rotary embedding (it keeps norms).
            mask_BN: true for tokens that count in the statistics; None for all.
        """
        assert q_BHNK is not None, "query_norm routes on the query"
        plan = self.plan
        shared_BNS = q_BHNK.new_ones(
            (q_BHNK.shape[0], q_BHNK.shape[2], plan.num_shared), dtype=torch.float32
        )
        if plan.all_shared:
            empty = shared_BNS[..., :0]
            return Routing(shared_BNS, empty.bool(), empty)
        norm_BNE = q_BHNK[:, plan.num_shared :].float().norm(dim=-1).transpose(1, 2)
        probs_BNE = (norm_BNE / _safe_std(norm_BNE)).softmax(dim=-1)
        selected_BNE = self.select(norm_BNE.detach())
        routed_BNE = selected_BNE.to(probs_BNE.dtype)
        if self.options.straight_through:
            routed_BNE = routed_BNE * (1 + (probs_BNE - probs_BNE.detach()))
        gates_BNH = torch.cat([shared_BNS, routed_BNE], dim=-1)
        return self.record(Routing(gates_BNH, selected_BNE, probs_BNE), mask_BN)


def _safe_std(x_BNE: Tensor) -> Tensor:
    """Unbiased standard deviation over the last dimension, 1 where it is zero or undefined.

    The substitution happens before the square root, whose gradient at zero is infinite.
    """
    if x_BNE.shape[-1] < 2:
        return x_BNE.new_ones((*x_BNE.shape[:-1], 1))
    var_BN1 = x_BNE.var(dim=-1, keepdim=True)
    return torch.where(var_BN1 > torch.finfo(var_BN1.dtype).tiny, var_BN1, 1.0).sqrt()


def build_router(
    dim: int,
    plan: LayerPlan,
    options: RouterOptions,
    init: Callable[[Tensor, torch.Generator | None], object],
    generator: torch.Generator | None = None,
) -> Router:
    """Build the router of one layer and draw its weights.

    Args:
        dim: D, width of the attention input.
        init: fills a weight in place from a generator; each backbone has its own.
        generator: source of the draw; None for PyTorch's global one.
    """
    if options.kind == "query_norm":
        return QueryNormRouter(plan, options)
    router = TwoStageRouter(dim, plan, options)
    for weight in router.parameters():
        if not weight.is_meta:
            init(weight, generator)
    return router

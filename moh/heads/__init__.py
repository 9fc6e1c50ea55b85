"""Mixture-of-Head attention: head plan, routers, gates, balance loss, head load.

Needs torch and nothing else. ``moh.backbones`` wires it into timm, diffusers and transformers.

Tensor names end in their dimensions:
    B batch, N tokens, D width of the model, H heads, K width of a head, E routed heads.
"""

from moh.heads.balance import balance_loss, head_load, routers, sum_counts
from moh.heads.execution import gate_heads
from moh.heads.plan import HeadPlan, LayerPlan
from moh.heads.router import (
    QueryNormRouter,
    Router,
    RouterOptions,
    Routing,
    RoutingStatistics,
    TwoStageRouter,
    build_router,
)

__all__ = [
    "HeadPlan",
    "LayerPlan",
    "QueryNormRouter",
    "Router",
    "RouterOptions",
    "Routing",
    "RoutingStatistics",
    "TwoStageRouter",
    "balance_loss",
    "build_router",
    "gate_heads",
    "head_load",
    "routers",
    "sum_counts",
]

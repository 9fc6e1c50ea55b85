"""Mixture-of-Head attention: head plan, routers, gates, balance loss, head load.

Needs torch and nothing else. ``moh.backbones`` wires it into timm, diffusers and transformers.

Tensor names end in their dimensions:
    B batch, N tokens, D width of the model, H heads, K width of a head, E routed heads,
    S shared heads; in attention also M keys, G key heads, R rows (selected query-head pairs),
    C queries of a head that are taken together.
"""

from moh.heads.balance import (
    balance_loss,
    head_load,
    routers,
    selection_counts,
    set_selection_counts,
    sum_counts,
)
from moh.heads.control import draws_by_prefix, set_draws
from moh.heads.draws import combine
from moh.heads.execution import attend, execution_of, gate_heads, set_execution
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
from moh.heads.sparse import sparse_attention

__all__ = [
    "HeadPlan",
    "LayerPlan",
    "QueryNormRouter",
    "Router",
    "RouterOptions",
    "Routing",
    "RoutingStatistics",
    "TwoStageRouter",
    "attend",
    "balance_loss",
    "build_router",
    "combine",
    "draws_by_prefix",
    "execution_of",
    "gate_heads",
    "head_load",
    "routers",
    "selection_counts",
    "set_draws",
    "set_execution",
    "set_selection_counts",
    "sparse_attention",
    "sum_counts",
]

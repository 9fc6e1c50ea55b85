"""How a MoH layer is computed once its gates are known."""

from __future__ import annotations

from torch import Tensor


def gate_heads(y_BNHK: Tensor, gates_BNH: Tensor) -> Tensor:
    """Weight every head's output by its gate: the dense execution of equation 4.

    All heads have been computed; those that a token did not select are multiplied by zero.

    Args:
        y_BNHK: head outputs (B, N, H, K), before the output projection.
        gates_BNH: gates (B, N, H).

    Returns:
        (B, N, H, K) in the dtype of ``y_BNHK``. Gates of one leave it equal bit for bit.
    """
    return y_BNHK * gates_BNH.to(y_BNHK.dtype).unsqueeze(-1)

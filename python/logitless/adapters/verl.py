"""verl's fused head (verl/utils/kernel/linear_cross_entropy.py), same signature: log-probs and entropy of sampled
tokens.

The contract: hidden [..., d] and labels [...] are flattened, weight is [V / ranks, d] in the order of ranks, no label
is ignored. "none" gives [tokens] log-probs, "sum" and "mean" (over all tokens) a scalar of them; entropy is always
[tokens]. Under tensor parallelism verl sums the gradient of hidden outside, in the backward of Megatron's gather from
the sequence-parallel region; `hidden_grad="part"` is made for that: the sum over ranks of what each rank gets is the
gradient. Without such a sum outside, say `hidden_grad="whole"`: every rank gets the gradient.
"""

from __future__ import annotations

from typing import Optional

import torch.distributed as dist
from torch import Tensor

from .._ffi import ArgumentError
from ..torch import linear_logp
from ._parallel import share_of_gradient

_NO_LABEL = -(2**62)  # ignored by no caller


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Optional[dist.ProcessGroup] = None,
    *,
    hidden_grad: str = "part",
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy), f32 and differentiable; see the module."""
    if reduction.lower() not in ("none", "sum", "mean") or hidden_grad not in ("part", "whole"):
        raise ArgumentError(
            f"linear_cross_entropy: reduction is {reduction!r} and hidden_grad {hidden_grad!r}, want "
            "none, sum or mean and part or whole"
        )
    if hidden_grad == "part":
        hidden = share_of_gradient(hidden, dist_process_group)
    out = linear_logp(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        temperature=temperature,
        ignore_index=_NO_LABEL,
        entropy=True,
        group=dist_process_group,
    )
    logp, entropy = out.logp, out.entropy
    assert entropy is not None
    if reduction.lower() == "sum":
        logp = logp.sum()
    elif reduction.lower() == "mean":
        logp = logp.mean()
    return logp, entropy

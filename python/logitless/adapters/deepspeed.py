"""DeepSpeed's vocabulary-parallel losses (deepspeed/sequence), same signatures.

Shards may be uneven: then vocab_start_index and vocab_end_index are given on every rank. `tp_group=None` means that the
vocabulary is not cut, never the default group. The mean over no valid token is 0. With sp_group the value is the sum over
the sequence's ranks while the gradient stays this rank's.
"""
from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from .._ffi import ArgumentError
from ..torch import linear_cross_entropy
from ._parallel import group_size, sum_of_values


def _bounds(rows: int, start: Optional[int], end: Optional[int], tp_group: Any, device: torch.device) -> dict[str, int]:
    """vocab_start and vocab_size for the functions of logitless.torch; {} for equal shards, which the library checks."""
    if (start is None) != (end is None):
        raise ArgumentError("vocab_parallel: vocab_start_index and vocab_end_index are given together or not at all")
    if start is None:
        return {}
    if end - start != rows:
        raise ArgumentError(f"vocab_parallel: the shard [{start}, {end}) does not hold {rows} rows")
    total = torch.tensor([end], dtype=torch.int64, device=device)
    if group_size(tp_group) > 1:
        dist.all_reduce(total, dist.ReduceOp.MAX, group=tp_group)
    return {"vocab_start": start, "vocab_size": int(total.item())}


def _reduced(loss: Tensor, target: Tensor, reduction: str, ignore_index: int, sp_group: Any) -> Tensor:
    """Per-token losses -> DeepSpeed's result."""
    if reduction == "none":
        return loss
    loss = loss.sum()
    if reduction == "mean":
        valid = (target != ignore_index).sum().to(torch.float32)
        if group_size(sp_group) > 1:
            dist.all_reduce(valid, group=sp_group)
        loss = loss / valid.clamp(min=1.0)
    return sum_of_values(loss, sp_group)


def vocab_parallel_linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None,
                                        tp_group: Any = None, sp_group: Any = None, vocab_start_index: Optional[int] = None,
                                        vocab_end_index: Optional[int] = None, ignore_index: int = -100,
                                        reduction: str = "mean", chunk_size: Optional[int] = None) -> Tensor:
    """Cross entropy of hidden [..., d] and this rank's rows of the head, weight [v_local, d] and bias [v_local].

    hidden and target [...] are the same on every rank of tp_group, and so is hidden's gradient. "none" gives [...].
    chunk_size is accepted and not needed: the library's results do not depend on how the work is cut.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ArgumentError(f"vocab_parallel: reduction is {reduction!r}, want none, sum or mean")
    if chunk_size is not None and chunk_size <= 0:
        raise ArgumentError(f"vocab_parallel: chunk_size is {chunk_size}, want more than 0")
    if not torch.is_autocast_enabled(hidden.device.type):  # under autocast both take its dtype anyway
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if sp_group is None and reduction == "mean":
        return linear_cross_entropy(hidden, weight, target, bias=bias, ignore_index=ignore_index, group=tp_group,
                                    **_bounds(weight.shape[0], vocab_start_index, vocab_end_index, tp_group, weight.device))
    loss = linear_cross_entropy(hidden, weight, target, bias=bias, ignore_index=ignore_index, reduction="none",
                                group=tp_group,
                                **_bounds(weight.shape[0], vocab_start_index, vocab_end_index, tp_group, weight.device))
    return _reduced(loss, target, reduction, ignore_index, sp_group)

"""Gradients and sums across ranks, as the frameworks' contracts divide them between caller and callee."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor


def group_size(group: Optional[dist.ProcessGroup]) -> int:
    """Ranks of a group; None is one rank, never the default group."""
    return 1 if group is None else dist.get_world_size(group)


class _Gather(torch.autograd.Function):
    """Parts of all ranks along dimension 0. The gradient that arrives is complete on every rank: a rank takes its
    part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: D102
        ctx.first, ctx.rows = dist.get_rank(group) * x.shape[0], x.shape[0]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        return grad[ctx.first : ctx.first + ctx.rows], None


def gather_rows(x: Tensor, group: Optional[dist.ProcessGroup]) -> Tensor:
    """[n / ranks, ...] of each rank -> [n, ...], for functions whose gradient is already summed over the group."""
    return x if group_size(group) == 1 else _Gather.apply(x, group)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:  # noqa: D102
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        return grad / ctx.size, None


def share_of_gradient(x: Tensor, group: Optional[dist.ProcessGroup]) -> Tensor:
    """x itself; its gradient is divided by the ranks, so that a sum over them outside gives it back (exact for powers
    of two)."""
    return x if group_size(group) == 1 else _Share.apply(x, group_size(group))


def sum_of_values(x: Tensor, group: Optional[dist.ProcessGroup]) -> Tensor:
    """The sum over ranks in value, while the gradient stays that of this rank's x."""
    if group_size(group) == 1:
        return x
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return x + (total - x.detach())


class _GatherLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: D102
        ctx.group, ctx.first, ctx.rows = group, dist.get_rank(group) * x.shape[0], x.shape[0]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.first : ctx.first + ctx.rows], None


def gather_losses(x: Tensor, group: Optional[dist.ProcessGroup]) -> Tensor:
    """Parts of all ranks along dimension 0, for a result that every rank goes on to use on its own: gradients are
    summed."""
    return x if group_size(group) == 1 else _GatherLosses.apply(x, group)

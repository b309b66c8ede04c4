"""Megatron-Core's fused linear cross entropy (megatron/core/fusions/fused_linear_cross_entropy.py), same signature,
and its losses over logits (megatron/core/tensor_parallel/cross_entropy.py, fusions/fused_cross_entropy.py).

The contract of the first: hidden [tokens, d] or [s, b, d], weight [V / ranks, d] in the order of ranks, labels global
ids. "none" gives [tokens], "mean" (over labels that are not ignored) and "sum" a scalar. Despite its name there, the
result is the loss, not its negative. The gradient of hidden comes out complete on every rank; with sequence_parallel
hidden is this rank's part along dimension 0, and so is its gradient. Here shards need not be equal if `vocab_start`
and `vocab_size` say so, and `main_grad` takes weight's gradient in f32 (gradient accumulation fusion).
"""

from __future__ import annotations

from typing import Optional

import torch.distributed as dist
from torch import Tensor

from ..torch import cross_entropy
from ..torch import linear_cross_entropy as _linear_cross_entropy
from ._parallel import gather_rows


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: Optional[dist.ProcessGroup] = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    sequence_parallel: bool = False,
    *,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    main_grad: Optional[Tensor] = None,
) -> Tensor:
    """Loss of a vocabulary-parallel head: [tokens] f32 for "none", else a scalar; see the module."""
    if sequence_parallel:
        hidden = gather_rows(hidden, tp_group)
    return _linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        reduction=reduction,
        ignore_index=ignore_index,
        group=tp_group,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        main_grad=main_grad,
    )


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: Optional[dist.ProcessGroup] = None,
    *,
    in_place: bool = False,
) -> Tensor:
    """Loss of every token, [s, b] f32, of this rank's columns of logits [s, b, V / ranks]; target [s, b].

    Smoothing is Megatron's: the mass a is spread over the V - 1 other words of the whole vocabulary, on any number of
    ranks. tp_group None is one rank (Megatron takes its global group there: name it).
    """
    return cross_entropy(
        vocab_parallel_logits,
        target,
        label_smoothing=label_smoothing,
        smoothing_rule="others",
        reduction="none",
        group=tp_group,
        in_place=in_place,
    )


def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: Optional[dist.ProcessGroup]
) -> Tensor:
    """Loss of every token, [s, b] f32; the gradient takes the logits' memory, as in Megatron's fused loss."""
    return cross_entropy(vocab_parallel_logits, target, reduction="none", group=tp_group, in_place=True)

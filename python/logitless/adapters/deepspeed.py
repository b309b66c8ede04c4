"""DeepSpeed's vocabulary-parallel losses (deepspeed/sequence), same signatures.

Shards may be uneven: then vocab_start_index and vocab_end_index are given on every rank. `tp_group=None` means that the
vocabulary is not cut, never the default group. The mean over no valid token is 0. With sp_group the value is the sum
over the sequence's ranks while the gradient stays this rank's.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from .._ffi import ArgumentError
from ..torch import cross_entropy, linear_cross_entropy
from ._parallel import gather_losses, group_size, sum_of_values

_REDUCTIONS, _BACKENDS = ("none", "sum", "mean"), ("torch", "liger", "logitless")


def _bounds(rows: int, start: Optional[int], end: Optional[int], tp_group: Any, device: torch.device) -> dict[str, Any]:
    """vocab_start and vocab_size for the functions of logitless.torch; {} for equal shards. The library checks that
    shards leave no gap and do not overlap; what a rank finds wrong with its own bounds becomes an error on all."""
    if (start is None) != (end is None):
        raise ArgumentError("vocab_parallel: vocab_start_index and vocab_end_index are given together or not at all")
    if start is None or end is None:
        return {}
    total, wrong = end, end - start != rows
    if group_size(tp_group) > 1:
        found = torch.tensor([total, wrong], dtype=torch.int64, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=tp_group)
        total, wrong = found.tolist()
    if wrong:
        raise ArgumentError(
            f"vocab_parallel: on some rank [vocab_start_index, vocab_end_index) does not hold its shard; here "
            f"[{start}, {end}) and {rows} entries"
        )
    return {"vocab_start": start, "vocab_size": total}


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


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    tp_group: Any = None,
    sp_group: Any = None,
    vocab_start_index: Optional[int] = None,
    vocab_end_index: Optional[int] = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: Optional[int] = None,
) -> Tensor:
    """Cross entropy of hidden [..., d] and this rank's rows of the head, weight [v_local, d] and bias [v_local].

    hidden and target [...] are the same on every rank of tp_group, and so is hidden's gradient. "none" gives [...].
    chunk_size is accepted and not needed: the library's results do not depend on how the work is cut.
    """
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"vocab_parallel: reduction is {reduction!r}, want none, sum or mean")
    if chunk_size is not None and chunk_size <= 0:
        raise ArgumentError(f"vocab_parallel: chunk_size is {chunk_size}, want more than 0")
    if not torch.is_autocast_enabled(hidden.device.type):  # under autocast both take its dtype anyway
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if sp_group is None and reduction == "mean":
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            bias=bias,
            ignore_index=ignore_index,
            group=tp_group,
            **_bounds(weight.shape[0], vocab_start_index, vocab_end_index, tp_group, weight.device),
        )
    loss = linear_cross_entropy(
        hidden,
        weight,
        target,
        bias=bias,
        ignore_index=ignore_index,
        reduction="none",
        group=tp_group,
        **_bounds(weight.shape[0], vocab_start_index, vocab_end_index, tp_group, weight.device),
    )
    return _reduced(loss, target, reduction, ignore_index, sp_group)


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: Any = None,
    sp_group: Any = None,
    vocab_start_index: Optional[int] = None,
    vocab_end_index: Optional[int] = None,
    global_vocab_size: Optional[int] = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    gather_sequence_loss: bool = False,
    backend: str = "logitless",
    *,
    in_place: bool = False,
) -> Tensor:
    """Cross entropy of this rank's columns of logits, vocab_parallel_logits [..., v_local]; target [...] the same on
    all ranks.

    global_vocab_size with both indices spares the exchange of bounds. gather_sequence_loss ("none" only): the losses of
    all sequence ranks along dimension 0; its gradient is summed over them. backend is accepted and not looked at: the
    library computes. in_place: the gradient takes the logits' memory (logitless.torch.cross_entropy).
    """
    if reduction not in _REDUCTIONS or backend not in _BACKENDS:
        raise ArgumentError(
            f"vocab_parallel: reduction is {reduction!r} and backend {backend!r}, want one of "
            f"{', '.join(_REDUCTIONS)} and of {', '.join(_BACKENDS)}"
        )
    if gather_sequence_loss and (reduction != "none" or sp_group is None):
        raise ArgumentError("vocab_parallel: gather_sequence_loss wants reduction 'none' and an sp_group")
    if global_vocab_size is None:
        bounds = _bounds(vocab_parallel_logits.shape[-1], vocab_start_index, vocab_end_index, tp_group, target.device)
    elif vocab_start_index is None or vocab_end_index is None:
        raise ArgumentError("vocab_parallel: global_vocab_size wants vocab_start_index and vocab_end_index with it")
    else:
        bounds = {"vocab_start": vocab_start_index, "vocab_size": global_vocab_size}
    alone = sp_group is None and reduction == "mean"
    loss = cross_entropy(
        vocab_parallel_logits,
        target,
        ignore_index=ignore_index,
        reduction="mean" if alone else "none",
        group=tp_group,
        in_place=in_place,
        **bounds,
    )
    if gather_sequence_loss:
        return gather_losses(loss, sp_group)
    return loss if alone else _reduced(loss, target, reduction, ignore_index, sp_group)


class VocabParallelCausalLMLoss:
    """A model's `loss_function` for logits that stay cut over tp_group; bound to one shard, whose bounds are
    exchanged once."""

    def __init__(
        self,
        tp_group: Any = None,
        sp_group: Any = None,
        vocab_start_index: Optional[int] = None,
        vocab_end_index: Optional[int] = None,
        ignore_index: int = -100,
        backend: str = "logitless",
    ) -> None:
        self.tp_group, self.sp_group, self.ignore_index, self.backend = tp_group, sp_group, ignore_index, backend
        self.vocab_start_index, self.vocab_end_index = vocab_start_index, vocab_end_index
        self._key: Any = None
        self._bounds: dict[str, Any] = {}

    def __call__(
        self,
        logits: Tensor,
        labels: Optional[Tensor] = None,
        vocab_size: Optional[int] = None,
        shift_labels: Optional[Tensor] = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Mean over valid tokens, or their sum / num_items_in_batch. labels are shifted by one here, shift_labels are
        not.

        vocab_size is not looked at: the shards say how large the vocabulary is.
        """
        target = labels if shift_labels is None else shift_labels
        if target is None:
            raise ArgumentError("VocabParallelCausalLMLoss: labels or shift_labels must be given")
        key = (self.tp_group, logits.shape[-1], self.vocab_start_index, self.vocab_end_index)
        if self._key is None:
            self._bounds = _bounds(
                logits.shape[-1], self.vocab_start_index, self.vocab_end_index, self.tp_group, logits.device
            )
            self._key = key
        elif key != self._key:
            raise RuntimeError(
                "VocabParallelCausalLMLoss: the shard changed after the first call; make an instance for each"
            )
        whole = self.sp_group is None and num_items_in_batch is None
        loss = cross_entropy(
            logits,
            target,
            ignore_index=self.ignore_index,
            reduction="mean" if whole else "none",
            shift=shift_labels is None,
            group=self.tp_group,
            **self._bounds,
        )
        if whole:
            return loss
        target = target[..., 1:] if shift_labels is None else target
        if num_items_in_batch is None:
            return _reduced(loss, target, "mean", self.ignore_index, self.sp_group)
        return _reduced(loss, target, "sum", self.ignore_index, self.sp_group) / torch.as_tensor(
            num_items_in_batch, dtype=loss.dtype, device=loss.device
        ).clamp_min(1)


def configure_vocab_parallel_loss(
    model: Any, vocab_parallel_head: Any, sp_group: Any = None, ignore_index: int = -100, backend: str = "logitless"
) -> Any:
    """Puts VocabParallelCausalLMLoss into model.loss_function for a head that does not gather its logits; returns the
    model.

    The head names its group (mp_group), vocab_start_index and vocab_end_index. The model's own loss stays in
    `_deepspeed_original_loss_function`.
    """
    if not hasattr(model, "loss_function"):
        raise ArgumentError(f"configure_vocab_parallel_loss: {type(model).__name__} has no loss_function to replace")
    loss = VocabParallelCausalLMLoss(
        vocab_parallel_head.mp_group,
        sp_group,
        vocab_parallel_head.vocab_start_index,
        vocab_parallel_head.vocab_end_index,
        ignore_index,
        backend,
    )
    original = model.loss_function
    try:
        model.loss_function = loss
    except (AttributeError, TypeError) as error:
        raise ArgumentError(
            f"configure_vocab_parallel_loss: loss_function of {type(model).__name__} is read-only"
        ) from error
    if not hasattr(model, "_deepspeed_original_loss_function"):
        model._deepspeed_original_loss_function = original
    return model

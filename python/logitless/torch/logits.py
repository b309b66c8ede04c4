"""Cross entropy over logits that the caller has, for heads that cannot be fused."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _ffi
from . import _base, _ce
from ._common import MODES, choice, divisor_of, f32, output, outputs_of, refuse, shard, shifted, tell_peers


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    smoothing_rule: str = "all",
    z_loss: float = 0.0,
    ignore_index: int = -100,
    class_weight: Optional[Tensor] = None,
    token_weight: Optional[Tensor] = None,
    token_scaling: bool = False,
    reduction: str = "mean",
    normalizer: Union[None, float, Tensor] = None,
    shift: Union[bool, int] = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_argmax: bool = False,
    return_z_loss: bool = False,
    return_bad_targets: bool = False,
    group: Optional[dist.ProcessGroup] = None,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    in_place: bool = False,
    mode: str = "auto",
    workspace_budget_bytes: int = 0,
) -> Any:
    """The loss of :func:`linear_cross_entropy` with raw logits [..., v_local] in the place of x . w + bias.

    Equal f32 logits give its bits. The forward leaves the logits as they are. Options and results as there, and:

    Args:
        logits: [..., v_local] bf16, f16 or f32, this rank's columns; rows may be further apart than v_local.
        vocab_size: below the columns of logits with one rank: the rest is padding and gets gradient 0.
        in_place: the gradient is written over the logits, which then takes no memory. They are gone afterwards: a
            second backward is refused, and operations that saved them are told by torch. Eager code only.
        mode: "recompute" (also "auto"): the backward reads the logits again, for any upstream. "one_pass": the gradient
            of the mean or sum is formed in the forward, which reads the logits once, and scaled in the backward;
            with in_place the forward already overwrites the logits. Eager code only.
    """
    try:
        kind = choice("reduction", reduction, _ffi.REDUCTIONS)
        rule = choice("smoothing_rule", smoothing_rule, _ffi.SMOOTHING_RULES)
        if mode not in MODES:
            refuse("mode", repr(mode), "'auto', 'recompute' or 'one_pass'")
        if mode == "one_pass" and kind == _ffi.NONE:
            refuse("mode", "'one_pass'", "'recompute' with reduction 'none', whose upstream is not known beforehand")
        if logits.dim() < 1 or target.shape != logits.shape[:-1]:
            refuse("target", list(target.shape), f"{list(logits.shape[:-1])}, one id for each row of logits")
        if target.dtype not in (torch.int64, torch.int32):
            refuse("target's dtype", target.dtype, "int64 or int32")
        if target.device != logits.device:
            refuse("target", f"on {target.device}", f"{logits.device} like logits")
        if in_place and logits.dim() != 2 and not logits.is_contiguous():
            refuse("in_place", "True", "contiguous logits, or two dimensions")
        group_name, v_begin, v_total = shard(logits.shape[-1], group, vocab_start, vocab_size)
        divisor = divisor_of(normalizer, reduction, logits.device)
        if shift:
            target = shifted(target, int(shift), ignore_index)
    except _ffi.ArgumentError:
        tell_peers(group)
        raise
    wants_gradient = torch.is_grad_enabled() and logits.requires_grad
    options = _base.Options(
        ignore_index,
        float(temperature),
        float(softcap),
        float(label_smoothing),
        float(z_loss),
        rule,
        kind,
        int(token_scaling),
        v_begin,
        v_total,
        group_name,
        0 if wants_gradient else _base.FROZEN_ALL,
        workspace_budget_bytes,
        outputs_of(return_lse, return_entropy, return_argmax, return_z_loss, return_bad_targets),
    )
    shape = target.shape
    if logits.dim() != 2:
        logits, target = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    results = _ce.ce(
        logits, target, f32(class_weight), f32(token_weight, flat=True), divisor, options, in_place, mode == "one_pass"
    )
    return output(results, options, shape, int(shift))


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, group: Optional[dist.ProcessGroup], **options: object
) -> Tensor:
    """:func:`cross_entropy` of this rank's columns [..., v_local] of logits cut over `group`; None means one rank."""
    return cross_entropy(logits, target, group=group, **options)

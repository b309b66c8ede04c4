"""Cross entropy over logits that the caller has, for heads that cannot be fused."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _ffi
from . import _base, _ce, _lookup
from ._base import get_num_threads, is_compiling, is_grad_enabled, watched
from ._common import FIXED, MODES, choice, divisor_of, f32, output, outputs_of, refuse, shard, shifted, tell_peers

_known = _ffi.plans.calls.get


class LogpOf(NamedTuple):
    """Results of :func:`logp_of`, [..., m]: logp f32; rank int64, 1 for the largest logit, None where not asked."""

    logp: Tensor
    rank: Optional[Tensor] = None


class TopLogp(NamedTuple):
    """Results of :func:`top_logp`, [..., k], largest first: ids int64, logp f32."""

    ids: Tensor
    logp: Tensor


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
    key = None
    if group is None and not is_compiling():
        n, shape = target.numel(), logits.shape
        key = (
            "cross_entropy",
            type(logits), logits.dtype, logits.get_device(), logits.requires_grad, logits.is_neg(),
            shape[-1:], logits.is_contiguous() or logits.stride(),
            type(target), target.dtype, target.get_device(), target.is_contiguous(),
            (n - 1).bit_length() if n <= 4096 else -n >> 12,  # bucket(n)
            class_weight if class_weight is None else _base.weights_signature(class_weight),
            token_weight if token_weight is None else _base.weights_signature(token_weight, n),
            is_grad_enabled(), get_num_threads(), normalizer is None, shift, mode, in_place,
            temperature, softcap, label_smoothing, smoothing_rule, z_loss, ignore_index, token_scaling, reduction,
            return_lse, return_entropy, return_argmax, return_z_loss, return_bad_targets,
            vocab_start, vocab_size, workspace_budget_bytes,
        )  # fmt: skip
        known = _known(key)
        if known is not None and target.shape == shape[:-1] and not watched():
            if shift:
                target = shifted(target, int(shift), ignore_index)
            if known.plain and normalizer is None:
                out = _ce.run_plain(known, logits, target)
            else:
                divisor = divisor_of(normalizer, reduction, logits.device)
                out = _ce.run(known, logits, target, class_weight, token_weight, divisor)
            return output(out, known.options, target.shape, int(shift)) if shift or known.options.outputs else out
    given = logits, class_weight, token_weight, target
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
        if in_place and not (logits.is_contiguous() or (logits.dim() == 2 and _base.in_rows(logits))):
            refuse("in_place", f"True, with logits of strides {logits.stride()}", "contiguous rows, or all contiguous")
        group_name, v_begin, v_total = shard(logits.shape[-1], group, vocab_start, vocab_size)
        divisor = divisor_of(normalizer, reduction, logits.device)
        class_weight, token_weight = f32(class_weight), f32(token_weight)
        if shift:
            target = shifted(target, int(shift), ignore_index)
    except _ffi.ArgumentError:
        tell_peers(group, logits)
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
    shape, one_pass = target.shape, mode == "one_pass" and wants_gradient
    if _base.needs_operators(logits, logits):
        if in_place or mode == "one_pass":
            raise _ffi.ArgumentError("cross_entropy: in_place and mode 'one_pass' are for eager code")
        if logits.dim() != 2:
            logits, target = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
        if token_weight is not None:
            token_weight = token_weight.reshape(-1)
        return output(_ce.ce(logits, target, class_weight, token_weight, divisor, options), options, shape, int(shift))
    logits, target, class_weight, token_weight = _ce.normal(logits, target, class_weight, token_weight)
    known = _ce.kind_of(logits, target, class_weight, token_weight, options, one_pass, in_place and wants_gradient)
    if known.plain and divisor is None:
        results = _ce.run_plain(known, logits, target)
    else:
        results = _ce.run(known, logits, target, class_weight, token_weight, divisor)
    # As in linear_cross_entropy: what needed no conversion is found above the next time.
    same = (logits, class_weight, token_weight, given[3] if shift else target)
    if key is not None and all(a is b for a, b in zip(given, same)) and all(type(v) in FIXED for v in key[-20:]):
        _ffi.plans.keep(key, known)
    return output(results, options, shape, int(shift))


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, group: Optional[dist.ProcessGroup], **options: Any
) -> Any:
    """:func:`cross_entropy` of this rank's columns [..., v_local] of logits cut over `group`; None means one rank."""
    return cross_entropy(logits, target, group=group, **options)


def logp_of(
    logits: Tensor,
    ids: Tensor,
    *,
    target: Optional[Tensor] = None,
    rank: bool = False,
    temperature: float = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    group: Optional[dist.ProcessGroup] = None,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    workspace_budget_bytes: int = 0,
) -> LogpOf:
    """Log-probabilities of several tokens in each row, and their ranks, from one pass over the logits. No gradient.

    ``logp[i,j] = z[i, ids[i,j]] - lse[i]`` in nats with z = softcap(logits) / temperature, rounded once;
    ``rank[i,j] = 1 + (how many logits of the row are greater)``: equal logits have the same rank.

    Args:
        logits: [..., v_local] bf16, f16 or f32, this rank's columns. They stay as they are.
        ids: [..., m] int64 or int32, m at most 1024: ids in the whole vocabulary, or ``ignore_index`` where a row has
            fewer, which gives 0 and rank 0. Others are an error on a CPU and give NaN and rank 0 on a GPU.
        target: [...] labels: rows whose label is ``ignore_index`` are skipped and give 0 and rank 0. None: no row is.
        rank: whether ranks are wanted. group, vocab_start, vocab_size: as for :func:`cross_entropy`.

    A row that holds NaN gives NaN and rank 0.
    """
    found, ranks, _, _ = _look_up(
        "logp_of", logits, ids, target, 0, rank, temperature, softcap, ignore_index, group, vocab_start, vocab_size,
        workspace_budget_bytes,
    )  # fmt: skip
    return LogpOf(found.view(ids.shape), ranks.view(ids.shape) if rank else None)


def top_logp(
    logits: Tensor,
    k: int,
    *,
    target: Optional[Tensor] = None,
    temperature: float = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    group: Optional[dist.ProcessGroup] = None,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    workspace_budget_bytes: int = 0,
) -> TopLogp:
    """The k most probable tokens of each row and their log-probabilities, from one pass over the logits. No gradient.

    Largest first; of equal logits the lower id comes first, always. k is 1 .. 128 and at most the vocabulary. Rows that
    are skipped (``target``, as in :func:`logp_of`) have ids -1 and logp 0, rows that hold NaN ids -1 and logp NaN.
    """
    if k < 1:
        refuse("k", k, "1 or more")
    _, _, top, found = _look_up(
        "top_logp", logits, None, target, k, False, temperature, softcap, ignore_index, group, vocab_start, vocab_size,
        workspace_budget_bytes,
    )  # fmt: skip
    shape = (*logits.shape[:-1], k)
    return TopLogp(top.view(shape), found.view(shape))


def _look_up(
    name: str,
    logits: Tensor,
    ids: Optional[Tensor],
    target: Optional[Tensor],
    n_top: int,
    rank: bool,
    temperature: float,
    softcap: float,
    ignore_index: int,
    group: Optional[dist.ProcessGroup],
    vocab_start: Optional[int],
    vocab_size: Optional[int],
    workspace_budget_bytes: int,
) -> Any:
    rows = logits.shape[:-1]
    try:
        if logits.dim() < 1:
            refuse("logits", list(logits.shape), f"[..., v_local] ({name})")
        if ids is not None and (ids.dim() != logits.dim() or ids.shape[:-1] != rows):
            refuse("ids", list(ids.shape), f"{list(rows)} and a dimension of ids ({name})")
        if target is not None and target.shape != rows:
            refuse("target", list(target.shape), f"{list(rows)}, one id for each row of logits ({name})")
        for what, t in (("ids", ids), ("target", target)):
            if t is not None and t.dtype not in (torch.int64, torch.int32):
                refuse(f"dtype of {what}", t.dtype, "int64 or int32")
            if t is not None and t.device != logits.device:
                refuse(what, f"on {t.device}", f"{logits.device} like logits")
        if ids is not None and ids.shape[-1] == 0:
            refuse("ids", list(ids.shape), f"at least one id a row ({name})")
        bounds = shard(logits.shape[-1], group, vocab_start, vocab_size)
    except _ffi.ArgumentError:
        tell_peers(group, logits)
        raise
    if target is None:  # no row is ignored
        target = logits.new_full(rows, 1 if ignore_index == 0 else 0, dtype=torch.int64)
    options = ignore_index, float(temperature), float(softcap), bounds[1], bounds[2], bounds[0], workspace_budget_bytes
    flat = logits.detach()
    if flat.dim() != 2:  # where it is 2, a shard may be empty
        flat = flat.reshape(target.numel(), flat.shape[-1])
    flat_ids = None if ids is None else ids.reshape(target.numel(), ids.shape[-1])
    return _lookup.look_up(flat, target.reshape(-1), flat_ids, n_top, rank, *options)

"""The functions over torch tensors. They check, fold shapes and call the library; what is computed, it computes."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _ffi
from . import _base, _linear_ce, _linear_ce_op
from ._base import get_num_threads, is_any_autocast_enabled, is_compiling, is_grad_enabled, watched
from ._common import FIXED, MODES, choice, divisor_of, f32, output, outputs_of, refuse, shard, shifted, tell_peers

_known = _ffi.plans.calls.get


class LogProbs(NamedTuple):
    """Results of :func:`linear_logp`; both [...] f32 and differentiable, entropy None where not asked."""

    logp: Tensor
    entropy: Optional[Tensor] = None


def _check_shapes(x: Tensor, w: Tensor, target: Tensor, bias: Optional[Tensor]) -> None:
    if x.dim() < 1 or w.dim() != 2 or x.shape[-1] != w.shape[1]:
        refuse("x and w", f"{list(x.shape)} and {list(w.shape)}", "[..., n_hidden] and [v_local, n_hidden]")
    if target.shape != x.shape[:-1]:
        refuse("target", list(target.shape), f"{list(x.shape[:-1])}, one id for each row of x")
    if target.dtype not in (torch.int64, torch.int32):
        refuse("target's dtype", target.dtype, "int64 or int32")
    if bias is not None and bias.shape != w.shape[:1]:
        refuse("bias", list(bias.shape), f"[{w.shape[0]}]")
    for name, t in (("w", w), ("target", target), ("bias", bias)):
        if t is not None and t.device != x.device:
            refuse(name, f"on {t.device}", f"{x.device} like x")


def _cast(x: Tensor, w: Tensor, bias: Optional[Tensor]) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """Under autocast the operands of the product go to its dtype, as those of torch.nn.functional.linear do."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, w, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype)


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    *,
    bias: Optional[Tensor] = None,
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
    main_grad: Optional[Tensor] = None,
    mode: str = "auto",
    workspace_budget_bytes: int = 0,
) -> Any:
    """Cross entropy of a linear head, without its logits in memory.

    .. code-block:: text

        z[i,v]  = softcap(x_i . w_v + bias_v) / temperature      softcap(r) = C tanh(r / C), or r where C = 0
        lse[i]  = ln sum_v exp z[i,v]        nll[i] = lse[i] - z[i, target_i]        H[i] = lse[i] - sum_v p[i,v] z[i,v]
        loss[i] = s_i ((1 - a) cw[y] nll[i] + a / V sum_v cw[v] (lse[i] - z[i,v]) + c lse[i]^2)
        mean    = sum_i loss[i] / normalizer, or / sum_i cw[y_i] over valid tokens      sum = sum_i loss[i]

    Args:
        x: [..., n_hidden] hidden states, bf16, f16 or f32. Rows may be strided; other layouts are copied.
        w: [v_local, n_hidden] rows of the head, this rank's shard of them.
        target: [...] int64 or int32, ids in the whole vocabulary, or ``ignore_index``.
        bias: [v_local].
        temperature: T > 0. softcap: C >= 0, 0 for none.
        label_smoothing: a in [0, 1]. ``smoothing_rule``: "all" spreads it over all V classes (PyTorch), "others"
            over the V - 1 other ones (Megatron).
        z_loss: coefficient c >= 0.
        ignore_index: targets with this value have loss 0 and gradient 0, whatever x holds in their rows.
        class_weight: [V] f32, finite, >= 0, PyTorch's rule. token_weight: [...] f32, s_i (no gradient).
        token_scaling: s_i is also multiplied by the detached probability of the target.
        reduction: "mean", "sum" or "none" ([...], 0 where ignored). The mean over no valid token is 0 with gradients
            of 0, where torch.nn.functional.cross_entropy gives NaN.
        normalizer: the divisor of the mean, instead of the count of valid tokens of this call (gradient accumulation,
            data parallelism): a number or a tensor of one element.
        shift: n (True: 1): position t is compared with target[..., t + n]; per-token results lose the last n positions.
        return_lse, return_entropy: per token, differentiable. return_argmax: int64, lowest index on ties, -1 where
            ignored. return_z_loss: c lse^2, not differentiable. return_bad_targets: [1] int64, on a GPU the count
            of targets outside [0, V) (such rows are NaN); on a CPU they raise.
        group: torch.distributed group over which the vocabulary is cut; None means one rank, never the default group.
            x, target and all options are the same on every rank; grad_x comes out summed on every rank.
        vocab_start, vocab_size: the first id of this rank's shard and V. Both or neither: without them, equal shards in
            the order of ranks. Shards may be of any sizes, in any order, also empty. With one rank, a vocab_size
            below w's rows declares the rest as padding.
        main_grad: [v_local, n_hidden] f32: w's gradient is added to it in the backward, in f32, and w gets none.
        mode: "recompute": the backward forms the logits again (4 GEMMs; repeatable, any per-token upstream).
            "one_pass": gradients of the mean or sum are formed in the forward (3 GEMMs; they are held until the
            backward, which scales them: a narrow gradient is then rounded twice unless the upstream is a power of
            two, and one in f16 has lost what a loss scale would have kept). "auto": one_pass where only the
            reduced loss is returned, w or x requires a gradient and neither is f16, else recompute.
        workspace_budget_bytes: bound of the workspace, 0 for the library's own.

    Returns:
        The loss (f32), or :class:`CrossEntropyOutput` where a ``return_`` option is set.

    Raises:
        logitless.ArgumentError: a bad argument (also a ValueError). logitless.Error: everything else.
    """
    key = None
    if group is None and not is_compiling():
        n = target.numel()
        key = (
            type(x), x.dtype, x.get_device(), x.requires_grad, x.is_contiguous() or x.stride(), x.is_neg(),
            type(w), w.dtype, w.get_device(), w.requires_grad, w.is_contiguous() or w.stride(), w.is_neg(), w.shape,
            type(target), target.dtype, target.get_device(), target.is_contiguous(),
            (n - 1).bit_length() if n <= 4096 else -n >> 12,  # bucket(n)
            bias if bias is None else _base.signature(bias),
            class_weight if class_weight is None else _base.weights_signature(class_weight),
            token_weight if token_weight is None else _base.weights_signature(token_weight, n),
            main_grad if main_grad is None else _base.signature(main_grad),
            is_grad_enabled(), get_num_threads(), normalizer is None, shift, mode,
            temperature, softcap, label_smoothing, smoothing_rule, z_loss, ignore_index, token_scaling, reduction,
            return_lse, return_entropy, return_argmax, return_z_loss, return_bad_targets,
            vocab_start, vocab_size, workspace_budget_bytes,
        )  # fmt: skip
        kind = _known(key)
        if (
            kind is not None
            and x.shape == (*target.shape, kind.n_hidden)
            and not is_any_autocast_enabled()
            and not watched()
        ):
            if shift:
                target = shifted(target, int(shift), ignore_index)
            if kind.plain and normalizer is None:
                out = _linear_ce.run_plain(kind, x, w, target)
            else:
                divisor = divisor_of(normalizer, reduction, x.device)
                out = _linear_ce.run(kind, x, w, target, bias, (class_weight, token_weight, divisor, main_grad))
            return output(out, kind.options, target.shape, int(shift)) if shift or kind.options.outputs else out
    given = x, w, bias, target, class_weight, token_weight
    try:
        x, w, bias, target, options, skip, one_pass = _prepare(
            x,
            w,
            target,
            bias,
            (ignore_index, float(temperature), float(softcap), float(label_smoothing), float(z_loss)),
            smoothing_rule,
            reduction,
            token_scaling,
            shift,
            outputs_of(return_lse, return_entropy, return_argmax, return_z_loss, return_bad_targets),
            group,
            vocab_start,
            vocab_size,
            main_grad,
            mode,
            workspace_budget_bytes,
        )
        divisor = divisor_of(normalizer, reduction, x.device)
        class_weight, token_weight = f32(class_weight), f32(token_weight)
    except _ffi.ArgumentError:
        tell_peers(group, x)
        raise
    shape = target.shape
    if _base.needs_operators(x, w):
        if x.dim() != 2:
            x, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
        if token_weight is not None:
            token_weight = token_weight.reshape(-1)
        results = _linear_ce_op.linear_ce(
            x, w, target, bias, class_weight, token_weight, divisor, main_grad, options, one_pass
        )
        return output(results, options, shape, skip)
    x, w, target, bias, class_weight, token_weight = _linear_ce.normal(x, w, target, bias, class_weight, token_weight)
    kind = _linear_ce.kind_of(x, w, target, bias, class_weight, token_weight, main_grad, options, one_pass)
    if kind.plain and divisor is None:
        results = _linear_ce.run_plain(kind, x, w, target)
    else:
        results = _linear_ce.run(kind, x, w, target, bias, (class_weight, token_weight, divisor, main_grad))
    # What needed no conversion, and options without values that can change, is found above the next time.
    same = all(a is b for a, b in zip(given, (x, w, bias, given[3] if shift else target, class_weight, token_weight)))
    if same and key is not None and all(type(v) in FIXED for v in key[-19:]):
        _ffi.plans.keep(key, kind)
    return output(results, options, shape, skip)


def _prepare(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Optional[Tensor],
    numbers: tuple[int, float, float, float, float],
    smoothing_rule: str,
    reduction: str,
    token_scaling: bool,
    shift: Union[bool, int],
    outputs: int,
    group: Optional[dist.ProcessGroup],
    vocab_start: Optional[int],
    vocab_size: Optional[int],
    main_grad: Optional[Tensor],
    mode: str,
    workspace_budget_bytes: int,
) -> tuple[Tensor, Tensor, Optional[Tensor], Tensor, _base.Options, int, bool]:
    """Every check of linear_cross_entropy: what is refused is refused before anything is done."""
    kind = choice("reduction", reduction, _ffi.REDUCTIONS)
    rule = choice("smoothing_rule", smoothing_rule, _ffi.SMOOTHING_RULES)
    if mode not in MODES:
        refuse("mode", repr(mode), "'auto', 'recompute' or 'one_pass'")
    _check_shapes(x, w, target, bias)
    if main_grad is not None and (main_grad.shape != w.shape or main_grad.dtype != torch.float32):
        refuse("main_grad", f"{list(main_grad.shape)} {main_grad.dtype}", f"{list(w.shape)} torch.float32")
    x, w, bias = _cast(x, w, bias)
    group_name, v_begin, v_total = shard(w.shape[0], group, vocab_start, vocab_size)
    if shift:
        target = shifted(target, int(shift), numbers[0])
    frozen = _frozen(x, w, bias)
    one_pass = _one_pass(mode, kind, frozen, main_grad, outputs & (_base.LSE | _base.ENTROPY))
    # A loss scale, which f16 gradients need, comes with the upstream: gradients formed for an upstream of 1 would lose
    # what lies below f16's range before it is scaled up.
    one_pass = one_pass and (mode == "one_pass" or torch.float16 not in (x.dtype, w.dtype))
    options = _base.Options(
        *numbers, rule, kind, int(token_scaling), v_begin, v_total, group_name, frozen, workspace_budget_bytes, outputs
    )
    return x, w, bias, target, options, int(shift), one_pass


def _frozen(x: Tensor, w: Tensor, bias: Optional[Tensor]) -> int:
    if not torch.is_grad_enabled():
        return _base.FROZEN_ALL
    return (
        (0 if x.requires_grad else _ffi.FROZEN_X)
        | (0 if w.requires_grad else _ffi.FROZEN_W)
        | (0 if bias is not None and bias.requires_grad else _ffi.FROZEN_BIAS)
    )


def _one_pass(mode: str, reduction: int, frozen: int, main_grad: Optional[Tensor], per_token: int) -> bool:
    possible = reduction != _ffi.NONE and main_grad is None
    if mode == "one_pass" and not possible:
        refuse(
            "mode",
            "'one_pass'",
            "'recompute' with reduction 'none' or main_grad, whose upstream is not known beforehand",
        )
    return possible and frozen != _base.FROZEN_ALL and (mode == "one_pass" or (mode == "auto" and not per_token))


def linear_logp(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    *,
    bias: Optional[Tensor] = None,
    temperature: float = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    entropy: bool = False,
    shift: Union[bool, int] = False,
    group: Optional[dist.ProcessGroup] = None,
    vocab_start: Optional[int] = None,
    vocab_size: Optional[int] = None,
    main_grad: Optional[Tensor] = None,
    workspace_budget_bytes: int = 0,
) -> LogProbs:
    """Log-probability of each target under softmax(z), and the entropy of that distribution, for RL.

    ``logp[i] = z[i, target_i] - lse[i]`` and ``H[i] = lse[i] - sum_v p[i,v] z[i,v]`` in nats, [...] f32, 0 where
    ignored; both have a gradient for any per-token upstream. A token's values have the same bits alone and in any
    batch, for any cut of the vocabulary. Arguments as for :func:`linear_cross_entropy`.
    """
    out = linear_cross_entropy(
        x,
        w,
        target,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        ignore_index=ignore_index,
        reduction="none",
        shift=shift,
        return_entropy=entropy,
        group=group,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        main_grad=main_grad,
        mode="recompute",
        workspace_budget_bytes=workspace_budget_bytes,
    )
    if entropy:
        return LogProbs(-out.loss, out.entropy)
    return LogProbs(-out if out.requires_grad or torch.compiler.is_compiling() else out.neg_())

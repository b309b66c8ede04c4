"""ce, the loss over logits that the caller has, on torch tensors: as py, which has what the two share.

The gradient may take the logits' place: the backward (of "one_pass" already the forward) writes it over them. A few
bytes on the host, `state`, know whether the logits are still there, and the library refuses a pass that would read
what is gone.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.graph import increment_version  # tells others that saved the logits that they changed

from .. import _ffi
from ._base import (
    ENTROPY,
    FROZEN_ALL,
    LSE,
    SCHEMA_OPTIONS,
    Options,
    callable_with_tensors,
    dtype_of,
    fake_results,
    filled,
    finished,
    needs_operators,
    new_results,
    operator,
    packed,
    passed,
    register,
    rows_of,
    stream_of,
    vector,
    workspace,
)
from ._comm import communicator

N_TENSORS = 5  # of a forward, before its options
_STATE_BYTES = 32  # sizeof(ll_ce_state)
_forward, _backward, _forward_backward = map(
    callable_with_tensors, (_ffi.ce_forward, _ffi.ce_backward, _ffi.ce_forward_backward)
)


def _plan(logits: Tensor, o: Options) -> _ffi.Plan:
    n_tokens = _ffi.round_up_tokens(logits.shape[0])
    threads = 0 if logits.is_cuda else torch.get_num_threads()
    group = communicator(o.group) if o.group else None
    key = (
        "ce",
        n_tokens,
        logits.shape[1],
        logits.dtype,
        logits.get_device(),
        threads,
        o[:11],
        o.workspace_budget_bytes,
    )

    def make() -> _ffi.Plan:
        desc = _ffi.PlanDesc(
            _ffi.CUDA if logits.is_cuda else _ffi.CPU,
            max(logits.get_device(), 0),
            n_tokens,
            0,
            o.v_begin,
            logits.shape[1],
            o.v_total,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            threads,
            o.workspace_budget_bytes,
            *o[:8],
            _ffi.CE,
            dtype_of(logits),
            0,
        )
        with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
            return _ffi.Plan(desc, group)

    return _ffi.plans.get(key, make) if group is None else group.plan(key, make)


def forward(
    logits: Tensor,
    target: Tensor,
    class_weight: Optional[Tensor],
    token_weight: Optional[Tensor],
    divisor: Optional[Tensor],
    o: Options,
    grad_logits: Optional[Tensor] = None,
    state: Optional[Tensor] = None,
) -> tuple[Optional[Tensor], ...]:
    """Seven results as those of _linear_ce.forward; with ``grad_logits`` the gradient for an upstream of 1 is written
    there."""
    results = new_results(logits, o)
    if logits.shape[0] == 0 and o.reduction == _ffi.NONE:
        return finished(results, o)
    plan = _plan(logits, o)
    operands = (logits, vector(target), packed(class_weight), packed(token_weight), divisor)
    counter = results[5] if logits.is_cuda else None
    if grad_logits is None:
        space = workspace(logits, plan, _ffi.FORWARD)
        none = (None,) * 6  # sums, upstreams, gradient
        _forward(plan.handle, stream_of(logits), 0, space, *operands, *passed(results), *none, state, counter)
    else:
        ups = (torch.ones((), dtype=torch.float32, device=logits.device), None, None, None)
        flags, space = int(grad_logits is logits), workspace(logits, plan, _ffi.FORWARD_BACKWARD)
        out = (grad_logits, state, counter)
        _forward_backward(plan.handle, stream_of(logits), flags, space, *operands, *passed(results), None, *ups, *out)
    return finished(results, o)


def backward(
    up_loss: Optional[Tensor],
    up_lse: Optional[Tensor],
    up_entropy: Optional[Tensor],
    logits: Tensor,
    target: Tensor,
    class_weight: Optional[Tensor],
    token_weight: Optional[Tensor],
    divisor: Optional[Tensor],
    rows: Tensor,
    entropy: Optional[Tensor],
    o: Options,
    state: Optional[Tensor] = None,
) -> Tensor:
    """The gradient of the logits; over them where ``state`` is given."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format) if state is None else logits
    if logits.shape[0] == 0:
        return grad
    plan = _plan(logits, o)
    operands = (logits, vector(target), packed(class_weight), packed(token_weight), divisor)
    results = (None, rows, None, None, None, entropy, None, None)
    ups = (packed(up_loss), None, packed(up_lse), packed(up_entropy))
    flags, space = int(state is not None), workspace(logits, plan, _ffi.BACKWARD)
    _backward(plan.handle, stream_of(logits), flags, space, *operands, *results, None, *ups, grad, state, None)
    if state is not None:
        increment_version(logits)
    return grad


# ---- Autograd ---------------------------------------------------------------------------------------------------


def _check_backward(*ups: Optional[Tensor]) -> bool:
    """False where there is nothing to do."""
    if torch.is_grad_enabled():
        raise _ffi.ArgumentError(
            "logitless: double backward (create_graph=True) is not offered: the gradient of cross_entropy "
            "has no gradient of its own"
        )
    return any(up is not None for up in ups)


class CE(torch.autograd.Function):
    """The loss, lse, entropy, z_loss, argmax, bad_targets. in_place and one_pass as in the function's documentation."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        class_weight: Optional[Tensor],
        token_weight: Optional[Tensor],
        divisor: Optional[Tensor],
        o: Options,
        in_place: bool,
        one_pass: bool,
    ) -> Any:
        rows = rows_of(logits)
        if in_place and rows is not logits:
            raise _ffi.ArgumentError(
                f"cross_entropy: in_place with logits of strides {logits.stride()}, want contiguous columns"
            )
        state = torch.zeros(_STATE_BYTES, dtype=torch.uint8) if in_place else None
        grad = (
            None
            if not one_pass
            else rows
            if in_place
            else torch.empty_like(rows, memory_format=torch.contiguous_format)
        )
        loss, saved, lse, entropy, z_loss, argmax, bad = forward(
            rows, target, class_weight, token_weight, divisor, o, grad, state
        )
        if grad is logits:
            increment_version(logits)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in (z_loss, argmax, bad) if t is not None))
        ctx.save_for_backward(logits, target, class_weight, token_weight, divisor, saved, entropy)
        ctx.options, ctx.state, ctx.kept = o, state, grad
        return (loss, lse, entropy, z_loss, argmax, bad) if o.outputs else loss

    @staticmethod
    def backward(
        ctx: Any,
        up_loss: Optional[Tensor],
        up_lse: Optional[Tensor] = None,
        up_entropy: Optional[Tensor] = None,
        *_: None,
    ) -> tuple[Optional[Tensor], ...]:
        nothing = (None,) * 7
        if not _check_backward(up_loss, up_lse, up_entropy):
            return None, *nothing
        kept, ctx.kept = ctx.kept, None
        if kept is not None and up_lse is None and up_entropy is None:
            return kept.mul_(up_loss.reshape(1)), *nothing
        logits, *saved = ctx.saved_tensors
        return backward(up_loss, up_lse, up_entropy, rows_of(logits), *saved, ctx.options, ctx.state), *nothing


# Function.apply without its look for transforms of torch.func, of which `needs_operators` has seen none.
_apply = super(torch.autograd.Function, CE).apply


# ---- Operators --------------------------------------------------------------------------------------------------

_SCHEMA = "Tensor logits, Tensor target, Tensor? class_weight, Tensor? token_weight, Tensor? divisor, " + SCHEMA_OPTIONS
_SCHEMA_BACKWARD = (
    "Tensor? up_loss, Tensor? up_lse, Tensor? up_entropy, Tensor logits, Tensor target, Tensor? class_weight, "
    "Tensor? token_weight, Tensor? divisor, Tensor rows, Tensor entropy, " + SCHEMA_OPTIONS
)


def _forward_op(logits: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return filled(forward(rows_of(logits), *args[: N_TENSORS - 1], Options(*args[N_TENSORS - 1 :])), logits)


def _backward_op(*args: Any) -> Tensor:
    tensors = list(args[:10])
    if tensors[9].shape[0] != tensors[3].shape[0]:
        tensors[9] = None
    tensors[3] = rows_of(tensors[3])
    return backward(*tensors, Options(*args[10:]))


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    return fake_results(args[0], Options(*args[N_TENSORS:]))


def _backward_fake(*args: Any) -> Tensor:
    return torch.empty_like(args[3], memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1], *output[4:])
    ctx.save_for_backward(*inputs[:5], output[1], output[3])
    ctx.options = Options(*inputs[N_TENSORS:])


def _op_backward(ctx: Any, *ups: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
    o = ctx.options
    up_lse, up_entropy = ups[2] if o.outputs & LSE else None, ups[3] if o.outputs & ENTROPY else None
    nothing = (None,) * (4 + len(Options._fields))
    if not _check_backward(ups[0], up_lse, up_entropy):
        return None, *nothing
    return _OP_BACKWARD(ups[0], up_lse, up_entropy, *ctx.saved_tensors, *ctx.options), *nothing


_SEVEN = "(" + ", ".join(["Tensor"] * 7) + ")"
register(f"ce_forward({_SCHEMA}) -> {_SEVEN}", _forward_op, _forward_fake, _op_backward, _setup)
register(f"ce_backward({_SCHEMA_BACKWARD}) -> Tensor", _backward_op, _backward_fake)
_OP_FORWARD, _OP_BACKWARD = operator("ce_forward"), operator("ce_backward")


def ce(
    logits: Tensor,
    target: Tensor,
    class_weight: Optional[Tensor],
    token_weight: Optional[Tensor],
    divisor: Optional[Tensor],
    o: Options,
    in_place: bool,
    one_pass: bool,
) -> Any:
    """The loss, or (loss, lse, entropy, z_loss, argmax, bad_targets) where more is wanted; differentiable."""
    if needs_operators(logits, logits):
        if in_place or one_pass:
            raise _ffi.ArgumentError("cross_entropy: in_place and mode 'one_pass' are for eager code")
        results = _OP_FORWARD(logits, target, class_weight, token_weight, divisor, *o)
    elif o.frozen != FROZEN_ALL:
        return _apply(logits, target, class_weight, token_weight, divisor, o, in_place, one_pass)
    else:
        results = forward(rows_of(logits), target, class_weight, token_weight, divisor, o)
    return (results[0], *results[2:7]) if o.outputs else results[0]

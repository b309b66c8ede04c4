"""linear_ce on torch tensors: the calls into the library, and their registration with autograd and torch.compile.

    forward            x, w, target, ...  ->  loss, rows [3, n], lse, entropy, z_loss, argmax, bad_targets
    forward_backward   the same, and grad_x, grad_w, grad_bias of the reduced loss for an upstream of 1
    backward           upstreams and the forward's results  ->  grad_x, grad_w, grad_bias

Two ways lead to one implementation. Operators of torch.library are what torch.compile and
opcheck see; in plain eager code an autograd.Function calls the implementation without the dispatcher, which would take
longer than everything else here.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Optional

import torch
from torch import Tensor

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

_GRAD_F32 = 1  # ll_dtype of an f32 gradient
_ACCUMULATE_W = 2  # LL_ACCUMULATE_W
_NO_SUMS_UPS_GRADS = (None,) * 8  # of a forward


N_TENSORS = 8  # of a forward, before its options

_SCHEMA_FORWARD = (
    "Tensor x, Tensor w, Tensor target, Tensor? bias, Tensor? class_weight, Tensor? token_weight, "
    "Tensor? divisor, Tensor? main_grad, " + SCHEMA_OPTIONS
)
_SCHEMA_BACKWARD = (
    "Tensor? up_loss, Tensor? up_lse, Tensor? up_entropy, Tensor x, Tensor w, "
    "Tensor target, Tensor? bias, Tensor? class_weight, Tensor? token_weight, Tensor? divisor, "
    "Tensor rows, Tensor entropy, Tensor(a!)? main_grad, " + SCHEMA_OPTIONS
)


# ---- Plans and operands -----------------------------------------------------------------------------------------


def _plan(x: Tensor, w: Tensor, bias: Optional[Tensor], main_grad: Optional[Tensor], o: Options) -> _ffi.Plan:
    n_tokens, n_hidden = _ffi.round_up_tokens(x.shape[0]), x.shape[1]
    threads = 0 if x.is_cuda else torch.get_num_threads()
    group = communicator(o.group) if o.group else None
    key = (
        n_tokens,
        n_hidden,
        w.shape[0],
        x.dtype,
        w.dtype,
        None if bias is None else bias.dtype,
        main_grad is None,
        x.get_device(),
        threads,
        o[:13],
    )

    def make() -> _ffi.Plan:
        desc = _ffi.PlanDesc(
            _ffi.CUDA if x.is_cuda else _ffi.CPU,
            max(x.get_device(), 0),
            n_tokens,
            n_hidden,
            o.v_begin,
            w.shape[0],
            o.v_total,
            dtype_of(x),
            dtype_of(w),
            0 if bias is None else dtype_of(bias),
            0,
            0 if main_grad is None else _GRAD_F32,
            0,
            o.frozen,
            threads,
            o.workspace_budget_bytes,
            *o[:8],
        )
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            return _ffi.Plan(desc, group)

    return _ffi.plans.get(key, make) if group is None else group.plan(key, make)


_forward, _backward, _forward_backward = map(
    callable_with_tensors, (_ffi.forward, _ffi.backward, _ffi.forward_backward)
)


# ---- The passes -------------------------------------------------------------------------------------------------


def forward(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Optional[Tensor],
    class_weight: Optional[Tensor],
    token_weight: Optional[Tensor],
    divisor: Optional[Tensor],
    main_grad: Optional[Tensor],
    o: Options,
    gradients: bool = False,
) -> tuple[Optional[Tensor], ...]:
    """Seven results, None where not wanted; with ``gradients`` ten, the last three for an upstream of 1."""
    results = new_results(x, o)
    if x.shape[0] == 0 and o.reduction == _ffi.NONE:
        return finished(results, o)  # nothing to write, and no pointer to tell the library what is wanted
    plan = _plan(x, w, bias, main_grad, o)
    weights = (packed(class_weight), packed(token_weight), divisor)
    operands = (rows_of(x), rows_of(w), vector(bias), vector(target), *weights)
    counter = results[5] if x.is_cuda else None
    if not gradients:
        space = workspace(x, plan, _ffi.FORWARD)
        _forward(plan.handle, stream_of(x), 0, space, *operands, *passed(results), *_NO_SUMS_UPS_GRADS, counter)
        return finished(results, o)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    grads = _new_gradients(x, w, bias, o.frozen)
    space = workspace(x, plan, _ffi.FORWARD_BACKWARD)
    ups = (one, None, None, None)
    _forward_backward(plan.handle, stream_of(x), 0, space, *operands, *passed(results), None, *ups, *grads, counter)
    return *finished(results, o), *grads


def _new_gradients(x: Tensor, w: Tensor, bias: Optional[Tensor], frozen: int) -> tuple[Optional[Tensor], ...]:
    def new(t: Optional[Tensor], bit: int) -> Optional[Tensor]:
        return None if t is None or frozen & bit else torch.empty(t.shape, dtype=t.dtype, device=t.device)

    return new(x, _ffi.FROZEN_X), new(w, _ffi.FROZEN_W), new(bias, _ffi.FROZEN_BIAS)


def backward(
    up_loss: Optional[Tensor],
    up_lse: Optional[Tensor],
    up_entropy: Optional[Tensor],
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Optional[Tensor],
    class_weight: Optional[Tensor],
    token_weight: Optional[Tensor],
    divisor: Optional[Tensor],
    rows: Tensor,
    entropy: Optional[Tensor],
    main_grad: Optional[Tensor],
    o: Options,
) -> tuple[Optional[Tensor], ...]:
    """grad_x, grad_w, grad_bias, None where frozen; grad_w is added to ``main_grad`` instead where that is given."""
    into_main = main_grad is not None and not o.frozen & _ffi.FROZEN_W
    grads = _new_gradients(x, w, bias, o.frozen | (_ffi.FROZEN_W if into_main else 0))
    if x.shape[0] == 0:  # as above: upstreams of no tokens have no pointer
        return tuple(None if g is None else g.zero_() for g in grads)
    plan = _plan(x, w, bias, main_grad, o)
    weights = (packed(class_weight), packed(token_weight), divisor)
    operands = (rows_of(x), rows_of(w), vector(bias), vector(target), *weights)
    results = (None, rows, None, None, None, entropy, None, None)
    ups = (packed(up_loss), None, packed(up_lse), packed(up_entropy))
    out = (grads[0], main_grad if into_main else grads[1], grads[2])
    flags, space = _ACCUMULATE_W if into_main else 0, workspace(x, plan, _ffi.BACKWARD)
    _backward(plan.handle, stream_of(x), flags, space, *operands, *results, None, *ups, *out, None)
    return grads


# ---- Autograd ---------------------------------------------------------------------------------------------------


def _gradients(
    ctx: Any, up_loss: Optional[Tensor], up_lse: Optional[Tensor], up_entropy: Optional[Tensor], run_backward: Any
) -> tuple[Optional[Tensor], ...]:
    if torch.is_grad_enabled():
        raise _ffi.ArgumentError(
            "logitless: double backward (create_graph=True) is not offered: gradients of "
            "linear_cross_entropy have no gradient of their own"
        )
    if up_loss is None and up_lse is None and up_entropy is None:
        return None, None, None
    kept, ctx.kept = ctx.kept, None
    if kept is not None and up_lse is None and up_entropy is None:
        # The gradients of one pass are handed over, so a second backward recomputes. reshape: with a scale of one
        # dimension torch multiplies in f32 and rounds once; one of none would be rounded to the gradient's dtype first.
        scale = up_loss.reshape(1)
        if torch.compiler.is_compiling() or needs_operators(kept[0] if kept[0] is not None else scale, scale):
            # Traced, the gradients are results of the forward, which a backward may not change.
            return tuple(None if g is None else (g * scale).to(g.dtype) for g in kept)
        return tuple(None if g is None else g.mul_(scale) for g in kept)
    return run_backward(up_loss, up_lse, up_entropy)


class LinearCE(torch.autograd.Function):
    """The eager way: the loss, or (loss, lse, entropy, z_loss, argmax, bad_targets) where more is wanted."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        target: Tensor,
        bias: Optional[Tensor],
        class_weight: Optional[Tensor],
        token_weight: Optional[Tensor],
        divisor: Optional[Tensor],
        main_grad: Optional[Tensor],
        o: Options,
        one_pass: bool,
    ) -> Any:
        results = forward(x, w, target, bias, class_weight, token_weight, divisor, main_grad, o, one_pass)
        loss, rows, lse, entropy, z_loss, argmax, bad = results[:7]
        ctx.set_materialize_grads(False)
        # main_grad is not among the saved tensors: the backward of another micro-batch may add to it in the meantime.
        ctx.options, ctx.kept, ctx.main_grad = o, results[7:] or None, main_grad
        if not o.outputs:
            ctx.save_for_backward(x, w, target, bias, class_weight, token_weight, divisor, rows)
            return loss
        ctx.save_for_backward(x, w, target, bias, class_weight, token_weight, divisor, rows, entropy)
        ctx.mark_non_differentiable(*(t for t in (z_loss, argmax, bad) if t is not None))
        return loss, lse, entropy, z_loss, argmax, bad

    @staticmethod
    def backward(
        ctx: Any,
        up_loss: Optional[Tensor],
        up_lse: Optional[Tensor] = None,
        up_entropy: Optional[Tensor] = None,
        *_: None,
    ) -> tuple[Optional[Tensor], ...]:
        def run(*ups: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
            saved = ctx.saved_tensors
            return backward(*ups, *saved, *(None,) * (9 - len(saved)), ctx.main_grad, ctx.options)

        grad_x, grad_w, grad_bias = _gradients(ctx, up_loss, up_lse, up_entropy, run)
        return grad_x, grad_w, None, grad_bias, None, None, None, None, None, None


# Function.apply without its look for transforms of torch.func, of which `needs_operators` has seen none.
_apply = super(torch.autograd.Function, LinearCE).apply


# ---- Operators --------------------------------------------------------------------------------------------------
# An operator has no optional results: what is not wanted is an empty tensor.


def _forward_op(*args: Any) -> tuple[Tensor, ...]:
    return filled(forward(*args[:N_TENSORS], Options(*args[N_TENSORS:])), args[0])


def _forward_backward_op(*args: Any) -> tuple[Tensor, ...]:
    return filled(forward(*args[:N_TENSORS], Options(*args[N_TENSORS:]), gradients=True), args[0])


def _backward_op(*args: Any) -> tuple[Tensor, ...]:
    tensors, x, entropy = list(args[:13]), args[3], args[11]
    if entropy.shape[0] != x.shape[0]:
        tensors[11] = None
    return filled(backward(*tensors, Options(*args[13:])), x)


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    return fake_results(args[0], Options(*args[N_TENSORS:]))


def _forward_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x, w, bias, o = args[0], args[1], args[3], Options(*args[N_TENSORS:])
    return *_forward_fake(*args), *filled(_new_gradients(x, w, bias, o.frozen), x)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x, w, bias, main_grad, o = args[3], args[4], args[6], args[12], Options(*args[13:])
    into_main = main_grad is not None and not o.frozen & _ffi.FROZEN_W
    return filled(_new_gradients(x, w, bias, o.frozen | (_ffi.FROZEN_W if into_main else 0)), x)


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    o, kept = Options(*inputs[N_TENSORS:]), output[7:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1], *output[4:])
    ctx.save_for_backward(*inputs[:7], output[1], output[3])
    ctx.options, ctx.main_grad = o, inputs[7]
    ctx.kept = _present(kept, inputs[0], inputs[1], inputs[3], o.frozen) if kept else None


def _present(
    grads: tuple[Tensor, ...], x: Tensor, w: Optional[Tensor], bias: Optional[Tensor], frozen: int
) -> tuple[Optional[Tensor], ...]:
    """An operator's gradients without the empty tensors in the places of those that were not wanted."""
    return tuple(
        g if t is not None and not frozen & bit else None
        for g, t, bit in zip(grads, (x, w, bias), (_ffi.FROZEN_X, _ffi.FROZEN_W, _ffi.FROZEN_BIAS))
    )


def _op_backward(ctx: Any, *ups: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
    def run(*ups: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        x, w, _, bias, *_ = saved = ctx.saved_tensors
        grads = _OP_BACKWARD(*ups, *saved, ctx.main_grad, *ctx.options)
        return _present(grads, x, None if ctx.main_grad is not None else w, bias, ctx.options.frozen)

    o = ctx.options  # what was not wanted was an empty tensor
    up_lse, up_entropy = ups[2] if o.outputs & LSE else None, ups[3] if o.outputs & ENTROPY else None
    grad_x, grad_w, grad_bias = _gradients(ctx, ups[0], up_lse, up_entropy, run)
    return grad_x, grad_w, None, grad_bias, *(None,) * (4 + len(Options._fields))


_SEVEN = "(" + ", ".join(["Tensor"] * 7) + ")"
_TEN = "(" + ", ".join(["Tensor"] * 10) + ")"
register(f"linear_ce_forward({_SCHEMA_FORWARD}) -> {_SEVEN}", _forward_op, _forward_fake, _op_backward, _setup)
register(
    f"linear_ce_forward_backward({_SCHEMA_FORWARD}) -> {_TEN}",
    _forward_backward_op,
    _forward_backward_fake,
    _op_backward,
    _setup,
)
register(f"linear_ce_backward({_SCHEMA_BACKWARD}) -> (Tensor, Tensor, Tensor)", _backward_op, _backward_fake)
_OP_FORWARD, _OP_FORWARD_BACKWARD, _OP_BACKWARD = map(
    operator, ("linear_ce_forward", "linear_ce_forward_backward", "linear_ce_backward")
)


def linear_ce(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Optional[Tensor],
    class_weight: Optional[Tensor],
    token_weight: Optional[Tensor],
    divisor: Optional[Tensor],
    main_grad: Optional[Tensor],
    o: Options,
    one_pass: bool,
) -> Any:
    """The loss, or (loss, lse, entropy, z_loss, argmax, bad_targets) where more is wanted; differentiable."""
    if needs_operators(x, w):
        op = _OP_FORWARD_BACKWARD if one_pass else _OP_FORWARD
        results = op(x, w, target, bias, class_weight, token_weight, divisor, main_grad, *o)
    elif o.frozen != FROZEN_ALL:
        return _apply(x, w, target, bias, class_weight, token_weight, divisor, main_grad, o, one_pass)
    else:
        results = forward(x, w, target, bias, class_weight, token_weight, divisor, main_grad, o)
    return (results[0], *results[2:7]) if o.outputs else results[0]

"""linear_ce on torch tensors as operators of torch.library, for what watches or replaces operations: torch.compile,
opcheck, torch.func. _linear_ce.py has what they do."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor

from .. import _ffi
from ._base import ENTROPY, LSE, SCHEMA_OPTIONS, Options, fake_results, filled, operator, register
from ._linear_ce import gradients, kind_of, normal

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

# An operator has no optional results: what is not wanted is an empty tensor.


def _run_forward(args: tuple[Any, ...], one_pass: bool) -> tuple[Tensor, ...]:
    o, divisor, main_grad = Options(*args[N_TENSORS:]), args[6], args[7]
    operands = normal(*args[:6])
    kind = kind_of(*operands, main_grad, o, one_pass)
    x, w, target, bias, class_weight, token_weight = operands
    return filled(kind.forward(x, w, target, bias, (class_weight, token_weight, divisor, None)), args[0])


def _forward_op(*args: Any) -> tuple[Tensor, ...]:
    return _run_forward(args, False)


def _forward_backward_op(*args: Any) -> tuple[Tensor, ...]:
    return _run_forward(args, True)


def _backward_op(*args: Any) -> tuple[Tensor, ...]:
    operands, (divisor, rows, entropy, main_grad) = normal(*args[3:9]), args[9:13]
    kind = kind_of(*operands, main_grad, Options(*args[13:]))
    saved = divisor, rows, entropy if entropy.shape[0] == args[3].shape[0] else None, main_grad
    return filled(kind.backward(args[0], args[1], args[2], *operands, *saved), args[3])


def _fake_gradients(x: Tensor, w: Tensor, bias: Optional[Tensor], frozen: int) -> tuple[Optional[Tensor], ...]:
    def new(t: Optional[Tensor], bit: int) -> Optional[Tensor]:
        return None if t is None or frozen & bit else t.new_empty(t.shape)

    return new(x, _ffi.FROZEN_X), new(w, _ffi.FROZEN_W), new(bias, _ffi.FROZEN_BIAS)


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    return fake_results(args[0], Options(*args[N_TENSORS:]))


def _forward_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x, w, bias, o = args[0], args[1], args[3], Options(*args[N_TENSORS:])
    return *_forward_fake(*args), *filled(_fake_gradients(x, w, bias, o.frozen), x)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x, w, bias, main_grad, o = args[3], args[4], args[6], args[12], Options(*args[13:])
    into_main = main_grad is not None and not o.frozen & _ffi.FROZEN_W
    return filled(_fake_gradients(x, w, bias, o.frozen | (_ffi.FROZEN_W if into_main else 0)), x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
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
    o = ctx.options  # what was not wanted was an empty tensor
    up_lse, up_entropy = ups[2] if o.outputs & LSE else None, ups[3] if o.outputs & ENTROPY else None
    kept, ctx.kept = ctx.kept, None  # a second backward forms them again
    grads = gradients(kept, ups[0], up_lse, up_entropy)
    if grads is None:
        x, w, _, bias, *_ = saved = ctx.saved_tensors
        found = _OP_BACKWARD(ups[0], up_lse, up_entropy, *saved, ctx.main_grad, *o)
        grads = _present(found, x, None if ctx.main_grad is not None else w, bias, o.frozen)
    grad_x, grad_w, grad_bias = grads
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
    """`run` for operands of two dimensions as operators, for what watches or replaces operations."""
    op = _OP_FORWARD_BACKWARD if one_pass else _OP_FORWARD
    results = op(x, w, target, bias, class_weight, token_weight, divisor, main_grad, *o)
    return (results[0], *results[2:7]) if o.outputs else results[0]

"""ce, the loss over logits that the caller has, on torch tensors: as _linear_ce.py, which has what the two share.

The gradient may take the logits' place: the backward (of "one_pass" already the forward) writes it over them. A few
bytes on the host, `state`, know whether the logits are still there, and the library refuses a pass that would read
what is gone.
"""

from __future__ import annotations

from collections.abc import Hashable
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
    Kind,
    Options,
    allocator,
    as_rows,
    bucket,
    check_rows,
    dtype_of,
    fake_results,
    filled,
    finished,
    gradient_of,
    is_grad_enabled,
    layout,
    new_loss,
    new_results,
    one_on,
    operator,
    packed,
    register,
    scaled,
    weights_signature,
)
from ._comm import communicator

N_TENSORS = 5  # of a forward, before its options
_STATE_BYTES = 32  # sizeof(ll_ce_state)
# Places of the operands of a pass in the library's table (python/ffi/ce.c).
_PLACES_FORWARD = (0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 19, 20)
_PLACES_FORWARD_BACKWARD = (0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 14, 18, 19, 20)
_PLACES_BACKWARD = (0, 1, 2, 3, 4, 6, 10, 14, 16, 17, 18, 19)
_PLACES_PLAIN = (0, 1, 5, 6)
_PLACES_PLAIN_BACKWARD = (0, 1, 6, 14, 18)


# ---- Plans and kinds of calls -----------------------------------------------------------------------------------


def plan_of(logits: Tensor, n: int, o: Options, n_ids: int = 0, n_top: int = 0) -> _ffi.Plan:
    n_tokens = _ffi.round_up_tokens(n)
    threads = 0 if logits.is_cuda else torch.get_num_threads()
    group = communicator(o.group, logits.get_device()) if o.group else None
    key = (
        "ce",
        n_tokens,
        logits.shape[-1],
        logits.dtype,
        logits.get_device(),
        threads,
        o[:11],
        o.workspace_budget_bytes,
        n_ids,
        n_top,
    )

    def make() -> _ffi.Plan:
        desc = _ffi.PlanDesc(
            _ffi.CUDA if logits.is_cuda else _ffi.CPU,
            max(logits.get_device(), 0),
            n_tokens,
            0,
            o.v_begin,
            logits.shape[-1],
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
            n_ids,
            n_top,
        )
        with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
            return _ffi.Plan(desc, group)

    return _ffi.plans.get(key, make) if group is None else group.plan(key, make)


def kind_of(
    logits: Tensor,
    target: Tensor,
    class_weight: Optional[Tensor],
    token_weight: Optional[Tensor],
    o: Options,
    one_pass: bool = False,
    in_place: bool = False,
) -> LogitsKind:
    """The kind of a call with such operands: logits contiguous or in two dimensions, the rest contiguous. Collective
    in a group: the ranks meet."""
    key: Hashable = (
        "ce",
        bucket(target.numel()),
        (logits.dtype, logits.shape[-1], layout(logits), logits.get_device()),
        (target.dtype, target.get_device()),
        weights_signature(class_weight),
        weights_signature(token_weight, target.numel()),
        torch.get_num_threads(),
        o,
        one_pass,
        in_place,
    )
    cache = communicator(o.group, logits.get_device()).plans if o.group else _ffi.plans
    plan = plan_of(logits, target.numel(), o) if o.group else None
    kind = cache.calls.get(key)
    if kind is None or (plan is not None and kind.plan is not plan):
        kind = LogitsKind(plan or plan_of(logits, target.numel(), o), o, logits, None, target, one_pass)
        kind.in_place = in_place
        kind.plain = kind.plain and class_weight is token_weight is None and not one_pass and not in_place
        cache.keep(key, kind)
    return kind


# ---- The passes -------------------------------------------------------------------------------------------------


class LogitsKind(Kind):
    """The passes of ce for a kind of call."""

    __slots__ = ("in_place",)
    op = _ffi.CE
    in_place: bool

    def plain_forward(self, logits: Tensor, target: Tensor, keep: bool) -> tuple[Tensor, Optional[Tensor]]:
        """`forward` of a plain kind, sooner: loss and rows."""
        o, n, new = self.options, target.numel(), allocator(self.index)
        loss, rows = new_loss(new, target, n, o, keep)
        if n > 0 or o.reduction != _ffi.NONE:
            operands = (logits, target, loss, rows) if keep else (logits, target, loss)
            self.execute(_ffi.FORWARD, 0, n, new, _PLACES_PLAIN, operands, keep)
        return loss, rows

    def plain_backward(self, up: Tensor, logits: Tensor, target: Tensor, rows: Tensor) -> Tensor:
        """`backward` of a plain kind, sooner."""
        n, new = target.numel(), allocator(self.index)
        grad = gradient_of(logits, new)
        if n > 0:
            operands = logits, target, rows, packed(up), grad
            self.execute(_ffi.BACKWARD, 0, n, new, _PLACES_PLAIN_BACKWARD, operands, "backward")
        return grad

    def forward(
        self,
        logits: Tensor,
        target: Tensor,
        class_weight: Optional[Tensor],
        token_weight: Optional[Tensor],
        divisor: Optional[Tensor],
        state: Optional[Tensor] = None,
        keep: bool = True,
    ) -> tuple[Optional[Tensor], ...]:
        """Seven results, None where not wanted; of one pass eight, the last the gradient for an upstream of 1, over the
        logits where the kind is in place. ``state``: the bytes that know whether the logits are still there."""
        o, n, new = self.options, target.numel(), allocator(self.index)
        results = new_results(new, target, n, o, keep)
        grad = None
        if self.one_pass:
            grad = logits if self.in_place else gradient_of(logits, new)
        if n == 0 and o.reduction == _ffi.NONE:
            return finished(results, target, o)
        loss, rows, entropy, z_loss, argmax, bad = results
        counter = bad if self.index >= 0 else None
        common = (
            *(logits.contiguous() if self.copies_x else logits, target, class_weight, token_weight, divisor),
            *(loss, rows, entropy, z_loss, argmax),
        )
        given = divisor is None, state is None, self.one_pass, keep
        if not self.one_pass:
            self.execute(_ffi.FORWARD, 0, n, new, _PLACES_FORWARD, (*common, state, counter), given)
            return finished(results, target, o)
        operands = (*common, one_on(self.index), grad, state, counter)
        self.execute(_ffi.FORWARD_BACKWARD, int(self.in_place), n, new, _PLACES_FORWARD_BACKWARD, operands, given)
        return *finished(results, target, o), grad

    def backward(
        self,
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
        state: Optional[Tensor] = None,
    ) -> Tensor:
        """The gradient of the logits; over them where ``state`` is given."""
        n, new = target.numel(), allocator(self.index)
        grad = gradient_of(logits, new) if state is None else logits
        if n == 0:
            return grad
        up_loss, up_lse, up_entropy = packed(up_loss), packed(up_lse), packed(up_entropy)
        operands = (
            *(logits.contiguous() if self.copies_x else logits, target, class_weight, token_weight, divisor),
            *(rows, entropy, up_loss, up_lse, up_entropy, grad, state),
        )
        given = divisor is None, entropy is None, up_loss is None, up_lse is None, up_entropy is None, state is None
        self.execute(_ffi.BACKWARD, int(state is not None), n, new, _PLACES_BACKWARD, operands, given)
        if state is not None:
            increment_version(logits)
        return grad


# ---- Autograd ---------------------------------------------------------------------------------------------------


def _refuse_double_backward() -> None:
    if is_grad_enabled():
        raise _ffi.ArgumentError(
            "logitless: double backward (create_graph=True) is not offered: the gradient of cross_entropy "
            "has no gradient of its own"
        )


class CE(torch.autograd.Function):
    """The loss, lse, entropy, z_loss, argmax, bad_targets. in_place and one_pass as in the function's documentation."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, kind: LogitsKind, rest: tuple[Any, ...]) -> Any:
        target, class_weight, token_weight, divisor = rest
        state = torch.zeros(_STATE_BYTES, dtype=torch.uint8) if kind.in_place else None
        results = kind.forward(logits, target, class_weight, token_weight, divisor, state)
        loss, rows, lse, entropy, z_loss, argmax, bad, *kept = results
        if kept and kind.in_place:
            increment_version(logits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, target, class_weight, token_weight, divisor, rows, entropy)
        ctx.kind, ctx.state, ctx.kept = kind, state, kept[0] if kept else None
        if not kind.options.outputs:
            return loss
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
        _refuse_double_backward()
        if up_loss is up_lse is up_entropy is None:
            return None, None, None
        kept, ctx.kept = ctx.kept, None
        if kept is not None and up_loss is not None and up_lse is None and up_entropy is None:
            return scaled(kept, up_loss), None, None
        kind, saved, state, ups = ctx.kind, ctx.saved_tensors, ctx.state, (up_loss, up_lse, up_entropy)
        logits, target, class_weight, token_weight, divisor, rows, entropy = saved
        plain = class_weight is token_weight is entropy is None and not kind.options.group
        if plain and kind.fits(logits, None, target, rows):
            return kind.backward(*ups, logits, target, None, None, divisor, rows, None, state), None, None
        return _backward_of(kind, saved, state, *ups), None, None


class CEPlain(torch.autograd.Function):
    """The usual call, sooner: the loss of a plain kind with logits and target alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: tuple[LogitsKind, Tensor]) -> Any:
        kind, target = call
        loss, rows = kind.plain_forward(logits, target, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, target, rows)
        ctx.kind = kind
        return loss

    @staticmethod
    def backward(ctx: Any, up: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        _refuse_double_backward()
        if up is None:
            return None, None
        kind, (logits, target, rows) = ctx.kind, ctx.saved_tensors
        if kind.fits(logits, None, target, rows):
            return kind.plain_backward(up, logits, target, rows), None
        return _backward_of(kind, (logits, target, None, None, None, rows, None), None, up, None, None), None


def _backward_of(kind: LogitsKind, saved: tuple[Any, ...], state: Optional[Tensor], *ups: Optional[Tensor]) -> Tensor:
    """A backward that looks at its operands anew. In a group every pass starts with a meeting."""
    logits, target, class_weight, token_weight, divisor, rows, entropy = saved
    operands = normal(logits, target, class_weight, token_weight)
    kind = kind_of(*operands, kind.options, False, kind.in_place)
    grad = kind.backward(ups[0], ups[1], ups[2], *operands, divisor, rows.contiguous(), packed(entropy), state)
    return grad.view(logits.shape)


# Function.apply without its look for transforms of torch.func, of which `needs_operators` has seen none.
_apply = super(torch.autograd.Function, CE).apply
_apply_plain = super(torch.autograd.Function, CEPlain).apply


def run(
    kind: LogitsKind,
    logits: Tensor,
    target: Tensor,
    class_weight: Optional[Tensor],
    token_weight: Optional[Tensor],
    divisor: Optional[Tensor],
) -> Any:
    """The loss, or (loss, lse, entropy, z_loss, argmax, bad_targets) where more is wanted; differentiable. For plain
    eager code and operands of that kind."""
    if kind.options.frozen != FROZEN_ALL:
        return _apply(logits, kind, (target, class_weight, token_weight, divisor))
    results = kind.forward(logits, target, class_weight, token_weight, divisor, None, False)
    return (results[0], *results[2:7]) if kind.options.outputs else results[0]


def run_plain(kind: LogitsKind, logits: Tensor, target: Tensor) -> Tensor:
    """`run` of a plain kind without a divisor, sooner."""
    if kind.options.frozen != FROZEN_ALL:
        return _apply_plain(logits, (kind, target))
    return kind.plain_forward(logits, target, False)[0]


# ---- Operators --------------------------------------------------------------------------------------------------

_SCHEMA = "Tensor logits, Tensor target, Tensor? class_weight, Tensor? token_weight, Tensor? divisor, " + SCHEMA_OPTIONS
_SCHEMA_BACKWARD = (
    "Tensor? up_loss, Tensor? up_lse, Tensor? up_entropy, Tensor logits, Tensor target, Tensor? class_weight, "
    "Tensor? token_weight, Tensor? divisor, Tensor rows, Tensor entropy, " + SCHEMA_OPTIONS
)


def normal(
    logits: Tensor, target: Tensor, class_weight: Optional[Tensor], token_weight: Optional[Tensor]
) -> tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
    """Operands as `kind_of` and the passes take them."""
    logits = as_rows(logits)
    if logits.dim() == 2 and target.dim() != 1:
        target = target.reshape(-1)
    check_rows(logits, target)
    return logits, target.contiguous(), packed(class_weight), packed(token_weight)


def _forward_op(*args: Any) -> tuple[Tensor, ...]:
    operands = normal(*args[:4])
    kind = kind_of(*operands, Options(*args[N_TENSORS:]))
    return filled(kind.forward(*operands, args[4]), args[0])


def _backward_op(*args: Any) -> Tensor:
    operands, (divisor, rows, entropy) = normal(*args[3:7]), args[7:10]
    kind = kind_of(*operands, Options(*args[10:]))
    saved = divisor, rows, entropy if entropy.shape[0] == args[3].shape[0] else None
    return kind.backward(args[0], args[1], args[2], *operands, *saved)


def _forward_fake(*args: Any) -> tuple[Tensor, ...]:
    return fake_results(args[0], Options(*args[N_TENSORS:]))


def _backward_fake(*args: Any) -> Tensor:
    return torch.empty_like(args[3], memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1], *output[4:])
    ctx.save_for_backward(*inputs[:5], output[1], output[3])
    ctx.options = Options(*inputs[N_TENSORS:])


def _op_backward(ctx: Any, *ups: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
    o = ctx.options
    up_lse, up_entropy = ups[2] if o.outputs & LSE else None, ups[3] if o.outputs & ENTROPY else None
    nothing = (None,) * (4 + len(Options._fields))
    _refuse_double_backward()
    if ups[0] is up_lse is up_entropy is None:
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
) -> Any:
    """`run` for operands of two dimensions as operators, for what watches or replaces operations."""
    results = _OP_FORWARD(logits, target, class_weight, token_weight, divisor, *o)
    return (results[0], *results[2:7]) if o.outputs else results[0]

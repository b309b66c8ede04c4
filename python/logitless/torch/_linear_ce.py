"""linear_ce on torch tensors: the calls into the library, and their registration with autograd.

    forward            x, w, target, ...  ->  loss, rows [3, n], lse, entropy, z_loss, argmax, bad_targets
    forward_backward   the same, and grad_x, grad_w, grad_bias of the reduced loss for an upstream of 1
    backward           upstreams and the forward's results  ->  grad_x, grad_w, grad_bias

Two ways lead to one implementation. Operators of torch.library (_linear_ce_op.py) are what torch.compile and
opcheck see; in plain eager code an autograd.Function calls the implementation without the dispatcher, which would take
longer than everything else here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any, Optional

import torch
from torch import Tensor

from .. import _ffi
from ._base import (
    FROZEN_ALL,
    Kind,
    Options,
    allocator,
    as_rows,
    bucket,
    check_rows,
    dtype_of,
    finished,
    gradient_of,
    is_grad_enabled,
    layout,
    needs_operators,
    new_loss,
    new_results,
    one_on,
    packed,
    scaled,
    signature,
    vector,
    weights_signature,
)
from ._comm import communicator

_GRAD_F32 = 1  # ll_dtype of an f32 gradient
_ACCUMULATE_W = 2  # LL_ACCUMULATE_W
# Places of the operands of a pass in the library's table (python/ffi/linear_ce.c).
_PLACES_PLAIN = (0, 1, 3, 7, 8)
_PLACES_PLAIN_FORWARD_BACKWARD = (0, 1, 3, 7, 8, 16, 20, 21)
_PLACES_PLAIN_BACKWARD = (0, 1, 3, 8, 16, 20, 21)
_PLACES_FORWARD = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 14, 23)
_PLACES_FORWARD_BACKWARD = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 14, 16, 20, 21, 22, 23)
_PLACES_BACKWARD = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 18, 19, 20, 21, 22)


# ---- Plans and kinds of calls -----------------------------------------------------------------------------------


def _plan(x: Tensor, w: Tensor, bias: Optional[Tensor], main_grad: Optional[Tensor], n: int, o: Options) -> _ffi.Plan:
    n_tokens, n_hidden = _ffi.round_up_tokens(n), x.shape[-1]
    threads = 0 if x.is_cuda else torch.get_num_threads()
    group = communicator(o.group, x.get_device()) if o.group else None
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


def normal(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Optional[Tensor],
    class_weight: Optional[Tensor],
    token_weight: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """Operands as `kind_of` and the passes take them."""
    x, w = as_rows(x), as_rows(w)
    if x.dim() == 2 and target.dim() != 1:
        target = target.reshape(-1)
    check_rows(x, target)
    return x, w, target.contiguous(), vector(bias), packed(class_weight), packed(token_weight)


def kind_of(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Optional[Tensor],
    class_weight: Optional[Tensor],
    token_weight: Optional[Tensor],
    main_grad: Optional[Tensor],
    o: Options,
    one_pass: bool = False,
) -> LinearKind:
    """The kind of a call with such operands: x [..., n_hidden] contiguous or in two dimensions, target contiguous, the
    rest as the library takes it. Collective in a group: the ranks meet."""
    key: Hashable = (
        bucket(target.numel()),
        (x.dtype, x.shape[-1], layout(x), x.get_device()),
        (w.dtype, w.shape, layout(w), w.get_device()),
        (target.dtype, target.get_device()),
        signature(bias),
        weights_signature(class_weight),
        weights_signature(token_weight, target.numel()),
        signature(main_grad),
        torch.get_num_threads(),
        o,
        one_pass,
    )
    if not o.group:
        kind = _ffi.plans.calls.get(key)
        if kind is None:
            kind = LinearKind(_plan(x, w, bias, main_grad, target.numel(), o), o, x, w, target, one_pass)
            kind.plain = kind.plain and bias is class_weight is token_weight is main_grad is None
            _ffi.plans.keep(key, kind)
        return kind
    plan = _plan(x, w, bias, main_grad, target.numel(), o)
    cache = communicator(o.group, x.get_device()).plans
    kind = cache.calls.get(key)
    if kind is None or kind.plan is not plan:
        kind = LinearKind(plan, o, x, w, target, one_pass)
        cache.keep(key, kind)
    return kind


# ---- The passes -------------------------------------------------------------------------------------------------


class LinearKind(Kind):
    """The passes of linear_ce for a kind of call."""

    __slots__ = ()
    op = _ffi.LINEAR_CE

    def plain_forward(
        self, x: Tensor, w: Tensor, target: Tensor, keep: bool
    ) -> tuple[Tensor, Optional[Tensor], Optional[tuple[Optional[Tensor], ...]]]:
        """`forward` of a plain kind, sooner: loss, rows, and the gradients of one pass."""
        o, n, new = self.options, target.numel(), allocator(self.index)
        loss, rows = new_loss(new, target, n, o, keep)
        if n == 0 and o.reduction == _ffi.NONE:
            return loss, rows, None
        if not self.one_pass:
            operands = (x, w, target, loss, rows) if keep else (x, w, target, loss)
            self.execute(_ffi.FORWARD, 0, n, new, _PLACES_PLAIN, operands, keep)
            return loss, rows, None
        grads = self.plain_gradients(x, w, n, new)
        both = x, w, target, loss, rows, one_on(self.index), grads[0], grads[1]
        self.execute(_ffi.FORWARD_BACKWARD, 0, n, new, _PLACES_PLAIN_FORWARD_BACKWARD, both, "plain one pass")
        return loss, rows, grads

    def plain_backward(
        self, up: Tensor, x: Tensor, w: Tensor, target: Tensor, rows: Tensor
    ) -> tuple[Optional[Tensor], ...]:
        """`backward` of a plain kind, sooner."""
        n, new = target.numel(), allocator(self.index)
        grads = self.plain_gradients(x, w, n, new)
        if n == 0:
            return tuple(None if g is None else g.zero_() for g in grads)
        operands = x, w, target, rows, packed(up), grads[0], grads[1]
        self.execute(_ffi.BACKWARD, 0, n, new, _PLACES_PLAIN_BACKWARD, operands, "backward")
        return grads

    def plain_gradients(
        self, x: Tensor, w: Tensor, n: int, new: Callable[..., Tensor]
    ) -> tuple[Optional[Tensor], Optional[Tensor]]:
        """`gradient_of` x and w, by sizes that are known."""
        frozen, n_hidden = self.options.frozen, self.n_hidden
        grad_w = None if frozen & _ffi.FROZEN_W else new((w.shape[0], n_hidden), (n_hidden, 1), w.dtype)
        if x.dim() != 2:
            return gradient_of(x, new, frozen & _ffi.FROZEN_X), grad_w
        return None if frozen & _ffi.FROZEN_X else new((n, n_hidden), (n_hidden, 1), x.dtype), grad_w

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        target: Tensor,
        bias: Optional[Tensor],
        rest: tuple[Optional[Tensor], ...],
        keep: bool = True,
    ) -> tuple[Optional[Tensor], ...]:
        """Seven results, None where not wanted; of one pass ten, the last three for an upstream of 1. ``rest`` is
        class_weight, token_weight, divisor, main_grad; ``keep``: a backward will want the rows."""
        o, n, new = self.options, target.numel(), allocator(self.index)
        results = new_results(new, target, n, o, keep)
        if n == 0 and o.reduction == _ffi.NONE:
            return finished(results, target, o)  # nothing to write, and no pointer to tell what is wanted
        if self.copies_x:
            x = x.contiguous()
        if self.copies_w:
            w = w.contiguous()
        loss, rows, entropy, z_loss, argmax, bad = results
        class_weight, token_weight, divisor, _ = rest
        counter = bad if self.index >= 0 else None
        operands: tuple[Optional[Tensor], ...]
        if not self.one_pass:
            operands = (
                *(x, w, bias, target, class_weight, token_weight, divisor),
                *(loss, rows, entropy, z_loss, argmax, counter),
            )
            self.execute(_ffi.FORWARD, 0, n, new, _PLACES_FORWARD, operands, (divisor is None, keep))
            return finished(results, target, o)
        frozen = o.frozen
        grads = (
            gradient_of(x, new, frozen & _ffi.FROZEN_X),
            gradient_of(w, new, frozen & _ffi.FROZEN_W),
            gradient_of(bias, new, frozen & _ffi.FROZEN_BIAS),
        )
        operands = (
            *(x, w, bias, target, class_weight, token_weight, divisor, loss, rows, entropy, z_loss, argmax),
            *(one_on(self.index), *grads, counter),
        )
        given = divisor is None, "one pass"
        self.execute(_ffi.FORWARD_BACKWARD, 0, n, new, _PLACES_FORWARD_BACKWARD, operands, given)
        return *finished(results, target, o), *grads

    def backward(
        self,
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
    ) -> tuple[Optional[Tensor], ...]:
        """grad_x, grad_w, grad_bias, None where frozen; grad_w is added to ``main_grad`` where that is given."""
        n, frozen, new = target.numel(), self.options.frozen, allocator(self.index)
        into_main = main_grad is not None and not frozen & _ffi.FROZEN_W
        grads = (
            gradient_of(x, new, frozen & _ffi.FROZEN_X),
            gradient_of(w, new, frozen & _ffi.FROZEN_W or int(into_main)),
            gradient_of(bias, new, frozen & _ffi.FROZEN_BIAS),
        )
        if n == 0:  # as above: upstreams of no tokens have no pointer
            return tuple(None if g is None else g.zero_() for g in grads)
        if self.copies_x:
            x = x.contiguous()
        if self.copies_w:
            w = w.contiguous()
        up_loss, up_lse, up_entropy = packed(up_loss), packed(up_lse), packed(up_entropy)
        operands = (
            *(x, w, bias, target, class_weight, token_weight, divisor, rows, entropy, up_loss, up_lse, up_entropy),
            *(grads[0], main_grad if into_main else grads[1], grads[2]),
        )
        flags = _ACCUMULATE_W if into_main else 0
        given = divisor is None, entropy is None, up_loss is None, up_lse is None, up_entropy is None
        self.execute(_ffi.BACKWARD, flags, n, new, _PLACES_BACKWARD, operands, given)
        return grads


# ---- Autograd ---------------------------------------------------------------------------------------------------


def gradients(
    kept: Any, up_loss: Optional[Tensor], up_lse: Optional[Tensor], up_entropy: Optional[Tensor]
) -> Optional[tuple[Optional[Tensor], ...]]:
    """Gradients that need no pass over the operands; None where they do. ``kept``: those that one pass formed, which
    are handed over to who asks first, or None."""
    if is_grad_enabled():
        raise _ffi.ArgumentError(
            "logitless: double backward (create_graph=True) is not offered: gradients of "
            "linear_cross_entropy have no gradient of their own"
        )
    if up_loss is None and up_lse is None and up_entropy is None:
        return None, None, None
    if kept is not None and up_loss is not None and up_lse is None and up_entropy is None:
        if needs_operators(kept[0] if kept[0] is not None else up_loss, up_loss):
            # Traced, the gradients are results of the forward, which a backward may not change.
            scale = up_loss.reshape(1)
            return tuple(None if g is None else (g * scale).to(g.dtype) for g in kept)
        return tuple(None if g is None else scaled(g, up_loss) for g in kept)
    return None


class LinearCE(torch.autograd.Function):
    """The eager way: the loss, or (loss, lse, entropy, z_loss, argmax, bad_targets) where more is wanted."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Optional[Tensor],
        call: tuple[LinearKind, Tensor, tuple[Optional[Tensor], ...]],
    ) -> Any:
        kind, target, rest = call
        results = kind.forward(x, w, target, bias, rest)
        ctx.set_materialize_grads(False)
        # main_grad is not among the saved tensors: the backward of another micro-batch may add to it in the meantime.
        ctx.call = [kind, rest[3], results[7:] if kind.one_pass else None]
        loss, rows, lse, entropy, z_loss, argmax, bad = results[:7]
        ctx.save_for_backward(x, w, target, rows, bias, *rest[:3], entropy)
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
        kind, main_grad, kept = call = ctx.call
        call[2] = None  # a second backward forms them again
        grads = gradients(kept, up_loss, up_lse, up_entropy)
        if grads is None:
            grads = _backward_of(kind.options, ctx.saved_tensors, main_grad, up_loss, up_lse, up_entropy)
        grad_x, grad_w, grad_bias = grads
        return grad_x, grad_w, grad_bias, None


class LinearCEPlain(torch.autograd.Function):
    """The usual call, sooner: the loss of a plain kind with x, w and target alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, call: tuple[LinearKind, Tensor]) -> Any:
        kind, target = call
        loss, rows, kept = kind.plain_forward(x, w, target, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w, target, rows)
        ctx.call = [kind, kept]
        return loss

    @staticmethod
    def backward(ctx: Any, up: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        kind, kept = call = ctx.call
        call[1] = None  # a second backward forms them again
        grads = gradients(kept, up, None, None)
        if grads is None:
            saved = ctx.saved_tensors
            if kind.fits(*saved):
                grads = kind.plain_backward(up, *saved)
            else:
                grads = _backward_of(kind.options, (*saved, *_NO_MORE), None, up, None, None)
        return grads[0], grads[1], None


def _backward_of(
    o: Options, saved: tuple[Any, ...], main_grad: Optional[Tensor], *ups: Optional[Tensor]
) -> tuple[Optional[Tensor], ...]:
    """A backward that looks at its operands anew. In a group every pass starts with a meeting."""
    x, w, target, rows, bias, class_weight, token_weight, divisor, entropy = saved
    operands = normal(x, w, target, bias, class_weight, token_weight)
    kind = kind_of(*operands, main_grad, o)
    results = divisor, rows.contiguous(), packed(entropy), main_grad
    grad_x, grad_w, grad_bias = kind.backward(ups[0], ups[1], ups[2], *operands, *results)
    return None if grad_x is None else grad_x.view(x.shape), grad_w, grad_bias


_NO_MORE = (None, None, None, None, None)
# Function.apply without its look for transforms of torch.func, of which `needs_operators` has seen none.
_apply = super(torch.autograd.Function, LinearCE).apply
_apply_plain = super(torch.autograd.Function, LinearCEPlain).apply


def run(
    kind: LinearKind, x: Tensor, w: Tensor, target: Tensor, bias: Optional[Tensor], rest: tuple[Optional[Tensor], ...]
) -> Any:
    """The loss, or (loss, lse, entropy, z_loss, argmax, bad_targets) where more is wanted; differentiable. For plain
    eager code and operands of that kind."""
    if kind.options.frozen != FROZEN_ALL:
        return _apply(x, w, bias, (kind, target, rest))
    results = kind.forward(x, w, target, bias, rest, False)
    return (results[0], *results[2:7]) if kind.options.outputs else results[0]


def run_plain(kind: LinearKind, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """`run` of a plain kind without a divisor, sooner."""
    if kind.options.frozen != FROZEN_ALL:
        return _apply_plain(x, w, (kind, target))
    return kind.plain_forward(x, w, target, False)[0]

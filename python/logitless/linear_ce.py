"""linear_ce over arrays: the three passes of the C library with outputs made here and nothing differentiated."""

from __future__ import annotations

import struct
from numbers import Real
from typing import Any, NamedTuple, Optional

from . import _ffi
from ._arrays import Arrays, arrays_of, dtype_code, readable


class Sums(NamedTuple):
    """Sums over the tokens of a call, each the exact sum rounded once; add them over data shards, then divide."""

    loss: float
    z_loss: float
    weight: float
    n_valid: int
    n_ignored: int


class Forward(NamedTuple):
    """Results of a forward. loss: [] or [n_tokens] f32; the others [n_tokens], f32 (argmax int64), 0 where ignored.

    entropy, z_loss, argmax: None where not asked for. sums: None on a GPU, where reading them would wait.
    """

    loss: Any
    nll: Any
    lse: Any
    lse_lo: Any
    entropy: Any = None
    z_loss: Any = None
    argmax: Any = None
    sums: Optional[Sums] = None


class Gradients(NamedTuple):
    """f32 gradients: x [n_tokens, n_hidden], w [v, n_hidden], bias [v]; None where not asked for."""

    x: Any = None
    w: Any = None
    bias: Any = None


class LinearCE:
    """Loss and log-probabilities of a linear head over NumPy, PyTorch, CuPy or JAX arrays, without its logits in
    memory.

    .. code-block:: text

        z[i,v]  = softcap(x_i . w_v + bias_v) / temperature      softcap(r) = C tanh(r / C), or r where C = 0
        lse[i]  = ln sum_v exp z[i,v]        nll[i] = lse[i] - z[i, target_i]        H[i] = lse[i] - sum_v p[i,v] z[i,v]
        loss    = mean or sum of nll, or one a token; options as in include/logitless/logitless.h

    x [n_tokens, n_hidden] and w [v, n_hidden] in f32, f16 or bf16, rows contiguous; target [n_tokens] int64 or int32,
    ids or ignore_index; bias [v]; class_weight [vocab_size] f32; token_weight [n_tokens] f32. Arrays pass by DLPack
    without copies; on a GPU the work is queued on their library's current stream. An object holds options only: any
    threads may share it.
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        softcap: float = 0.0,
        label_smoothing: float = 0.0,
        smoothing_rule: str = "all",
        z_loss: float = 0.0,
        ignore_index: int = -100,
        token_scaling: bool = False,
        reduction: str = "mean",
        vocab_size: Optional[int] = None,
        n_threads: int = 0,
        workspace_budget_bytes: int = 0,
    ) -> None:
        for name, value, choices in (
            ("reduction", reduction, _ffi.REDUCTIONS),
            ("smoothing_rule", smoothing_rule, _ffi.SMOOTHING_RULES),
        ):
            if value not in choices:
                raise _ffi.ArgumentError(f"LinearCE: {name} is {value!r}, want one of {', '.join(choices)}")
        self._reduction = _ffi.REDUCTIONS[reduction]
        self._vocab_size, self._n_threads, self._budget = vocab_size, n_threads, workspace_budget_bytes
        self._loss = (
            ignore_index,
            float(temperature),
            float(softcap),
            float(label_smoothing),
            float(z_loss),
            _ffi.SMOOTHING_RULES[smoothing_rule],
            self._reduction,
            int(token_scaling),
        )

    def forward(
        self,
        x: Any,
        w: Any,
        target: Any,
        *,
        bias: Any = None,
        class_weight: Any = None,
        token_weight: Any = None,
        normalizer: Optional[float] = None,
        entropy: bool = False,
        argmax: bool = False,
        z_loss: bool = False,
    ) -> Forward:
        """One GEMM. ``normalizer``: the divisor of the mean instead of the count of valid tokens."""
        a, plan = self._plan(x, w, bias, frozen=7)
        out = self._outputs(a, x, entropy, argmax, z_loss)
        self._run(
            _ffi.forward,
            _ffi.FORWARD,
            a,
            plan,
            (x, w, bias, target, class_weight, token_weight, self._divisor(a, normalizer)),
            out,
            (None,) * 8,
        )
        return self._give(a, out)

    def backward(
        self,
        x: Any,
        w: Any,
        target: Any,
        saved: Forward,
        *,
        bias: Any = None,
        class_weight: Any = None,
        token_weight: Any = None,
        normalizer: Optional[float] = None,
        up_loss: Any = None,
        up_nll: Any = None,
        up_lse: Any = None,
        up_entropy: Any = None,
        grad_x: bool = True,
        grad_w: bool = True,
    ) -> Gradients:
        """Gradients of J from ``saved``, what the forward gave, for upstreams dJ/dloss (a number or [n_tokens]),
        dJ/dnll, dJ/dlse and dJ/dentropy ([n_tokens], f32; None: 0). May be repeated. dJ/dentropy needs
        ``entropy=True`` before.
        """
        frozen = (0 if grad_x else _ffi.FROZEN_X) | (0 if grad_w else _ffi.FROZEN_W)
        a, plan = self._plan(x, w, bias, frozen | (_ffi.FROZEN_BIAS if bias is None else 0))
        grads = self._gradients(a, x, w, bias, grad_x, grad_w)
        self._run(
            _ffi.backward,
            _ffi.BACKWARD,
            a,
            plan,
            (x, w, bias, target, class_weight, token_weight, self._divisor(a, normalizer)),
            (None, None, saved.nll, saved.lse, saved.lse_lo, saved.entropy, None, None, None),
            (self._upstream(a, up_loss), up_nll, up_lse, up_entropy, *grads, None),
        )
        return Gradients(*(g if g is None else a.give(g) for g in grads))

    def forward_backward(
        self,
        x: Any,
        w: Any,
        target: Any,
        *,
        bias: Any = None,
        class_weight: Any = None,
        token_weight: Any = None,
        normalizer: Optional[float] = None,
        up_loss: Any = None,
        entropy: bool = False,
        argmax: bool = False,
        z_loss: bool = False,
        grad_x: bool = True,
        grad_w: bool = True,
    ) -> tuple[Forward, Gradients]:
        """Forward and gradients of the loss in one pass (3 GEMMs), for an upstream ``up_loss`` known now; None: 1."""
        frozen = (0 if grad_x else _ffi.FROZEN_X) | (0 if grad_w else _ffi.FROZEN_W)
        a, plan = self._plan(x, w, bias, frozen | (_ffi.FROZEN_BIAS if bias is None else 0))
        out = self._outputs(a, x, entropy, argmax, z_loss)
        grads = self._gradients(a, x, w, bias, grad_x, grad_w)
        if up_loss is None:
            up_loss = 1.0
            if self._reduction == _ffi.NONE:
                raise _ffi.ArgumentError("LinearCE: up_loss is None, want one value a token with reduction 'none'")
        self._run(
            _ffi.forward_backward,
            _ffi.FORWARD_BACKWARD,
            a,
            plan,
            (x, w, bias, target, class_weight, token_weight, self._divisor(a, normalizer)),
            out,
            (self._upstream(a, up_loss), None, None, None, *grads, None),
        )
        return self._give(a, out), Gradients(*(g if g is None else a.give(g) for g in grads))

    # ---- The parts ----

    def _plan(self, x: Any, w: Any, bias: Any, frozen: int) -> tuple[Arrays, _ffi.Plan]:
        a = arrays_of(x)
        if len(x.shape) != 2 or len(w.shape) != 2:
            raise _ffi.ArgumentError(
                f"LinearCE: x and w have {len(x.shape)} and {len(w.shape)} dimensions, want 2 and 2"
            )
        desc = _ffi.PlanDesc(
            a.device_type,
            a.device_id,
            _ffi.round_up_tokens(x.shape[0]),
            x.shape[1],
            0,
            w.shape[0],
            w.shape[0] if self._vocab_size is None else self._vocab_size,
            dtype_code(x),
            dtype_code(w),
            0 if bias is None else dtype_code(bias),
            1,
            1,
            0 if bias is None else 1,
            frozen,
            self._n_threads,
            self._budget,
            *self._loss,
        )

        def make() -> _ffi.Plan:
            with a.guard():
                return _ffi.Plan(desc)

        return a, _ffi.plans.get(desc, make)

    def _outputs(self, a: Arrays, x: Any, entropy: bool, argmax: bool, z_loss: bool) -> tuple[Any, ...]:
        n = x.shape[0]
        return (
            a.empty((n,) if self._reduction == _ffi.NONE else (), "float32"),
            None,  # nll, lse, lse_lo as one tensor
            *(a.empty((n,), "float32") for _ in range(3)),
            a.empty((n,), "float32") if entropy else None,
            a.empty((n,), "float32") if z_loss else None,
            a.empty((n,), "int64") if argmax else None,
            a.empty((40,), "uint8"),
        )

    @staticmethod
    def _gradients(a: Arrays, x: Any, w: Any, bias: Any, grad_x: bool, grad_w: bool) -> tuple[Any, ...]:
        return (
            a.empty(tuple(x.shape), "float32") if grad_x else None,
            a.empty(tuple(w.shape), "float32") if grad_w else None,
            a.empty(tuple(bias.shape), "float32") if bias is not None else None,
        )

    @staticmethod
    def _divisor(a: Arrays, normalizer: Optional[float]) -> Any:
        return None if normalizer is None else a.full((), normalizer, "float64")

    @staticmethod
    def _upstream(a: Arrays, up: Any) -> Any:
        return a.full((), float(up), "float32") if isinstance(up, Real) else up

    @staticmethod
    def _run(
        function: Any,
        which: int,
        a: Arrays,
        plan: _ffi.Plan,
        operands: tuple[Any, ...],
        results: tuple[Any, ...],
        rest: tuple[Any, ...],
    ) -> None:
        workspace = a.empty((plan.workspace_bytes[which] + 64,), "uint8")
        function(plan.handle, a.stream, 0, workspace, *map(readable, operands), *results, *rest)

    @staticmethod
    def _give(a: Arrays, out: tuple[Any, ...]) -> Forward:
        loss, _, *rows, sums = out
        on_host = a.device_type == _ffi.CPU
        read = Sums(*struct.unpack("<dddqq", bytes(sums.tolist()))) if on_host else None
        return Forward(*(r if r is None else a.give(r) for r in (loss, *rows)))._replace(sums=read)

"""What linear_ce and ce on torch tensors share: options, operands as the library takes them, results, registration."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .. import _ffi

_DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class Options(NamedTuple):
    """What is no tensor, in the order of the operators' schemas. Names as in ``ll_loss`` and ``ll_plan_desc``."""

    ignore_index: int
    temperature: float
    softcap: float
    label_smoothing: float
    z_loss: float
    smoothing_rule: int
    reduction: int
    token_scaling: int
    v_begin: int
    v_total: int
    group: str  # name of a torch.distributed group, "" for one rank
    frozen: int  # LL_FROZEN_ bits
    workspace_budget_bytes: int
    outputs: (
        int  # ENTROPY | Z_LOSS | ARGMAX | BAD_TARGETS | LSE: wanted beyond the loss; last, for no plan depends on it
    )


ENTROPY, Z_LOSS, ARGMAX, BAD_TARGETS, LSE = 1, 2, 4, 8, 16
FROZEN_ALL = _ffi.FROZEN_X | _ffi.FROZEN_W | _ffi.FROZEN_BIAS
SCHEMA_OPTIONS = (
    "int ignore_index, float temperature, float softcap, float label_smoothing, float z_loss, "
    "int smoothing_rule, int reduction, int token_scaling, SymInt v_begin, SymInt v_total, str group, "
    "int frozen, int workspace_budget_bytes, int outputs"
)


# ---- Operands and results -----------------------------------------------------------------------------------------


def dtype_of(t: Tensor) -> int:
    if t.dtype not in _DTYPES:
        raise _ffi.ArgumentError(f"logitless: a tensor of {t.dtype}, want float32, bfloat16 or float16")
    return _DTYPES[t.dtype]


def rows_of(t: Tensor) -> Tensor:
    """t itself where the library takes its strides (unit column stride, rows that do not overlap), else a copy."""
    if t.shape[0] <= 1 or t.shape[1] <= 1:
        return t.contiguous()
    return t if t.stride(1) == 1 and t.stride(0) >= t.shape[1] else t.contiguous()


def vector(t: Optional[Tensor]) -> Optional[Tensor]:
    return t if t is None or t.stride(0) >= 1 else t.contiguous()


def packed(t: Optional[Tensor]) -> Optional[Tensor]:
    return None if t is None else t.contiguous()


def stream_of(x: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else -1


def workspace(x: Tensor, plan: _ffi.Plan, which: int) -> Tensor:
    return torch.empty(plan.workspace_bytes[which] + 64, dtype=torch.uint8, device=x.device)


def callable_with_tensors(function: Any) -> Any:
    """function, or what makes older torch's tensors fit it: they go through __dlpack__, which refuses those that
    require a gradient."""
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return function
    return lambda *args: function(*(a.detach() if isinstance(a, Tensor) else a for a in args))


def new_results(x: Tensor, o: Options) -> tuple[tuple[Optional[Tensor], ...], Optional[Tensor]]:
    """(loss, nll, lse, lse_lo, entropy, z_loss, argmax) for the rows of x, None where not wanted, and the counter."""
    n, device = x.shape[0], x.device
    nll = torch.empty(n, dtype=torch.float32, device=device)
    lse, lse_lo = torch.empty_like(nll), torch.empty_like(nll)
    loss = torch.empty_like(nll) if o.reduction == _ffi.NONE else torch.empty((), dtype=torch.float32, device=device)
    if not o.outputs:
        return (loss, nll, lse, lse_lo, None, None, None), None
    entropy = torch.empty_like(nll) if o.outputs & ENTROPY else None
    z_loss = torch.empty_like(nll) if o.outputs & Z_LOSS else None
    argmax = torch.empty(n, dtype=torch.int64, device=device) if o.outputs & ARGMAX else None
    bad = torch.zeros(1, dtype=torch.int64, device=device) if o.outputs & BAD_TARGETS else None
    return (loss, nll, lse, lse_lo, entropy, z_loss, argmax), bad


def fake_results(x: Tensor, o: Options) -> tuple[Tensor, ...]:
    """Shapes and dtypes of the eight results for the rows of x."""
    n, f32 = x.shape[0], torch.float32

    def rows(wanted: int = 1, dtype: torch.dtype = f32) -> Tensor:
        return x.new_empty(n if wanted else 0, dtype=dtype if wanted else f32)

    bad = o.outputs & BAD_TARGETS
    return (
        x.new_empty((n,) if o.reduction == _ffi.NONE else (), dtype=f32),
        rows(),
        rows(),
        rows(),
        rows(o.outputs & ENTROPY),
        rows(o.outputs & Z_LOSS),
        rows(o.outputs & ARGMAX, torch.int64),
        x.new_empty(1 if bad else 0, dtype=torch.int64 if bad else f32),
    )


def filled(results: tuple[Optional[Tensor], ...], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0, dtype=torch.float32) if t is None else t for t in results)


# ---- Registration -------------------------------------------------------------------------------------------------

library = torch.library.Library("logitless", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)
_PLAIN = (Tensor, torch.nn.Parameter)


def register(name: str, run: Any, fake: Any) -> None:
    """One implementation for CPU and CUDA tensors, and the shapes of its results."""
    for key in ("CPU", "CUDA"):
        library.impl(name, run, key)
    torch.library.register_fake(f"logitless::{name}", fake, lib=library)


def needs_operators(x: Tensor, w: Tensor) -> bool:
    """True where something watches or replaces operations: compilation, subclasses of Tensor, modes, torch.func."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in _PLAIN
        or type(w) not in _PLAIN
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )

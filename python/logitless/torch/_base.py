"""What linear_ce and ce on torch tensors share: options, operands as the library takes them, results, registration."""

from __future__ import annotations

import zlib
from pathlib import Path
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


def new_results(x: Tensor, o: Options) -> tuple[Optional[Tensor], ...]:
    """For the rows of x: loss; rows [3, n], which are nll, lse and lse_lo; entropy, z_loss, argmax, the counter, None
    where not wanted."""
    n, f32, device = x.shape[0], torch.float32, x.device
    loss = torch.empty((n,) if o.reduction == _ffi.NONE else (), dtype=f32, device=device)
    rows = torch.empty((3, n), dtype=f32, device=device)
    if not o.outputs:
        return loss, rows, None, None, None, None
    entropy = torch.empty(n, dtype=f32, device=device) if o.outputs & ENTROPY else None
    z_loss = torch.empty(n, dtype=f32, device=device) if o.outputs & Z_LOSS else None
    argmax = torch.empty(n, dtype=torch.int64, device=device) if o.outputs & ARGMAX else None
    bad = torch.zeros(1, dtype=torch.int64, device=device) if o.outputs & BAD_TARGETS else None
    return loss, rows, entropy, z_loss, argmax, bad


def passed(results: tuple[Optional[Tensor], ...]) -> tuple[Optional[Tensor], ...]:
    """Results in the order of the library's operands from loss to argmax."""
    loss, rows, entropy, z_loss, argmax, _ = results
    return loss, rows, None, None, None, entropy, z_loss, argmax


def finished(results: tuple[Optional[Tensor], ...], o: Options) -> tuple[Optional[Tensor], ...]:
    """loss, rows, lse, entropy, z_loss, argmax, bad_targets: lse is a copy, because rows are saved for the backward."""
    return *results[:2], results[1][1].clone() if o.outputs & LSE else None, *results[2:]


def fake_results(x: Tensor, o: Options) -> tuple[Tensor, ...]:
    """Shapes and dtypes of the seven results for the rows of x."""
    n, f32 = x.shape[0], torch.float32

    def rows(bit: int, dtype: torch.dtype = f32) -> Tensor:
        wanted = o.outputs & bit
        return x.new_empty(n if wanted else 0, dtype=dtype if wanted else f32)

    bad = o.outputs & BAD_TARGETS
    return (
        x.new_empty((n,) if o.reduction == _ffi.NONE else (), dtype=f32),
        x.new_empty((3, n), dtype=f32),
        rows(LSE),
        rows(ENTROPY),
        rows(Z_LOSS),
        rows(ARGMAX, torch.int64),
        x.new_empty(1 if bad else 0, dtype=torch.int64 if bad else f32),
    )


def filled(results: tuple[Optional[Tensor], ...], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0, dtype=torch.float32) if t is None else t for t in results)


# ---- Registration -------------------------------------------------------------------------------------------------

library = torch.library.Library("logitless", "DEF")

# torch.compile keeps compiled graphs on disk, keyed by the names of operators and not by what stands behind them: after
# an upgrade of this package it would run graphs made for other results. So the names change with these files.
_SUFFIX = f"{zlib.crc32(b''.join(path.read_bytes() for path in sorted(Path(__file__).parent.glob('_*.py')))):08x}"
TAGS = (torch.Tag.pt2_compliant_tag,)
_PLAIN = (Tensor, torch.nn.Parameter)


def operator(name: str) -> Any:
    """The operator that `register` made under this name."""
    return getattr(torch.ops.logitless, f"{name}_{_SUFFIX}").default


def register(schema: str, run: Any, fake: Any, backward: Any = None, setup: Any = None) -> None:
    """An operator: one implementation for CPU and CUDA tensors, the shapes of its results, and its gradient."""
    plain, rest = schema.split("(", 1)
    name = f"{plain}_{_SUFFIX}"
    library.define(f"{name}({rest}", tags=TAGS)
    for key in ("CPU", "CUDA"):
        library.impl(name, run, key)
    torch.library.register_fake(f"logitless::{name}", fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(f"logitless::{name}", backward, setup_context=setup, lib=library)


def needs_operators(x: Tensor, w: Tensor) -> bool:
    """True where something watches or replaces operations: compilation, subclasses of Tensor, modes, torch.func."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in _PLAIN
        or type(w) not in _PLAIN
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )

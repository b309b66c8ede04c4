"""What linear_ce and ce on torch tensors share: options, operands as the library takes them, results, registration."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

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


def in_rows(t: Tensor) -> bool:
    """Whether the library takes the strides of a matrix: unit column stride, rows that do not overlap."""
    if t.shape[0] <= 1 or t.shape[1] <= 1:
        return t.is_contiguous()
    return t.stride(1) == 1 and t.stride(0) >= t.shape[1]


def rows_of(t: Tensor) -> Tensor:
    """t itself where the library takes its strides, else a copy."""
    return t if in_rows(t) else t.contiguous()


def as_rows(t: Tensor) -> Tensor:
    """t without a lazy negation; as [rows, columns] unless it is contiguous."""
    if t.is_neg():
        t = t.resolve_neg()
    return t if t.dim() == 2 or t.is_contiguous() else t.reshape(-1, t.shape[-1])


def layout(t: Tensor) -> Any:
    """What the library needs to know of a tensor's strides."""
    return t.is_contiguous() or t.stride()


def vector(t: Optional[Tensor]) -> Optional[Tensor]:
    if t is not None and t.is_neg():
        t = t.resolve_neg()
    return t if t is None or t.stride(0) >= 1 else t.contiguous()


def packed(t: Optional[Tensor]) -> Optional[Tensor]:
    """t as its memory says: dense, and not the negative of what lies there, which autograd makes of complex numbers."""
    return None if t is None else t.contiguous().resolve_neg()


def signature(t: Optional[Tensor]) -> Any:
    """What a call of one kind and another have alike in an operand that is a vector or a matrix of fixed size."""
    if t is None:
        return None
    return type(t), t.dtype, t.shape, t.stride(), t.get_device(), t.requires_grad, t.is_neg()


def weights_signature(t: Optional[Tensor], n_tokens: int = -1) -> Any:
    """The same of class weights; with ``n_tokens`` of token weights, whose size is that of the batch or an error."""
    if t is None:
        return None
    n = t.numel()
    return type(t), t.dtype, t.is_contiguous(), t.get_device(), n if n_tokens < 0 else n == n_tokens


def check_rows(x: Tensor, target: Tensor) -> None:
    """Beyond here one number says how many rows there are."""
    if x.numel() != target.numel() * x.shape[-1]:
        raise _ffi.ArgumentError(f"logitless: target is {list(target.shape)}, want one id for each of {list(x.shape)}")


def bucket(n_tokens: int) -> int:
    """Numbers of tokens that have a plan in common (`_ffi.round_up_tokens`) or smaller classes of them, cheaply."""
    return (n_tokens - 1).bit_length() if n_tokens <= 4096 else -n_tokens >> 12


# What torch.compile's generated code allocates with: (size, stride, dtype) on a CPU or the current GPU, half the time
# of torch.empty. Not of torch's public interface, so it may be missing.
_guards = getattr(torch._C._dynamo, "guards", None)
_EMPTY_CPU = getattr(_guards, "_empty_strided_cpu", None)
_EMPTY_CUDA = getattr(_guards, "_empty_strided_cuda", None)


# Bound once: looking a name up in a module of a module takes longer than these calls.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_address = Tensor.data_ptr
get_num_threads, is_grad_enabled = torch.get_num_threads, torch.is_grad_enabled
is_compiling: Callable[[], bool] = torch.compiler.is_compiling
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


def allocator(index: int) -> Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]:
    """empty_strided(size, stride, dtype) on the CPU (-1) or a GPU; sizes and strides are tuples."""
    if index < 0:
        if _EMPTY_CPU is not None:
            return _EMPTY_CPU
    elif _EMPTY_CUDA is not None and _current_device() == index:
        return _EMPTY_CUDA
    device = torch.device("cpu") if index < 0 else torch.device("cuda", index)
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def gradient_of(t: Optional[Tensor], new: Callable[..., Tensor], frozen: int = 0) -> Any:
    """Contiguous memory for the gradient of t, None where there is none."""
    if t is None or frozen:
        return None
    if t.is_contiguous():
        return new(tuple(t.shape), t.stride(), t.dtype)
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def scaled(gradient: Tensor, upstream: Tensor) -> Tensor:
    """The gradient times a number, in its place."""
    if gradient.dtype is not torch.float32:
        # With a scale of one dimension torch multiplies in f32 and rounds once; one of none would be rounded to the
        # gradient's dtype first.
        upstream = upstream.reshape(1)
    return gradient.mul_(upstream)


_ones: dict[int, Tensor] = {}


def one_on(index: int) -> Tensor:
    """The upstream 1 of a gradient formed in one pass. Kept for good: no stream's work may find its memory reused."""
    one = _ones.get(index)
    if one is None:  # copied from the host, which waits: streams other than this one may read it at once
        device = "cpu" if index < 0 else f"cuda:{index}"
        one = _ones[index] = torch.tensor(1.0, dtype=torch.float32).to(device)
    return one


_SMALL = 4 << 20


class _Spaces(threading.local):
    """Small workspaces that are kept, one for each thread and device, for calls on the device's default stream.

    What a thread queues on one stream comes in order, so a call finds its workspace free. That stream is never captured
    in a graph and never destroyed; other streams, and groups, whose operations come back to Python in the middle of a
    call, get memory of their own.
    """

    def __init__(self) -> None:
        self.by_device: dict[int, int] = {}  # addresses
        self._held: list[Tensor] = []

    def new(self, index: int) -> int:
        space = torch.empty(_SMALL, dtype=torch.uint8, device="cpu" if index < 0 else f"cuda:{index}")
        self._held.append(space)
        self.by_device[index] = space.data_ptr()
        return self.by_device[index]


_spaces = _Spaces()


class Kind:
    """A kind of call: plan, options and the passes prepared so far, for operands that are alike but for their memory
    and the number of tokens (at most the plan's). What the two operations add is their own."""

    __slots__ = (
        *("plan", "options", "index", "copies_x", "copies_w", "one_pass", "passes", "n_hidden", "plain"),
        *("_workspaces", "_like", "_like_w"),
    )
    op: int

    def __init__(
        self, plan: _ffi.Plan, options: Options, x: Tensor, w: Optional[Tensor], target: Tensor, one_pass: bool
    ) -> None:
        self.plan, self.options, self.one_pass = plan, options, one_pass
        self.index = x.get_device() if x.is_cuda else -1
        self.n_hidden = x.shape[-1]
        self.copies_x = not x.is_contiguous() and not in_rows(x)
        self.copies_w = w is not None and not in_rows(w)
        self.passes: dict[Hashable, _ffi.Prepared] = {}
        # Whether the loss may be had by `plain_forward` and `plain_backward`, which see nothing but these operands;
        # `kind_of` knows of others.
        self.plain = not (options.outputs or options.group or self.copies_x or self.copies_w)
        # Of each pass: the bytes, and whether they may be those that the thread keeps.
        sizes = [n_bytes + 64 for n_bytes in plan.workspace_bytes]
        self._workspaces = [(size, size <= _SMALL and not options.group) for size in sizes]
        self._like = x.dtype, x.get_device(), layout(x), False, target.dtype, target.get_device(), True, True
        self._like_w = None if w is None else (w.dtype, w.get_device(), layout(w), w.shape)

    def fits(self, x: Tensor, w: Optional[Tensor], target: Tensor, rows: Tensor) -> bool:
        """Whether saved tensors are still what the forward saw: hooks on saved tensors may give others back, and a
        parameter's data may have been replaced."""
        like_x = x.dtype, x.get_device(), x.is_contiguous() or x.stride(), x.is_neg()
        like = *like_x, target.dtype, target.get_device(), target.is_contiguous(), rows.is_contiguous()
        return (
            like == self._like
            and (w is None or self._like_w == (w.dtype, w.get_device(), w.is_contiguous() or w.stride(), w.shape))
            and x.shape == (*target.shape, self.n_hidden)
        )

    def execute(
        self,
        which: int,
        flags: int,
        n_tokens: int,
        new: Callable[..., Tensor],
        places: tuple[int, ...],
        operands: tuple[Optional[Tensor], ...],
        given: Hashable,
    ) -> None:
        """Queues a pass, or does it on a CPU. ``places`` of the operands in the library's table, ascending; ``given``
        tells calls apart that differ in which operands are there."""
        prepared = self.passes.get(given)
        if prepared is None:
            prepared = self.passes[given] = _prepare(self.plan, self.op, which, flags, places, operands)
        index, (size, small) = self.index, self._workspaces[which]
        stream = _current_stream(index) if index >= 0 else 0
        if small and stream == 0:
            space = _spaces.by_device.get(index) or _spaces.new(index)
        else:
            memory = new((size,), (1,), torch.uint8)
            space = memory.data_ptr()
        there: Any = operands if prepared.n_operands == len(operands) else [t for t in operands if t is not None]
        _ffi.run(prepared.handle, stream, n_tokens, space, size, *map(_address, there))


# Operands that the library sees as matrices and as vectors, by their places in the tables of python/ffi, and how many
# operands there are.
_MATRICES = {_ffi.LINEAR_CE: (0, 1, 20, 21), _ffi.CE: (0, 18, 21)}
_VECTORS = {_ffi.LINEAR_CE: (2, 3, 22), _ffi.CE: (1,)}
_COUNTS = {_ffi.LINEAR_CE: 24, _ffi.CE: 26}


def _prepare(
    plan: _ffi.Plan, op: int, which: int, flags: int, places: tuple[int, ...], operands: tuple[Optional[Tensor], ...]
) -> _ffi.Prepared:
    table: list[Optional[Tensor]] = [None] * _COUNTS[op]
    for place, t in zip(places, operands):
        if t is None:
            continue
        # Detached: tensors of older torch go through __dlpack__, which refuses those that require a gradient.
        t = t.detach()
        if place in _MATRICES[op] and t.dim() != 2:
            t = t.view(t.numel() // t.shape[-1], t.shape[-1])
        elif place in _VECTORS[op] and t.dim() != 1:
            t = t.view(t.numel())
        table[place] = t
    return plan.prepare(op, which, flags, table)


def new_loss(
    new: Callable[..., Tensor], target: Tensor, n: int, o: Options, with_rows: Union[bool, int]
) -> tuple[Tensor, Optional[Tensor]]:
    """Loss and rows of `new_results`."""
    rows = new((3, n), (n, 1), torch.float32) if with_rows else None
    if o.reduction != _ffi.NONE:
        return new((), (), torch.float32), rows
    return new(tuple(target.shape), target.stride(), torch.float32), rows  # target is contiguous


def new_results(
    new: Callable[..., Tensor], target: Tensor, n: int, o: Options, keep: bool
) -> tuple[Optional[Tensor], ...]:
    """For a target of n tokens: loss; rows [3, n], which are nll, lse and lse_lo, for a backward (``keep``) or lse;
    entropy, z_loss, argmax, the counter; None where not wanted."""
    f32, outputs = torch.float32, o.outputs
    loss, rows = new_loss(new, target, n, o, keep or outputs & LSE)
    if not outputs:
        return loss, rows, None, None, None, None
    shape, strides = tuple(target.shape), target.stride()  # contiguous
    entropy = new(shape, strides, f32) if outputs & ENTROPY else None
    z_loss = new(shape, strides, f32) if outputs & Z_LOSS else None
    argmax = new(shape, strides, torch.int64) if outputs & ARGMAX else None
    bad = new((1,), (1,), torch.int64).zero_() if outputs & BAD_TARGETS else None
    return loss, rows, entropy, z_loss, argmax, bad


def finished(results: tuple[Optional[Tensor], ...], target: Tensor, o: Options) -> tuple[Optional[Tensor], ...]:
    """loss, rows, lse, entropy, z_loss, argmax, bad_targets: lse is a copy, because rows are saved for the backward."""
    loss, rows, *more = results
    lse = rows[1].reshape(target.shape).clone() if o.outputs & LSE and rows is not None else None
    return loss, rows, lse, *more


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


def watched() -> bool:
    """True where modes or torch.func watch or replace operations."""
    return _dispatch_modes() > 0 or _transforms() is not None


def needs_operators(x: Tensor, w: Tensor) -> bool:
    """True where something watches or replaces operations: compilation, subclasses of Tensor, modes, torch.func."""
    return is_compiling() or type(x) not in _PLAIN or type(w) not in _PLAIN or watched()

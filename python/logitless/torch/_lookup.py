"""Log-probabilities and ranks of given ids, and the top, of logits in torch tensors: a forward of ce for them alone."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Optional

import torch
from torch import Tensor

from .. import _ffi
from . import _ce
from ._base import FROZEN_ALL, Kind, Options, allocator, bucket, filled, layout, needs_operators, operator, register
from ._comm import communicator

_LOOK_UP_SCHEMA = (
    "Tensor logits, Tensor target, Tensor? ids, int n_top, bool rank, int ignore_index, float temperature, "
    "float softcap, SymInt v_begin, SymInt v_total, str group, int workspace_budget_bytes"
)
_PLACES_LOOK_UP = (0, 1, 21, 22, 23, 24, 25)


class LookUpKind(Kind):
    """A forward of ce for the log-probabilities of ids and the top alone."""

    __slots__ = ("n_top", "rank")
    op = _ffi.CE
    n_top: int
    rank: bool

    def forward(self, logits: Tensor, target: Tensor, ids: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
        """id_logp, id_rank, top_ids, top_logp, None where not wanted."""
        n, k, new, f32, i64 = target.numel(), self.n_top, allocator(self.index), torch.float32, torch.int64
        m = 0 if ids is None else ids.shape[-1]
        id_logp = new((n, m), (m, 1), f32) if m else None
        id_rank = new((n, m), (m, 1), i64) if m and self.rank else None
        top_ids, top_logp = (new((n, k), (k, 1), i64), new((n, k), (k, 1), f32)) if k else (None, None)
        if n and (m or k):
            rows = logits.contiguous() if self.copies_x else logits
            operands = rows, target, ids if m else None, id_logp, id_rank, top_ids, top_logp
            self.execute(_ffi.FORWARD, 0, n, new, _PLACES_LOOK_UP, operands, m)
        return id_logp, id_rank, top_ids, top_logp


def _look_up(
    logits: Tensor, target: Tensor, ids: Optional[Tensor], n_top: int, rank: bool, o: Options
) -> tuple[Optional[Tensor], ...]:
    logits, target, _, _ = _ce.normal(logits, target, None, None)
    ids = None if ids is None else ids.reshape(target.numel(), ids.shape[-1]).contiguous()
    m = 0 if ids is None else ids.shape[-1]
    key: Hashable = (
        "look up",
        bucket(target.numel()),
        (logits.dtype, logits.shape[-1], layout(logits), logits.get_device()),
        (target.dtype, target.get_device()),
        None if ids is None else (m, ids.dtype, ids.get_device()),
        (n_top, rank, torch.get_num_threads(), o),
    )
    most = 1 << (m - 1).bit_length() if m else 0  # few plans for all numbers of ids
    cache = communicator(o.group, logits.get_device()).plans if o.group else _ffi.plans
    plan = _ce.plan_of(logits, target.numel(), o, most, n_top) if o.group else None
    kind = cache.calls.get(key)
    if kind is None or (plan is not None and kind.plan is not plan):
        kind = LookUpKind(plan or _ce.plan_of(logits, target.numel(), o, most, n_top), o, logits, None, target, False)
        kind.n_top, kind.rank = n_top, rank
        cache.keep(key, kind)
    return kind.forward(logits, target, ids)


def _look_up_op(logits: Tensor, target: Tensor, ids: Optional[Tensor], n_top: int, rank: bool, *rest: Any) -> Any:
    results = _look_up(logits, target, ids, n_top, rank, _look_up_options(*rest))
    return filled(results, logits)


def _look_up_options(
    ignore_index: int,
    temperature: float,
    softcap: float,
    v_begin: int,
    v_total: int,
    group: str,
    workspace_budget_bytes: int,
) -> Options:
    numbers = ignore_index, temperature, softcap, 0.0, 0.0, 0, _ffi.NONE, 0
    return Options(*numbers, v_begin, v_total, group, FROZEN_ALL, workspace_budget_bytes, 0)


def _look_up_fake(logits: Tensor, target: Tensor, ids: Optional[Tensor], n_top: int, rank: bool, *_: Any) -> Any:
    n, m = logits.shape[0], 0 if ids is None else ids.shape[-1]
    nothing = (0,)
    return (
        logits.new_empty((n, m) if m else nothing, dtype=torch.float32),
        logits.new_empty((n, m) if m and rank else nothing, dtype=torch.int64 if m and rank else torch.float32),
        logits.new_empty((n, n_top) if n_top else nothing, dtype=torch.int64 if n_top else torch.float32),
        logits.new_empty((n, n_top) if n_top else nothing, dtype=torch.float32),
    )


def look_up(
    logits: Tensor, target: Tensor, ids: Optional[Tensor], n_top: int, rank: bool, *rest: Any
) -> tuple[Optional[Tensor], ...]:
    """id_logp, id_rank [n, m], top_ids, top_logp [n, n_top] for logits [n, v]; None or empty where not wanted."""
    if needs_operators(logits, target):
        return _OP_LOOK_UP(logits, target, ids, n_top, rank, *rest)
    return _look_up(logits, target, ids, n_top, rank, _look_up_options(*rest))


register(f"ce_look_up({_LOOK_UP_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)", _look_up_op, _look_up_fake)
_OP_LOOK_UP = operator("ce_look_up")

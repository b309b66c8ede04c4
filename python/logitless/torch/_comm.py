"""A torch.distributed group as a communicator of the library (include/logitless/comm.h), on host memory.

The struct `ll_comm` is filled with callbacks that hand each operation to the group. max_i32 and sum_i64 are all-reduces
of integers, exact in any order. sum_f32 gathers slices and adds them in ascending ranks, because an all-reduce may
order its additions by size and time, and the bits of grad_x must depend on the group alone.
"""

from __future__ import annotations

import ctypes as c
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist

from .. import _ffi

_OK, _COMM = 0, 6  # ll_status
_SLICE = 1 << 18  # elements of every rank that sum_f32 holds at a time

_REDUCE = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_int64, c.c_void_p)
_GATHER = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p, c.c_size_t)
_ABORT = c.CFUNCTYPE(None, c.c_void_p, c.c_char_p)
_ERROR = c.CFUNCTYPE(c.c_void_p, c.c_void_p)


class _LlComm(c.Structure):
    _fields_ = [
        ("struct_bytes", c.c_size_t),
        ("rank", c.c_int32),
        ("size", c.c_int32),
        ("debug", c.c_int32),
        ("reserved", c.c_int32),
        ("self", c.c_void_p),
        ("max_i32", _REDUCE),
        ("sum_i64", _REDUCE),
        ("all_gather", _GATHER),
        ("sum_f32", _REDUCE),
        ("abort", _ABORT),
        ("error", _ERROR),
        ("group", c.c_void_p),
        ("destroy", c.c_void_p),
    ]


def _borrow(address: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    bytes_ = (c.c_char * (n * dtype.itemsize)).from_address(address)
    return torch.frombuffer(bytes_, dtype=dtype)


_REFUSED, _NO_PLAN, _PLAN = -1, 0, 1


class Communicator:
    """A rank's end of a group. ``address`` is that of its ``ll_comm``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Weakly: dist.destroy_process_group must end the group; one that outlives it aborts the interpreter at exit.
        self._group = weakref.ref(group)
        self.size = dist.get_world_size(group)
        self.plans = _ffi.PlanCache()  # only this group's: they point to the struct
        self._sentence = c.create_string_buffer(1)
        self._dead = False
        self._struct = _LlComm(
            struct_bytes=c.sizeof(_LlComm),
            rank=dist.get_rank(group),
            size=self.size,
            max_i32=_REDUCE(self._max),
            sum_i64=_REDUCE(self._sum),
            all_gather=_GATHER(self._all_gather),
            sum_f32=_REDUCE(self._sum_f32),
            abort=_ABORT(self._abort),
            error=_ERROR(self._error),
        )
        self.address = c.addressof(self._struct)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; None, which means the default one to torch.distributed, never comes out."""
        group = self._group()
        if group is None:
            raise RuntimeError("the group was destroyed")
        return group

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Whether this is a communicator of that very group."""
        return self._group() is group

    def plan(self, key: Hashable, make: Callable[[], _ffi.Plan]) -> _ffi.Plan:
        """The plan of a call. Making one is collective, so the ranks first ask each other whether all have theirs."""
        if self._meet(_PLAN if key in self.plans else _NO_PLAN) == _NO_PLAN:
            self.plans.drop(key)
        return self.plans.get(key, make)

    def refuse(self) -> None:
        """For a rank whose own arguments are bad: its peers, which meet in :meth:`plan`, get an error instead of
        waiting."""
        try:
            self._meet(_REFUSED)
        except _ffi.Error:
            pass  # the caller raises what it found itself

    def _meet(self, mine: int) -> int:
        found = torch.tensor([mine], dtype=torch.int32)
        if self._do(lambda: dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group)) != _OK:
            raise _ffi.CommError(f"logitless: the ranks of the group did not meet: {self._sentence.value.decode()}")
        if found.item() == _REFUSED:
            raise _ffi.ArgumentError("logitless: a rank of the group refused its arguments; its own error says why")
        return int(found.item())

    def _do(self, operation: Callable[[], None]) -> int:
        if self._dead:
            return _COMM
        try:
            operation()
        except Exception as error:  # noqa: BLE001  nothing may leave a callback
            self._fail(f"torch.distributed said: {error}")
            return _COMM
        return _OK

    def _fail(self, sentence: str) -> None:
        self._dead = True
        self._sentence = c.create_string_buffer(sentence.encode()[:900])

    def _reduce(self, address: int, n: int, dtype: torch.dtype, op: Any) -> int:
        return self._do(lambda: n and dist.all_reduce(_borrow(address, n, dtype), op, group=self.group))

    def _max(self, _: Any, address: int, n: int, __: Any) -> int:
        return self._reduce(address, n, torch.int32, dist.ReduceOp.MAX)

    def _sum(self, _: Any, address: int, n: int, __: Any) -> int:
        return self._reduce(address, n, torch.int64, dist.ReduceOp.SUM)

    def _all_gather(self, _: Any, mine: int, all_: int, n_bytes: int) -> int:
        def gather() -> None:
            parts = _borrow(all_, n_bytes * self.size, torch.uint8).view(self.size, n_bytes)
            dist.all_gather(list(parts.unbind(0)), _borrow(mine, n_bytes, torch.uint8), group=self.group)

        return self._do(gather)

    def _sum_f32(self, _: Any, address: int, n: int, __: Any) -> int:
        def add() -> None:
            for piece in _borrow(address, n, torch.float32).split(_SLICE):
                parts = [torch.empty_like(piece) for _ in range(self.size)]
                dist.all_gather(parts, piece, group=self.group)
                piece.copy_(parts[0])
                for part in parts[1:]:
                    piece.add_(part)

        return self._do(add) if n else self._do(lambda: None)

    def _abort(self, _: Any, sentence: bytes) -> None:
        # torch.distributed cannot tell the peers: they wait for the group's own time limit.
        self._fail((sentence or b"").decode(errors="replace"))

    def _error(self, _: Any) -> int:
        return c.addressof(self._sentence)


_communicators: dict[str, Communicator] = {}


def communicator(name: str) -> Communicator:
    """The communicator of the group of that name; a new one where the name has come to mean another group."""
    group = dist.distributed_c10d._resolve_process_group(name)
    known = _communicators.get(name)
    if known is None or not known.is_of(group):
        if known is not None:
            known.plans.clear()  # before the struct that they point to goes
        known = _communicators[name] = Communicator(group)
    return known

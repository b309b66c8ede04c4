"""A torch.distributed group as a communicator of the library (include/logitless/comm.h).

The struct `ll_comm` is filled with callbacks that hand each operation to the group. max_i32 and sum_i64 are all-reduces
of integers, exact in any order. sum_f32 gives each rank a slice of all ranks' values, which it adds in ascending ranks,
because an all-reduce may order its additions by size and time, and the bits of grad_x must depend on the group alone.

    tensors of the call   the group's backend for them   where the arrays of the callbacks lie
    on a CPU              any                            host memory
    on a GPU              nccl                           device memory, in the order of the call's stream
    on a GPU              another                        host memory: the library copies, and waits for the stream

Ranks also exchange short records in host memory, before anything is queued on a GPU. A group whose only backend is nccl
gets a Gloo group of the same ranks for that.
"""

from __future__ import annotations

import ctypes as c
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import torch
import torch.distributed as dist

# Its default arguments are `group.WORLD` of the moment of its first import, and torch.optim imports it: had the program
# made its groups by then, dist.destroy_process_group could not end the world group's threads, and one of Gloo's that
# frees a tensor while the interpreter ends aborts it (seen with torch 2.15).
import torch.distributed.nn.functional  # noqa: F401

from .. import _ffi

_OK, _COMM = 0, 6  # ll_status
_HOST, _DEVICE = 0, 1  # ll_comm_memory
_PIECE = {_HOST: 1 << 20, _DEVICE: 1 << 24}  # elements that sum_f32 exchanges at a time: 4 MiB, 64 MiB

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
        ("memory", c.c_int32),
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


def _borrow_host(address: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    bytes_ = (c.c_char * (n * dtype.itemsize)).from_address(address)
    return torch.frombuffer(bytes_, dtype=dtype)


_TYPES = {torch.int32: "<i4", torch.int64: "<i8", torch.float32: "<f4"}


class _DeviceArray:
    """n elements of device memory, for torch.as_tensor, which takes them without a copy."""

    def __init__(self, address: int, n: int, dtype: torch.dtype) -> None:
        self.__cuda_array_interface__ = {
            "shape": (n,),
            "typestr": _TYPES[dtype],
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Names of a group's backends by the type of device: {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config(group)).split(","))
    return {device: backend for device, _, backend in pairs}


def sum_in_order(values: torch.Tensor, group: dist.ProcessGroup, piece_elems: int) -> object:
    """values [n] f32 += those of the other ranks, added in ascending ranks: equal bits on all of them. Returns what the
    last operation was given.

    Twice the bytes of values go through a rank, as in a ring; three pieces are held.

        all_to_all   | mine for 0 | mine for 1 | ...    ->   | 0's for me | 1's for me | ...
        add                                                   my slice of the sum
        all_gather                                            | 0's slice  | 1's slice  | ...
    """
    size, tensors = dist.get_world_size(group), None
    for piece in values.split(piece_elems):
        slice_ = -(-piece.numel() // size)
        mine = piece.new_zeros(size * slice_)  # the last slice may be longer than what is left
        mine[: piece.numel()] = piece
        parts = torch.empty_like(mine)
        dist.all_to_all_single(parts, mine, group=group)
        first, *others = parts.view(size, slice_).unbind(0)
        for part in others:
            first.add_(part)
        dist.all_gather_into_tensor(mine, first, group=group)
        piece.copy_(mine[: piece.numel()])
        tensors = mine, parts, first
    return tensors


_REFUSED, _NO_PLAN, _PLAN = -1, 0, 1


_companions: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = []


def _host_group_of(group: dist.ProcessGroup) -> weakref.ref[Any]:
    """The group itself where it has a backend for host memory, else its companion of Gloo, one for all communicators:
    ranks that disagree on the device of a call have to meet too."""
    if backends_of(group).get("cpu", "nccl") != "nccl":
        return weakref.ref(group)
    _companions[:] = [pair for pair in _companions if pair[0]() is not None and pair[1]() is not None]
    for known, companion in _companions:
        if known() is group:
            return companion
    # Collective, and done by every rank here: whoever does or refuses a call gets its communicator first.
    ranks = dist.get_process_group_ranks(group)
    made = weakref.ref(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))
    _companions.append((weakref.ref(group), made))
    return made


class Communicator:
    """A rank's end of a group. ``address`` is that of its ``ll_comm``. ``device``: the GPU in whose memory the arrays
    of operations lie, None for host memory."""

    def __init__(self, group: dist.ProcessGroup, device: Optional[torch.device] = None) -> None:
        # Weakly: dist.destroy_process_group must end the group; one that outlives it aborts the interpreter at exit.
        self._group = weakref.ref(group)
        self._device = device
        self._host_group = _host_group_of(group)
        self.size = dist.get_world_size(group)
        self.plans = _ffi.PlanCache()  # only this group's: they point to the struct
        self._sentence = c.create_string_buffer(1)
        self._dead = False
        # What the last operations were given. Whoever drops a tensor last takes the interpreter's lock for it, and that
        # must not be a thread of Gloo's while a group or the interpreter ends: it hangs or aborts.
        self._recent: deque[object] = deque(maxlen=4)
        self._struct = _LlComm(
            struct_bytes=c.sizeof(_LlComm),
            rank=dist.get_rank(group),
            size=self.size,
            memory=_HOST if device is None else _DEVICE,
            max_i32=_REDUCE(self._max),
            sum_i64=_REDUCE(self._sum),
            all_gather=_GATHER(self._all_gather),
            sum_f32=_REDUCE(self._sum_f32),
            abort=_ABORT(self._abort),
            error=_ERROR(self._error),
        )
        self.address = c.addressof(self._struct)

    @staticmethod
    def _alive(reference: Callable[[], Optional[dist.ProcessGroup]]) -> dist.ProcessGroup:
        """The group; None, which means the default one to torch.distributed, never comes out."""
        group = reference()
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

        def least() -> object:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=self._alive(self._host_group))
            return found

        if self._do(least) != _OK:
            raise _ffi.CommError(f"logitless: the ranks of the group did not meet: {self._sentence.value.decode()}")
        if found.item() == _REFUSED:
            raise _ffi.ArgumentError("logitless: a rank of the group refused its arguments; its own error says why")
        return int(found.item())

    # ---- What the library calls ----

    def _do(self, operation: Callable[[], object]) -> int:
        if self._dead:
            return _COMM
        try:
            tensors = operation()
            if self._device is None:
                self._recent.append(tensors)
        except Exception as error:  # noqa: BLE001  nothing may leave a callback
            self._fail(f"torch.distributed said: {error}")
            return _COMM
        return _OK

    def _fail(self, sentence: str) -> None:
        self._dead = True
        self._sentence = c.create_string_buffer(sentence.encode()[:900])

    def _borrow(self, address: int, n: int, dtype: torch.dtype) -> torch.Tensor:
        """The library's array as a tensor, without a copy."""
        if self._device is None:
            return _borrow_host(address, n, dtype)
        return torch.as_tensor(_DeviceArray(address, n, dtype), device=self._device)

    def _in_order_of(self, stream: Optional[int]) -> AbstractContextManager[Any]:
        """torch.distributed queues behind the current stream, so the call's has to be that."""
        if self._device is None or torch.cuda.current_stream(self._device).cuda_stream == (stream or 0):
            return nullcontext()
        return torch.cuda.stream(torch.cuda.ExternalStream(stream or 0, device=self._device))

    def _reduce(self, address: int, n: int, dtype: torch.dtype, op: Any, stream: Optional[int]) -> int:
        def reduce() -> object:
            with self._in_order_of(stream):
                values = self._borrow(address, n, dtype)
                mine = values.clone()  # torch.distributed gets copies, which may outlive the call
                dist.all_reduce(mine, op, group=self._alive(self._group))
                values.copy_(mine)
                return mine

        return self._do(reduce if n else lambda: None)

    def _max(self, _: Any, address: int, n: int, stream: Optional[int]) -> int:
        return self._reduce(address, n, torch.int32, dist.ReduceOp.MAX, stream)

    def _sum(self, _: Any, address: int, n: int, stream: Optional[int]) -> int:
        return self._reduce(address, n, torch.int64, dist.ReduceOp.SUM, stream)

    def _all_gather(self, _: Any, mine: int, all_: int, n_bytes: int) -> int:
        def gather() -> object:  # host memory whatever the device
            one = _borrow_host(mine, n_bytes, torch.uint8).clone()
            parts = torch.empty(n_bytes * self.size, dtype=torch.uint8)
            dist.all_gather_into_tensor(parts, one, group=self._alive(self._host_group))
            _borrow_host(all_, n_bytes * self.size, torch.uint8).copy_(parts)
            return one, parts

        return self._do(gather if n_bytes else lambda: None)

    def _sum_f32(self, _: Any, address: int, n: int, stream: Optional[int]) -> int:
        def add() -> object:
            with self._in_order_of(stream):
                values, piece = self._borrow(address, n, torch.float32), _PIECE[self._struct.memory]
                return sum_in_order(values, self._alive(self._group), piece)

        return self._do(add if n else lambda: None)

    def _abort(self, _: Any, sentence: Optional[bytes]) -> None:
        # torch.distributed cannot tell the peers: they wait for the group's own time limit.
        self._fail((sentence or b"").decode(errors="replace"))

    def _error(self, _: Any) -> int:
        return c.addressof(self._sentence)


_communicators: dict[tuple[str, Optional[int]], Communicator] = {}
_resolve: Callable[[Any], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group


def communicator(name: str, index: int = -1) -> Communicator:
    """The communicator of the group of that name for tensors on the CPU (-1) or a GPU; a new one where the name has
    come to mean another group."""
    group = _resolve(name)
    on_device = index >= 0 and backends_of(group).get("cuda") == "nccl"
    key = name, index if on_device else None
    known = _communicators.get(key)
    if known is None or not known.is_of(group):
        if known is not None:
            known.plans.clear()  # before the struct that they point to goes
        device = torch.device("cuda", index) if on_device else None
        known = _communicators[key] = Communicator(group, device)
    return known

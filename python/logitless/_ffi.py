"""The shared library, its errors, and its plans. Nothing here computes: numbers go in, pointers are borrowed.

The library is liblogitless_ffi.so, in the folder LL_FFI_PATH where that is set, else in this package's `lib`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tvm_ffi
from tvm_ffi.error import register_error


class Error(RuntimeError):
    """A call that failed, with the sentence of the C library: function, argument, value found, value wanted.

    ``status`` is the name of the ``ll_status``, for example ``"LL_STATUS_UNSUPPORTED"``.
    """

    status = "LL_STATUS_UNKNOWN"


class ArgumentError(Error, ValueError):
    """The caller's fault (``LL_STATUS_INVALID_ARG``); also a :class:`ValueError`."""

    status = "LL_STATUS_INVALID_ARG"


class CommError(Error):
    """A rank did not come, or the communicator failed (``LL_STATUS_COMM``); the group is dead."""

    status = "LL_STATUS_COMM"


register_error("LL_STATUS_INVALID_ARG", ArgumentError)
register_error("LL_STATUS_COMM", CommError)
for _status in ("UNSUPPORTED", "WORKSPACE", "MEMORY", "CUDA", "INTERNAL"):
    _name = f"LL_STATUS_{_status}"
    register_error(_name, type(f"{_status.capitalize()}Error", (Error,), {"status": _name, "__module__": __name__}))


def _load() -> Any:
    folder = Path(os.environ.get("LL_FFI_PATH") or Path(__file__).parent / "lib")
    path = folder / "liblogitless_ffi.so"
    if not path.exists():
        raise ImportError(f"logitless: no {path}; the package was not installed with pip, or LL_FFI_PATH is wrong")
    return tvm_ffi.load_module(str(path))


_module = _load()  # kept: unloading it would leave the functions below without code
forward = _module.linear_ce_forward
backward = _module.linear_ce_backward
forward_backward = _module.linear_ce_forward_backward
run = _module.run  # a prepared call, with the addresses of its operands
ce_forward = _module.ce_forward
ce_backward = _module.ce_backward
ce_forward_backward = _module.ce_forward_backward
version: str = _module.version()

FORWARD, BACKWARD, FORWARD_BACKWARD = 0, 1, 2  # ll_pass
DTYPES = {"float32": 1, "bfloat16": 2, "float16": 3}  # ll_dtype
LINEAR_CE, CE = 0, 1  # ll_op
MEAN, SUM, NONE = 0, 1, 2  # ll_reduction
REDUCTIONS = {"mean": MEAN, "sum": SUM, "none": NONE}
SMOOTHING_RULES = {"all": 0, "others": 1}  # ll_smoothing
FROZEN_X, FROZEN_W, FROZEN_BIAS = 1, 2, 4
CPU, CUDA = 1, 2  # DLPack's device types
_BACKENDS = {CPU: 1, CUDA: 3}  # ll_backend


class PlanDesc(NamedTuple):
    """Everything that a plan depends on. Names as in ``ll_plan_desc`` and ``ll_loss``."""

    device_type: int
    device_id: int
    n_tokens_max: int
    n_hidden: int
    v_begin: int
    v_local: int
    v_total: int
    x_dtype: int
    w_dtype: int
    bias_dtype: int = 0
    grad_x_dtype: int = 0
    grad_w_dtype: int = 0
    grad_bias_dtype: int = 0
    frozen: int = 0
    n_threads: int = 0
    workspace_budget_bytes: int = 0
    ignore_index: int = -100
    temperature: float = 1.0
    softcap: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    smoothing_rule: int = 0
    reduction: int = MEAN
    token_scaling: int = 0
    op: int = 0  # LINEAR_CE or CE
    logits_dtype: int = 0
    grad_logits_dtype: int = 0
    n_ids: int = 0
    n_top: int = 0


_alive: weakref.WeakSet[Plan] = weakref.WeakSet()


class Plan:
    """A plan of the library, immutable. ``comm`` is a communicator that outlives it (``logitless.torch``), or None."""

    __slots__ = ("handle", "comm", "workspace_bytes", "__weakref__")

    def __init__(self, desc: PlanDesc, comm: Any = None) -> None:
        backend = _BACKENDS.get(desc.device_type)
        if backend is None:
            raise ArgumentError(
                f"logitless: tensors on a device of DLPack type {desc.device_type}, want CPU (1) or CUDA (2)"
            )
        self.comm = comm
        _alive.add(self)
        self.handle: int = _module.plan_create(
            desc.device_type, desc.device_id, backend, *desc[2:], 0 if comm is None else comm.address
        )
        self.workspace_bytes = tuple(_module.plan_workspace(self.handle, p) for p in range(3))

    def __del__(self) -> None:
        handle = getattr(self, "handle", 0)
        if handle and _module is not None:
            _module.plan_destroy(handle)

    def prepare(self, op: int, which: int, flags: int, operands: Sequence[Any]) -> Prepared:
        """The pass ``which`` over tensors like these, to be run with the addresses of others."""
        handle = _module.prepare(op, which, self.handle, flags, *operands)
        return Prepared(self, handle, sum(t is not None for t in operands))

    @property
    def numerics(self) -> str:
        """Id of the arithmetic: equal ids on equal inputs give equal bits."""
        return _module.plan_numerics(self.handle)

    def describe(self) -> str:
        """What was asked and chosen, and why better kernels refused."""
        return _module.plan_describe(self.handle)


class Prepared:
    """A call that :func:`run` repeats: ``run(handle, stream, n_tokens, workspace, its bytes, *addresses)``.

    One address for each operand that was no None when it was prepared. The memory there has the dtypes, strides, sizes
    and device of those tensors, but for the number of tokens: only the caller can know.
    """

    __slots__ = ("plan", "handle", "n_operands")

    def __init__(self, plan: Plan, handle: int, n_operands: int) -> None:
        self.plan, self.handle = plan, handle  # the plan lives as long as this
        self.n_operands = n_operands  # that many addresses

    def __del__(self) -> None:
        if _module is not None:
            _module.prepared_destroy(self.handle)


def round_up_tokens(n: int) -> int:
    """Tokens that a plan is made for, so that few plans serve batches of all sizes (results do not depend on it)."""
    if n > 4096:
        return -(-n // 4096) * 4096
    return max(64, 1 << (n - 1).bit_length())


_caches: weakref.WeakSet[PlanCache] = weakref.WeakSet()


class PlanCache:
    """The plans used last, at most ``limit``; safe to use from any thread.

    A plan that leaves the cache is destroyed when no call uses it any more. ``calls`` is for what is made from plans:
    it is emptied whenever a plan goes, so a plan that is used through it alone comes to :meth:`get` again and stays.
    """

    _CALLS = 1024  # more than a program has kinds of calls, but for those that grow without bound (row strides)

    def __init__(self, limit: int = 32) -> None:
        self.limit = limit
        _caches.add(self)
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self.calls: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """The plan of ``key``, which names everything that ``make`` makes it from."""
        with self._lock:  # held while a plan is made: two threads that want the same one make it once
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                return plan
            plan = self._plans[key] = make()
            dropped: list[Any] = []
            if len(self._plans) > self.limit:
                dropped = [self._plans.popitem(last=False)[1], *self.calls.values()]
                self.calls.clear()
        del dropped  # outside the lock: destroying joins threads
        return plan

    def keep(self, key: Hashable, call: Any) -> None:
        """Puts a call made from one of these plans under ``key``."""
        if len(self.calls) >= self._CALLS:
            self.calls.clear()
        self.calls[key] = call

    def __len__(self) -> int:
        return len(self._plans)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._plans

    def drop(self, key: Hashable) -> None:
        """Forgets the plan of ``key`` if there is one."""
        with self._lock:
            dropped = [self._plans.pop(key, None), *self.calls.values()]
            self.calls.clear()
        del dropped

    def clear(self) -> None:
        """Forgets all plans; their worker threads end."""
        with self._lock:
            dropped = [*self._plans.values(), *self.calls.values()]
            self._plans.clear()
            self.calls.clear()
        del dropped


plans = PlanCache()


def _after_fork() -> None:
    """In a forked child: plans whose threads or CUDA context stayed behind are forgotten, without being destroyed.

    The library would serve a child from such a plan with one thread; a new plan has threads of its own.
    """
    for plan in list(_alive):
        plan.handle = 0
    for cache in list(_caches):
        cache._plans.clear()
        cache.calls.clear()
        cache._lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


class KernelInfo(NamedTuple):
    """A kernel of this build; ``why_not`` is "" where this machine can run it, else a sentence."""

    name: str
    backend: str
    numerics: str
    why_not: str


def kernels() -> list[KernelInfo]:
    """Kernels of this build in order of preference."""
    return [KernelInfo(*(_module.kernel_field(i, f) for f in range(4))) for i in range(_module.kernel_count())]

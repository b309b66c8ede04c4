"""New arrays beside the caller's: NumPy, PyTorch, CuPy, JAX (on a CPU), and what else follows the array API
standard."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from . import _ffi


def readable(array: Any) -> Any:
    """array itself, or a view without NumPy's read-only mark: DLPack as the FFI asks for it has no word for that mark.

    For operands that the library only reads. The view borrows; the caller keeps the array during the call.
    """
    if array is None or type(array).__module__ != "numpy" or array.flags.writeable or array.size == 0:
        return array
    import numpy as np

    if min(array.strides, default=0) < 0:
        return array  # FFI and library refuse it
    span = array.itemsize + sum((n - 1) * step for n, step in zip(array.shape, array.strides))
    memory = (ctypes.c_char * span).from_address(array.ctypes.data)
    return np.ndarray(array.shape, array.dtype, memory, 0, array.strides)


class Arrays(NamedTuple):
    """How to make arrays of x's library on x's device, and where work on them is queued."""

    device_type: int  # DLPack's
    device_id: int
    stream: int  # of a GPU, as an integer; -1 on a CPU
    empty: Callable[[Any, str], Any]  # (shape, dtype's name)
    full: Callable[[Any, float, str], Any]  # (shape, value, dtype's name)
    guard: Callable[[], Any]  # context in which x's device is the current one
    give: Callable[[Any], Any]  # made by `empty` -> what the caller gets


def _same(array: Any) -> Any:
    return array


def _numpy(np: Any, device: tuple[int, int], give: Callable[[Any], Any] = _same) -> Arrays:
    return Arrays(
        *device,
        -1,
        lambda shape, dtype: np.empty(shape, dtype),
        lambda shape, value, dtype: np.full(shape, value, dtype),
        nullcontext,
        give,
    )


def _torch(torch: Any, x: Any, device: tuple[int, int]) -> Arrays:
    cuda = device[0] == _ffi.CUDA
    return Arrays(
        *device,
        torch.cuda.current_stream(x.device).cuda_stream if cuda else -1,
        lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype), device=x.device),
        lambda shape, value, dtype: torch.full(shape, value, dtype=getattr(torch, dtype), device=x.device),
        (lambda: torch.cuda.device(x.device)) if cuda else nullcontext,
        _same,
    )


def _cupy(cupy: Any, device: tuple[int, int]) -> Arrays:
    def guard() -> Any:
        return cupy.cuda.Device(device[1])

    def empty(shape: Any, dtype: str) -> Any:
        with guard():
            return cupy.empty(shape, dtype)

    def full(shape: Any, value: float, dtype: str) -> Any:
        with guard():
            return cupy.full(shape, value, dtype)

    with guard():
        stream = cupy.cuda.get_current_stream().ptr
    return Arrays(*device, stream, empty, full, guard, _same)


def dtype_code(x: Any) -> int:
    """The ll_dtype of an array of f32, bf16 or f16."""
    name = str(x.dtype).rpartition(".")[2]
    if name not in _ffi.DTYPES:
        raise _ffi.ArgumentError(f"logitless: an array of {name}, want float32, bfloat16 or float16")
    return _ffi.DTYPES[name]


def arrays_of(x: Any) -> Arrays:
    """The :class:`Arrays` of x, by the library that its type comes from."""
    if not hasattr(x, "__dlpack_device__"):
        raise _ffi.ArgumentError(f"logitless: x is a {type(x).__name__}, want an array that offers DLPack")
    kind, index = x.__dlpack_device__()
    device = (int(kind), int(index))
    library = type(x).__module__.partition(".")[0]
    if library == "torch":
        return _torch(sys.modules["torch"], x, device)
    if library == "cupy":
        return _cupy(sys.modules["cupy"], device)
    if device[0] != _ffi.CPU:
        raise _ffi.ArgumentError(f"logitless: an array of {library} on a GPU, want one of torch or cupy there")
    import numpy as np

    if library == "numpy":
        return _numpy(np, device)
    # Arrays that may not be written to (JAX's): made by NumPy and handed over without a copy.
    if library in ("jax", "jaxlib"):
        return _numpy(np, device, sys.modules["jax"].numpy.from_dlpack)
    return _numpy(np, device, x.__array_namespace__().from_dlpack)

"""Log-probabilities of given ids and the top k over arrays of logits, as in logitless.torch."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from . import _ffi
from ._arrays import arrays_of, dtype_code, readable


class LogpOf(NamedTuple):
    """Results of :func:`logp_of`, [n_tokens, m]: logp f32; rank int64, 1 for the largest, None if not asked for."""

    logp: Any
    rank: Any = None


class TopLogp(NamedTuple):
    """Results of :func:`top_logp`, [n_tokens, k], largest first: ids int64, logp f32."""

    ids: Any
    logp: Any


def logp_of(
    logits: Any,
    ids: Any,
    *,
    target: Any = None,
    rank: bool = False,
    temperature: float = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    vocab_size: Optional[int] = None,
    n_threads: int = 0,
) -> LogpOf:
    """Log-probabilities of several tokens in each row, and their ranks, from one pass over the logits.

    ``logp[i,j] = z[i, ids[i,j]] - lse[i]`` in nats with z = softcap(logits) / temperature, rounded once;
    ``rank[i,j] = 1 + (how many logits of the row are greater)``: equal logits have the same rank.

    Args:
        logits: [n_tokens, v] f32, f16 or bf16, rows contiguous, of NumPy, PyTorch, CuPy or JAX.
        ids: [n_tokens, m] int64 or int32, m at most 1024: ids, or ``ignore_index`` where a row has fewer (0, rank 0).
        target: [n_tokens]: rows where it is ``ignore_index`` are skipped and give 0 and rank 0. None: no row is.
        vocab_size: columns of logits that count; the rest is padding.
    """
    if len(logits.shape) != 2 or len(ids.shape) != 2:
        raise _ffi.ArgumentError(
            f"logp_of: logits and ids have {len(logits.shape)} and {len(ids.shape)} dimensions, want 2 and 2"
        )
    shape = (logits.shape[0], ids.shape[1])
    found, ranks, _, _ = _look_up(
        logits, ids, shape, target, 0, rank, temperature, softcap, ignore_index, vocab_size, n_threads
    )
    return LogpOf(found, ranks)


def top_logp(
    logits: Any,
    k: int,
    *,
    target: Any = None,
    temperature: float = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    vocab_size: Optional[int] = None,
    n_threads: int = 0,
) -> TopLogp:
    """The k most probable tokens of each row and their log-probabilities, from one pass over the logits.

    Largest first; of equal logits the lower id comes first, always. k is 1 .. 128 and at most the vocabulary. Rows that
    are skipped (as in :func:`logp_of`) have ids -1 and logp 0, rows that hold NaN ids -1 and logp NaN.
    """
    if len(logits.shape) != 2 or k < 1:
        raise _ffi.ArgumentError(f"top_logp: logits have {len(logits.shape)} dimensions and k is {k}, want 2 and >= 1")
    _, _, ids, found = _look_up(
        logits, None, (logits.shape[0], k), target, k, False, temperature, softcap, ignore_index, vocab_size, n_threads
    )
    return TopLogp(ids, found)


def _look_up(
    logits: Any,
    ids: Any,
    shape: tuple[int, int],
    target: Any,
    n_top: int,
    rank: bool,
    temperature: float,
    softcap: float,
    ignore_index: int,
    vocab_size: Optional[int],
    n_threads: int,
) -> tuple[Any, ...]:
    a = arrays_of(logits)
    n, v = logits.shape
    desc = _ffi.PlanDesc(
        a.device_type,
        a.device_id,
        _ffi.round_up_tokens(n),
        0,
        0,
        v,
        v if vocab_size is None else vocab_size,
        0,
        0,
        n_threads=n_threads,
        ignore_index=ignore_index,
        temperature=float(temperature),
        softcap=float(softcap),
        reduction=_ffi.NONE,
        op=_ffi.CE,
        logits_dtype=dtype_code(logits),
        n_ids=0 if ids is None else shape[1],
        n_top=n_top,
    )

    def make() -> _ffi.Plan:
        with a.guard():
            return _ffi.Plan(desc)

    plan = _ffi.plans.get(desc, make)
    if target is None:  # no row is ignored
        target = a.full((n,), 1 if ignore_index == 0 else 0, "int64")
    logp = a.empty(shape, "float32") if ids is not None else None
    ranks = a.empty(shape, "int64") if ids is not None and rank else None
    top_ids = a.empty(shape, "int64") if n_top else None
    top_logp = a.empty(shape, "float32") if n_top else None
    if n:
        workspace = a.empty((plan.workspace_bytes[_ffi.FORWARD] + 64,), "uint8")
        out = readable(ids), logp, ranks, top_ids, top_logp
        _ffi.ce_forward(plan.handle, a.stream, 0, workspace, readable(logits), readable(target), *(None,) * 19, *out)
    return tuple(t if t is None else a.give(t) for t in (logp, ranks, top_ids, top_logp))

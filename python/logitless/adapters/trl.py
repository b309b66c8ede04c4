"""TRL: the fused head of its trainers (trl/kernels/chunked_logprob.py), same signature.

`use_in_trl()` puts `chunked_logprob` in the place of TRL's own for all its trainers: `add_fused_lm_head` then scores
tokens with it. Outputs that need more than the library gives (`log_sum_sq_probs`, `mean_logits`) are refused by name.
"""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor

from .._ffi import ArgumentError
from ..torch import linear_cross_entropy
from ._scale import scaled

OUTPUTS = ("log_probs", "entropy", "is_top1")


def chunked_logprob(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    targets: Tensor,
    temperature: float,
    chunk_size: int = 0,
    final_logit_softcapping: Optional[float] = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ("entropy", "is_top1"),
) -> tuple[Optional[Tensor], ...]:
    """(log_probs, entropy, None, None, is_top1) of targets [n] under hidden [n, d] and weight [V, d]; None if not
    asked for.

    z = softcap(logit_scale (x . w + b)) / temperature. log_probs and entropy are f32 and differentiable; is_top1 says
    that the target has the largest logit and no earlier word has it too. chunk_size is accepted and not needed.
    """
    unknown = set(outputs) - set(OUTPUTS)
    if unknown:
        raise ArgumentError(
            f"chunked_logprob: outputs has {', '.join(sorted(unknown))}, want some of {', '.join(OUTPUTS)}"
        )
    x, bias, temperature = scaled(hidden, bias, logit_scale, final_logit_softcapping or 0.0, temperature)
    out = linear_cross_entropy(
        x,
        weight,
        targets,
        bias=bias,
        temperature=temperature,
        reduction="none",
        softcap=final_logit_softcapping or 0.0,
        return_lse=True,
        return_entropy="entropy" in outputs,
        return_argmax="is_top1" in outputs,
    )
    top1 = None if out.argmax is None else out.argmax == targets
    return -out.loss, out.entropy, None, None, top1


class ChunkedLogProb:
    """`chunked_logprob` under the name that TRL calls: apply."""

    apply = staticmethod(chunked_logprob)


def use_in_trl() -> Any:
    """Replaces the fused head of TRL's trainers; returns what was there, to put back. Refuses a TRL that has none."""
    import importlib

    utils: Any = importlib.import_module("trl.trainer.utils")
    if not hasattr(utils, "_ChunkedLogProbFunction"):
        import trl

        raise ArgumentError(
            f"use_in_trl: TRL {trl.__version__} has no trl.trainer.utils._ChunkedLogProbFunction to replace"
        )
    before = utils._ChunkedLogProbFunction
    utils._ChunkedLogProbFunction = ChunkedLogProb
    return before

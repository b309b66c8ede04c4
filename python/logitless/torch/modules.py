"""Modules over the functions: they hold options and no parameters, the head's weight is an argument."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor, nn

from .functional import LogProbs, linear_cross_entropy, linear_logp
from .logits import cross_entropy


class LinearCrossEntropyLoss(nn.Module):
    """:func:`linear_cross_entropy` with its options fixed: ``loss(x, w, target, bias=None)``.

    ``LinearCrossEntropyLoss(**options)``; a call may give further options and replace those given here.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor, w: Tensor, target: Tensor, bias: Optional[Tensor] = None, **options: Any) -> Any:
        """x [..., n_hidden], w [v_local, n_hidden], target [...], bias [v_local]."""
        return linear_cross_entropy(x, w, target, bias=bias, **{**self.options, **options})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LinearLogProbs(nn.Module):
    """:func:`linear_logp` with its options fixed: ``logp, entropy = module(x, w, target, bias=None)``."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor, w: Tensor, target: Tensor, bias: Optional[Tensor] = None, **options: Any) -> LogProbs:
        """x [..., n_hidden], w [v_local, n_hidden], target [...], bias [v_local]."""
        return linear_logp(x, w, target, bias=bias, **{**self.options, **options})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class CrossEntropyLoss(nn.Module):
    """:func:`cross_entropy` over given logits with its options fixed: ``loss(logits, target)``."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, logits: Tensor, target: Tensor, **options: Any) -> Any:
        """logits [..., v_local], target [...]."""
        return cross_entropy(logits, target, **{**self.options, **options})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())

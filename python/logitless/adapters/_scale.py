"""A factor on the logits, as some families of models have it, by what the library offers: the temperature."""

from __future__ import annotations

from typing import Optional

from torch import Tensor


def scaled(
    x: Tensor, bias: Optional[Tensor], scale: float, softcap: float, temperature: float
) -> tuple[Tensor, Optional[Tensor], float]:
    """x, bias and temperature that make softcap(x . w + bias) / T what softcap(scale (x . w + bias)) / T would be.

    Without a softcap the factor goes into the temperature and x needs no copy; else x and bias are multiplied, which
    rounds them unless the factor is a power of two.
    """
    if scale == 1.0:
        return x, bias, temperature
    if scale > 0 and not softcap:
        return x, bias, temperature / scale
    return x * scale, None if bias is None else bias * scale, temperature

"""logitless: loss and log-probabilities of a language-model head without the logits.

logitless.LinearCE          the passes over NumPy, PyTorch, CuPy or JAX arrays
logitless.logp_of, top_logp  log-probabilities of given ids, and the top k, of arrays of logits
logitless.torch             the same with autograd, torch.compile and torch.distributed; modules
logitless.adapters          signatures of the frameworks people already use
logitless.Error             what fails raises it, with the sentence of the C library
"""

from . import _ffi
from ._ffi import ArgumentError, Error, KernelInfo, kernels
from .linear_ce import Forward, Gradients, LinearCE, Sums
from .lookup import LogpOf, TopLogp, logp_of, top_logp

__version__: str = _ffi.version

__all__ = [
    "ArgumentError",
    "Error",
    "Forward",
    "Gradients",
    "KernelInfo",
    "LinearCE",
    "LogpOf",
    "Sums",
    "TopLogp",
    "__version__",
    "clear_plans",
    "kernels",
    "logp_of",
    "top_logp",
]


def clear_plans() -> None:
    """Forgets the cached plans (at most 32) and ends their sleeping threads; the next calls make new ones."""
    _ffi.plans.clear()

"""PyTorch: loss and log-probabilities of a language-model head with autograd, torch.compile and torch.distributed."""

from ._common import CrossEntropyOutput
from .functional import LogProbs, linear_cross_entropy, linear_logp
from .logits import LogpOf, TopLogp, cross_entropy, logp_of, top_logp, vocab_parallel_cross_entropy
from .modules import CrossEntropyLoss, LinearCrossEntropyLoss, LinearLogProbs

__all__ = [
    "CrossEntropyLoss",
    "CrossEntropyOutput",
    "LinearCrossEntropyLoss",
    "LinearLogProbs",
    "LogProbs",
    "LogpOf",
    "TopLogp",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_logp",
    "logp_of",
    "top_logp",
    "vocab_parallel_cross_entropy",
]

"""PyTorch: loss and log-probabilities of a language-model head with autograd, torch.compile and torch.distributed."""
from .functional import LinearCrossEntropyOutput, LogProbs, linear_cross_entropy, linear_logp
from .modules import LinearCrossEntropyLoss, LinearLogProbs

__all__ = ["LinearCrossEntropyLoss", "LinearCrossEntropyOutput", "LinearLogProbs", "LogProbs", "linear_cross_entropy",
           "linear_logp"]

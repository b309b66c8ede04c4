"""What the functions over hidden states and over logits share: checks, folding of shapes, results."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _ffi
from . import _base
from ._comm import communicator

MODES = ("auto", "recompute", "one_pass")
FIXED = (int, float, str, bool, type(None))  # types of options that cannot change their value


class CrossEntropyOutput(NamedTuple):
    """Results of a cross entropy where more than the loss was asked for; None where not asked."""

    loss: Tensor
    lse: Optional[Tensor] = None
    entropy: Optional[Tensor] = None
    argmax: Optional[Tensor] = None
    z_loss: Optional[Tensor] = None
    bad_targets: Optional[Tensor] = None


def refuse(what: str, found: object, wanted: str) -> NoReturn:
    """Raises the one kind of sentence that bad arguments get here."""
    raise _ffi.ArgumentError(f"cross entropy: {what} is {found}, want {wanted}")


def choice(what: str, value: str, choices: dict[str, int]) -> int:
    if value not in choices:
        refuse(what, repr(value), " or ".join(repr(c) for c in choices))
    return choices[value]


def shard(
    rows: int, group: Optional[dist.ProcessGroup], vocab_start: Optional[int], vocab_size: Optional[int]
) -> tuple[str, int, int]:
    """Group name, first column and whole vocabulary. Without bounds: equal shards in the order of ranks."""
    size = 1 if group is None else dist.get_world_size(group)
    if group is None or size == 1:
        return "", vocab_start or 0, rows if vocab_size is None else vocab_size
    if vocab_start is None and vocab_size is None:
        return group.group_name, dist.get_rank(group) * rows, size * rows
    if vocab_start is None or vocab_size is None:
        refuse("vocab_start or vocab_size", "given alone", "both, or neither for equal shards in the order of ranks")
    return group.group_name, vocab_start, vocab_size


def tell_peers(group: Optional[dist.ProcessGroup], x: Tensor) -> None:
    """For a rank that refuses its arguments: the others get an error instead of waiting."""
    if group is not None and dist.get_world_size(group) > 1 and not torch.compiler.is_compiling():
        communicator(group.group_name, x.get_device()).refuse()


def shifted(target: Tensor, shift: int, ignore_index: int) -> Tensor:
    """Position t gets the target of t + shift; the last ones, which have none, are ignored. x needs no copy."""
    if shift < 0 or target.dim() < 1:
        refuse("shift", shift, "0 or more, with a target that has a dimension of positions")
    tail = target.new_full((*target.shape[:-1], min(shift, target.shape[-1])), ignore_index)
    return torch.cat((target[..., shift:], tail), dim=-1)


def divisor_of(normalizer: Union[None, float, Tensor], reduction: str, device: torch.device) -> Optional[Tensor]:
    if normalizer is None:
        return None
    if reduction != "mean":
        refuse("normalizer", "given", f"reduction 'mean' with it, found {reduction!r}")
    if isinstance(normalizer, Tensor):
        return normalizer.detach().to(device=device, dtype=torch.float64).reshape(())
    return torch.full((), normalizer, dtype=torch.float64, device=device)


def f32(t: Optional[Tensor]) -> Optional[Tensor]:
    """Weights as the library reads them: f32, contiguous, without a gradient; t itself if it is that."""
    if t is None or (t.dtype == torch.float32 and t.is_contiguous() and not t.requires_grad and not t.is_neg()):
        return t
    return t.detach().resolve_neg().to(torch.float32).contiguous()


def outputs_of(lse: bool, entropy: bool, argmax: bool, z_loss: bool, bad_targets: bool) -> int:
    """The bits of Options.outputs."""
    return (
        _base.LSE * lse
        | _base.ENTROPY * entropy
        | _base.ARGMAX * argmax
        | _base.Z_LOSS * z_loss
        | _base.BAD_TARGETS * bad_targets
    )


def output(results: Any, o: _base.Options, shape: torch.Size, shift: int) -> Any:
    """What the caller gets: per-token results in the shape of the target, without the last `shift` positions."""

    if not o.outputs and not shift:
        return results if o.reduction != _ffi.NONE or results.dim() == len(shape) else results.view(shape)

    def folded(t: Tensor) -> Tensor:
        t = t if t.dim() == len(shape) else t.view(shape)
        return t[..., : shape[-1] - shift] if shift else t

    loss, *rows = results if o.outputs else (results,)
    loss = folded(loss) if o.reduction == _ffi.NONE else loss
    if not o.outputs:
        return loss
    lse, entropy, z_loss, argmax, bad = rows

    def wanted(bit: int, t: Tensor) -> Optional[Tensor]:
        return folded(t) if o.outputs & bit else None

    return CrossEntropyOutput(
        loss,
        wanted(_base.LSE, lse),
        wanted(_base.ENTROPY, entropy),
        wanted(_base.ARGMAX, argmax),
        wanted(_base.Z_LOSS, z_loss),
        bad if o.outputs & _base.BAD_TARGETS else None,
    )

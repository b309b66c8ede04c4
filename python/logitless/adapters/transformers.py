"""Transformers: a fused head for causal language models, in one call.

    model = AutoModelForCausalLM.from_config(...)
    fuse_lm_head(model)             # model(input_ids, labels=labels).loss now needs no logits while training
    unfuse_lm_head(model)

The model's own forward is kept for everything else: evaluation, generation, calls without labels. What differs between
families (softcap of Gemma, logit scale of Cohere, divided logits of Granite, multiplier of Falcon-H1, tied weights,
biases) is read from the model; that it was read rightly is checked when the head is fused, by comparing the loss of a
few random tokens with the model's own.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._ffi import ArgumentError
from ..torch import linear_cross_entropy
from ._scale import scaled

_LOSS_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index", "logits_to_keep", "return_dict")


def _logit_scale(config: Any) -> float:
    """The factor that the family multiplies its logits by before a softcap."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if config.model_type == "hyperclovax" else 1.0 / float(scaling)


def _loss(
    model: Any,
    hidden: Tensor,
    labels: Any,
    shift_labels: Any,
    num_items_in_batch: Any,
    ignore_index: int,
    options: dict[str, Any],
) -> Tensor:
    """Transformers' causal loss: mean over valid tokens, or their sum divided by num_items_in_batch."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    target = labels if shift_labels is None else shift_labels
    x, bias, temperature = scaled(
        hidden.to(head.weight.device), getattr(head, "bias", None), _logit_scale(config), softcap, 1.0
    )
    return linear_cross_entropy(
        x,
        head.weight,
        target.to(head.weight.device),
        bias=bias,
        softcap=softcap,
        temperature=temperature,
        shift=shift_labels is None,
        ignore_index=ignore_index,
        normalizer=num_items_in_batch,
        **options,
    )


def fuse_lm_head(model: Any, *, verify: bool = True, **options: Any) -> Any:
    """Gives `model` a forward that computes its training loss without logits; returns the model.

    In training mode with labels (or shift_labels) the output has `loss`, and `logits` is None. Losses and gradients
    equal the model's own up to rounding (its logits are rounded to the model's dtype, ours are not); with no valid
    label the loss is 0 instead of NaN. `options` go to linear_cross_entropy (label_smoothing, z_loss, mode, ...).
    Call it before the model is wrapped (PEFT, FSDP, DeepSpeed).

    verify: compare with the model's own forward on a few random tokens now, and refuse a model that differs. Turn it
    off only where the model cannot run yet (weights not loaded, or sharded).

    Raises:
        logitless.ArgumentError: no output head; a mixture of experts with a router loss; fused already; the losses
        differ.
    """
    head = model.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
        raise ArgumentError(f"fuse_lm_head: {type(model).__name__} has no output head with a weight")
    if getattr(model, "_logitless_forward", None) is not None:
        raise ArgumentError(f"fuse_lm_head: the head of this {type(model).__name__} is fused already")
    original = model.forward
    names = inspect.signature(original)

    @functools.wraps(type(model).forward)  # trainers look at the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = _by_name(names, args, kwargs)
        labelled = given.get("labels") is not None or given.get("shift_labels") is not None
        plain = not given.get("logits_to_keep") if not isinstance(given.get("logits_to_keep"), Tensor) else False
        if not (self.training and labelled and plain and given.get("return_dict") is not False):
            return original(*args, **kwargs)
        return _fused(self, given, options)

    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ArgumentError(
            f"fuse_lm_head: {type(model).__name__} adds a router loss (output_router_logits), which is not offered"
        )
    if verify:
        _verify(model, original, options)
    model._logitless_forward = original
    model.forward = types.MethodType(forward, model)
    return model


def unfuse_lm_head(model: Any) -> Any:
    """Gives the model its own forward back."""
    original = getattr(model, "_logitless_forward", None)
    if original is None:
        raise ArgumentError(f"unfuse_lm_head: the head of this {type(model).__name__} is not fused")
    model.forward = original
    model._logitless_forward = None
    return model


def _by_name(names: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = names.bind_partial(*args, **kwargs).arguments
    extra = next((n for n, p in names.parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    return {**bound, **bound.pop(extra, {})} if extra else dict(bound)


def _fused(model: Any, given: dict[str, Any], options: dict[str, Any]) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    if given.get("output_router_logits"):
        raise ArgumentError("fuse_lm_head: output_router_logits asks for a router loss, which is not offered")
    loss_arguments = {name: given.pop(name, None) for name in _LOSS_ARGUMENTS}
    out = model.base_model(**given)
    ignore_index = loss_arguments["ignore_index"]
    loss = _loss(
        model,
        out.last_hidden_state,
        loss_arguments["labels"],
        loss_arguments["shift_labels"],
        loss_arguments["num_items_in_batch"],
        -100 if ignore_index is None else ignore_index,
        options,
    )
    kept = {
        field.name: out.get(field.name)
        for field in dataclasses.fields(CausalLMOutputWithPast)
        if field.name not in ("loss", "logits")
    }
    return CausalLMOutputWithPast(loss=loss, **kept)


def _verify(model: Any, original: Callable[..., Any], options: dict[str, Any]) -> None:
    """The same loss from the same few tokens? Without dropout, without gradients; the model is left as it was."""
    parameter = model.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, parameter.shape[0], (2, 5), generator=generator).to(parameter.device)
    modes = {module: module.training for module in model.modules()}
    plain = {name: value for name, value in options.items() if name in ("mode", "workspace_budget_bytes")}
    model.eval()
    try:
        with torch.no_grad():
            own = original(input_ids=ids, labels=ids).loss.float()
            ours = _fused(model, {"input_ids": ids, "labels": ids}, plain).loss
    finally:
        for module, mode in modes.items():
            module.training = mode
    bound = 1e-4 if parameter.dtype == torch.float32 else 2e-2  # of narrow logits, which the model rounds
    if not torch.isclose(own, ours, rtol=bound, atol=bound):
        raise ArgumentError(
            f"fuse_lm_head: {type(model).__name__} gives {own.item():.6f} where its fused head gives "
            f"{ours.item():.6f}: its head does something that this function does not know"
        )

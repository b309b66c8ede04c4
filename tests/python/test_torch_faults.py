"""Reported faults of such kernels, as far as the way through Python can bring them back, and bad arguments.

The numbers (B24, ...) name public reports; tests/faults holds those that concern the library itself.
"""

import gc
import math

import pytest
import torch

import logitless
from logitless.torch import linear_cross_entropy, linear_logp


def exact(rows, device, dtype=torch.float32):
    """x and w whose logits are exactly `rows` [n][v]: row k of x is e_k, column k of w its logits."""
    z = torch.tensor(rows, dtype=dtype, device=device)
    x = torch.zeros(len(rows), 64, dtype=dtype, device=device)
    w = torch.zeros(z.shape[1], 64, dtype=dtype, device=device)
    for k in range(len(rows)):
        x[k, k] = 1
    w[:, : len(rows)] = z.T
    return x.requires_grad_(), w.requires_grad_()


def ids(*values, device="cpu"):
    return torch.tensor(values, device=device)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bad", [8, -1, -4, -(2**31)])
def test_b24_b25_bad_targets(reduction, bad, device):
    x, w = torch.randn(3, 16, device=device), torch.randn(8, 16, device=device)
    y = ids(2, bad, 5, device=device)
    if device == "cpu":
        with pytest.raises(logitless.ArgumentError, match=r"target\[1\]"):
            linear_cross_entropy(x, w, y, reduction=reduction)
    else:
        out = linear_cross_entropy(x, w, y, reduction=reduction, return_bad_targets=True)
        assert out.bad_targets.item() == 1
        nan = torch.isnan(out.loss)
        assert nan.tolist() == [False, True, False] if reduction == "none" else nan.item()
    assert torch.isfinite(linear_cross_entropy(x, w, ids(2, 7, 5, device=device), reduction=reduction)).all()


@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
def test_b27_b28_b101_all_ignored(mode, device):
    x, w = torch.randn(5, 16, device=device, requires_grad=True), torch.randn(9, 16, device=device, requires_grad=True)
    loss = linear_cross_entropy(x, w, torch.full((5,), -100, device=device), mode=mode)
    loss.backward()
    assert loss.item() == 0 and (x.grad == 0).all() and (w.grad == 0).all()


def test_b23_no_tokens(device):
    x, w = torch.randn(0, 16, device=device, requires_grad=True), torch.randn(9, 16, device=device, requires_grad=True)
    for reduction in ("mean", "sum", "none"):
        loss = linear_cross_entropy(x, w, torch.empty(0, dtype=torch.int64, device=device), reduction=reduction)
        loss.sum().backward()
        assert loss.sum().item() == 0 and x.grad.shape == (0, 16) and (w.grad == 0).all()


def test_b30_an_ignored_row_may_hold_nan(device):
    x, w = exact([[1.0, 2.0], [math.nan, 0.0]], device)
    x.data[1, 0] = math.nan
    loss = linear_cross_entropy(x, w.data.nan_to_num_().requires_grad_(), ids(0, -100, device=device))
    loss.backward()
    assert abs(loss.item() - 1.3132617) < 1e-6 and (x.grad[1] == 0).all() and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("ignore, target, rows", [(255, (0, 1, 255, 2), 3), (1, (1, 0, 2, 3), 3)])
def test_b32_b33_b102_ignore_index_anywhere(ignore, target, rows, device):
    x, w = torch.zeros(4, 8, device=device, requires_grad=True), torch.ones(5, 8, device=device, requires_grad=True)
    loss = linear_cross_entropy(x, w, ids(*target, device=device), ignore_index=ignore, reduction="none")
    ignored = target.index(ignore)
    assert loss[ignored] == 0
    assert abs(loss.sum().item() - rows * math.log(5)) < 1e-5
    loss.sum().backward()
    assert (x.grad[ignored] == 0).all()


def test_b35_mean_of_means(device):
    x, w = exact([[0.0, math.log(math.expm1(4.0))], [100.0, 0.0]], device)
    a = linear_cross_entropy(x[:1], w, ids(0, device=device), normalizer=4)
    b = linear_cross_entropy(x[1:].expand(3, 64), w, ids(0, 0, 0, device=device), normalizer=4)
    assert abs((a + b).item() - 1.0) < 1e-6


def test_b47_temperature_reaches_value_and_gradient(device):
    x, w = exact([[2.0, 0.0]], device)
    logp = linear_logp(x, w, ids(1, device=device), temperature=0.5).logp
    assert abs(logp.item() + 4.018150) < 1e-6
    logp.sum().backward()
    p0 = math.exp(4) / (math.exp(4) + 1)
    assert abs(w.grad[0, 0].item() + p0 / 0.5) < 1e-5


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, 1e-45, math.inf])
def test_b48_bad_temperature(temperature, device):
    with pytest.raises(ValueError, match="temperature"):
        linear_cross_entropy(
            torch.zeros(1, 8, device=device),
            torch.zeros(2, 8, device=device),
            ids(0, device=device),
            temperature=temperature,
        )


def test_b51_b52_confident_tokens(device):
    x, w = exact([[17.0, 0.0]], device)
    logp = linear_logp(x, w, ids(0, device=device)).logp
    assert abs(logp.item() / -4.13994e-8 - 1) < 1e-4
    x, w = exact([[7.0, 0.0]], device, torch.bfloat16)
    linear_cross_entropy(x, w, ids(0, device=device)).backward()
    assert abs(w.grad[0, 0].item() / -0.000911051 - 1) < 0.005


def test_b60_small_terms_are_not_skipped(device):
    v = 131072
    x = torch.zeros(64, 8, dtype=torch.bfloat16, device=device)
    x[:, 0] = 1
    w = torch.zeros(v, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
    linear_cross_entropy(x, w, torch.zeros(64, dtype=torch.int64, device=device), reduction="sum").backward()
    assert (w.grad[1:, 0] == 64 / v).all() and abs(w.grad[0, 0].item() + 64) < 0.5


def test_b65_a_frozen_head_gets_no_gradient_memory(device):
    x = torch.randn(4, 512, device=device, requires_grad=True)
    w = torch.randn(50000, 512, device=device)
    gc.collect()
    y = ids(1, 2, 3, 4, device=device)
    linear_cross_entropy(x, w, y).backward()  # makes the plan
    with torch.profiler.profile(profile_memory=True) as profile:
        linear_cross_entropy(x, w, y).backward()
    sizes = [max(e.cpu_memory_usage, getattr(e, "device_memory_usage", 0)) for e in profile.events()]
    assert x.numel() * 4 <= max(sizes) < w.numel() * 4


def test_b66_mixed_dtypes_work_or_are_refused_before_anything(device):
    for x_dtype, w_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        x = torch.randn(3, 16, device=device, dtype=x_dtype, requires_grad=True)
        w = torch.randn(9, 16, device=device, dtype=w_dtype, requires_grad=True)
        if device == "cuda":
            with pytest.raises(logitless.Error, match="dtype|w is|x is"):
                linear_cross_entropy(x, w, ids(0, 1, 2, device=device))
        else:
            linear_cross_entropy(x, w, ids(0, 1, 2)).backward()
            assert x.grad.dtype == x_dtype and w.grad.dtype == w_dtype


def test_b82_masked_columns_leave_entropy_and_gradient_finite(device):
    x = torch.tensor([[1.0, 0.0, 1e30]], device=device, requires_grad=True)
    w = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1e30]], device=device, requires_grad=True)
    _, entropy = linear_logp(x, w, ids(0, device=device), entropy=True)
    assert abs(entropy.item() - 0.582203) < 1e-6
    entropy.sum().backward()
    assert torch.allclose(w.grad[:, 0].cpu(), torch.tensor([0.196612, -0.196612, 0.0]), atol=1e-6)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"reduction": "avg"}, "reduction is 'avg'"),
        ({"smoothing_rule": "none"}, "smoothing_rule is 'none'"),
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"softcap": -1.0}, "softcap"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"normalizer": 0.0}, "divisor"),
        ({"normalizer": 2.0, "reduction": "sum"}, "normalizer"),
        ({"shift": -1}, "shift is -1"),
        ({"vocab_size": 0}, "v_total"),
        ({"vocab_start": 3}, "shard|v_begin"),
        ({"class_weight": torch.ones(3)}, "class_weight has 3 elements, want 9"),
        ({"token_weight": torch.ones(4)}, "token_weight has 4 elements, want 3"),
        ({"bias": torch.ones(4)}, r"bias is \[4\], want \[9\]"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, r"target is \[4\]"),
        ({"target": torch.zeros(3)}, "dtype is torch.float32"),
        ({"w": torch.zeros(9, 15)}, "x and w"),
        ({"w": torch.zeros(9, 16, dtype=torch.float64)}, "float64"),
        ({"main_grad": torch.zeros(9, 15)}, "main_grad"),
        ({"main_grad": torch.zeros(9, 16, dtype=torch.bfloat16)}, "main_grad"),
        ({"main_grad": torch.zeros(9, 16), "mode": "one_pass"}, "one_pass"),
    ],
)
def test_bad_arguments_are_one_sentence(change, sentence):
    call = {
        "x": torch.zeros(3, 16, requires_grad=True),
        "w": torch.zeros(9, 16),
        "target": torch.zeros(3, dtype=torch.int64),
        **change,
    }
    with pytest.raises(ValueError, match=sentence) as caught:
        linear_cross_entropy(call.pop("x"), call.pop("w"), call.pop("target"), **call)
    assert isinstance(caught.value, logitless.Error) and caught.value.status == "LL_STATUS_INVALID_ARG"

"""linear_cross_entropy against float64 torch: every option, alone and together, values and gradients."""

import pytest
import torch

from conftest import GRAD_BOUND, Problem, reference, relative
from logitless.torch import LinearCrossEntropyLoss, LinearLogProbs, linear_cross_entropy, linear_logp

PROBLEMS = [
    "f32:n1:d8:v1",
    "f32:n1:d1:v2",
    "f32:n33:d64:v257",
    "f32:n70:d33:v1031:bias:ign",
    "f32:n17:d16:v65:t0.5",
    "f32:n17:d16:v65:cap2",
    "f32:n17:d16:v65:ls0.1",
    "f32:n17:d16:v65:ls0.1:others",
    "f32:n17:d16:v65:zl0.01",
    "f32:n17:d16:v65:cw:ign",
    "f32:n17:d16:v65:tw:ign",
    "f32:n17:d16:v65:scaled:ign",
    "f32:n17:d16:v65:norm40:ign",
    "f32:n17:d16:v65:sum:ign",
    "f32:n17:d16:v65:none:ign",
    "f32:n50:d24:v300:bias:t0.7:cap4:ls0.1:zl0.001:cw:tw:scaled:ign:none",
    "f32:n50:d24:v300:bias:t0.7:cap4:ls0.1:others:zl0.001:cw:tw:ign:sum",
    "bf16:n33:d64:v257:bias:ign",
    "bf16:n40:d32:v500:cap4:ls0.1:none",
    "f16:n33:d64:v257:ign",
    "f16:n40:d32:v500:t0.7:sum",
]


@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
def test_against_float64(text, mode, device):
    p = Problem(text, device)
    if mode == "one_pass" and p.options["reduction"] == "none":
        with pytest.raises(ValueError, match="one_pass"):
            linear_cross_entropy(p.x, p.w, p.target, bias=p.bias, mode=mode, **p.options)
        return
    out = linear_cross_entropy(
        p.x,
        p.w,
        p.target,
        bias=p.bias,
        mode=mode,
        return_lse=True,
        return_entropy=True,
        return_z_loss=True,
        return_argmax=True,
        **p.options,
    )
    operands = p.double()
    loss, lse, entropy = reference(*operands, p.target, **p.options)
    # The logits themselves are f32 sums of n_hidden products: their error is part of every result.
    assert relative(out.loss, loss) < 1e-5
    assert (out.lse - lse).abs().max() < 1e-5 * (1 + lse.abs().max())
    assert (out.entropy - entropy).abs().max() < 2e-5 * (1 + lse.abs().max())
    assert torch.allclose(out.z_loss.double(), p.options["z_loss"] * lse**2, rtol=1e-5, atol=1e-7)
    assert ((out.argmax == -1) == (p.target == -100)).all()

    # Any upstream: of the loss alone, then of everything, with weights that differ between tokens.
    up = (
        torch.linspace(-1, 2, out.loss.numel(), device=device).reshape(out.loss.shape)
        if out.loss.dim()
        else torch.tensor(1.5, device=device)
    )
    rows = torch.linspace(0.5, -1, p.n, device=device)
    for ups in ((up, None, None), (up, rows, rows.flip(0))):
        grads = torch.autograd.grad(
            (out.loss, out.lse, out.entropy)[: 1 if ups[1] is None else 3],
            p.leaves(),
            [u for u in ups if u is not None],
            retain_graph=True,
        )
        wanted = torch.autograd.grad(
            (loss, lse, entropy)[: 1 if ups[1] is None else 3],
            [t for t in operands if t is not None],
            [u.double() for u in ups if u is not None],
            retain_graph=True,
        )
        for name, found, want in zip(("x", "w", "bias"), grads, wanted):
            if want.norm() > 1e-12:
                assert relative(found, want) < 3 * GRAD_BOUND[p.dtype], f"{text} grad_{name}"


@pytest.mark.parametrize("shift", [1, 3])
def test_shift_is_the_sliced_loss(shift, device):
    x = torch.randn(2, 9, 16, device=device, requires_grad=True)
    w = torch.randn(50, 16, device=device, requires_grad=True)
    y = torch.randint(0, 50, (2, 9), device=device)
    shifted = linear_cross_entropy(x, w, y, shift=shift, reduction="none", return_lse=True)
    sliced = linear_cross_entropy(x[:, :-shift], w, y[:, shift:], reduction="none", return_lse=True)
    assert shifted.loss.shape == (2, 9 - shift)
    assert torch.equal(shifted.loss, sliced.loss) and torch.equal(shifted.lse, sliced.lse)
    up = torch.randn(2, 9 - shift, device=device)
    for a, b in zip(torch.autograd.grad(shifted.loss, (x, w), up), torch.autograd.grad(sliced.loss, (x, w), up)):
        assert relative(a, b) < 1e-6
    mean = linear_cross_entropy(x, w, y, shift=shift)
    assert torch.equal(mean, linear_cross_entropy(x[:, :-shift], w, y[:, shift:]))


def test_logp_is_minus_nll_and_differentiable(device):
    p = Problem("f32:n20:d16:v99:bias:t0.8:ign", device)
    logp, entropy = linear_logp(p.x, p.w, p.target, bias=p.bias, temperature=0.8, entropy=True)
    operands = p.double()
    nll, _, wanted = reference(*operands, p.target, temperature=0.8, reduction="none")
    assert (logp + nll).abs().max() < 1e-5 and (entropy - wanted).abs().max() < 1e-5
    g = torch.randn(20, device=device)
    found = torch.autograd.grad((logp, entropy), p.leaves(), (g, g * 0.1))
    want = torch.autograd.grad((-nll, wanted), operands, (g.double(), g.double() * 0.1))
    for a, b in zip(found, want):
        assert relative(a, b) < 1e-5
    # Entropy asked for or not, before or after: the same bits (reported as verl 1672, 2484).
    assert torch.equal(linear_logp(p.x, p.w, p.target, bias=p.bias, temperature=0.8).logp, logp)


def test_modules_hold_options(device):
    p = Problem("f32:n20:d16:v99:bias", device)
    module = LinearCrossEntropyLoss(softcap=3.0, reduction="sum")
    assert torch.equal(
        module(p.x, p.w, p.target, p.bias),
        linear_cross_entropy(p.x, p.w, p.target, bias=p.bias, softcap=3.0, reduction="sum"),
    )
    assert torch.equal(
        module(p.x, p.w, p.target, reduction="mean"), linear_cross_entropy(p.x, p.w, p.target, softcap=3.0)
    )
    assert "softcap=3.0" in repr(module)
    logp, entropy = LinearLogProbs(temperature=2.0, entropy=True)(p.x, p.w, p.target)
    assert logp.shape == entropy.shape == (20,)


def test_dtypes_of_targets_and_layouts_that_are_not_contiguous(device):
    p = Problem("f32:n24:d16:v40", device)
    plain = linear_cross_entropy(p.x, p.w, p.target, reduction="none")
    wide = torch.zeros(24, 40, device=device)
    wide[:, :16] = p.x.detach()
    layouts = {
        "padded rows": (wide[:, :16], p.w, p.target),
        "columns apart": (p.x.detach().T.contiguous().T, p.w, p.target),
        "transposed head": (p.x, p.w.detach().T.contiguous().T, p.target),
        "every second target": (p.x, p.w, p.target.repeat_interleave(2)[::2]),
        "int32": (p.x, p.w, p.target.int()),
        "offset": (torch.cat((torch.zeros(3, device=device), p.x.detach().flatten()))[3:].view(24, 16), p.w, p.target),
        "[2, 12, d] transposed": (p.x.detach().view(12, 2, 16).transpose(0, 1), p.w, p.target.view(12, 2).T),
    }
    for name, (x, w, y) in layouts.items():
        got = linear_cross_entropy(x, w, y, reduction="none")
        wanted = plain if got.dim() == 1 else plain.view(12, 2).T
        assert torch.equal(got, wanted), name
    same_row = p.x.detach()[:1].expand(24, 16)
    assert torch.equal(
        linear_cross_entropy(same_row, p.w, p.target[:1].expand(24), reduction="none"), plain[:1].expand(24)
    )


def test_padded_vocabulary_takes_no_part(device):
    p = Problem("f32:n24:d16:v40", device)
    padded = torch.cat((p.w.detach(), torch.full((24, 16), 1e30, device=device))).requires_grad_()
    loss = linear_cross_entropy(p.x, padded, p.target, vocab_size=40)
    assert torch.equal(loss, linear_cross_entropy(p.x, p.w, p.target))
    loss.backward()
    assert (padded.grad[40:] == 0).all() and torch.isfinite(padded.grad).all()


def test_a_token_has_the_same_bits_in_any_batch(device):
    p = Problem("bf16:n257:d64:v1000", device)
    whole = linear_cross_entropy(p.x, p.w, p.target, reduction="none", return_lse=True, return_entropy=True)
    for n in (1, 2, 17, 64, 128):
        for start in (0, 100, 257 - n):
            part = linear_cross_entropy(
                p.x[start : start + n],
                p.w,
                p.target[start : start + n],
                reduction="none",
                return_lse=True,
                return_entropy=True,
            )
            for a, b in zip(part[:3], whole[:3]):
                assert torch.equal(a, b[start : start + n])

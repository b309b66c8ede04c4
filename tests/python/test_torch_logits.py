"""cross_entropy over given logits, against float64 and against the fused head; the gradient in the logits' place."""

import pytest
import torch

import logitless
from conftest import Problem, reference, relative
from logitless.torch import CrossEntropyLoss, cross_entropy, linear_cross_entropy, vocab_parallel_cross_entropy
from test_torch_loss import PROBLEMS


@pytest.fixture(
    params=["cpu"] + (["cuda"] if any(k.name == "ce_cuda" and not k.why_not for k in logitless.kernels()) else [])
)
def device(request):
    return request.param


def logits_of(p):
    """Logits of a problem as a leaf, without softcap and temperature."""
    z = p.x.detach().float() @ p.w.detach().float().T
    return (z if p.bias is None else z + p.bias.detach().float()).to(p.dtype).requires_grad_()


def eye(v, device):
    return torch.eye(v, dtype=torch.float64, device=device)


@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
def test_against_float64(text, mode, device):
    p = Problem(text, device)
    z = logits_of(p)
    if mode == "one_pass" and p.options["reduction"] == "none":
        with pytest.raises(ValueError, match="one_pass"):
            cross_entropy(z, p.target, mode=mode, **p.options)
        return
    before = z.detach().clone()
    out = cross_entropy(
        z,
        p.target,
        mode=mode,
        return_lse=True,
        return_entropy=True,
        return_z_loss=True,
        return_argmax=True,
        **p.options,
    )
    exact = z.detach().double().requires_grad_()
    loss, lse, entropy = reference(exact, eye(p.v, device), None, p.target, **p.options)
    assert relative(out.loss, loss) < 2e-6
    assert (out.lse - lse).abs().max() < 5e-7 * (1 + lse.abs().max()) and (out.entropy - entropy).abs().max() < 5e-6
    up = (
        torch.linspace(-1, 2, out.loss.numel(), device=device).reshape(out.loss.shape)
        if out.loss.dim()
        else torch.tensor(1.5, device=device)
    )
    rows = torch.linspace(0.5, -1, p.n, device=device)
    for ups in ((up,), (up, rows, rows.flip(0))):
        found = torch.autograd.grad((out.loss, out.lse, out.entropy)[: len(ups)], z, ups, retain_graph=True)[0]
        want = torch.autograd.grad(
            (loss, lse, entropy)[: len(ups)], exact, [u.double() for u in ups], retain_graph=True
        )[0]
        if want.norm() > 1e-12:
            assert relative(found, want) < {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}[p.dtype]
    assert torch.equal(z, before), "the logits changed"


def test_equal_logits_give_the_bits_of_the_fused_head():
    x = torch.eye(32)
    w = torch.randn(500, 32)
    y = torch.randint(0, 500, (32,))
    fused = linear_cross_entropy(x, w, y, reduction="none", return_lse=True, return_entropy=True)
    given = cross_entropy(w.T.contiguous(), y, reduction="none", return_lse=True, return_entropy=True)
    for a, b in zip(fused[:3], given[:3]):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_in_place(mode, dtype, device):
    p = Problem(f"{dtype}:n33:d16:v70:ign", device)
    hidden = logits_of(p)
    want = torch.autograd.grad(
        cross_entropy(hidden * 1, p.target, mode=mode), hidden, torch.tensor(3.0, device=device)
    )[0]
    z = hidden * 1
    loss = cross_entropy(z, p.target, in_place=True, mode=mode)
    found = []
    z.register_hook(lambda g: found.append((g.data_ptr(), g.clone())))
    got = torch.autograd.grad(loss, hidden, torch.tensor(3.0, device=device), retain_graph=True)[0]
    assert torch.equal(got, want) and found[0][0] == z.data_ptr()
    with pytest.raises(RuntimeError, match="in-?place|intact"):
        torch.autograd.grad(loss, hidden)


def test_in_place_is_noticed_by_others_who_saved_the_logits(device):
    p = Problem("f32:n5:d8:v20", device)
    z = logits_of(p) * 1
    other = z.square().sum()
    cross_entropy(z, p.target, in_place=True).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_in_place_refusals(device):
    p = Problem("f32:n6:d8:v20", device)
    z = logits_of(p).detach()
    with pytest.raises(ValueError, match="in_place"):
        cross_entropy(z.T.contiguous().T.requires_grad_(), p.target, in_place=True)
    with pytest.raises(ValueError, match="in_place"):
        cross_entropy(z.view(2, 3, 20).transpose(0, 1).requires_grad_(), p.target.view(2, 3).T, in_place=True)


def test_repeats_slices_and_modules(device):
    p = Problem("f32:n24:d16:v40:ign", device)
    z = logits_of(p)
    loss = cross_entropy(z, p.target, mode="one_pass")
    first = torch.autograd.grad(loss, z, torch.tensor(1.0, device=device), retain_graph=True)[0].clone()
    assert relative(torch.autograd.grad(loss, z, torch.tensor(2.0, device=device))[0], 2 * first) < 1e-6
    wide = torch.full((24, 47), 1e30, device=device)
    wide[:, :40] = z.detach()
    assert torch.equal(cross_entropy(wide[:, :40], p.target), loss) and torch.equal(
        cross_entropy(wide, p.target, vocab_size=40), loss
    )
    assert torch.equal(CrossEntropyLoss()(z.view(2, 12, 40), p.target.view(2, 12)), loss)
    assert torch.equal(vocab_parallel_cross_entropy(z, p.target, None), loss)
    shifted = cross_entropy(z.view(2, 12, 40), p.target.view(2, 12), shift=True, reduction="none")
    assert torch.equal(shifted, cross_entropy(z.view(2, 12, 40)[:, :-1], p.target.view(2, 12)[:, 1:], reduction="none"))
    with torch.no_grad():
        assert torch.equal(cross_entropy(z, p.target), loss)
    assert cross_entropy(z[:0], p.target[:0], reduction="none").shape == (0,)
    assert cross_entropy(z, torch.full_like(p.target, -100)).item() == 0
    with pytest.raises(logitless.ArgumentError, match="double backward"):
        torch.autograd.grad(cross_entropy(z, p.target), z, create_graph=True)


def test_compiled_and_opcheck(device):
    p = Problem("f32:n9:d8:v33:ign", device)
    z = logits_of(p)

    def step(z, y):
        out = cross_entropy(z * 2, y, label_smoothing=0.1, return_entropy=True)
        return out.loss + out.entropy.sum()

    results = []
    for run in (step, torch.compile(step, fullgraph=True)):
        loss = run(z, p.target)
        results.append((loss, torch.autograd.grad(loss, z)[0]))
    assert torch.allclose(results[0][0], results[1][0]) and relative(results[1][1], results[0][1]) < 1e-6
    from logitless.torch import _base

    o = _base.Options(-100, 1.0, 0.0, 0.1, 1e-3, 0, 0, 0, 0, 33, "", 0, 0, 0)
    for outputs in (0, 31):
        torch.library.opcheck(
            _base.operator("ce_forward"), (z, p.target, None, None, None, *o._replace(outputs=outputs))
        )
    with pytest.raises(Exception, match="eager"):
        torch.compile(lambda z: cross_entropy(z, p.target, in_place=True), fullgraph=True)(z)

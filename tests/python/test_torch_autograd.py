"""What autograd asks of the functions: retained graphs, frozen operands, accumulation, autocast, refusals."""

import pytest
import torch

import logitless
from conftest import Problem, reference, relative
from logitless.torch import cross_entropy, linear_cross_entropy, linear_logp


def test_saved_tensors_that_come_back_in_another_layout(device):
    """Hooks on saved tensors, and a parameter whose data is replaced between the forward and the backward."""
    p = Problem("f32:n33:d16:v70:bias", device)
    wide = torch.zeros(33, 40, device=device)
    wide[:, :16] = p.x.detach()
    weights = {"class_weight": torch.rand(70, device=device), "return_entropy": True}

    def copied(t):
        """The values, elsewhere: contiguous."""
        return t.detach().clone(memory_format=torch.contiguous_format)

    def spread(t):
        """The values, elsewhere: every second element."""
        return t.detach().repeat_interleave(2, -1)[..., ::2] if t.dim() else t.detach().clone()

    def total(out):
        return out if torch.is_tensor(out) else out.loss + out.entropy.sum()

    for more in ({}, {"bias": p.bias}, weights):
        call = {"mode": "recompute", **more}
        want = torch.autograd.grad(total(linear_cross_entropy(p.x, p.w, p.target, **call)), (p.x, p.w))
        for layout in (p.x.detach().clone(), wide[:, :16], p.x.detach().T.contiguous().T):
            for unpack in (copied, spread):
                x, w = layout.detach().requires_grad_(), p.w.detach().clone().requires_grad_()
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
                    loss = total(linear_cross_entropy(x, w, p.target, **call))
                    for a, b in zip(torch.autograd.grad(loss, (x, w)), want):
                        assert torch.equal(a, b)
        w = p.w.detach().clone().requires_grad_()
        loss = total(linear_cross_entropy(p.x, w, p.target, **call))
        w.data = w.data.T.contiguous().T
        for a, b in zip(torch.autograd.grad(loss, (p.x, w)), want):
            assert torch.equal(a, b)
    for options in ({}, {"return_entropy": True}):
        z = (p.x.detach() @ p.w.detach().T).view(3, 11, 70).requires_grad_()
        found = []
        for unpack in (lambda t: t, copied, spread):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
                out = total(cross_entropy(z, p.target.view(3, 11), **options))
                found.append(torch.autograd.grad(out, z)[0])
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("mode", ["auto", "recompute", "one_pass"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("bias", ["", ":bias"])
def test_a_second_backward_is_the_first_times_its_upstream(mode, dtype, bias, device):
    p = Problem(f"{dtype}:n33:d16:v70:ign{bias}", device)
    loss = linear_cross_entropy(p.x, p.w, p.target, bias=p.bias, mode=mode)
    first = torch.autograd.grad(loss, p.leaves(), torch.tensor(1.0, device=device), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, p.leaves(), torch.tensor(2.0, device=device), retain_graph=True)
    third = torch.autograd.grad(loss, p.leaves(), torch.tensor(0.0, device=device))
    for a, b, c, k in zip(first, second, third, kept):
        assert torch.equal(a, k), "a later backward changed an earlier gradient"
        # One pass and recomputing cut tokens differently on a GPU: f32 sums may differ in their last bits.
        assert relative(b, 2 * a) < (1e-6 if dtype == "f32" else 1e-3)
        assert (c == 0).all()


def test_a_narrow_gradient_is_scaled_in_f32(device):
    p = Problem("bf16:n33:d16:v70", device)
    one = torch.autograd.grad(linear_cross_entropy(p.x, p.w, p.target, mode="one_pass"), p.w)[0]
    third = torch.autograd.grad(
        linear_cross_entropy(p.x, p.w, p.target, mode="one_pass"), p.w, torch.tensor(1 / 3, device=device)
    )[0]
    assert torch.equal(third, (one.float() * torch.tensor(1 / 3)).bfloat16())


def test_f16_gradients_keep_what_a_loss_scale_keeps(device):
    p = Problem("f16:n64:d16:v600", device)
    tokens, scale = 1e6, 65536.0  # a mean over many tokens, of which these are a few
    x, w, _ = p.double()
    loss = torch.nn.functional.cross_entropy(x @ w.t(), p.target, reduction="sum") / tokens
    want = torch.autograd.grad(loss, (x, w))

    def error(mode):
        loss = scale * linear_cross_entropy(p.x, p.w, p.target, normalizer=tokens, mode=mode)
        return [relative(g.double() / scale, r) for g, r in zip(torch.autograd.grad(loss, (p.x, p.w)), want)]

    assert max(error("auto")) < 1e-3
    assert min(error("one_pass")) > 3e-3, "the problem is too easy to show the difference"


def test_upstreams_that_are_negative_views(device):
    """Autograd makes them of complex numbers: the memory holds minus the value."""
    p = Problem("f32:n9:d8:v20", device)
    z = (p.x.detach() @ p.w.detach().T).requires_grad_()
    calls = [
        ((p.x, p.w), lambda mode, **o: linear_cross_entropy(p.x, p.w, p.target, mode=mode, **o)),
        ((z,), lambda mode, **o: cross_entropy(z, p.target, mode=mode, **o)),
    ]
    for leaves, call in calls:
        for mode in ("recompute", "one_pass"):
            for options in ({}, {"reduction": "none"}, {"return_lse": True, "return_entropy": True}):
                if mode == "one_pass" and "reduction" in options:
                    continue
                out = call(mode, **options)
                outs = (out.loss, out.lse, out.entropy) if "return_lse" in options else (out,)
                ups = [torch.rand_like(t) + 0.5 for t in outs]
                negative = [torch._neg_view(-up) for up in ups]
                assert all(up.is_neg() for up in negative)
                want = torch.autograd.grad(outs, leaves, ups, retain_graph=True)
                for a, b in zip(torch.autograd.grad(outs, leaves, negative), want):
                    assert relative(a, b) < 1e-6
    # As it comes about.
    loss = linear_cross_entropy(p.x, p.w, p.target)
    want = torch.autograd.grad(loss, p.x, retain_graph=True)[0]
    number = torch.complex(torch.zeros_like(loss), loss)
    got = torch.autograd.grad((number.conj() * torch.tensor(1j)).real.sum(), p.x)[0]
    assert relative(got, want) < 1e-6


def test_per_token_upstreams_are_not_the_first_one_times_all(device):
    p = Problem("f32:n2:d8:v20:none", device)
    loss = linear_cross_entropy(p.x, p.w, p.target, reduction="none")
    grad_x, grad_w = torch.autograd.grad(loss, (p.x, p.w), torch.tensor([0.0, 1.0], device=device))
    assert (grad_x[0] == 0).all() and (grad_x[1] != 0).any()
    alone = torch.autograd.grad(linear_cross_entropy(p.x[1:], p.w, p.target[1:], reduction="sum"), p.w)[0]
    assert relative(grad_w, alone) < 1e-6


@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
@pytest.mark.parametrize("frozen", ["x", "w", "both"])
def test_frozen_operands_get_no_gradient(frozen, mode, device):
    p = Problem("f32:n33:d16:v70:bias", device)
    whole = torch.autograd.grad(linear_cross_entropy(p.x, p.w, p.target, bias=p.bias, mode=mode), p.leaves())
    if frozen in ("x", "both"):
        p.x.requires_grad_(False)
    if frozen in ("w", "both"):
        p.w.requires_grad_(False)
    loss = linear_cross_entropy(p.x, p.w, p.target, bias=p.bias, mode=mode)
    loss.backward()
    for t, want in zip((p.x, p.w, p.bias), whole):
        if t.requires_grad:
            assert relative(t.grad, want) < 1e-6
        else:
            assert t.grad is None


def test_without_gradients_nothing_is_kept(device):
    p = Problem("f32:n33:d16:v70", device)
    with torch.no_grad():
        loss = linear_cross_entropy(p.x, p.w, p.target)
    assert not loss.requires_grad
    assert torch.equal(loss, linear_cross_entropy(p.x, p.w, p.target, mode="recompute"))
    assert not linear_cross_entropy(p.x.detach(), p.w.detach(), p.target).requires_grad


def test_double_backward_is_refused_by_name(device):
    p = Problem("f32:n5:d8:v20", device)
    for mode in ("one_pass", "recompute"):
        with pytest.raises(logitless.ArgumentError, match="double backward"):
            torch.autograd.grad(linear_cross_entropy(p.x, p.w, p.target, mode=mode), p.x, create_graph=True)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_main_grad_is_added_to_in_f32(dtype, device):
    p = Problem(f"{dtype}:n60:d16:v70:ign", device)
    main = torch.full(p.w.shape, 0.5, device=device)
    # Two micro-batches, both forwards done before the first backward.
    losses = [
        linear_cross_entropy(p.x[part], p.w, p.target[part], reduction="sum", main_grad=main)
        for part in (slice(0, 25), slice(25, 60))
    ]
    for loss in losses:
        loss.backward()
    assert p.w.grad is None and p.x.grad is not None
    x, w, _ = p.double()
    reference(x, w, None, p.target, reduction="sum")[0].backward()
    # In bf16 a GPU rounds dz, and nothing else: a sum in bf16 would be off by 2^-9 a micro-batch.
    assert relative(main - 0.5, w.grad) < (1e-5 if dtype == "f32" or device == "cpu" else 4e-3)
    with pytest.raises(ValueError, match="one_pass"):
        linear_cross_entropy(p.x, p.w, p.target, main_grad=main, mode="one_pass")


def test_autocast_casts_the_product_as_linear_does(device):
    p = Problem("f32:n33:d16:v70:bias", device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = linear_cross_entropy(p.x, p.w, p.target, bias=p.bias)
    assert loss.dtype == torch.float32
    narrow = [t.detach().bfloat16() for t in p.leaves()]
    assert torch.equal(loss, linear_cross_entropy(narrow[0], narrow[1], p.target, bias=narrow[2]))
    loss.backward()
    assert p.w.grad.dtype == p.x.grad.dtype == torch.float32
    x, w, b = (t.double().requires_grad_() for t in narrow)
    reference(x, w, b, p.target)[0].backward()
    assert relative(p.w.grad, w.grad) < 5e-3 and relative(p.x.grad, x.grad) < 5e-3


def test_gradient_accumulation_with_the_callers_count(device):
    """A: one token, B: three tokens; the divisor 4 makes the two micro-batches add up to the whole batch."""
    p = Problem("f32:n4:d8:v20", device)
    whole = linear_cross_entropy(p.x, p.w, p.target)
    want = torch.autograd.grad(whole, p.w)[0]
    parts = [
        linear_cross_entropy(p.x[s], p.w, p.target[s], normalizer=n)
        for s, n in ((slice(0, 1), 4), (slice(1, 4), torch.tensor(4)))
    ]
    assert torch.allclose(sum(parts), whole, rtol=1e-6)
    assert relative(sum(torch.autograd.grad(part, p.w)[0] for part in parts), want) < 1e-6


def test_saved_tensors_that_change_are_noticed(device):
    p = Problem("f32:n5:d8:v20", device)
    loss = linear_cross_entropy(p.x, p.w, p.target, mode="recompute")
    with torch.no_grad():
        p.w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logp_gradient_reaches_a_policy_ratio(device):
    p = Problem("f32:n12:d8:v30:ign", device)
    logp, _ = linear_logp(p.x, p.w, p.target)
    ratio = torch.exp(logp - logp.detach())
    ratio.sum().backward()
    x, w, _ = p.double()
    (-reference(x, w, None, p.target, reduction="none")[0]).sum().backward()
    assert relative(p.x.grad, x.grad) < 1e-5 and relative(p.w.grad, w.grad) < 1e-5

"""The shapes, options and tolerances of Liger-Kernel's public tests (fused linear cross entropy, cross entropy over
logits, vocabulary parallel, scaled cross entropy with entropy), against float64 on the same operands.

Liger compares with PyTorch in the operands' dtype; here the reference is exact, and the tolerances are Liger's or
tighter. What takes a CPU too long runs on a GPU alone. Ranks of a group have the bits of one rank (group_worker.py,
check_ligers_shapes), so the cases here hold for them.
"""

import pytest
import torch

import logitless
from conftest import GRAD_BOUND, reference, relative
from logitless.torch import cross_entropy, linear_cross_entropy, linear_logp

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CE_DEVICES = ["cpu"] + (["cuda"] if any(k.name == "ce_cuda" and not k.why_not for k in logitless.kernels()) else [])


def gpu_only(device, elements, limit):
    if device == "cpu" and elements > limit:
        pytest.skip("too long for a CPU")


def near(found, wanted, atol, rtol):
    error = (found.detach().double() - wanted.detach().double()).abs()
    worst = (error - atol - rtol * wanted.detach().double().abs()).max() if error.numel() else torch.tensor(0.0)
    assert worst <= 0, f"beyond {atol} + {rtol} |x| by {worst.item()}; largest error {error.max().item()}"


def linear_case(n, h, v, dtype, device, bias=False, scale=1.0):
    """Operands as torch.nn.Linear initialises a head, and the same in float64."""
    generator = torch.Generator().manual_seed(n + h + v)
    make = lambda *shape: torch.rand(*shape, generator=generator) * 2 - 1  # noqa: E731
    x = (torch.randn(n, h, generator=generator) * scale).to(device, dtype).requires_grad_()
    w = (make(v, h) / h**0.5).to(device, dtype).requires_grad_()
    b = (make(v) / h**0.5).to(device, dtype).requires_grad_() if bias else None
    y = torch.randint(0, v, (n,), generator=generator).to(device)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (x, w, b)]
    return (x, w, b), y, exact


FLCE = [(8, 128, 1024, 4096), (4, 47, 31, 123), (2, 2, 8, 8), (9, 7, 41, 41), (2, 16, 32, 64), (1, 32, 64, 128)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("b, t, h, v", FLCE)
def test_fused_linear(b, t, h, v, reduction, dtype, bias, device):
    gpu_only(device, b * t * h * v * (dtype != F32) + (reduction == "sum") * b * t * h * v, 2e9)
    (x, w, c), y, exact = linear_case(b * t, h, v, dtype, device, bias)
    y[::5] = -100
    want = reference(*exact, y, reduction=reduction)[0]
    mode = "recompute" if reduction == "none" else "one_pass"
    loss = linear_cross_entropy(x, w, y, bias=c, reduction=reduction, mode=mode)
    up = torch.linspace(-1, 1, b * t, device=device) if reduction == "none" else torch.tensor(1.0, device=device)
    loss.backward(up)
    want.backward(up.double())
    # mean: Liger's; sum: Liger's are 5 and 50 in bf16, 1e-3 and 5e-2 in f32.
    near(loss, want, *((1e-5, 5e-6) if dtype == F32 else (5e-3, 5e-3)))
    for found, wanted in zip((x, w, c), exact):
        if found is not None:
            near(found.grad, wanted.grad, *((1e-5, 5e-4) if dtype == F32 else (5e-2, 2e-2)))
            assert relative(found.grad, wanted.grad) < {F32: 1e-5, BF16: 8e-3, F16: 2e-3}[dtype]


@pytest.mark.parametrize("dtype, atol, rtol", [(F32, 1e-5, 5e-4), (BF16, 5e-3, 5e-2)])
def test_fused_linear_with_all_options(dtype, atol, rtol, device):
    (x, w, b), y, exact = linear_case(4 * 47, 31, 123, dtype, device, bias=True)
    y[::7] = 42
    weight = torch.rand(123, device=device)
    options = dict(label_smoothing=0.1, ignore_index=42, z_loss=1e-4, softcap=30.0, class_weight=weight)
    out = linear_cross_entropy(x, w, y, bias=b, return_z_loss=True, mode="recompute", **options)
    want, lse, _ = reference(*exact, y, **options)
    out.loss.backward()
    want.backward()
    near(out.loss, want, atol, rtol)
    near(out.z_loss, 1e-4 * lse**2, atol, rtol)
    for found, wanted in zip((x, w, b), exact):
        near(found.grad, wanted.grad, atol, rtol)
    main = torch.zeros(123, 31, device=device)  # "accumulate in f32"
    linear_cross_entropy(x, w, y, bias=b, main_grad=main, **options).backward()
    assert relative(main, exact[1].grad) < (1e-5 if dtype == F32 else 8e-3)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_fused_linear_under_amp(dtype, accumulate, device):
    (x, w, _), y, _ = linear_case(4 * 47, 31, 123, F32, device)
    exact = [t.detach().to(dtype).double().requires_grad_() for t in (x, w)]
    main = torch.zeros(123, 31, device=device) if accumulate else None
    with torch.autocast(device, dtype):
        loss = linear_cross_entropy(x, w, y, main_grad=main)
    loss.backward()
    want = reference(*exact, None, y)[0]
    want.backward()
    near(loss, want, 5e-3, 5e-2)
    near(x.grad, exact[0].grad, 5e-3, 5e-2)
    near(main if accumulate else w.grad, exact[1].grad, 5e-3, 5e-2)


def test_fused_linear_without_gradients(device):
    (x, w, _), y, exact = linear_case(4 * 47, 31, 123, F32, device)
    with torch.no_grad():
        loss = linear_cross_entropy(x, w, y)
    assert not loss.requires_grad
    near(loss, reference(*exact, y)[0], 1e-5, 5e-4)


@pytest.mark.parametrize("ignore", [-100, 2])
def test_token_accuracy_predictions_and_scaling(ignore, device):
    (x, w, _), y, exact = linear_case(9 * 7, 41, 41, F32, device)
    y[::4] = ignore
    out = linear_cross_entropy(x, w, y, ignore_index=ignore, return_argmax=True, return_lse=True)
    assert isinstance(out, tuple) and out.entropy is None
    valid, best = y != ignore, (exact[0] @ exact[1].T).argmax(-1)
    assert torch.equal(out.argmax[valid], best[valid]) and (out.argmax[~valid] == -1).all()
    assert ((out.argmax == y)[valid].double().mean() - (best == y)[valid].double().mean()).abs() < 1e-12
    scaled = linear_cross_entropy(x, w, y, ignore_index=ignore, token_scaling=True, reduction="sum")
    want = reference(*exact, y, ignore_index=ignore, token_scaling=True, reduction="sum")[0]
    near(scaled, want, 1e-6, 1e-5)
    for found, wanted in zip(torch.autograd.grad(scaled, (x, w)), torch.autograd.grad(want, exact[:2])):
        near(found, wanted, 1e-6, 1e-4)


# ---- Cross entropy over logits ----------------------------------------------------------------------------------

CE = [(2, 4096, 32000), (3, 423, 32000), (2, 2, 8), (9, 7, 41)]


def ce_case(n, v, dtype, device, scale=1.0):
    z = (torch.randn(n, v, generator=torch.Generator().manual_seed(n + v)) * scale).to(device, dtype).requires_grad_()
    y = torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(v)).to(device)
    return z, y, z.detach().double().requires_grad_()


def ce_reference(z, y, **options):
    """`conftest.reference` without a head as large as the square of the vocabulary."""

    class Logits:
        shape = (z.shape[1],)

        def __rmatmul__(self, _):
            return z

        T = property(lambda self: self)

    class Whole:
        def __matmul__(self, w):
            return z

    return reference(Whole(), Logits(), None, y, **options)


def run_ce(z, exact, y, dtype, atol, rtol, up=None, **options):
    out = cross_entropy(z, y, return_z_loss=True, **options)
    want, lse, _ = ce_reference(exact, y, **options)
    up = torch.ones_like(out.loss) if up is None else up
    found = torch.autograd.grad(out.loss, z, up)[0]
    wanted = torch.autograd.grad(want, exact, up.double())[0]
    near(out.loss, want, max(atol, 1e-7 if dtype == F32 else 0), 5e-7 if dtype == F32 else rtol)
    near(found, wanted, atol, rtol)
    return out, lse


@pytest.mark.parametrize("device", CE_DEVICES)
@pytest.mark.parametrize("dtype, atol, rtol", [(F32, 1e-8, 1e-6), (BF16, 1e-8, 5e-2), (F16, 1e-7, 5e-2)])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("b, t, v", CE)
def test_cross_entropy(b, t, v, reduction, dtype, atol, rtol, device):
    gpu_only(device, b * t * v, 1e8 if reduction == "mean" else 1e6)
    z, y, exact = ce_case(b * t, v, dtype, device)
    before = z.detach().clone()
    run_ce(z, exact, y, dtype, atol if reduction == "mean" else max(atol, 1e-7), rtol, reduction=reduction)
    assert torch.equal(z, before), "the input changed"


@pytest.mark.parametrize("device", CE_DEVICES)
@pytest.mark.parametrize(
    "options",
    [{"ignore_index": i} for i in (2, -123, 1, -300, 42)]
    + [{"label_smoothing": a, "ignore_index": i} for a, i in ((0.1, 1), (0.2, -123))]
    + [{"softcap": c} for c in (30.0, 40.0)]
    + [{"z_loss": 1e-4}, {"z_loss": 1e-5, "label_smoothing": 0.1}, {"class_weight": True}]
    + [{"softcap": 30.0, "z_loss": 1e-4, "label_smoothing": 0.1, "ignore_index": 42, "class_weight": True}],
    ids=str,
)
@pytest.mark.parametrize("dtype, atol, rtol", [(F32, 1e-8, 1e-6), (BF16, 1e-8, 5e-2)])
def test_cross_entropy_options(options, dtype, atol, rtol, device):
    z, y, exact = ce_case(9 * 7, 67, dtype, device)
    options = dict(options)
    if "ignore_index" in options:
        y[::6] = options["ignore_index"]
    if options.get("class_weight"):
        options["class_weight"] = torch.rand(67, generator=torch.Generator().manual_seed(1)).to(device)
    out, lse = run_ce(z, exact, y, dtype, 1e-7 if dtype == F32 else atol, max(rtol, 2e-6), reduction="mean", **options)
    near(out.z_loss, options.get("z_loss", 0.0) * lse**2, 1e-8, 1e-5)
    # Not the last layer: any upstream, whole or a token.
    run_ce(z, exact, y, dtype, 1e-7, max(rtol, 4e-6), torch.tensor(0.37, device=device), reduction="sum", **options)
    rows = torch.linspace(-1, 1, 63, device=device)
    run_ce(z, exact, y, dtype, 1e-7, max(rtol, 4e-6), rows, reduction="none", **options)


@pytest.mark.parametrize("device", CE_DEVICES)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_gradient_of_a_confident_true_class(dtype, device):
    """V = 4096, the target's logit 10 above all others. Liger allows 4 times PyTorch's error; here the gradient's own
    rounding is what is left."""
    z, y, _ = ce_case(64, 4096, dtype, device)
    with torch.no_grad():
        z[torch.arange(64), y] = z.max(-1).values + 10
    exact = z.detach().double().requires_grad_()
    wanted = torch.autograd.grad(ce_reference(exact, y)[0], exact)[0]
    found = torch.autograd.grad(cross_entropy(z, y), z)[0]
    at = torch.arange(64), y
    assert ((found.double()[at] - wanted[at]) / wanted[at]).abs().max() < {BF16: 2**-8, F16: 2**-10}[dtype]


@pytest.mark.parametrize("device", CE_DEVICES)
def test_targets_outside_are_no_silent_loss(device):
    z, y, _ = ce_case(9, 41, F32, device)
    y[3] = 41
    if device == "cpu":
        with pytest.raises(logitless.ArgumentError, match=r"target\[3\]"):
            cross_entropy(z, y)
    else:
        assert torch.isnan(cross_entropy(z, y))


# ---- Vocabulary parallel: one rank and no group -----------------------------------------------------------------


@pytest.mark.parametrize("device", CE_DEVICES)
@pytest.mark.parametrize("ignore", [-100, 0, 2, -123])
@pytest.mark.parametrize("scale", [0.5, 1.0, 5.0])
@pytest.mark.parametrize(
    "s, b, v", [(8, 2, 128), (16, 4, 4096), (32, 1, 32000), (5, 3, 123), (16, 1, 4096), (32, 2, 32000)]
)
def test_vocabulary_parallel_losses(s, b, v, scale, ignore, device):
    z, y, exact = ce_case(s * b, v, F32, device, scale)
    y[::7] = ignore
    loss = cross_entropy(z.view(s, b, v), y.view(s, b), reduction="none", ignore_index=ignore, group=None)
    want = ce_reference(exact, y, reduction="none", ignore_index=ignore)[0]
    near(loss.view(-1), want, 1e-6, 1e-6)
    up = torch.linspace(0.1, 1, s * b, device=device)
    found = torch.autograd.grad(loss, z, up.view(s, b))[0]
    near(found, torch.autograd.grad(want, exact, up.double())[0], 1e-6, 1e-5)


# ---- Scaled cross entropy with entropy --------------------------------------------------------------------------

SCALED = [
    *[(256, 128, 512), (193, 70, 517), (192, 96, 257), (521, 70, 517), (521, 7, 13), (129, 64, 257), (256, 64, 1600)],
    *[(257, 70, 1937), (2048, 256, 512), (64, 4096, 512), (1025, 64, 131072)],
]


@pytest.mark.parametrize("temperature, stride, ignore", [(0.1, 5, -7), (0.7, 7, -11), (1.3, 11, -23), (1.5, 5, -7)])
@pytest.mark.parametrize("n, h, v", SCALED)
def test_scaled_with_entropy(n, h, v, temperature, stride, ignore, device):
    gpu_only(device, n * h * v, 4e7)
    (x, w, _), y, exact = linear_case(n, h, v, BF16, device, scale=2.0)
    y[::stride] = ignore
    logp, entropy = linear_logp(x, w, y, temperature=temperature, ignore_index=ignore, entropy=True)
    nll, _, wanted = reference(*exact, y, temperature=temperature, ignore_index=ignore, reduction="none")
    near(-logp, nll, 2e-5, 1e-5)  # Liger: 5e-2 and 2e-2
    near(entropy, wanted, 1e-4, 1e-5)
    g, e = torch.linspace(-1, 1, n, device=device), torch.linspace(1, -0.5, n, device=device)
    g[::9] = 0
    for ups, outs, exacts in (((g, e), (logp, entropy), (-nll, wanted)), ((e,), (entropy,), (wanted,))):
        found = torch.autograd.grad(outs, (x, w), ups, retain_graph=True)
        want = torch.autograd.grad(exacts, exact[:2], [u.double() for u in ups], retain_graph=True)
        for a, b in zip(found, want):
            near(a, b, 2e-2 * max(1.0, b.abs().max().item()), 1e-1)
            assert relative(a, b) < 3 * GRAD_BOUND[BF16]
        assert (found[0][::stride] == 0).all(), "ignored rows"


def test_scaled_in_f32(device):
    (x, w, _), y, exact = linear_case(17, 31, 257, F32, device)
    logp, entropy = linear_logp(x, w, y, temperature=0.8, entropy=True)
    nll, _, wanted = reference(*exact, y, temperature=0.8, reduction="none")
    near(-logp, nll, 6e-6, 0)  # Liger: 6e-5
    near(entropy, wanted, 6e-6, 0)
    (logp.sum() + entropy.sum()).backward()
    (-nll.sum() + wanted.sum()).backward()
    near(x.grad, exact[0].grad, 6e-6, 1e-5)
    near(w.grad, exact[1].grad, 6e-6, 1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_scaled_with_nothing_valid(scale, device):
    (x, w, _), y, _ = linear_case(65, 16, 70, BF16, device, scale=scale)
    logp, entropy = linear_logp(x, w, torch.full_like(y, -100), entropy=True)
    (logp.sum() + entropy.sum()).backward()
    assert (logp == 0).all() and (entropy == 0).all() and (x.grad == 0).all() and (w.grad == 0).all()

"""Calls are prepared once for a kind of operands and options (logitless.torch._base.Kind): what tells kinds apart, and
what may change under a kind that is known. Every result is compared with that of a process that knows nothing."""

import threading

import pytest
import torch

import logitless
from conftest import Problem
from logitless import _ffi
from logitless.torch import cross_entropy, linear_cross_entropy, linear_logp


def fresh(call):
    """The result of a call whose kind is not known."""
    logitless.clear_plans()
    return call()


def step(x, w, target, **options):
    loss = linear_cross_entropy(x, w, target, **options)
    leaves = [t for t in (x, w, options.get("bias")) if t is not None and t.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)] if leaves else [loss]


def variants(p):
    """Calls that differ from each other in one thing."""
    x, w, y, bias = p.x.detach(), p.w.detach(), p.target, p.bias.detach()
    leaf = lambda t: t.detach().clone().requires_grad_()  # noqa: E731
    wide = torch.zeros(p.n, 2 * x.shape[1], device=x.device, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    negative = torch._neg_view(-x)
    return {
        "plain": lambda: step(x, w, y),
        "gradient of x": lambda: step(leaf(x), w, y),
        "gradient of w": lambda: step(x, leaf(w), y),
        "of both": lambda: step(leaf(x), leaf(w), y),
        "recompute": lambda: step(leaf(x), leaf(w), y, mode="recompute"),
        "bias": lambda: step(x, w, y, bias=bias),
        "gradient of bias": lambda: step(x, leaf(w), y, bias=leaf(bias)),
        "strided bias": lambda: step(x, w, y, bias=bias.repeat_interleave(2)[::2]),
        "int32": lambda: step(x, w, y.int()),
        "padded rows": lambda: step(wide[:, : x.shape[1]].requires_grad_(False), w, y),
        "transposed head": lambda: step(leaf(x), w.T.contiguous().T.requires_grad_(), y),
        "negative bit": lambda: step(negative, w, y),
        "negative bit of w": lambda: step(x, torch._neg_view(-w), y),
        "negative bit of bias": lambda: step(x, w, y, bias=torch._neg_view(-bias)),
        "two dimensions": lambda: step(leaf(x.view(3, -1, x.shape[1])), w, y.view(3, -1)),
        "one": lambda: step(x[0], w, y[0]),
        "fewer tokens": lambda: step(x[:7], leaf(w), y[:7]),
        "many tokens": lambda: step(leaf(x.repeat(60, 1)), w, y.repeat(60)),
        "no tokens": lambda: step(leaf(x[:0]), leaf(w), y[:0]),
        "temperature": lambda: step(x, w, y, temperature=0.5),
        "softcap": lambda: step(x, w, y, softcap=2.0),
        "smoothing": lambda: step(x, w, y, label_smoothing=0.1),
        "others": lambda: step(x, w, y, label_smoothing=0.1, smoothing_rule="others"),
        "z-loss": lambda: step(x, w, y, z_loss=0.1),
        "ignore": lambda: step(x, w, y, ignore_index=int(y[0])),
        "scaling": lambda: step(x, w, y, token_scaling=True),
        "sum": lambda: step(x, w, y, reduction="sum"),
        "none": lambda: step(leaf(x), w, y, reduction="none"),
        "class weights": lambda: step(x, w, y, class_weight=torch.linspace(0, 1, p.v, device=x.device)),
        "narrow class weights": lambda: step(x, w, y, class_weight=torch.linspace(0, 1, p.v, device=x.device).half()),
        "token weights": lambda: step(leaf(x), w, y, token_weight=torch.linspace(0, 1, p.n, device=x.device)),
        "normalizer": lambda: step(x, w, y, normalizer=3.0),
        "another normalizer": lambda: step(x, w, y, normalizer=torch.tensor(5.0)),
        "shift": lambda: step(leaf(x.view(3, -1, x.shape[1])), w, y.view(3, -1), shift=True),
        "shift of 2": lambda: step(leaf(x.view(3, -1, x.shape[1])), w, y.view(3, -1), shift=2, reduction="none"),
        "padding": lambda: step(x, w, y.clamp(max=p.v - 5), vocab_size=p.v - 4),
        "temperature as a tensor": lambda: step(x, w, y, temperature=torch.tensor(0.5)),
    }


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_kinds_do_not_mix(dtype, device):
    p = Problem(f"{dtype}:n33:d16:v70:bias", device)
    calls = variants(p)
    want = {name: fresh(call) for name, call in calls.items()}
    logitless.clear_plans()
    for _ in range(3):  # made, known, known
        for name, call in calls.items():
            for a, b in zip(call(), want[name]):
                assert torch.equal(a, b), name


def test_what_is_no_constant_is_read_every_time(device):
    p = Problem("f32:n33:d16:v70", device)
    t = torch.tensor(1.0)
    for value in (1.0, 0.5, 2.0):
        t.fill_(value)
        want = linear_cross_entropy(p.x, p.w, p.target, temperature=value)
        assert torch.equal(linear_cross_entropy(p.x, p.w, p.target, temperature=t), want)


def test_a_known_kind_still_checks_shapes_and_devices(device):
    p = Problem("f32:n32:d16:v70", device)
    for _ in range(2):
        linear_cross_entropy(p.x.view(4, 8, 16), p.w, p.target.view(4, 8))
        linear_cross_entropy(p.x, p.w, p.target, token_weight=torch.ones(32, device=device))
        linear_cross_entropy(p.x, p.w, p.target, class_weight=torch.ones(70, device=device))
        cross_entropy(p.x, p.target % 16, token_weight=torch.ones(32, device=device))
    for x, target, more in (
        (p.x.view(4, 8, 16), p.target.view(8, 4), {}),
        (p.x.view(4, 8, 16), p.target, {}),
        (p.x.view(64, 8), p.target.repeat(2), {}),
        (p.x, p.target, {"token_weight": torch.ones(31, device=device)}),
        (p.x, p.target, {"class_weight": torch.ones(71, device=device)}),
        (p.x, p.target, {"bias": torch.ones(71, device=device)}),
    ):
        with pytest.raises(ValueError, match=r"want"):
            linear_cross_entropy(x, p.w, target, **more)
    with pytest.raises(ValueError, match="one id for each row"):
        cross_entropy(p.x.view(4, 8, 16), (p.target % 16).view(8, 4))
    with pytest.raises(ValueError, match="31"):
        cross_entropy(p.x, p.target % 16, token_weight=torch.ones(30, device=device).repeat(2)[:31])


def test_autocast_and_modes_are_seen_by_known_kinds(device):
    p = Problem("f32:n33:d16:v70", device)
    plain = linear_cross_entropy(p.x, p.w, p.target)
    assert torch.equal(linear_cross_entropy(p.x, p.w, p.target), plain)
    with torch.autocast(device, torch.bfloat16):
        cast = linear_cross_entropy(p.x, p.w, p.target)
    assert torch.equal(cast, linear_cross_entropy(p.x.bfloat16(), p.w.bfloat16(), p.target))
    assert not torch.equal(cast, plain)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        seen: list = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        linear_cross_entropy(p.x, p.w, p.target)
    assert any("linear_ce_forward" in name for name in Watch.seen)


def test_threads_are_part_of_a_kind():
    p = Problem("f32:n33:d16:v70", "cpu")
    before = torch.get_num_threads()
    try:
        want = linear_cross_entropy(p.x, p.w, p.target)
        torch.set_num_threads(before + 1)
        assert torch.equal(linear_cross_entropy(p.x, p.w, p.target), want)
        kinds = {id(kind.plan) for kind in _ffi.plans.calls.values()}
        assert len(kinds) >= 2
    finally:
        torch.set_num_threads(before)


def test_plans_may_go_between_a_forward_and_its_backward(device):
    p = Problem("f32:n33:d16:v70", device)
    want = torch.autograd.grad(linear_cross_entropy(p.x, p.w, p.target, mode="recompute"), p.leaves())
    for _ in range(2):
        loss = linear_cross_entropy(p.x, p.w, p.target, mode="recompute")
        logitless.clear_plans()
        for a, b in zip(torch.autograd.grad(loss, p.leaves()), want):
            assert torch.equal(a, b)
    for n in range(40):  # more kinds than there are plans
        linear_logp(p.x, p.w, p.target, temperature=1 + n / 64)
        assert len(_ffi.plans) <= _ffi.plans.limit
        for a, b in zip(
            torch.autograd.grad(linear_cross_entropy(p.x, p.w, p.target, mode="recompute"), p.leaves()), want
        ):
            assert torch.equal(a, b)


def test_threads_have_workspaces_of_their_own(device):
    problems = [Problem(f"f32:n{n}:d{d}:v{v}:bias", device) for n, d, v in ((33, 16, 70), (5, 48, 900), (64, 8, 333))]

    def call(p):
        return step(p.x, p.w, p.target, bias=p.bias, mode="recompute")

    want = [call(p) for p in problems]
    wrong = []

    def work(first):
        for i in range(60):
            k = (first + i) % len(problems)
            if not all(torch.equal(a, b) for a, b in zip(call(problems[k]), want[k])):
                wrong.append((first, i))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_kinds_without_bound_are_forgotten():
    p = Problem("f32:n5:d16:v70", "cpu")
    wide = torch.zeros(5, 3000)
    for step_ in range(16, 16 + _ffi.PlanCache._CALLS):
        x = wide.view(-1)[: 5 * step_].view(5, step_)[:, :16]
        linear_cross_entropy(x, p.w.detach(), p.target)
        assert len(_ffi.plans.calls) <= _ffi.PlanCache._CALLS


def test_in_place_and_out_of_place_logits_are_different_kinds(device):
    p = Problem("f32:n33:d16:v70", device)
    z = (p.x.detach() @ p.w.detach().T).requires_grad_()
    want = torch.autograd.grad(cross_entropy(z, p.target), z)[0]
    for in_place in (False, True, False, True):
        copy = z * 1
        got = torch.autograd.grad(cross_entropy(copy, p.target, in_place=in_place), z)[0]
        assert torch.equal(got, want)
        assert torch.equal(copy.detach(), want if in_place else z.detach())

"""torch.compile with fullgraph, opcheck, fake tensors, and modes that must not be bypassed."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from conftest import Problem, relative
from logitless.torch import _base, linear_cross_entropy


def options(v, **changed):
    plain = _base.Options(-100, 1.0, 0.0, 0.1, 1e-3, 0, 0, 0, 0, v, "", 0, 0, 0)
    return plain._replace(**changed)


def operands(device, bias=True):
    p = Problem("f32:n9:d16:v33:bias", device)
    return p, (p.x, p.w, p.target, p.bias if bias else None, None, None, None, None)


@pytest.mark.parametrize(
    "changed", [{}, {"reduction": 2, "outputs": 31}, {"frozen": 2}], ids=["mean", "none", "frozen"]
)
def test_opcheck_forward(changed, device):
    _, tensors = operands(device)
    torch.library.opcheck(_base.operator("linear_ce_forward"), (*tensors, *options(33, **changed)))


@pytest.mark.parametrize("bias", [True, False])
def test_opcheck_forward_backward(bias, device):
    _, tensors = operands(device, bias)
    torch.library.opcheck(
        _base.operator("linear_ce_forward_backward"), (*tensors, *options(33, frozen=0 if bias else 4))
    )


@pytest.mark.parametrize("main_grad", [False, True])
def test_opcheck_backward(main_grad, device):
    p, tensors = operands(device)
    tensors = [t if t is None else t.detach() for t in tensors]
    _, rows, *_ = _base.operator("linear_ce_forward")(*tensors, *options(33))
    main = torch.zeros(33, 16, device=device) if main_grad else None
    torch.library.opcheck(
        _base.operator("linear_ce_backward"),
        (
            torch.ones((), device=device),
            torch.ones(9, device=device),
            None,
            *tensors[:7],
            rows,
            torch.empty(0, device=device),
            main,
            *options(33),
        ),
    )


@pytest.mark.parametrize("mode", ["auto", "recompute", "one_pass"])
def test_compiled_equals_eager(mode, device):
    p = Problem("f32:n33:d16:v70:bias:ign", device)

    def step(x, w, bias, target):
        loss = linear_cross_entropy(torch.tanh(x), w, target, bias=bias, softcap=20.0, mode=mode)
        return loss * 2

    results = []
    for run in (step, torch.compile(step, fullgraph=True)):
        loss = run(p.x, p.w, p.bias, p.target)
        results.append((loss, *torch.autograd.grad(loss, p.leaves())))
    assert torch.equal(results[0][0], results[1][0])
    for eager, compiled in zip(*results):
        assert relative(compiled, eager) < 1e-6


def test_compiled_per_token_results(device):
    p = Problem("f32:n33:d16:v70:ign", device)

    def step(x, w, target):
        out = linear_cross_entropy(
            x, w, target, reduction="none", return_lse=True, return_entropy=True, return_argmax=True
        )
        return (out.loss * torch.exp(-out.loss)).sum() + out.lse.square().mean() - 0.1 * out.entropy.sum(), out.argmax

    (eager, best), (compiled, compiled_best) = (
        step(p.x, p.w, p.target),
        torch.compile(step, fullgraph=True)(p.x, p.w, p.target),
    )
    assert torch.equal(best, compiled_best) and torch.allclose(eager, compiled)
    for a, b in zip(torch.autograd.grad(eager, p.leaves()), torch.autograd.grad(compiled, p.leaves())):
        assert relative(b, a) < 1e-5


def test_compiled_for_any_number_of_tokens(device):
    p = Problem("f32:n33:d16:v70", device)
    run = torch.compile(lambda x, w, y: linear_cross_entropy(x, w, y, reduction="none"), fullgraph=True, dynamic=True)
    for n in (33, 7, 12, 20):
        assert torch.equal(
            run(p.x[:n], p.w, p.target[:n]), linear_cross_entropy(p.x[:n], p.w, p.target[:n], reduction="none")
        )


def test_a_compiled_retained_graph_may_be_used_again(device):
    p = Problem("f32:n9:d16:v33", device)
    loss = torch.compile(lambda x, w, y: linear_cross_entropy(x, w, y, mode="one_pass"), fullgraph=True)(
        p.x, p.w, p.target
    )
    first = torch.autograd.grad(loss, p.leaves(), torch.tensor(1.0, device=device), retain_graph=True)
    second = torch.autograd.grad(loss, p.leaves(), torch.tensor(3.0, device=device))
    for a, b in zip(first, second):
        assert relative(b, 3 * a) < 1e-6


def test_fake_tensors_reach_no_pointer(device):
    with FakeTensorMode():
        x = torch.empty(1 << 20, 4096, device=device, requires_grad=True)
        w = torch.empty(1 << 17, 4096, device=device, requires_grad=True)
        out = linear_cross_entropy(x, w, torch.zeros(1 << 20, dtype=torch.int64, device=device), return_lse=True)
        assert out.loss.shape == () and out.lse.shape == (1 << 20,)
        out.loss.backward()
        assert w.grad.shape == w.shape and x.grad.shape == x.shape


def test_traced_calls_are_operators(device):
    p = Problem("f32:n9:d16:v33", device)
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        graph = make_fx(lambda x, w: linear_cross_entropy(x, w, p.target))(p.x, p.w)
    assert any("linear_ce_forward" in str(node.target) for node in graph.graph.nodes)
    assert torch.equal(graph(p.x * 2, p.w), linear_cross_entropy(p.x * 2, p.w, p.target).detach())

"""What only a GPU has: streams, graphs, calls that do not wait. The other files run their tests on a GPU too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import Problem, relative
from logitless.torch import linear_cross_entropy, linear_logp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SLEEP_CYCLES = 2_000_000_000  # about a second


def step(p, mode):
    loss = linear_cross_entropy(p.x, p.w, p.target, bias=p.bias, mode=mode)
    return loss, *torch.autograd.grad(loss, p.leaves())


@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
def test_the_host_does_not_wait(mode):
    p = Problem("bf16:n300:d256:v5000:bias:ign", "cuda")

    def others():
        logp, entropy = linear_logp(p.x, p.w, p.target, entropy=True)
        (logp + entropy).sum().backward()
        return linear_cross_entropy(p.x, p.w, p.target, normalizer=7.0, return_bad_targets=True)

    want, _ = step(p, mode), others()  # the first call of a kind makes its plan, which does wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLEEP_CYCLES)
        busy = torch.cuda.Event()
        busy.record()
        got, out = step(p, mode), others()
        assert not busy.query(), "the calls returned after the GPU was done: something waited"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(got, want)) and out.bad_targets.item() == 0


def test_work_goes_to_the_current_stream():
    p = Problem("f32:n65:d64:v1000", "cuda")
    want = step(p, "recompute")
    source = p.x.detach().clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(20):
        with torch.no_grad(), torch.cuda.stream(stream):
            p.x.fill_(1e3)
            torch.cuda._sleep(SLEEP_CYCLES // 100)
            p.x.copy_(source)  # late: a call on another stream would have read what was there before
        with torch.cuda.stream(stream):
            got = step(p, "recompute")
        torch.cuda.current_stream().wait_stream(stream)
        assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
def test_a_captured_step_may_be_replayed_with_other_data(mode):
    p = Problem("bf16:n130:d64:v1000:ign", "cuda")
    other = Problem("bf16:n130:d64:v1000", "cuda")
    step(p, mode)  # makes the plan
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(p, mode)
    for data in (p.target.clone(), other.target, torch.full_like(p.target, -100)):
        with torch.no_grad():
            p.target.copy_(data)
        graph.replay()
        for a, b in zip(captured, step(p, mode)):
            assert torch.equal(a, b)


def test_reduce_overhead_mode_of_compile_uses_graphs():
    p = Problem("bf16:n64:d64:v500:ign", "cuda")
    run = torch.compile(lambda x, w, y: linear_cross_entropy(x * 2, w, y), fullgraph=True, mode="reduce-overhead")
    want = linear_cross_entropy(p.x * 2, p.w, p.target)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        loss = run(p.x, p.w, p.target)
        assert torch.equal(loss, want)
        grads = torch.autograd.grad(loss, p.leaves())
    for a, b in zip(grads, torch.autograd.grad(want, p.leaves())):
        assert relative(a, b) < 4e-3


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    x = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(131072, 256, device="cuda", dtype=torch.bfloat16)
    y = torch.randint(0, 131072, (4096,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, w, y, mode="recompute").backward()
    assert torch.cuda.max_memory_allocated() - before < 600 << 20, "the logits in bf16 alone are 1024 MiB"


def test_a_group_is_refused_with_the_librarys_sentence(tmp_path):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    worker = Path(__file__).parent / "group_worker.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), "2", tmp_path / "meeting", "cuda_is_refused"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    for out, err in [rank.communicate(timeout=120) for rank in ranks]:
        assert "ok cuda_is_refused" in out, err[-2000:]

"""What only a GPU has: streams, graphs, calls that do not wait. The other files run their tests on a GPU too."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conftest import Problem, relative
from logitless.torch import _comm, cross_entropy, linear_cross_entropy, linear_logp, logp_of, top_logp

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


def logits_step(z, y, ids, **options):
    """Everything over logits; z is a leaf."""
    loss = cross_entropy(z, y, **options)
    found = logp_of(z, ids, target=y, rank=True)
    grad = torch.autograd.grad(loss.sum(), z)[0]
    # Detached: a graph that lives on ties z to the stream of its own forward, which cannot be captured elsewhere.
    return (loss.detach(), grad, *found, *top_logp(z, 5, target=y))


def logits_problem(n=300, v=5000, dtype=torch.bfloat16):
    z = torch.randn(n, v, device="cuda").to(dtype).requires_grad_()
    y, ids = torch.randint(0, v, (n,), device="cuda"), torch.randint(0, v, (n, 3), device="cuda")
    y[::3] = -100
    return z, y, ids


@pytest.mark.parametrize("options", [{}, {"mode": "one_pass"}, {"reduction": "none", "softcap": 5.0}], ids=str)
def test_the_host_does_not_wait_for_logits(options):
    z, y, ids = logits_problem()
    want = logits_step(z, y, ids, **options)
    in_place = z.detach().clone().requires_grad_()
    cross_entropy(in_place * 1, y, in_place=True).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLEEP_CYCLES)
        busy = torch.cuda.Event()
        busy.record()
        got = logits_step(z, y, ids, **options)
        cross_entropy(in_place * 1, y, in_place=True).backward()
        assert not busy.query(), "the calls returned after the GPU was done: something waited"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_logits_on_another_stream_and_in_a_graph():
    z, y, ids = logits_problem()
    want = logits_step(z, y, ids)
    source = z.detach().clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(10):
        with torch.no_grad(), torch.cuda.stream(stream):
            z.fill_(1e3)
            torch.cuda._sleep(SLEEP_CYCLES // 100)
            z.copy_(source)  # late: a call on another stream would have read what was there before
        with torch.cuda.stream(stream):
            got = logits_step(z, y, ids)
        torch.cuda.current_stream().wait_stream(stream)
        assert all(torch.equal(a, b) for a, b in zip(got, want))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = logits_step(z, y, ids)
    for target in (y.clone(), torch.randint_like(y, 0, 5000), torch.full_like(y, -100)):
        with torch.no_grad():
            y.copy_(target)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, logits_step(z, y, ids)))


def test_bad_ids_and_targets_of_logits_are_nan_and_counted():
    z, y, ids = logits_problem(n=7, v=50, dtype=torch.float32)
    y[1], ids[2, 1] = 50, -3
    out = cross_entropy(z, y, reduction="none", return_bad_targets=True)
    assert out.bad_targets.item() == 1 and torch.isnan(out.loss).tolist() == [i == 1 for i in range(7)]
    found = logp_of(z, ids, rank=True)
    assert torch.isnan(found.logp[2]).tolist() == [False, True, False] and found.rank[2, 1] == 0


def test_gradients_of_logits_take_no_memory_in_place():
    z = torch.randn(4096, 32000, device="cuda", dtype=torch.bfloat16, requires_grad=True) * 1
    y = torch.randint(0, 32000, (4096,), device="cuda")
    cross_entropy(z * 1, y, in_place=True).backward()  # makes the plan
    held = z * 1
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = cross_entropy(held, y, in_place=True)
    grad = torch.autograd.grad(loss, held)[0]
    assert grad.data_ptr() == held.data_ptr()
    assert torch.cuda.max_memory_allocated() - before < 8 << 20, "the logits are 250 MiB"


def test_a_device_other_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    p = Problem("bf16:n33:d64:v1000", "cuda:1")
    want = step(p, "recompute")
    with torch.cuda.device(1):
        assert all(torch.equal(a, b) for a, b in zip(step(p, "recompute"), want))


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


def test_operations_of_a_communicator_in_device_memory(tmp_path):
    """NCCL with one rank, which no plan asks for: the callbacks as the library calls them, on the stream it names."""
    if not dist.is_nccl_available():
        pytest.skip("no NCCL")
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        comm = _comm.Communicator(dist.group.WORLD, torch.device("cuda", 0))
        ends = comm._struct
        assert ends.memory == _comm._DEVICE and (ends.rank, ends.size) == (0, 1)
        stream = torch.cuda.Stream()
        for call, dtype in ((ends.max_i32, torch.int32), (ends.sum_i64, torch.int64), (ends.sum_f32, torch.float32)):
            t = torch.zeros(1000, dtype=dtype, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP_CYCLES // 100)
                t += torch.arange(1000, device="cuda").to(dtype)
            assert call(None, t.data_ptr() + 8 * dtype.itemsize, 900, stream.cuda_stream) == 0
            assert call(None, 0, 0, stream.cuda_stream) == 0
            stream.synchronize()
            assert torch.equal(t, torch.arange(1000, device="cuda").to(dtype))
        mine, everyones = (ctypes.c_char * 5)(*b"bytes"), (ctypes.c_char * 5)()
        assert ends.all_gather(None, ctypes.addressof(mine), ctypes.addressof(everyones), 5) == 0
        assert everyones.raw == b"bytes" and comm._meet(_comm._PLAN) == _comm._PLAN
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl"])
def test_a_group_over_gpus(tmp_path, backend):
    """Two ranks: with Gloo on whatever GPUs there are, with NCCL on two. If the library refuses, it says why."""
    if "nccl" in backend and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each rank")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    worker = Path(__file__).parent / "group_worker.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), "2", tmp_path / "meeting", "cuda"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "LOGITLESS_TEST_BACKEND": backend},
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    for out, err in outputs:
        assert "ok cuda" in out or "refused" in out, err[-3000:]
    if "refused" in outputs[0][0]:
        pytest.skip(outputs[0][0].strip())

"""logitless.LinearCE over NumPy, JAX, CuPy and PyTorch arrays; errors; the cache of plans."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import logitless
from logitless import _ffi


def problem(n=7, d=16, v=33, dtype=np.float32):
    r = np.random.default_rng(1)
    x, w = r.standard_normal((n, d)).astype(dtype), r.standard_normal((v, d)).astype(dtype)
    y = r.integers(0, v, n)
    y[2] = -100
    return x, w, y, r.standard_normal(v).astype(dtype)


def float64(x, w, y, b):
    """nll, lse, entropy and dz of the mean, 0 where ignored."""
    z = x.astype(float) @ w.astype(float).T + b.astype(float)
    lse = np.log(np.exp(z).sum(1))
    p = np.exp(z - lse[:, None])
    keep = (y != -100).astype(float)
    at = np.where(y == -100, 0, y)
    dz = p.copy()
    dz[np.arange(len(y)), at] -= 1
    return (
        (lse - z[np.arange(len(y)), at]) * keep,
        lse * keep,
        (lse - (p * z).sum(1)) * keep,
        dz * keep[:, None] / keep.sum(),
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numpy(dtype):
    x, w, y, b = problem(dtype=dtype)
    nll, lse, entropy, dz = float64(x, w, y, b)
    head = logitless.LinearCE()
    out, grads = head.forward_backward(x, w, y, bias=b, entropy=True, argmax=True)
    assert abs(float(out.loss) - nll.sum() / 6) < 1e-5
    assert np.allclose(out.nll, nll, atol=1e-5) and np.allclose(out.lse, lse, atol=1e-5)
    assert np.allclose(out.entropy, entropy, atol=1e-5)
    assert (out.argmax == np.where(y == -100, -1, (x.astype(float) @ w.astype(float).T + b).argmax(1))).all()
    assert out.sums.n_valid == 6 and out.sums.n_ignored == 1 and abs(out.sums.loss - nll.sum()) < 1e-5
    assert np.allclose(grads.x, dz @ w.astype(float), atol=1e-5) and grads.x.dtype == np.float32
    assert np.allclose(grads.w, dz.T @ x.astype(float), atol=1e-5) and np.allclose(grads.bias, dz.sum(0), atol=1e-6)
    again = head.backward(x, w, y, head.forward(x, w, y, bias=b), bias=b, up_loss=1.0)
    for a, c in zip(again, grads):
        assert np.array_equal(a, c)
    lse_only = head.backward(x, w, y, out, bias=b, up_lse=np.ones(7, np.float32), grad_w=False)
    assert lse_only.w is None and np.isfinite(lse_only.x).all()


def test_memory_that_may_not_be_written_and_rows_apart():
    x, w, y, b = problem()
    want = logitless.LinearCE(reduction="none").forward(x, w, y, bias=b).loss
    wide = np.zeros((7, 24), np.float32)
    wide[:, :16] = x
    for t in (x, w, y, b):
        t.flags.writeable = False
    got = logitless.LinearCE(reduction="none").forward(wide[:, :16], w, y, bias=b).loss
    assert np.array_equal(got, want)
    with pytest.raises(ValueError, match="w .*stride"):
        logitless.LinearCE().forward(x, np.asfortranarray(w), y, bias=b)


def test_jax_arrays_pass_without_copies():
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    x, w, y, b = problem()
    out, grads = logitless.LinearCE().forward_backward(*map(jnp.asarray, (x, w, y)), bias=jnp.asarray(b))
    want, wanted = logitless.LinearCE().forward_backward(x, w, y.astype(np.int32), bias=b)
    assert type(out.loss).__module__.startswith("jax") and np.array_equal(out.nll, want.nll)
    assert np.array_equal(grads.w, wanted.w)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_tensors(device):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    x, w, y, b = problem()
    out = logitless.LinearCE().forward(
        *(torch.tensor(t, device=device) for t in (x, w, y)), bias=torch.tensor(b, device=device)
    )
    assert out.loss.device.type == device and abs(out.loss.item() - float64(x, w, y, b)[0].sum() / 6) < 1e-5


def test_cupy_arrays_on_their_stream():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not cupy.cuda.is_available():
        pytest.skip("no GPU")
    x, w, y, b = problem(n=300, d=64, v=1000)
    nll, *_ = float64(x, w, y, b)
    with cupy.cuda.Stream(non_blocking=True):
        out = logitless.LinearCE().forward(*map(cupy.asarray, (x, w, y)), bias=cupy.asarray(b))
        assert type(out.nll).__module__.startswith("cupy") and np.allclose(cupy.asnumpy(out.nll), nll, atol=1e-4)


def test_errors_are_one_type_with_the_librarys_sentence():
    x, w, y, b = problem()
    y[3] = 33
    with pytest.raises(logitless.ArgumentError, match=r"target\[3\] is 33, want 0 .. 32") as caught:
        logitless.LinearCE().forward(x, w, y)
    assert isinstance(caught.value, ValueError) and caught.value.status == "LL_STATUS_INVALID_ARG"
    with pytest.raises(logitless.Error) as caught:
        logitless.LinearCE(workspace_budget_bytes=1).forward(x, w, problem()[2])
    assert caught.value.status == "LL_STATUS_WORKSPACE" and not isinstance(caught.value, ValueError)
    for bad, sentence in (
        ((x.astype(np.float64), w, y), "float64"),
        ((x[0], w, y), "dimensions"),
        (([1.0], w, y), "DLPack"),
        ((x, w[:, :8], y), "w has shape"),
        ((x, w, y[:3]), "target"),
    ):
        with pytest.raises(ValueError, match=sentence):
            logitless.LinearCE().forward(*bad)
    with pytest.raises(ValueError, match="token_weight has 3 elements, want 7"):
        logitless.LinearCE().forward(x, w, y, token_weight=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="class_weight has 64-bit"):
        logitless.LinearCE().forward(x, w, y, class_weight=np.ones(33))
    with pytest.raises(ValueError, match="not contiguous"):
        logitless.LinearCE().forward(x, w, y, token_weight=np.ones((14,), np.float32)[::2])
    with pytest.raises(ValueError, match="LinearCE: reduction is 'avg'"):
        logitless.LinearCE(reduction="avg")


def test_the_cache_is_bounded_and_evicts_the_oldest():
    cache = _ffi.PlanCache(limit=2)
    made = []

    def plan(v):
        def make():
            made.append(v)
            return _ffi.Plan(_ffi.PlanDesc(_ffi.CPU, 0, 64, 8, 0, v, v, 1, 1, n_threads=1))

        return cache.get(v, make)

    first = plan(10)
    assert plan(11) is plan(11) and plan(10) is first
    plan(12)  # 11 was used before 10
    assert len(cache) == 2 and plan(10) is first
    plan(11)
    assert made == [10, 11, 12, 11]
    assert "v10" in first.describe() and first.numerics


def test_equal_calls_share_a_plan_and_sizes_are_rounded():
    x, w, y, _ = problem()
    logitless.clear_plans()
    for n in (1, 5, 7):
        logitless.LinearCE().forward(x[:n], w, np.abs(y[:n]) % 33)
    assert len(_ffi.plans) == 1
    logitless.LinearCE(softcap=2.0).forward(x, w, y)
    assert len(_ffi.plans) == 2
    logitless.clear_plans()
    assert len(_ffi.plans) == 0
    assert [_ffi.round_up_tokens(n) for n in (0, 1, 64, 65, 4096, 4097, 10000)] == [64, 64, 64, 128, 4096, 8192, 12288]


def test_threads_share_plans():
    x, w, y, b = problem(n=50, d=32, v=500)
    want = logitless.LinearCE(reduction="none", n_threads=2).forward(x, w, y, bias=b)
    logitless.clear_plans()
    faults = []

    def work():
        try:
            for _ in range(20):
                got = logitless.LinearCE(reduction="none", n_threads=2).forward(x, w, y, bias=b)
                if not np.array_equal(got.loss, want.loss):
                    faults.append("other bits")
        except Exception as error:  # noqa: BLE001
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults and len(_ffi.plans) == 1


def test_a_forked_child_makes_its_own_plans():
    """B95: the worker threads of a plan do not come along; whoever waited for them would wait for ever."""
    x, w, y, b = problem(n=200, d=32, v=3000)
    head = logitless.LinearCE(n_threads=2)
    want = head.forward(x, w, y, bias=b).loss
    child = os.fork()
    if child == 0:
        try:
            fine = np.array_equal(head.forward(x, w, y, bias=b).loss, want)
            logitless.clear_plans()
        except BaseException:
            fine = False
        os._exit(0 if fine else 1)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert np.array_equal(head.forward(x, w, y, bias=b).loss, want)


def test_kernels_are_listed():
    names = [k.name for k in logitless.kernels()]
    assert {"linear_ce_cpu_plain", "ce_cpu_plain", "linear_ce_cuda"} <= set(names)
    assert all(k.why_not == "" for k in logitless.kernels() if k.name == "linear_ce_cpu_plain")

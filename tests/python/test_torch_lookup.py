"""Log-probabilities and ranks of given ids, and the top k: against float64 and stable sorting; ties, ignored rows,
layouts, compilation; NumPy has the same."""

import numpy as np
import pytest
import torch

import logitless
from conftest import DTYPES
from logitless.torch import linear_logp, logp_of, top_logp


@pytest.fixture(
    params=["cpu"] + (["cuda"] if any(k.name == "ce_cuda" and not k.why_not for k in logitless.kernels()) else [])
)
def device(request):
    return request.param


def problem(dtype, n, v, m, device, ties=False):
    generator = torch.Generator().manual_seed(n + v + m)
    z = torch.randn(n, v, generator=generator) * 4
    if ties:
        z = z.round()
    ids = torch.randint(0, v, (n, m), generator=generator)
    return z.to(DTYPES[dtype]).to(device), ids.to(device)


def wanted(z, ids, k, temperature=1.0, softcap=0.0):
    z = z.double()
    raw = z
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    logp = torch.log_softmax(z / temperature, -1)
    rank = 1 + (raw[:, None, :] > raw.gather(-1, ids)[:, :, None]).sum(-1)
    order = torch.sort(raw, dim=-1, descending=True, stable=True).indices[:, :k]
    return logp.gather(-1, ids), rank, order, logp.gather(-1, order)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("n, v, m, k", [(1, 1, 1, 1), (5, 70, 3, 4), (33, 1000, 17, 20), (130, 257, 64, 128)])
@pytest.mark.parametrize("ties", [False, True])
def test_against_float64_and_stable_sorting(dtype, n, v, m, k, ties, device):
    z, ids = problem(dtype, n, v, m, device, ties)
    for options in ({}, {"temperature": 0.7, "softcap": 5.0}):
        logp, rank, order, top = wanted(z, ids, k, **options)
        before = z.clone()
        found = logp_of(z, ids, rank=True, **options)
        best = top_logp(z, k, **options)
        assert (found.logp - logp).abs().max() < 2e-6 * (1 + logp.abs().max()) and (found.logp <= 0).all()
        assert torch.equal(found.rank, rank)
        assert torch.equal(best.ids, order), "equal logits: the lower id comes first"
        assert (best.logp - top).abs().max() < 2e-6 * (1 + top.abs().max())
        assert torch.equal(z, before)
        assert logp_of(z, ids, **options).rank is None and torch.equal(logp_of(z, ids, **options).logp, found.logp)
        assert torch.equal(logp_of(z, best.ids[:, :8], rank=True, **options).logp, best.logp[:, :8])


def test_rows_and_ids_that_are_ignored(device):
    z, ids = problem("f32", 6, 50, 4, device)
    z[2], z[4, 3] = float("nan"), float("nan")
    target = torch.tensor([1, -100, -100, 0, 5, 6], device=device)
    ids[0, 1:] = -100
    found, best = logp_of(z, ids, target=target, rank=True), top_logp(z, 3, target=target)
    logp, rank, order, top = wanted(z, ids.clamp(min=0), 3)
    assert found.logp[0, 1:].tolist() == [0, 0, 0] and found.rank[0, 1:].tolist() == [0, 0, 0]
    for row in (1, 2):  # ignored, whatever they hold
        assert (found.logp[row] == 0).all() and (found.rank[row] == 0).all()
        assert (best.ids[row] == -1).all() and (best.logp[row] == 0).all()
    assert torch.isnan(found.logp[4]).all() and (found.rank[4] == 0).all()
    assert torch.isnan(best.logp[4]).all() and (best.ids[4] == -1).all()
    for row in (3, 5):
        assert torch.allclose(found.logp[row].double(), logp[row], atol=1e-5) and torch.equal(
            found.rank[row], rank[row]
        )
        assert torch.equal(best.ids[row], order[row]) and torch.allclose(best.logp[row].double(), top[row], atol=1e-5)
    assert torch.equal(logp_of(z[3:4], ids[3:4], ignore_index=0).logp, found.logp[3:4])


def test_shapes_layouts_and_equal_bits(device):
    z, ids = problem("bf16", 24, 100, 5, device)
    found, best = logp_of(z, ids, rank=True), top_logp(z, 7)
    folded = logp_of(z.view(2, 3, 4, 100), ids.view(2, 3, 4, 5), rank=True)
    assert folded.logp.shape == (2, 3, 4, 5) and torch.equal(folded.logp.view(24, 5), found.logp)
    assert top_logp(z.view(2, 12, 100), 7).ids.shape == (2, 12, 7)
    assert torch.equal(logp_of(z[3], ids[3], rank=True).logp, found.logp[3]) and top_logp(z[3], 7).ids.shape == (7,)
    wide = torch.full((24, 130), 30.0, device=device, dtype=z.dtype)
    wide[:, :100] = z
    for given in (wide[:, :100], z.T.contiguous().T, wide):
        more = {"vocab_size": 100} if given is wide else {}
        assert torch.equal(logp_of(given, ids.int(), rank=True, **more).rank, found.rank)
        assert torch.equal(logp_of(given, ids.T.contiguous().T, **more).logp, found.logp)
        assert torch.equal(top_logp(given, 7, **more).ids, best.ids)
    for n in (1, 5, 11):
        assert torch.equal(logp_of(z[:n], ids[:n]).logp, found.logp[:n])
    grad = z.clone().requires_grad_()
    assert not logp_of(grad, ids).logp.requires_grad and not top_logp(grad, 2).logp.requires_grad
    empty = logp_of(z[:0], ids[:0], rank=True)
    assert empty.logp.shape == (0, 5) and empty.rank.shape == (0, 5) and top_logp(z[:0], 3).ids.shape == (0, 3)


def test_the_targets_logp_is_that_of_the_loss(device):
    z, ids = problem("f32", 40, 300, 1, device)
    one = torch.eye(40, device=device)
    want = linear_logp(one, z.T.contiguous(), ids[:, 0]).logp
    assert torch.allclose(logp_of(z, ids).logp[:, 0], want, atol=1e-6, rtol=1e-6)


def test_compiled(device):
    z, ids = problem("f32", 9, 70, 3, device)

    @torch.compile(fullgraph=True)
    def run(z, ids):
        found, best = logp_of(z * 2, ids, rank=True), top_logp(z * 2, 4)
        return found.logp + 1, found.rank, best.ids, best.logp * 2

    logp, rank, order, top = run(z, ids)
    found, best = logp_of(z * 2, ids, rank=True), top_logp(z * 2, 4)
    assert torch.equal(logp, found.logp + 1) and torch.equal(rank, found.rank)
    assert torch.equal(order, best.ids) and torch.equal(top, best.logp * 2)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda z, ids: logp_of(z, ids[:3]), "ids is"),
        (lambda z, ids: logp_of(z, ids.float()), "dtype"),
        (lambda z, ids: logp_of(z, ids[:, :0]), "at least one"),
        (lambda z, ids: logp_of(z, ids, target=ids[:, 0][:3]), "target is"),
        (lambda z, ids: logp_of(z, ids.repeat(1, 400)), "n_ids|1024"),
        (lambda z, ids: logp_of(z, ids, temperature=0.0), "temperature"),
        (lambda z, ids: logp_of(z, ids + 50), r"ids\[0, 0\]"),
        (lambda z, ids: top_logp(z, 0), "k is 0"),
        (lambda z, ids: top_logp(z, 51), "n_top"),
        (lambda z, ids: logp_of(z.double(), ids), "float64"),
    ],
)
def test_refusals(call, sentence):
    z, ids = problem("f32", 6, 50, 4, "cpu")
    with pytest.raises(ValueError, match=sentence):
        call(z, ids)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numpy_has_the_same_bits(dtype):
    z, ids = problem("f32" if dtype == np.float32 else "f16", 12, 90, 3, "cpu", ties=True)
    target = torch.arange(12)
    target[::4] = -100
    found, best = logp_of(z, ids, target=target, rank=True), top_logp(z, 5, target=target)
    logp, rank = logitless.logp_of(z.numpy(), ids.numpy(), target=target.numpy(), rank=True)
    top, top_p = logitless.top_logp(z.numpy(), 5, target=target.numpy())
    assert isinstance(logp, np.ndarray) and logp.dtype == np.float32 and rank.dtype == np.int64
    for a, b in ((logp, found.logp), (rank, found.rank), (top, best.ids), (top_p, best.logp)):
        assert np.array_equal(a, b.numpy())
    assert logitless.logp_of(z.numpy(), ids.numpy()).rank is None
    assert np.array_equal(
        logitless.logp_of(z.numpy(), ids.numpy(), ignore_index=0).logp, logp_of(z, ids, ignore_index=0).logp
    )
    with pytest.raises(ValueError, match="want 2 and 2"):
        logitless.logp_of(z.numpy()[0], ids.numpy())
    with pytest.raises(ValueError, match="k is 0"):
        logitless.top_logp(z.numpy(), 0)

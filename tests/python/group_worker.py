"""One rank of test_torch_group.py: `group_worker.py RANK SIZE FILE CHECK...`. Prints `ok CHECK`, or dies by an
assertion.

Every rank has the whole head, so it can compute what one rank gives, and compares its shard's results with that bit
by bit.
"""

import gc
import importlib
import os
import sys
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

import logitless
from conftest import Problem
from logitless.torch import linear_cross_entropy, linear_logp

RANK, SIZE = int(sys.argv[1]), int(sys.argv[2])


def cuts(v, kind):
    """Shard boundaries: equal, cut inside the kernels' tiles of 64, with an empty shard, or in the reverse order of
    ranks."""
    if kind == "equal":
        bounds = [v * r // SIZE for r in range(SIZE + 1)]
    elif kind == "empty":
        bounds = [0, 0, *(v // 2 + 7 * r for r in range(SIZE - 2)), v]
    else:
        bounds = [0, *sorted((v * (r + 1) * (r + 2)) // (SIZE * (SIZE + 1)) - 3 for r in range(SIZE - 1)), v]
    shards = list(zip(bounds, bounds[1:]))
    return shards[::-1] if kind == "reverse" else shards


def bits(what, mine, whole):
    assert torch.equal(mine, whole), f"rank {RANK}: {what} differs: {(mine.double() - whole.double()).abs().max()}"


def equal_on_ranks(what, t):
    parts = [torch.empty_like(t) for _ in range(SIZE)]
    dist.all_gather(parts, t.contiguous())
    for part in parts:
        bits(what, part, t)


def near(what, mine, theirs, bound):
    error = ((mine.double() - theirs.double()).norm() / theirs.double().norm()).item()
    assert error <= bound, f"rank {RANK}: {what} differs by {error}"


def run(p, w, bias, **more):
    x = p.x.detach().clone().requires_grad_()
    out = linear_cross_entropy(
        x, w, p.target, bias=bias, return_lse=True, return_entropy=True, return_argmax=True, **p.options, **more
    )
    rows = torch.linspace(0.5, -1, p.n, device=x.device)
    (
        (out.loss if out.loss.dim() == 0 else (out.loss * rows).sum())
        + (out.lse * rows.flip(0)).sum()
        + (out.entropy * rows).sum()
    ).backward()
    return out, x.grad


def check_shards(world):
    for text in (
        "f32:n33:d16:v257:bias:ign",
        "f32:n20:d8:v300:cap4:ls0.1:zl0.001:cw:tw:none",
        "bf16:n70:d32:v1000:t0.7:sum",
    ):
        for kind in ("equal", "uneven", "empty", "reverse"):
            p = Problem(text, "cpu")
            if kind == "equal" and p.v % SIZE:
                continue
            one, one_grad_x = run(p, p.w, p.bias)
            first, end = cuts(p.v, kind)[RANK]
            w = p.w.detach()[first:end].clone().requires_grad_()
            bias = None if p.bias is None else p.bias.detach()[first:end].clone().requires_grad_()
            bounds = {} if kind == "equal" else {"vocab_start": first, "vocab_size": p.v}
            out, grad_x = run(p, w, bias, group=world, **bounds)
            for name in ("loss", "lse", "entropy", "argmax"):
                bits(f"{text} {kind} {name}", getattr(out, name), getattr(one, name))
            bits(f"{text} {kind} grad_w", w.grad, p.w.grad[first:end])
            if bias is not None:
                bits(f"{text} {kind} grad_bias", bias.grad, p.bias.grad[first:end])
            equal_on_ranks("grad_x", grad_x)
            assert torch.allclose(
                grad_x.double(), one_grad_x.double(), rtol=1e-2 if p.dtype != torch.float32 else 1e-5, atol=1e-5
            )


def check_modes(world):
    """auto takes one pass; a frozen shard on one rank alone; main_grad; logp."""
    p = Problem("f32:n33:d16:v256", "cpu")
    one = torch.autograd.grad(linear_cross_entropy(p.x, p.w, p.target), (p.x, p.w))
    first, end = cuts(p.v, "equal")[RANK]
    w = p.w.detach()[first:end].clone().requires_grad_(RANK != 0)
    x = p.x.detach().clone().requires_grad_()
    for _ in range(3):
        x.grad = w.grad = None
        linear_cross_entropy(x, w, p.target, group=world).backward()
        assert torch.allclose(x.grad, one[0], atol=1e-7) and (w.grad is None) == (RANK == 0)
        if RANK:
            assert torch.allclose(w.grad, one[1][first:end], atol=1e-7)
    main = torch.zeros(end - first, 16)
    linear_cross_entropy(x, w.requires_grad_(), p.target, group=world, main_grad=main).backward()
    assert torch.allclose(main, one[1][first:end], atol=1e-7)
    bits("logp", linear_logp(x, w, p.target, group=world).logp, linear_logp(p.x, p.w, p.target).logp)


def check_no_group_is_one_rank(world):
    p = Problem("f32:n9:d8:v30", "cpu")
    p.x.data.mul_(RANK + 1)  # each rank its own batch: nothing may be exchanged
    loss = linear_cross_entropy(p.x, p.w, p.target)
    z = p.x.detach().double() @ p.w.detach().double().T
    assert abs(loss.item() - torch.nn.functional.cross_entropy(z, p.target).item()) < 1e-4


def check_errors(world):
    """A fault of one rank is the same error on all, and the group works on."""
    p = Problem("f32:n9:d8:v64", "cpu")
    first, end = cuts(p.v, "equal")[RANK]
    w = p.w.detach()[first:end]
    want = linear_cross_entropy(p.x.detach(), p.w.detach(), p.target, reduction="none")

    def fails(sentence, x=p.x, w=w, target=p.target, **more):
        try:
            linear_cross_entropy(x.detach(), w, target, group=world, reduction="none", **more)
        except logitless.ArgumentError as error:
            assert sentence in str(error), f"rank {RANK}: {error}"
        else:
            raise AssertionError(f"rank {RANK}: no error where {sentence!r} was due")
        bits(
            "loss after an error",
            linear_cross_entropy(p.x.detach(), p.w.detach()[first:end], p.target, group=world, reduction="none"),
            want,
        )

    bad = p.target.clone()
    if RANK == SIZE - 1:
        bad[4] = 64
    fails("target[4] is 64", target=bad)
    other = p.target.clone()
    if RANK == 0:
        other[0] = (other[0] + 1) % 64
    fails("differ in", target=other)
    fails("differ in", temperature=1.0 + (RANK == 0))
    fails("refused" if RANK else "target is", target=p.target if RANK else p.target[:3])
    fails("refused" if RANK else "mode is", mode="auto" if RANK else "fast")
    fails("shard", vocab_start=0, vocab_size=64)  # all claim the first columns: full logits, or a forgotten start
    fails("shard", w=p.w.detach(), vocab_start=RANK * 64, vocab_size=64 * SIZE + 1)  # a gap at the end


def check_groups(world):
    """Subgroups side by side, strided ones too; a name that comes to mean another group."""
    groups = [dist.new_group(list(range(parity, SIZE, 2))) for parity in (0, 1)]
    mine, size, rank = groups[RANK % 2], len(range(RANK % 2, SIZE, 2)), RANK // 2
    p = Problem("f32:n20:d8:v120", "cpu")
    p.x.data.mul_(1 + RANK % 2)
    one = linear_cross_entropy(p.x, p.w, p.target, reduction="none")
    shard = p.w.detach()[120 // size * rank : 120 // size * (rank + 1)]
    for _ in range(2):
        bits("loss of a subgroup", linear_cross_entropy(p.x, shard, p.target, group=mine, reduction="none"), one)


def check_adapters(world):
    """Who sums the gradient of hidden states, the caller or the callee, is a matter of each contract."""
    from logitless.adapters import deepspeed, megatron, verl

    p = Problem("f32:n24:d16:v120:ign", "cpu")
    first, end = cuts(p.v, "equal")[RANK]
    want = torch.autograd.grad(linear_cross_entropy(p.x, p.w, p.target, reduction="sum"), (p.x, p.w))

    def leaf(t):
        return t.detach().clone().requires_grad_()

    x, w = leaf(p.x), leaf(p.w[first:end])
    megatron.linear_cross_entropy(x, w, p.target, world, "sum").backward()
    assert torch.allclose(x.grad, want[0], atol=1e-5) and torch.allclose(w.grad, want[1][first:end], atol=1e-5)
    rows = slice(24 // SIZE * RANK, 24 // SIZE * (RANK + 1))
    x = leaf(p.x[rows])
    loss = megatron.linear_cross_entropy(x, w, p.target, world, "sum", sequence_parallel=True)
    bits("sequence parallel loss", loss, linear_cross_entropy(p.x, p.w, p.target, reduction="sum"))
    loss.backward()
    assert torch.allclose(x.grad, want[0][rows], atol=1e-5)

    y = p.target.clamp(min=0)
    want = torch.autograd.grad(linear_logp(p.x, p.w, y).logp.sum(), p.x)[0]
    for kind in ("part", "whole"):
        x = leaf(p.x)
        verl.linear_cross_entropy(x, w, y, 1.0, "sum", world, hidden_grad=kind)[0].backward()
        if kind == "part":
            dist.all_reduce(x.grad)
        assert torch.allclose(x.grad, want, atol=1e-5), kind

    # Uneven shards by bounds; then every rank its own part of the sequence, over the same group.
    (first, end), x = cuts(p.v, "uneven")[RANK], leaf(p.x)
    call = dict(vocab_start_index=first, vocab_end_index=end)
    loss = deepspeed.vocab_parallel_linear_cross_entropy(x, p.w.detach()[first:end], p.target, tp_group=world, **call)
    bits("deepspeed mean", loss, linear_cross_entropy(p.x, p.w, p.target))
    part = deepspeed.vocab_parallel_linear_cross_entropy(leaf(p.x[rows]), p.w.detach(), p.target[rows], sp_group=world)
    assert torch.allclose(part, linear_cross_entropy(p.x, p.w, p.target), atol=1e-6)
    x = leaf(p.x[rows])
    deepspeed.vocab_parallel_linear_cross_entropy(x, p.w.detach(), p.target[rows], sp_group=world).backward()
    want = torch.autograd.grad(linear_cross_entropy(p.x, p.w, p.target), p.x)[0]
    assert torch.allclose(x.grad, want[rows], atol=1e-6)


def check_columns(world, z, y):
    """cross_entropy over columns of logits: bits of one rank."""
    from logitless.torch import cross_entropy

    more = {"return_lse": True, "return_entropy": True, "return_argmax": True}
    for options in (
        {},
        {"label_smoothing": 0.1, "softcap": 3.0, "temperature": 0.7},
        {"reduction": "none", "z_loss": 0.01},
    ):
        one = cross_entropy(z, y, **more, **options)
        want = torch.autograd.grad(one.loss.sum() + one.entropy.sum(), z)[0]
        for kind in ("uneven", "empty", "reverse"):
            first, end = cuts(257, kind)[RANK]
            columns = {"group": world, "vocab_start": first, "vocab_size": 257}
            part = z.detach()[:, first:end].clone().requires_grad_()
            out = cross_entropy(part, y, **more, **columns, **options)
            for name in ("loss", "lse", "entropy", "argmax"):
                bits(f"logits {kind} {name}", getattr(out, name), getattr(one, name))
            (out.loss.sum() + out.entropy.sum()).backward()
            bits(f"logits {kind} gradient", part.grad, want[:, first:end])
            held = z.detach()[:, first:end].clone().requires_grad_()
            loss = cross_entropy(held, y, in_place=True, **columns, **options)
            loss.sum().backward()
            whole = torch.autograd.grad(cross_entropy(z, y, **options).sum(), z)[0]
            bits(f"logits {kind} in place", held.detach(), whole[:, first:end])


def logits_and_targets(device="cpu"):
    torch.manual_seed(0)  # the same on every rank
    z = torch.randn(30, 257).mul_(4)
    y = torch.randint(0, 257, (30,))
    y[::4] = -100
    return z.to(device).requires_grad_(), y.to(device)


def check_logits(world):
    """cross_entropy over columns of logits: bits of one rank, DeepSpeed's and Megatron's losses, in place."""
    from logitless.adapters import deepspeed, megatron
    from logitless.torch import cross_entropy

    z, y = logits_and_targets()
    check_columns(world, z, y)
    first, end = cuts(257, "uneven")[RANK]
    held = z.detach()[:, first:end].clone()
    loss = deepspeed.vocab_parallel_cross_entropy(
        held.requires_grad_(), y, tp_group=world, vocab_start_index=first, vocab_end_index=end, in_place=True
    )
    loss.backward()
    bits("in place", held.detach(), torch.autograd.grad(cross_entropy(z, y), z)[0][:, first:end])
    try:
        deepspeed.vocab_parallel_cross_entropy(
            held, y, tp_group=world, vocab_start_index=first, vocab_end_index=end + (RANK == 0)
        )
    except logitless.ArgumentError as error:
        assert "does not hold its shard" in str(error)
    else:
        raise AssertionError("bounds that do not fit were taken")
    rows = slice(16 // SIZE * RANK, 16 // SIZE * (RANK + 1))
    gathered = deepspeed.vocab_parallel_cross_entropy(
        z.detach()[rows].requires_grad_(), y[rows], sp_group=world, reduction="none", gather_sequence_loss=True
    )
    bits("gathered losses", gathered, cross_entropy(z, y, reduction="none")[: 16 // SIZE * SIZE])
    even = torch.zeros(1, 1, 8)
    even[0, 0, 0] = 2  # B41: local means gave 0.816468 and 0.866468
    loss = megatron.vocab_parallel_cross_entropy(
        even[..., 8 // SIZE * RANK : 8 // SIZE * (RANK + 1)], torch.zeros(1, 1, dtype=torch.int64), 0.1, world
    )
    assert abs(loss.item() - 0.866468) < 1e-6


def check_lookup(world):
    """Log-probs and ranks of ids and the top k of logits cut over ranks: the bits of one rank."""
    from logitless.torch import logp_of, top_logp

    torch.manual_seed(0)
    z = torch.randn(30, 257).mul_(4).round_()  # with ties, across shards too
    ids = torch.randint(0, 257, (30, 6))
    one, best = logp_of(z, ids, rank=True, temperature=0.7), top_logp(z, 9, temperature=0.7)
    for kind in ("uneven", "empty", "reverse"):
        first, end = cuts(257, kind)[RANK]
        for _ in range(2):  # made, known
            call = dict(temperature=0.7, group=world, vocab_start=first, vocab_size=257)
            found, top = logp_of(z[:, first:end], ids, rank=True, **call), top_logp(z[:, first:end], 9, **call)
            bits(f"{kind} logp", found.logp, one.logp)
            bits(f"{kind} rank", found.rank, one.rank)
            bits(f"{kind} top ids", top.ids, best.ids)
            bits(f"{kind} top logp", top.logp, best.logp)


def check_ligers_shapes(world):
    """The vocabulary-parallel cases of test_liger_matrix.py, which checks one rank: the same bits."""
    from logitless.torch import cross_entropy

    for s, b, v in ((8, 2, 128), (16, 1, 4096)):
        z, y = torch.randn(s, b, v, generator=torch.Generator().manual_seed(v)), torch.arange(s * b).view(s, b) % v
        for options in ({}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "smoothing_rule": "others"}):
            leaf, part = z.clone().requires_grad_(), z.chunk(SIZE, -1)[RANK].clone().requires_grad_()
            one = cross_entropy(leaf, y, reduction="none", **options)
            cut = cross_entropy(part, y, reduction="none", group=world, **options)
            one.sum().backward()
            cut.sum().backward()
            bits(f"{s} {b} {v} {options}", cut, one)
            bits("gradient", part.grad, leaf.grad.chunk(SIZE, -1)[RANK])
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(521, 2048, generator=generator) * 0.05, torch.randn(320 * SIZE, 2048, generator=generator) * 0.05
    y = torch.randint(0, 320 * SIZE, (521,), generator=generator)
    y[::19] = -100
    w = w.bfloat16()
    one, whole = x.bfloat16().requires_grad_(), w.clone().requires_grad_()
    cut, part = x.bfloat16().requires_grad_(), w.chunk(SIZE)[RANK].clone().requires_grad_()
    found = linear_logp(cut, part, y, temperature=0.8, entropy=True, group=world)
    wanted = linear_logp(one, whole, y, temperature=0.8, entropy=True)
    (found.logp.sum() + found.entropy.sum()).backward()
    (wanted.logp.sum() + wanted.entropy.sum()).backward()
    bits("logp", found.logp, wanted.logp)
    bits("entropy", found.entropy, wanted.entropy)
    bits("grad_w", part.grad, whole.grad.chunk(SIZE)[RANK])
    near("grad_x", cut.grad, one.grad, 4e-3)
    equal_on_ranks("grad_x", cut.grad)


def check_megatrons_own(world):
    """Megatron's own losses over logits cut over ranks, values and gradients."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    from logitless.adapters import megatron

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=SIZE)
    group = parallel_state.get_tensor_model_parallel_group()
    torch.manual_seed(0)
    width = 40
    z, y, up = torch.randn(6, 3, width * SIZE) * 5, torch.randint(0, width * SIZE, (6, 3)), torch.randn(6, 3)
    for dtype, rounding in ((torch.float32, 0), (torch.bfloat16, 4e-3)):
        part = z[..., width * RANK : width * (RANK + 1)].to(dtype)
        for theirs, ours in (
            (vocab_parallel_cross_entropy, lambda z, y: megatron.vocab_parallel_cross_entropy(z, y, 0.0, group)),
            (
                lambda z, y: fused_vocab_parallel_cross_entropy(z, y, group),
                lambda z, y: megatron.fused_vocab_parallel_cross_entropy(z, y, group),
            ),
        ):
            found = []
            for call in (theirs, ours):
                leaf = part.clone().requires_grad_()
                loss = call(leaf * 1, y)
                loss.backward(up)
                found.append((loss.detach(), leaf.grad))
            near(f"{dtype} loss", found[1][0], found[0][0], 1e-6)
            # Megatron's fused loss rounds its gradient to bf16 whatever the logits are.
            fused = theirs is not vocab_parallel_cross_entropy
            near(f"{dtype} gradient", found[1][1], found[0][1], 4e-3 if fused else max(rounding, 1e-6))
            assert found[0][0].shape == found[1][0].shape and found[0][1].shape == found[1][1].shape


def check_verls_own(world):
    """verl's log-probs and entropy over Megatron's groups, as it computes them without its fused kernel (which needs a
    GPU), from logits that exist; the gradient of hidden is summed over ranks outside, as there."""
    import importlib.util
    import types
    from pathlib import Path

    from megatron.core import parallel_state

    from logitless.adapters import verl

    # Without running verl/__init__.py, which wants Ray.
    root = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    for name in ("verl", "verl.utils", "verl.utils.megatron"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits

    torch._dynamo.config.disable = True
    group = parallel_state.get_tensor_model_parallel_group()
    p = Problem("f32:n24:d16:v120", "cpu")
    shard, up = p.w.detach().chunk(SIZE)[RANK], torch.linspace(-1, 2, 24)

    def theirs(x, w):
        logits = x @ w.T / 0.7
        return vocab_parallel_log_probs_from_logits(logits.clone(), p.target), vocab_parallel_entropy(logits)

    def ours(x, w):
        return verl.linear_cross_entropy(x, w, p.target, 0.7, "none", group)

    found = []
    for call in (theirs, ours):
        x, w = p.x.detach().clone().requires_grad_(), shard.clone().requires_grad_()
        logp, entropy = call(x, w)
        ((logp * up).sum() + (entropy * up.flip(0)).sum()).backward()
        dist.all_reduce(x.grad, group=group)
        found.append((logp.detach(), entropy.detach(), x.grad, w.grad))
    for name, a, b in zip(("logp", "entropy", "grad_x", "grad_w"), *found):
        near(name, b, a, 1e-5)


def check_cuda(world):
    """The vocabulary over ranks whose tensors are on GPUs: the bits of one rank; then a captured step."""
    device = torch.device("cuda", RANK % torch.cuda.device_count())
    torch.cuda.set_device(device)
    for text in (
        "f32:n33:d16:v257:bias:ign",
        "bf16:n70:d64:v1000:t0.7:sum",
        "bf16:n300:d128:v4100:ls0.1:zl0.001:cw:tw:none",
    ):
        for kind in ("uneven", "empty", "reverse"):
            p = Problem(text, device)
            one, one_grad_x = run(p, p.w, p.bias)
            first, end = cuts(p.v, kind)[RANK]
            w = p.w.detach()[first:end].clone().requires_grad_()
            bias = None if p.bias is None else p.bias.detach()[first:end].clone().requires_grad_()
            for _ in range(2):  # made, known
                w.grad = None
                try:
                    out, grad_x = run(p, w, bias, group=world, vocab_start=first, vocab_size=p.v)
                except logitless.Error as error:
                    if error.status != "LL_STATUS_UNSUPPORTED":
                        raise
                    print(f"refused: {error}", flush=True)
                    sys.exit(0)
                for name in ("loss", "lse", "entropy", "argmax"):
                    bits(f"{text} {kind} {name}", getattr(out, name), getattr(one, name))
                bits(f"{text} {kind} grad_w", w.grad, p.w.grad[first:end])
                equal_on_ranks("grad_x", grad_x)
                near("grad_x", grad_x, one_grad_x, 1e-5 if p.dtype == torch.float32 else 8e-3)
    fails = False
    try:
        target = p.target if RANK else p.target[:3]
        linear_cross_entropy(p.x, w, target, group=world, vocab_start=first, vocab_size=p.v)
    except logitless.ArgumentError as error:
        fails = ("refused" if RANK else "target is") in str(error)
    assert fails, "a rank's bad argument is an error on all"
    check_columns(world, *logits_and_targets(device))


def check_compiled(world):
    p = Problem("f32:n20:d8:v120", "cpu")
    first, end = cuts(p.v, "equal")[RANK]
    w = p.w.detach()[first:end].clone().requires_grad_()
    step = torch.compile(lambda x, w, y: linear_cross_entropy(x, w, y, group=world), fullgraph=True)
    loss = step(p.x, w, p.target)
    bits("compiled loss", loss, linear_cross_entropy(p.x, p.w, p.target))
    loss.backward()
    whole = torch.autograd.grad(linear_cross_entropy(p.x, p.w, p.target), p.w)[0]
    assert torch.allclose(w.grad, whole[first:end], atol=1e-7)


def check_dead_rank(world):
    """A rank that leaves makes the others fail within the group's time limit, and later calls at once."""
    p = Problem("f32:n9:d8:v64", "cpu")
    first, end = cuts(p.v, "equal")[RANK]
    call = dict(group=world, reduction="none")
    linear_cross_entropy(p.x.detach(), p.w.detach()[first:end], p.target, **call)
    if RANK == SIZE - 1:
        return
    for _ in range(2):
        try:
            linear_cross_entropy(p.x.detach(), p.w.detach()[first:end], p.target, **call)
        except logitless.Error as error:
            assert error.status == "LL_STATUS_COMM", error
        else:
            raise AssertionError("no error without the last rank")


def main():
    torch.set_num_threads(1)
    backend = os.environ.get("LOGITLESS_TEST_BACKEND", "gloo")
    dist.init_process_group(
        backend, init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=SIZE, timeout=timedelta(seconds=60)
    )
    for name in sys.argv[4:]:
        globals()[f"check_{name}"](dist.group.WORLD)
        if name != "dead_rank":
            dist.barrier()
        print(f"ok {name}", flush=True)
    if not {"dead_rank", "megatrons_own"} & set(sys.argv):  # Megatron keeps its groups
        # Whoever keeps a group alive beyond this makes one exit of the interpreter in ten an abort. Optimizers import
        # what follows in the midst of a program.
        importlib.import_module("torch._dynamo")
        group = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        gc.collect()
        assert group() is None, "the group is still alive"
        print("ok ends", flush=True)


if __name__ == "__main__":
    main()

"""Host time of a call from Python, and how much of it is the C library's own: what the package adds.

    python bench/bench_python.py [cpu|cuda] [--json FILE]

The problem is as small as problems get, so that the library's time is that of checks and launches. On a GPU the host
runs ahead: what is timed is how long it takes to queue. The queue is drained between rounds, which are short, so that it
never fills: median and least of 200 rounds of 10 calls. "C library" is the prepared call by itself, with memory that
exists; "bare" is the least that PyTorch asks for the same results: tensors from its allocator and, where there are
gradients, an autograd.Function that does nothing.
"""

import json
import statistics
import sys
import time

import torch

from logitless import _ffi
from logitless.torch import cross_entropy, linear_cross_entropy, linear_logp


def times_us(call, device, rounds=200, calls=10):
    """Median and least of the rounds."""
    found = []
    for _ in range(calls):
        call()
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(found), min(found)


class Bare(torch.autograd.Function):
    """Saves what the loss saves, and allocates what it allocates."""

    @staticmethod
    def forward(ctx, x, w, target):
        rows, space = x.new_empty((3, 16)), x.new_empty(4096)
        ctx.save_for_backward(x, w, target, rows)
        return x.new_empty(()) if space is not None else None

    @staticmethod
    def backward(ctx, up):
        x, w, *_ = ctx.saved_tensors
        return (torch.empty_like(x), torch.empty_like(w), None) if x.new_empty(4096) is not None else None


def c_calls(x, w, y):
    """The library's forward and backward of the call below, prepared, with addresses of memory that exists."""
    torch.autograd.grad(linear_cross_entropy(x, w, y, mode="recompute"), (x, w))  # prepares them
    torch.autograd.grad(linear_cross_entropy(x, w, y, mode="recompute"), (x, w))
    kind = next(kind for kind in _ffi.plans.calls.values() if "backward" in kind.passes)
    forward, backward = kind.passes[True].handle, kind.passes["backward"].handle
    size = max(kind.plan.workspace_bytes) + 64
    space = torch.empty(size, dtype=torch.uint8, device=x.device)
    loss, rows = torch.empty((), device=x.device), torch.empty((3, 16), device=x.device)
    one, grads = torch.ones((), device=x.device), [torch.empty_like(t) for t in (x, w)]
    stream = torch._C._cuda_getCurrentRawStream(kind.index) if x.is_cuda else 0
    tensors = [x, w, y, loss, rows], [x, w, y, rows, one, *grads]
    ahead, back = ([t.data_ptr() for t in ts] for ts in tensors)
    memory = space, loss, rows, one, grads
    return (
        lambda: _ffi.run(forward, stream, 16, space.data_ptr(), size, *ahead),
        lambda: _ffi.run(backward, stream, 16, space.data_ptr(), size, *back),
        memory,
    )


def main():
    arguments = sys.argv[1:]
    device = next((a for a in arguments if a in ("cpu", "cuda")), "cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    x = torch.randn(16, 64, device=device, requires_grad=True)
    w = torch.randn(64, 64, device=device, requires_grad=True)
    y = torch.randint(0, 64, (16,), device=device)
    z = torch.randn(16, 64, device=device, requires_grad=True)
    c_forward, c_backward, memory = c_calls(x, w, y)

    def without_gradients(call):
        def run():
            with torch.no_grad():
                call(x, w, y)

        return run

    def empty():
        return torch.empty((3, 16), device=device), torch.empty((), device=device), torch.empty(16384, device=device)

    def both(call, leaves=(x, w)):
        return lambda: torch.autograd.grad(call(), leaves)

    linear, ce = torch.nn.functional.linear, torch.nn.functional.cross_entropy
    nothing = times_us(without_gradients(lambda *_: None), device)
    ahead, back = times_us(c_forward, device), times_us(c_backward, device)
    whole = tuple(a + b for a, b in zip(ahead, back))
    rows = [
        ("C library, forward", c_forward, None),
        ("C library, backward", c_backward, None),
        ("linear_cross_entropy without gradients", without_gradients(linear_cross_entropy), ahead),
        ("linear_logp without gradients", without_gradients(linear_logp), ahead),
        ("linear_cross_entropy, forward", lambda: linear_cross_entropy(x, w, y, mode="recompute"), ahead),
        ("  forward and backward", both(lambda: linear_cross_entropy(x, w, y, mode="recompute")), whole),
        ("  in one pass", both(lambda: linear_cross_entropy(x, w, y)), None),
        ("cross_entropy, forward and backward", both(lambda: cross_entropy(z, y), z), None),
        ("bare: three tensors", empty, None),
        ("bare: autograd.Function, forward", lambda: Bare.apply(x, w, y), None),
        ("bare: forward and backward", both(lambda: Bare.apply(x, w, y)), None),
        ("torch: linear + cross_entropy, forward", lambda: ce(linear(x, w), y), None),
        ("torch: forward and backward", both(lambda: ce(linear(x, w), y)), None),
    ]
    results = []
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'cpu'}; us a call")
    for name, call, own in rows:
        took = times_us(call, device)
        inside = nothing[0] if "without gradients" in name else 0.0  # torch.no_grad() itself
        added = None if own is None else took[0] - own[0] - inside
        print(f"{name:42s} {took[0]:7.1f} (least {took[1]:7.1f})" + ("" if added is None else f"   added {added:6.1f}"))
        results.append({"call": name.strip(), "us": took[0], "least_us": took[1], "added_us": added})
    if "--json" in arguments:
        with open(arguments[arguments.index("--json") + 1], "w") as file:
            json.dump({"torch": torch.__version__, "device": device, "rows": results}, file, indent=2)
    del memory


if __name__ == "__main__":
    main()

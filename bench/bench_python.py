"""Host time of a call from Python, and how much of it is the C library's own: what the package adds.

    python bench/bench_python.py [cpu|cuda]

The problem is as small as problems get, so that the library's time is that of checks and launches. On a GPU the host runs
ahead; what is timed is how long it takes to queue, with the queue drained between rounds. Best of 7 rounds of 200 calls.
"""

import sys
import time

import torch

from logitless import _ffi
from logitless.torch import _base, _linear_ce, linear_cross_entropy, linear_logp


def best_us(call, device, rounds=7, calls=200):
    best = float("inf")
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    x = torch.randn(16, 64, device=device, requires_grad=True)
    w = torch.randn(64, 64, device=device, requires_grad=True)
    y = torch.randint(0, 64, (16,), device=device)
    options = _base.Options(-100, 1.0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 64, "", 0, 0, 0)
    results = _base.new_results(x, options)
    plan = _linear_ce._plan(x, w, None, None, options)
    space = _base.workspace(x, plan, _ffi.FORWARD)
    grads = [torch.empty_like(t) for t in (x, w)]
    operands = (x.detach(), w.detach(), None, y, None, None, None)
    one, stream = torch.ones((), device=device), _base.stream_of(x)
    back = _base.workspace(x, plan, _ffi.BACKWARD)
    saved = (None, results[1], None, None, None, None, None, None, None)

    def c_forward():
        _ffi.forward(plan.handle, stream, 0, space, *operands, *_base.passed(results), *(None,) * 9)

    def c_backward():
        _ffi.backward(plan.handle, stream, 0, back, *operands, *saved, one, None, None, None, *grads, None, None)

    def train():
        torch.autograd.grad(linear_cross_entropy(x, w, y, mode="recompute"), (x, w))

    def score():
        with torch.no_grad():
            linear_logp(x, w, y)

    linear = torch.nn.functional.linear

    def torch_train():
        torch.autograd.grad(torch.nn.functional.cross_entropy(linear(x, w), y), (x, w))

    c_fwd, c_bwd = best_us(c_forward, device), best_us(c_backward, device)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'cpu'}; us a call")
    for name, call, own in (
        ("forward, no gradients (linear_logp)", score, c_fwd),
        ("forward with autograd", lambda: linear_cross_entropy(x, w, y, mode="recompute"), c_fwd),
        ("forward and backward", train, c_fwd + c_bwd),
        ("torch's linear + cross_entropy, both", torch_train, None),
    ):
        took = best_us(call, device)
        added = "" if own is None else f"   C library {own:6.1f}   Python adds {took - own:6.1f}"
        print(f"{name:38s} {took:7.1f}{added}")


if __name__ == "__main__":
    main()

"""Times ce over given logits on a GPU against the public peers and against a copy, all in one process, in turn.

    LL_CUDA_PATH=build python3 bench/peers_ce_cuda.py --library build/liblogitless.so --json OUT.json
    ... bench/peers_ce_cuda.py 8192x128256:bf16 8192x32000:f32 --rounds 5 --only copy,logitless,torch

A problem is TOKENS x VOCABULARY : DTYPE; logits are normal (deviation 2), the loss is the mean, and a call is forward
and backward. Every round times every method once more (A B A B ...); a number is the median of the rounds.

    copy   b.copy_(a) of the logits: one read and one write, the least that forward and backward can move
    GB/s   of one read and one write of the logits, whatever a method moves; % is that of the copy's rate
    MiB    rise of the allocator's peak over the logits themselves; a gradient that is not put in their place counts
    err    |got - want| / |want| of the gradient of a few rows against double

logitless is measured with the gradient beside the logits, over them (in place: what it writes is not read again, so
after its first call it works on numbers of the same size that are no logits), and by its forward alone. Peers that are
not installed, or refuse, are listed with their reason.
"""
import argparse
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import ll_ctypes
from peers_cuda import driver_version, milliseconds

MIB = 2.0**20
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
DEFAULT = [f"8192x{v}:bf16" for v in (32000, 50304, 102400, 128256, 152064, 201088, 262144)] + [
    f"{n}x128256:bf16" for n in (1024, 2048, 4096, 16384, 32768, 65536)] + [
    f"8192x{v}:f32" for v in (32000, 128256, 262144)]


class Problem:
    def __init__(self, text):
        self.text = text
        sizes, self.dtype_name = text.split(":")
        self.n, self.v = (int(part) for part in sizes.split("x"))
        self.dtype = DTYPES[self.dtype_name]
        generator = torch.Generator("cuda").manual_seed(1)
        self.logits = torch.empty(self.n, self.v, dtype=self.dtype, device="cuda")
        for begin in range(0, self.n, 1024):  # no f32 copy of all of them
            part = self.logits[begin:begin + 1024]
            part.copy_(torch.randn(part.shape, device="cuda", generator=generator).mul_(2.0))
        self.y = torch.randint(0, self.v, (self.n,), device="cuda", generator=generator)
        self.bytes = self.logits.numel() * self.logits.element_size()

    def wanted(self, rows):
        p = torch.softmax(self.logits[rows].double(), 1)
        p[torch.arange(len(rows), device="cuda"), self.y[rows]] -= 1.0
        return p / self.n


class Method:
    def __init__(self, name, run, grad=None, extra_mib=None, keep=(), passes=2):
        self.name, self.run, self.grad, self.extra_mib, self.keep = name, run, grad, extra_mib, keep
        self.passes, self.times, self.peak_mib, self.error = passes, [], None, None


def copy(problem):
    to = torch.empty_like(problem.logits)
    yield Method("copy", lambda: to.copy_(problem.logits), keep=(to,))


def logitless(problem, library):
    x, y = problem.logits, problem.y
    plan = ll_ctypes.CePlan(library, x, backend=ll_ctypes.BACKEND_CUDA)
    size = max(plan.workspace_bytes(name) for name in ll_ctypes.PASSES)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    rows = {name: torch.empty(problem.n, device="cuda") for name in ("nll", "lse")}
    loss, one, grad = torch.empty(1, device="cuda"), torch.ones(1, device="cuda"), torch.empty_like(x)
    print(plan.describe(), flush=True)
    forward = ll_ctypes.ce_args(x, y, workspace, loss=loss, **rows)
    both = ll_ctypes.ce_args(x, y, workspace, grad, loss=loss, up_loss=one, **rows)
    keep = (workspace, rows, loss, one, grad, plan)
    extra = size / MIB
    yield Method("logitless, forward", lambda: plan.run("forward", forward), None, extra, keep, 1)
    yield Method("logitless", lambda: plan.run("forward_backward", both), lambda: grad,
                 extra + problem.bytes / MIB, keep)
    over, state = x.clone(), ll_ctypes.CeState(struct_bytes=ll_ctypes.c.sizeof(ll_ctypes.CeState))
    place = ll_ctypes.ce_args(over, y, workspace, over, state, loss=loss, up_loss=one, **rows)
    yield Method("logitless, in place", lambda: plan.run("forward_backward", place), None, extra, keep + (over, state))


def differentiable(problem, name, function, in_place=False):
    """in_place: the method writes its gradient over what it is given, so that every call works on the last one's."""
    x = (problem.logits.clone() if in_place else problem.logits.detach()).requires_grad_(True)

    def both():
        x.grad = None
        function(x).backward()

    yield Method(name, both, None if in_place else lambda: x.grad)


def torch_methods(problem):
    def loss(x):
        return F.cross_entropy(x.float(), problem.y)

    yield from differentiable(problem, "torch eager", loss)
    yield from differentiable(problem, "torch compiled", torch.compile(loss))


def liger(problem):
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    yield from differentiable(problem, "Liger Triton (in place)",
                              lambda x: LigerCrossEntropyFunction.apply(x, problem.y, None)[0], True)


def quack(problem):
    from quack.cross_entropy import cross_entropy
    yield from differentiable(problem, "QuACK", lambda x: cross_entropy(x, problem.y, reduction="mean"))


def prepare(method, wanted, rows):
    """First call: compiles, checks, and measures memory in a second one."""
    method.run()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    method.run()
    torch.cuda.synchronize()
    method.peak_mib = method.extra_mib
    if method.extra_mib is None:
        method.peak_mib = (torch.cuda.max_memory_allocated() - base) / MIB
    if method.grad:
        got = method.grad()[rows].double()
        method.error = float((got - wanted).norm() / wanted.norm())


def run_problem(text, options, library):
    problem = Problem(text)
    rows = torch.arange(0, problem.n, max(1, problem.n // 4), device="cuda")[:4]
    wanted = problem.wanted(rows)
    sources = {"copy": lambda: copy(problem), "logitless": lambda: logitless(problem, library),
               "torch": lambda: torch_methods(problem), "liger": lambda: liger(problem), "quack": lambda: quack(problem)}
    methods, failures = [], []
    for name, source in sources.items():
        if options.only and name not in options.only.split(","):
            continue
        try:
            for method in source():
                prepare(method, wanted, rows)
                methods.append(method)
        except Exception as error:  # a peer's own: said, and the others go on
            failures.append({"method": name, "why": (type(error).__name__ + ": " + str(error)).split("\n")[0][:300]})
            print(f"{text} | {name} | {failures[-1]['why']}", flush=True)
            torch.cuda.empty_cache()
    for round_ in range(options.rounds + 1):  # the first round warms up
        for method in methods:
            took = milliseconds(method.run)
            if round_:
                method.times.append(took)
    return report(problem, methods, failures)


def report(problem, methods, failures):
    floor = next((statistics.median(m.times) for m in methods if m.name == "copy"), None)
    rows = []
    for m in methods:
        ms = statistics.median(m.times)
        part = floor * m.passes / 2 / ms if floor else None
        rows.append({"method": m.name, "ms": round(ms, 4), "low": round(min(m.times), 4),
                     "high": round(max(m.times), 4), "gb_s": round(m.passes * problem.bytes / ms / 1e6, 1),
                     "of_copy": part and round(part, 3), "extra_mib": round(m.peak_mib, 1), "grad_error": m.error})
        share = "" if part is None else f"{100 * part:.0f} % of a copy"
        error = "" if m.error is None else f"{m.error:.2e}"
        print(f"{problem.text} | {m.name} | {ms:.3f} ms | {rows[-1]['gb_s']:.0f} GB/s | {share} | {m.peak_mib:.0f} MiB | "
              f"{error}", flush=True)
    return {"problem": problem.text, "rows": rows, "not_run": failures}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", default=DEFAULT, metavar="TOKENSxVOCABULARY:DTYPE")
    parser.add_argument("--library", default="build/liblogitless.so")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="some of copy,logitless,torch,liger,quack")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new problem after so long")
    parser.add_argument("--commit", default="", help="written to the JSON file")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    library, begin = ll_ctypes.Library(options.library), time.monotonic()
    result = {"machine": torch.cuda.get_device_name(), "driver": driver_version(), "torch": torch.__version__,
              "cuda": torch.version.cuda, "commit": options.commit, "command": " ".join(sys.argv),
              "rounds": options.rounds, "problems": []}
    for text in options.problems:
        if time.monotonic() - begin > options.seconds:
            print(f"{text} | left out: --seconds {options.seconds:g} have passed")
            continue
        result["problems"].append(run_problem(text, options, library))
        torch.cuda.empty_cache()
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()

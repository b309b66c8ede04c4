"""Times logitless on a GPU against the public peers and against cuBLAS, all in one process, in turn.

    LL_CUDA_PATH=build python3 bench/peers_cuda.py --library build/liblogitless.so --json OUT.json
    ... bench/peers_cuda.py 4096x4096x131072 8192x2048x151936 --rounds 5 --only cublas,logitless,torch

A problem is TOKENS x HIDDEN x VOCABULARY; x and w are random bf16, the loss is the mean. Every round times every
method once more (A B A B ...), because the rate of a card falls as it warms; a number is the median of the rounds.

    G1   the logits GEMM, G3 all three GEMMs (logits, grad_x, grad_w), by cuBLAS through torch.mm, in the same rounds
    MiB  rise of the allocator's peak over inputs and gradients; for logitless: workspace and outputs
    err  |got - want| / |want| of grad_x on sampled rows, want in double from the same bf16 inputs

Peers that are not installed, or that refuse a problem, are listed with their reason. verl's kernel and the
512-token chunk path come from the packages verl (two files of it) and liger-kernel.
"""
import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import types
import zipfile

import torch
import torch.nn.functional as F

import ll_ctypes

MIB = 2.0**20
DEFAULT = ["4096x4096x131072", "8192x4096x131072", "16384x4096x131072", "8192x2048x151936", "8192x5120x202048",
           "8192x7168x129280"]


class Problem:
    def __init__(self, text):
        self.text = text
        self.n, self.d, self.v = (int(part) for part in text.split("x"))
        generator = torch.Generator("cuda").manual_seed(1)
        self.x = torch.randn(self.n, self.d, device="cuda", generator=generator).to(torch.bfloat16)
        self.w = torch.empty(self.v, self.d, device="cuda", dtype=torch.bfloat16)
        for begin in range(0, self.v, 8192):  # no f32 copy of all of w
            rows = min(8192, self.v - begin)
            part = torch.randn(rows, self.d, device="cuda", generator=generator) * (2.0 / self.d**0.5)
            self.w[begin:begin + rows] = part.to(torch.bfloat16)
        self.y = torch.randint(0, self.v, (self.n,), device="cuda", generator=generator)
        self.gemm_flop = 2.0 * self.n * self.d * self.v

    def wanted_grad_x(self, rows):
        """grad_x of the mean loss for some rows, in double."""
        x, y = self.x[rows].double(), self.y[rows]
        z = torch.cat([x @ self.w[b:b + 8192].double().t() for b in range(0, self.v, 8192)], 1)
        p = torch.softmax(z, 1)
        p[torch.arange(len(rows), device="cuda"), y] -= 1.0
        grad = torch.zeros_like(x)
        for b in range(0, self.v, 8192):
            grad += p[:, b:b + 8192] @ self.w[b:b + 8192].double()
        return grad / self.n


class Method:
    """run() does one call on the GPU. gemms: products that it needs at least, for TFLOP/s. keep: tensors that the
    call knows by address only."""

    def __init__(self, name, phase, gemms, run, grad_x=None, extra_mib=None, keep=()):
        self.keep = keep
        self.name, self.phase, self.gemms, self.run, self.grad_x, self.extra_mib = name, phase, gemms, run, grad_x, extra_mib
        self.times, self.peak_mib, self.error = [], None, None


def cublas(problem):
    x, w = problem.x, problem.w
    z = torch.empty(problem.n, problem.v, dtype=torch.bfloat16, device="cuda")
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    torch.mm(x, w.t(), out=z)
    dz = torch.softmax(z.float()[:256], 1).to(torch.bfloat16).repeat(problem.n // 256 + 1, 1)[:problem.n].contiguous()
    yield Method("cublas", "g1", 1, lambda: torch.mm(x, w.t(), out=z))
    yield Method("cublas", "dx", 1, lambda: torch.mm(dz, w, out=dx))
    yield Method("cublas", "dw", 1, lambda: torch.mm(dz.t(), x, out=dw))


def logitless(problem, library):
    x, w, y = problem.x, problem.w, problem.y
    outputs = {name: torch.empty(problem.n, device="cuda") for name in ("nll", "lse", "lse_lo", "entropy")}
    loss, one = torch.empty(1, device="cuda"), torch.ones(1, device="cuda")
    grad_x = torch.empty_like(x)
    for grad_dtype, torch_dtype in ((None, torch.bfloat16), ("f32", torch.float32)):
        plan = ll_ctypes.Plan(library, x, w, grad_w_dtype=grad_dtype, backend=ll_ctypes.BACKEND_CUDA)
        grad_w = torch.empty(problem.v, problem.d, dtype=torch_dtype, device="cuda")
        size = {name: plan.workspace_bytes(name) for name in ll_ctypes.PASSES}
        workspace = torch.empty(max(size.values()), dtype=torch.uint8, device="cuda")
        saved, keep = dict(outputs), (outputs, loss, one, grad_x, grad_w, workspace)
        forward = ll_ctypes.linear_ce_args(x, w, y, workspace, loss=loss, **saved)
        both = ll_ctypes.linear_ce_args(x, w, y, workspace, (grad_x, grad_w), loss=loss, up_loss=one, **saved)
        backward = ll_ctypes.linear_ce_args(x, w, y, workspace, (grad_x, grad_w), up_loss=one, **saved)
        name = "logitless" + ("" if grad_dtype is None else ", f32 grad_w")
        print(plan.describe(), flush=True)

        def apart(plan=plan, forward=forward, backward=backward):
            plan.run("forward", forward)
            plan.run("backward", backward)

        if grad_dtype is None:
            yield Method(name, "fwd", 1, lambda plan=plan, a=forward: plan.run("forward", a), None,
                         size["forward"] / MIB, keep)
        yield Method(name, "fwd+bwd", 3, lambda plan=plan, a=both: plan.run("forward_backward", a), lambda: grad_x,
                     size["forward_backward"] / MIB, keep)
        yield Method(name, "fwd, bwd", 4, apart, lambda: grad_x, max(size["forward"], size["backward"]) / MIB, keep)


def differentiable(problem, name, function, gemms, forward=True):
    """Methods of a function of (x, w) that gives a mean loss."""
    x, w = problem.x.detach().requires_grad_(True), problem.w.detach().requires_grad_(True)

    def both():
        x.grad = w.grad = None
        function(x, w).backward()

    def only_forward():
        with torch.no_grad():
            function(x, w)

    if forward:
        yield Method(name, "fwd", 1, only_forward)
    yield Method(name, "fwd+bwd", gemms, both, lambda: x.grad)


def torch_methods(problem):
    def loss(x, w):
        return F.cross_entropy(F.linear(x, w).float(), problem.y)

    if problem.n <= 8192:
        yield from differentiable(problem, "torch eager", loss, 3)
    yield from differentiable(problem, "torch compiled", torch.compile(loss), 3, False)


def liger(problem):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Triton
    y = problem.y
    yield from differentiable(problem, "Liger Triton", lambda x, w: Triton.apply(x, w, y)[0], 3)
    yield from differentiable(problem, "Liger Triton, f32 sums", lambda x, w: Triton.apply(
        x, w, y, None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32)[0], 3, False)


def liger_chunks(problem):
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import _FusedLinearPPOFallbackFunction as Chunks
    y = problem.y
    yield from differentiable(problem, "512-token chunks", lambda x, w: Chunks.apply(x, w, y, 1.0, -100, False).mean(), 4)


def liger_cute(problem):
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import liger_fused_linear_cross_entropy_sm90
    y = problem.y

    def loss(x, w):
        result = liger_fused_linear_cross_entropy_sm90(x, w, y)
        return result[0] if isinstance(result, tuple) else result

    yield from differentiable(problem, "Liger CuTe", loss, 3, False)


def cut_cross_entropy(problem):
    from cut_cross_entropy import linear_cross_entropy
    yield from differentiable(problem, "Cut Cross-Entropy", lambda x, w: linear_cross_entropy(
        x, w, problem.y, reduction="mean"), 4)


def quack(problem):
    from quack.linear_cross_entropy import chunked_linear_cross_entropy
    yield from differentiable(problem, "QuACK", lambda x, w: chunked_linear_cross_entropy(x, w, problem.y), 3)


def verl(problem, wheel):
    if not wheel:
        raise RuntimeError("give --verl WHEEL")
    folder = "/tmp/peers_cuda_verl"
    with zipfile.ZipFile(wheel) as archive:
        for name in ("kernels", "linear_cross_entropy"):
            archive.extract(f"verl/utils/kernel/{name}.py", folder)
    device = types.ModuleType("verl.utils.device")
    device.get_device_capability = lambda i=0: torch.cuda.get_device_capability(i)
    device.get_device_name = lambda: "cuda"
    device.is_cuda_available = True
    device.get_torch_device = lambda: torch.cuda
    for name in ("verl", "verl.utils", "verl.utils.kernel"):
        module = types.ModuleType(name)
        module.__path__ = [f"{folder}/{name.replace('.', '/')}"]
        sys.modules[name] = module
    sys.modules["verl.utils.device"] = device
    from verl.utils.kernel import kernels
    sys.modules["verl.utils.kernel"].kernels = kernels
    spec = importlib.util.spec_from_file_location("verl.utils.kernel.linear_cross_entropy",
                                                  f"{folder}/verl/utils/kernel/linear_cross_entropy.py")
    module = importlib.util.module_from_spec(spec)
    module.__package__ = "verl.utils.kernel"
    spec.loader.exec_module(module)
    yield from differentiable(problem, "verl Triton", lambda x, w: -module.LinearCrossEntropy.apply(
        x, w, problem.y, 1.0, "none", None)[0].mean(), 4)


def milliseconds(run):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def prepare(method, problem, wanted, rows):
    """First call: compiles, checks, and measures memory in a second one."""
    method.run()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    method.run()
    torch.cuda.synchronize()
    if method.extra_mib is None:
        method.peak_mib = (torch.cuda.max_memory_allocated() - base) / MIB
    else:
        method.peak_mib = method.extra_mib + 16.0 * problem.n / MIB
    if method.grad_x:
        got = method.grad_x()[rows].double()
        method.grad_error = float((got - wanted).norm() / wanted.norm())


def run_problem(text, options, library):
    problem = Problem(text)
    rows = torch.arange(0, problem.n, max(1, problem.n // 8), device="cuda")[:8]
    wanted = problem.wanted_grad_x(rows)
    sources = {"cublas": lambda: cublas(problem), "logitless": lambda: logitless(problem, library),
               "torch": lambda: torch_methods(problem), "liger": lambda: liger(problem), "chunks": lambda: liger_chunks(problem),
               "cute": lambda: liger_cute(problem), "cce": lambda: cut_cross_entropy(problem), "quack": lambda: quack(problem),
               "verl": lambda: verl(problem, options.verl)}
    methods, failures = [], []
    for name, source in sources.items():
        if options.only and name not in options.only.split(","):
            continue
        try:
            for method in source():
                prepare(method, problem, wanted, rows)
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
    median = {(m.name, m.phase): statistics.median(m.times) for m in methods}
    g1 = median.get(("cublas", "g1"))
    g3 = g1 and g1 + median[("cublas", "dx")] + median[("cublas", "dw")]
    floor = {"fwd": g1, "fwd+bwd": g3, "fwd, bwd": g1 and g1 + g3}
    rows = []
    for m in methods:
        ms = median[(m.name, m.phase)]
        base = floor.get(m.phase)
        rows.append({"method": m.name, "phase": m.phase, "ms": round(ms, 3), "low": round(min(m.times), 3),
                     "high": round(max(m.times), 3), "tflops": round(m.gemms * problem.gemm_flop / ms / 1e9, 1),
                     "x_gemms": round(ms / base, 3) if base else None, "extra_mib": round(m.peak_mib, 1),
                     "grad_x_error": getattr(m, "grad_error", None)})
        error = "" if rows[-1]["grad_x_error"] is None else f"{rows[-1]['grad_x_error']:.2e}"
        print(f"{problem.text} | {m.name} | {m.phase} | {ms:.3f} ms | {rows[-1]['tflops']} TFLOP/s | "
              f"{rows[-1]['x_gemms']} x GEMMs | {m.peak_mib:.0f} MiB | {error}", flush=True)
    return {"problem": problem.text, "g1_ms": g1, "g3_ms": g3, "rows": rows, "not_run": failures}


def copy_bandwidth():
    a = torch.empty(2**31, dtype=torch.bfloat16, device="cuda").normal_()
    b = torch.empty_like(a)
    times = [milliseconds(lambda: b.copy_(a)) for _ in range(12)][2:]
    return 4.0 * a.numel() / statistics.median(times) / 1e6


def driver_version():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().split("\n")[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", default=DEFAULT, metavar="TOKENSxHIDDENxVOCABULARY")
    parser.add_argument("--library", default="build/liblogitless.so")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="some of cublas,logitless,torch,liger,chunks,cute,cce,quack,verl")
    parser.add_argument("--verl", metavar="WHEEL", help="the package verl, for its Triton kernel")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new problem after so long")
    parser.add_argument("--commit", default="", help="written to the JSON file")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    library, begin = ll_ctypes.Library(options.library), time.monotonic()
    result = {"machine": torch.cuda.get_device_name(), "driver": driver_version(), "torch": torch.__version__,
              "cuda": torch.version.cuda, "commit": options.commit, "command": " ".join(sys.argv),
              "rounds": options.rounds, "copy_gb_s": round(copy_bandwidth(), 1), "problems": []}
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

"""One side of bench/peers_cpu.py in a process of its own: PyTorch or logitless on the same inputs.

Reads one JSON request a line from stdin and answers each with one JSON line. A side has its own process
because its peak memory is the process's, because no allocator, cache of packed weights or spinning OpenMP
thread of one side can then help or disturb the other, and because it sleeps in read() while the other runs.
Which problem is timed when is the parent's business.
"""
import argparse
import ctypes
import json
import os
import sys
import time

import torch
import torch.nn.functional as F

import ll_ctypes

TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
COMPARE_ROWS = 4096


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes():
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def timed(function):
    """{loss, ms, and bytes by which the resident set rose during the call at its highest}; function gives the
    loss. ru_maxrss is VmHWM of the whole life of the process; writing 5 to clear_refs starts it again, so that
    making the inputs does not hide a rise."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = resident_bytes()
    begin = time.perf_counter()
    loss = function()
    seconds = time.perf_counter() - begin
    return {"loss": loss, "ms": 1e3 * seconds, "rise_bytes": max(0, peak_bytes() - before)}


def measured(function):
    """The same after free heap went back to the system: what is free but resident would hide a rise."""
    ctypes.CDLL(None).malloc_trim(0)
    return timed(function)


class Inputs:
    """x [n, d] normal, w [v, d] normal with logits of deviation 1, y [n] uniform; equal in both processes."""

    def __init__(self, n, d, v, dtype, seed=1):
        random = torch.Generator().manual_seed(seed)
        make = TORCH_DTYPES[dtype]
        self.x = torch.empty(n, d, dtype=make).normal_(generator=random)
        self.w = torch.empty(v, d, dtype=make).normal_(0, d ** -0.5, generator=random)
        self.y = torch.randint(v, (n,), generator=random)


class TorchSide:
    """F.linear + F.cross_entropy. Timed as a training step has it: .grad is None, and the backward keeps the
    memory that it made. `measure` has .grad from the start and adds to it, as gradient accumulation does, so
    that the gradients' own memory is not part of the rise, as for the other side."""

    def __init__(self, _library):
        self.versions = {"torch": torch.__version__, "isa": torch.backends.cpu.get_cpu_capability()}

    def make(self, request):
        self.inputs = None
        self.inputs = Inputs(request["n"], request["d"], request["v"], request["dtype"])
        return {}

    def call(self, request, leaves):
        if request["pass"] == "forward":
            with torch.no_grad():
                return F.cross_entropy(F.linear(*leaves), self.inputs.y[:request["tokens"]]).item()
        loss = F.cross_entropy(F.linear(*leaves), self.inputs.y[:request["tokens"]])
        loss.backward()
        return loss.item()

    def leaves(self, request):
        torch.set_num_threads(request["threads"])
        return [tensor.detach().requires_grad_()
                for tensor in (self.inputs.x[:request["tokens"]], self.inputs.w)]

    def widened_loss(self, request):
        """PyTorch's loss of the same inputs widened to f32."""
        wide = [tensor.float() for tensor in (self.inputs.x[:request["tokens"]], self.inputs.w)]
        return {"loss": self.call({**request, "pass": "forward"}, wide)}

    def measure(self, request):
        leaves = self.leaves(request)
        if request["pass"] != "forward":
            for leaf in leaves:
                leaf.grad = torch.empty_like(leaf).fill_(0)
        answer = measured(lambda: self.call(request, leaves))
        for leaf, path in zip(leaves, request.get("save", ())):
            leaf.grad.view(torch.uint8).numpy().tofile(path)
        return answer

    def run(self, request):
        leaves = self.leaves(request)
        run = measured if request.get("trim") else timed
        return run(lambda: self.call(request, leaves))


class LogitlessSide:
    """A plan for each dtype of gradients, a workspace for each pass of it, both made once and, with the
    plan's threads, counted as extra memory of that pass's first call."""

    def __init__(self, library):
        self.library = ll_ctypes.Library(library)
        self.versions = {"logitless": self.library.version}

    def make(self, request):
        for plan in getattr(self, "plans", {}).values():
            plan.close()
        self.inputs, self.plans, self.workspaces, self.grads = None, {}, {}, {}
        self.inputs = Inputs(request["n"], request["d"], request["v"], request["dtype"])
        x, w = self.inputs.x, self.inputs.w
        for dtype in request["grad_dtypes"]:
            # empty and fill, for zeros() would leave pages that the timed call has to fault in
            self.grads[dtype] = [torch.empty(t.shape, dtype=TORCH_DTYPES[dtype]).fill_(0) for t in (x, w)]
        n = x.shape[0]
        self.results = {name: torch.empty(n).fill_(0) for name in ("nll", "lse")}
        self.results["loss"] = torch.empty(1).fill_(0)
        self.up_loss = torch.ones(1)
        return {}

    def prepare(self, request):
        dtype, name, n = request["grads"], request["pass"], request["tokens"]
        if dtype not in self.plans:
            self.plans[dtype] = self.plan(dtype, request)
        if (dtype, name) not in self.workspaces:
            size = self.plans[dtype].workspace_bytes(name)
            self.workspaces[dtype, name] = torch.empty(size + 64, dtype=torch.uint8)
        grads, more = None, {}
        if name != "forward":
            grads = self.grads[dtype][0][:n], self.grads[dtype][1]
            more = {"up_loss": self.up_loss}
        args = ll_ctypes.linear_ce_args(self.inputs.x[:n], self.inputs.w, self.inputs.y[:n],
                                        self.workspaces[dtype, name], grads, **self.results, **more)
        return self.plans[dtype], args

    def plan(self, dtype, request):
        """Within the budget asked for, or, if the least needed is more, as the library likes it."""
        more = {"grad_dtype": dtype, "n_threads": request["threads"]}
        budget = request.get("budget_bytes", 0)
        try:
            return ll_ctypes.Plan(self.library, self.inputs.x, self.inputs.w, budget_bytes=budget, **more)
        except ll_ctypes.Error as error:
            if error.status != ll_ctypes.STATUS_WORKSPACE or not budget:
                raise
            return ll_ctypes.Plan(self.library, self.inputs.x, self.inputs.w, **more)

    def call(self, request):
        plan, args = self.prepare(request)
        plan.run(request["pass"], args)
        return self.results["loss"].item()

    def measure(self, request):
        answer = measured(lambda: self.call(request))
        plan = self.plans[request["grads"]]
        return {**answer, "kernel": plan.kernel, "numerics": plan.numerics, "threads": plan.n_threads,
                "describe": plan.describe(), "workspace_bytes": plan.workspace_bytes(request["pass"])}

    def run(self, request):
        self.prepare(request)
        return timed(lambda: self.call(request))

    def compare(self, request):
        """|ours - saved| / |saved| over each whole gradient, in double."""
        grad_x, grad_w = self.grads[request["grads"]]
        dtype, distances = TORCH_DTYPES[request["dtype"]], []
        for path, ours in zip(request["saved"], (grad_x[:request["tokens"]], grad_w)):
            saved = torch.from_file(path, shared=False, size=ours.numel(), dtype=dtype).view(ours.shape)
            error, norm = 0.0, 0.0
            for row in range(0, ours.shape[0], COMPARE_ROWS):
                theirs = saved[row:row + COMPARE_ROWS].float()
                error += (ours[row:row + COMPARE_ROWS].float() - theirs).double().square().sum().item()
                norm += theirs.double().square().sum().item()
            distances.append((error / norm) ** 0.5 if norm else float(error > 0))
        return {"grad_x": distances[0], "grad_w": distances[1]}


def warm_up(side, request):
    """Code pages, thread stacks and the library's own buffers are no memory of the problem."""
    for dtype in ("f32", "bf16"):
        side.make({"n": 64, "d": 128, "v": 512, "dtype": dtype, "grad_dtypes": [dtype]})
        for name in ("forward", "forward_backward"):
            side.run({**request, "pass": name, "tokens": 64, "grads": dtype})
    return {}


def main():
    options = argparse.ArgumentParser()
    options.add_argument("side", choices=("torch", "logitless"))
    options.add_argument("library")
    arguments = options.parse_args()
    side = {"torch": TorchSide, "logitless": LogitlessSide}[arguments.side](arguments.library)
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        try:
            if what == "versions":
                answer = side.versions
            else:
                answer = warm_up(side, request) if what == "warm_up" else getattr(side, what)(request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

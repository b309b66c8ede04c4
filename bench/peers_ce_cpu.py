#!/usr/bin/env python3
"""`ce` of logitless against PyTorch's F.cross_entropy over given logits on this CPU: time and memory.

As in peers_cpu.py each side lives in a process of its own (this file with --side) on equal inputs, the two are
asked in turn, A B A B, and results are compared before anything is timed. bench/README.md explains the table.
"""
import argparse
import datetime
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time

import peers_cpu
from peers_cpu import ROOT, Failure

PROBLEMS = ["n2048:v32000", "n2048:v50257", "n2048:v128256", "n2048:v151936"]
# fwd: loss alone. fb: loss and gradient, PyTorch's forward and backward. in place: the gradient over the logits,
# which PyTorch cannot do; its peer is PyTorch's fb.
VARIANTS = {"fwd": "forward", "fb": "forward_backward", "fb in place": "forward_backward"}
HEADER = ["problem", "dtype", "pass", "torch ms", "logitless ms", "ratio", "GB/s", "torch MiB", "logitless MiB"]


class Side(peers_cpu.Side):
    def __init__(self, name, library):
        self.name = name
        command = [sys.executable, os.path.abspath(__file__), "--side", name, "--library", library]
        # huge pages for PyTorch's fresh gradients, as in peers_cpu.py
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, "THP_MEM_ALLOC_ENABLE": "1"})


# ---- The two sides, each in its process -------------------------------------------------------------------

def inputs_of(request):
    """Logits of deviation 2 and uniform targets; equal in both processes."""
    import torch
    from peers_worker import TORCH_DTYPES
    random = torch.Generator().manual_seed(1)
    n, v = request["n"], request["v"]
    logits = torch.empty(n, v).normal_(0, 2, generator=random).to(TORCH_DTYPES[request["dtype"]])
    return logits, torch.randint(v, (n,), generator=random)


class TorchSide:
    def __init__(self, _library):
        import torch
        self.versions = {"torch": torch.__version__, "isa": torch.backends.cpu.get_cpu_capability()}

    def make(self, request):
        self.logits = self.leaf = None
        self.logits, self.target = inputs_of(request)
        return {}

    def call(self, variant):
        import torch
        import torch.nn.functional as F
        if variant == "fwd":
            with torch.no_grad():
                return F.cross_entropy(self.logits, self.target).item()
        loss = F.cross_entropy(self.leaf, self.target)
        loss.backward()
        return loss.item()

    def run(self, request):
        import torch
        from peers_worker import measured
        torch.set_num_threads(request["threads"])
        self.leaf = self.logits.detach().requires_grad_()  # .grad is None, as after zero_grad()
        return measured(lambda: self.call(request["variant"]))

    def sample(self, _request):
        """Loss of the same logits in f32, and some rows of the last gradient."""
        import torch.nn.functional as F
        wide = F.cross_entropy(self.logits.float(), self.target).item()
        return {"loss": wide, "rows": self.leaf.grad[::257].float().tolist()}


class LogitlessSide:
    def __init__(self, library):
        import ll_ctypes
        self.library = ll_ctypes.Library(library)
        self.versions = {"logitless": self.library.version}

    def make(self, request):
        import ll_ctypes
        import torch
        if getattr(self, "plan", None):
            self.plan.close()
        self.logits, self.target = inputs_of(request)
        self.grad = torch.empty_like(self.logits).fill_(0)
        self.plan = ll_ctypes.CePlan(self.library, self.logits, n_threads=request["threads"])
        size = max(self.plan.workspace_bytes(name) for name in ll_ctypes.PASSES)
        self.workspace = torch.empty(size + 64, dtype=torch.uint8)
        self.results = {name: torch.zeros(self.logits.shape[0]) for name in ("nll", "lse")}
        self.results["loss"], self.up_loss = torch.zeros(1), torch.ones(1)
        return {"kernel": self.plan.kernel, "numerics": self.plan.numerics, "threads": self.plan.n_threads,
                "describe": self.plan.describe(), "workspace_bytes": size}

    def run(self, request):
        import ll_ctypes
        from peers_worker import measured
        more, state = {}, None
        if request["variant"] != "fwd":
            more = {"grad_logits": self.grad, "up_loss": self.up_loss}
        logits = self.logits
        if request["variant"] == "fb in place":
            self.grad.copy_(self.logits)  # fresh logits, which the call overwrites
            logits, state = self.grad, ll_ctypes.CeState(struct_bytes=ll_ctypes.c.sizeof(ll_ctypes.CeState))
        args = ll_ctypes.ce_args(logits, self.target, self.workspace, state=state, **self.results, **more)

        def call():
            self.plan.run(VARIANTS[request["variant"]], args)
            return self.results["loss"].item()
        return measured(call)

    def sample(self, _request):
        return {"loss": self.results["loss"].item(), "rows": self.grad[::257].float().tolist()}


def serve(side):
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        try:
            answer = side.versions if what == "versions" else getattr(side, what)(request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


# ---- The comparison ---------------------------------------------------------------------------------------

def check(text, dtype, torch, ours):
    """How far loss and gradients are apart."""
    import torch as pytorch
    theirs, own = torch.ask("sample"), ours.ask("sample")
    a, b = pytorch.tensor(theirs["rows"], dtype=pytorch.double), pytorch.tensor(own["rows"], dtype=pytorch.double)
    apart = {"loss": peers_cpu.relative(own["loss"], theirs["loss"]), "gradient": ((a - b).norm() / a.norm()).item()}
    if not (apart["loss"] <= peers_cpu.LOSS_TOLERANCE and apart["gradient"] <= peers_cpu.GRADIENT_TOLERANCE[dtype]):
        raise Failure(f"{text} {dtype}: results are apart by {apart}")
    return apart


def run_problem(text, dtype, torch, ours, here, options):
    n, v = (int(part[1:]) for part in text.split(":"))
    request = {"n": n, "v": v, "dtype": dtype, "threads": options.threads}
    torch.ask("make", **request)
    about = ours.ask("make", **request)
    counts = peers_cpu.thread_counts(here)
    for variant in VARIANTS:
        # PyTorch with the number of threads that suits it best
        trials = {count: torch.ask("run", variant=variant, threads=count)["ms"] for count in counts}
        best = min(trials, key=trials.get)
        times = {"torch": [], "logitless": []}
        first = None
        for _ in range(options.rounds):
            theirs = torch.ask("run", variant=variant, threads=best)
            own = ours.ask("run", variant=variant)
            times["torch"].append(theirs["ms"])
            times["logitless"].append(own["ms"])
            first = first or (theirs, own)
        apart = check(text, dtype, torch, ours) if variant != "fwd" else None
        ms = {key: statistics.median(values) for key, values in times.items()}
        passes = 1 if variant == "fwd" else 2
        moved = passes * n * v * peers_cpu.ELEMENT_BYTES[dtype]
        yield {"problem": text, "dtype": dtype, "pass": variant, "torch_ms": ms["torch"],
               "logitless_ms": ms["logitless"], "time_ratio": ms["logitless"] / ms["torch"],
               "gbytes_per_s": moved / ms["logitless"] * 1e-6, "torch_extra_bytes": first[0]["rise_bytes"],
               "logitless_extra_bytes": first[1]["rise_bytes"], "apart": apart, "torch_threads": best,
               "thread_trials_ms": trials, "torch_all_ms": times["torch"], "logitless_all_ms": times["logitless"],
               "logitless": about, "load_average": os.getloadavg()[0]}


def table_line(row):
    cells = [row["problem"], row["dtype"], row["pass"], f"{row['torch_ms']:.1f}", f"{row['logitless_ms']:.1f}",
             f"{row['time_ratio']:.2f}", f"{row['gbytes_per_s']:.1f}", f"{row['torch_extra_bytes'] / 2**20:.1f}",
             f"{row['logitless_extra_bytes'] / 2**20:.1f}"]
    return "| " + " | ".join(cells) + " |"


def arguments():
    parser = argparse.ArgumentParser(description="ce of logitless against PyTorch on this CPU; see bench/README.md")
    parser.add_argument("problems", nargs="*", metavar="nN:vV", help="default: four usual shapes")
    parser.add_argument("--library", default=os.path.join(ROOT, "build", "liblogitless.so"))
    parser.add_argument("--dtypes", default="f32,bf16", help="default f32,bf16")
    parser.add_argument("--threads", type=int, default=0, help="of logitless; default: as the library chooses")
    parser.add_argument("--rounds", type=int, default=7, help="A B rounds")
    parser.add_argument("--json", metavar="FILE", help="everything measured, for bench/results/")
    parser.add_argument("--side", choices=("torch", "logitless"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.problems = options.problems or PROBLEMS
    options.dtypes = options.dtypes.split(",")
    for text in options.problems:
        if not re.fullmatch(r"n[1-9]\d*:v[1-9]\d*", text):
            parser.error(f"found problem {text!r}, wanted nTOKENS:vVOCABULARY, both at least 1")
    for dtype in options.dtypes:
        if dtype not in peers_cpu.GRADIENT_TOLERANCE:
            parser.error(f"--dtypes: found {dtype!r}, wanted f32, bf16 or both")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not os.path.exists(options.library):
        parser.error(f"--library {options.library}: no such file; run make first")
    return options


def main():
    options = arguments()
    if options.side:
        serve({"torch": TorchSide, "logitless": LogitlessSide}[options.side](options.library))
        return 0
    here, began = peers_cpu.machine(), time.time()
    sides = [Side(name, os.path.abspath(options.library)) for name in ("torch", "logitless")]
    rows, code = [], 0
    try:
        versions = {"python": sys.version.split()[0]}
        for side in sides:
            versions.update(side.ask("versions"))
        print(f"{here['cpu']}, {here['cores']} cores, {' '.join(here['isa'])}; logitless {versions['logitless']}, "
              f"torch {versions['torch']}; load average {os.getloadavg()[0]:.1f}")
        print("| " + " | ".join(HEADER) + " |\n" + "|---|---|---" + "|---:" * (len(HEADER) - 3) + "|", flush=True)
        for text in options.problems:
            for dtype in options.dtypes:
                for row in run_problem(text, dtype, *sides, here, options):
                    rows.append(row)
                    print(table_line(row), flush=True)
    except Failure as failure:
        print(f"peers_ce_cpu: {failure}", file=sys.stderr)
        code = 1
    finally:
        for side in sides:
            side.close()
    if options.json and not code:
        command = shlex.join(["python", os.path.relpath(os.path.abspath(sys.argv[0]), ROOT), *sys.argv[1:]])
        git = peers_cpu.output_of
        result = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                  "command": command, "commit": git("git", "rev-parse", "HEAD"),
                  "modified": bool(git("git", "status", "--porcelain")), "machine": here, "versions": versions,
                  "seconds": round(time.time() - began, 1), "rows": rows}
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

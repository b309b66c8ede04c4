#!/usr/bin/env python3
"""logitless against PyTorch's F.linear + F.cross_entropy on this CPU: time, part of the FMA peak, memory.

Each side lives in a child process of its own (bench/peers_worker.py says why) and the two are asked in turn,
A B A B, so that a clock that falls or a neighbour that wakes hits both. Before anything is timed the results
are compared. bench/README.md explains the table.
"""
import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
PROBLEMS = ["n2048:d1024:v50257", "n1024:d2048:v128256", "n4096:d768:v50257", "n1:d4096:v151936"]
ELEMENT_BYTES = {"f32": 4, "bf16": 2}
# Relative norm of the gradients' difference. PyTorch rounds bf16 logits and their gradients to bf16 (up to
# 2^-8 each), ours are f32.
GRADIENT_TOLERANCE = {"f32": 1e-4, "bf16": 3e-2}
# Relative, of the loss, also for bf16: there PyTorch's own loss is off by up to a hundredth, so ours is compared
# with PyTorch's f32 loss of the same inputs.
LOSS_TOLERANCE = 1e-5
ISA_FLAGS = "avx2 fma avx512f avx512_bf16 avx512_fp16 avx512_vnni amx_bf16 amx_tile asimd bf16 sve".split()
PAUSE_S = 0.1    # between the sides: OpenMP threads spin for some ms after their work
SHORT_MS = 500   # below: three times the rounds
HEADER = ["problem", "dtype", "pass", "torch ms", "logitless ms", "ratio", "% FMA peak", "torch MiB",
          "logitless MiB", "ratio", "with grads"]


class Failure(Exception):
    pass


class Side:
    def __init__(self, name, library, environment):
        self.name = name
        self.process = subprocess.Popen([sys.executable, os.path.join(HERE, "peers_worker.py"), name, library],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def ask(self, what, **request):
        time.sleep(PAUSE_S)
        try:
            self.process.stdin.write(json.dumps({"do": what, **request}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Failure(f"the process of {self.name} ended with {self.process.wait()} (-9: out of memory?)")
        answer = json.loads(line)
        if "error" in answer:
            raise Failure(f"{self.name}, {what} {request}: {answer['error']}")
        return answer

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def output_of(*command):
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine():
    cores, model, flags = set(), "unknown", ""
    package = "0"
    with open("/proc/cpuinfo") as file:
        for line in file:
            key, _, value = (part.strip() for part in line.partition(":"))
            if key == "model name":
                model = value
            elif key in ("flags", "Features"):
                flags = value
            elif key == "physical id":
                package = value
            elif key == "core id":
                cores.add((package, value))
    usable = len(os.sched_getaffinity(0))
    with open("/proc/meminfo") as file:
        memory_kb = int(file.readline().split()[1])
    return {"cpu": model, "cpus": usable, "cores": min(len(cores) or usable, usable),
            "isa": [flag for flag in ISA_FLAGS if flag in flags.split()],
            "memory_gib": round(memory_kb / 2**20, 1), "kernel": os.uname().release}


def fma_peak(program):
    """GFLOP/s of a loop of independent FMAs on all cores, from the program; None without one."""
    if not os.path.exists(program):
        return None
    text = output_of(os.path.abspath(program), "bench", "--json", "--seconds", "0", "f:f32:n1:d64:v64")
    return json.loads(text)["fma_peak_gflops"] if text else None


def thread_counts(here):
    """1, 2, 4, ... and all cores, and all CPUs where a core has two."""
    counts = {here["cores"], here["cpus"]}
    count = 1
    while count < here["cores"]:
        counts.add(count)
        count *= 2
    return sorted(counts)


def best_threads(torch, n, counts):
    """Thread count of either pass, tried on an eighth of the tokens; only counts near the forward's best are
    tried for the backward. {pass: {count: ms}} of all trials."""
    tokens = max(1, n // 8)
    trials = {"forward": {}, "forward_backward": {}}
    for name, times in trials.items():
        for count in counts:
            forward = trials["forward"]
            if name != "forward" and forward[count] > 1.5 * min(forward.values()):
                continue
            request = {"pass": name, "tokens": tokens, "threads": count}
            times[count] = min(torch.ask("run", **request)["ms"] for _ in range(2))
    return trials


def affordable_tokens(torch, n, threads, cap_s):
    """(tokens, False) if PyTorch's forward, and forward and backward (4 forwards in all) take under cap_s, else
    (tokens of which they do, True): bf16 without bf16 instructions is up to 499 times slower than f32. Few
    tokens overestimate, so a bad answer of the first probe is checked by a second."""
    for probe in (min(4, n), min(32, n)):
        answer = torch.ask("run", **{"pass": "forward", "tokens": probe, "threads": threads})
        token_s = 4 * answer["ms"] / 1e3 / probe
        if n * token_s <= cap_s:
            return n, False
    return min(n, max(1, int(cap_s / token_s))), True


def relative(value, wanted):
    return abs(value - wanted) / abs(wanted)


def compare(text, sides, row, scratch, tokens, threads, options):
    """First forward_backward of both sides: gradients against each other, and the memory of both passes."""
    torch, ours = sides
    saved = [os.path.join(scratch, name) for name in ("grad_x", "grad_w")]
    grad_limit = GRADIENT_TOLERANCE[row["dtype"]]
    torch_runs = {}
    for name in ("forward", "forward_backward"):
        more = {"save": saved} if name != "forward" else {}
        torch_runs[name] = torch.ask("measure", **{"pass": name, "tokens": tokens, "threads": threads[name]}, **more)
    row["torch"] = torch_runs
    row["f32_loss"] = torch_runs["forward"]["loss"]
    if row["dtype"] != "f32":
        row["f32_loss"] = torch.ask("widened_loss", tokens=tokens)["loss"]
    row["logitless"] = {}
    for grads in row["grad_dtypes"]:
        for name in ("forward", "forward_backward"):
            if name == "forward" and grads != row["dtype"]:
                continue
            budget = options.budget
            if budget == "tenth":
                budget = torch_runs["forward_backward"]["rise_bytes"] // 10
            answer = ours.ask("measure", **{"pass": name, "tokens": tokens, "threads": options.threads},
                              grads=grads, budget_bytes=budget)
            answer["budget_bytes"] = budget
            answer["loss_difference"] = relative(answer["loss"], row["f32_loss"])
            if not answer["loss_difference"] <= LOSS_TOLERANCE:
                raise Failure(f"{text} {row['dtype']} {name}: loss {answer['loss']!r}, torch's f32 loss is "
                              f"{row['f32_loss']!r}")
            if name != "forward":
                distance = ours.ask("compare", saved=saved, tokens=tokens, dtype=row["dtype"], grads=grads)
                answer["gradient_difference"] = distance
                if not max(distance.values()) <= grad_limit:
                    raise Failure(f"{text} {row['dtype']} gradients: relative difference {distance}, "
                                  f"wanted at most {grad_limit}")
            row["logitless"][name, grads] = answer
    for path in saved:
        os.remove(path)


def time_in_turn(name, row, sides, n, threads, options, time_torch):
    """Medians in milliseconds of {"torch": ..., grads: ...}, every time kept."""
    torch, ours = sides
    variants = [grads for (pass_name, grads) in row["logitless"] if pass_name == name]
    times = {key: [] for key in ["torch"] * time_torch + variants}
    rounds = 0
    while rounds < options.rounds or (rounds < 3 * options.rounds and max(map(max, times.values())) < SHORT_MS):
        if time_torch:
            request = {"pass": name, "tokens": n, "threads": threads[name], "trim": rounds == 0}
            answer = torch.ask("run", **request)
            times["torch"].append(answer["ms"])
            row["torch"][name].setdefault("fresh_rise_bytes", answer["rise_bytes"])
        for grads in variants:
            request = {"pass": name, "tokens": n, "threads": options.threads, "grads": grads}
            times[grads].append(ours.ask("run", **request)["ms"])
        rounds += 1
    return times


def rows_of(text, dtype, name, times, row, peak, shape, scale):
    n, d, v = shape
    torch_ms = statistics.median(times["torch"]) if "torch" in times else row["torch"][name]["ms"] * scale
    gflop = (2e-9 if name == "forward" else 6e-9) * n * d * v
    for grads, measured in ((g, m) for (p, g), m in row["logitless"].items() if p == name):
        ms = statistics.median(times[grads])
        theirs, own = row["torch"][name]["rise_bytes"] * scale, measured["rise_bytes"]
        fresh = row["torch"][name].get("fresh_rise_bytes")
        grad_bytes = 0 if name == "forward" else (n + v) * d * ELEMENT_BYTES[grads]
        yield {"problem": text, "dtype": dtype, "pass": name, "grad_dtype": grads if name != "forward" else None,
               "torch_ms": torch_ms, "logitless_ms": ms, "time_ratio": ms / torch_ms,
               "torch_scaled_from_tokens": row.get("tokens"),
               "gflops": gflop / ms * 1e3, "fma_peak_gflops": peak,
               "fma_peak_part": gflop / ms * 1e3 / peak if peak else None,
               "torch_extra_bytes": round(theirs), "logitless_extra_bytes": own,
               "memory_ratio": own / theirs if theirs else None,
               "torch_peak_bytes": fresh, "logitless_peak_bytes": own + grad_bytes,
               "peak_ratio": (own + grad_bytes) / fresh if fresh else None,
               "torch_threads": row["threads"][name], "thread_trials_ms": row["trials"].get(name),
               "torch_all_ms": times.get("torch", [row["torch"][name]["ms"]]), "logitless_all_ms": times[grads],
               "logitless": {key: measured[key] for key in measured if key not in ("ms", "rise_bytes")},
               "torch_loss": row["torch"][name]["loss"], "torch_f32_loss": row["f32_loss"],
               "load_average": os.getloadavg()[0]}


def table_line(row):
    about = "~" if row["torch_scaled_from_tokens"] else ""
    name = "fwd" if row["pass"] == "forward" else "fwd+bwd"
    if row["grad_dtype"] not in (None, row["dtype"]):
        name += f", {row['grad_dtype']} grads"
    part = f"{100 * row['fma_peak_part']:.0f}" if row["fma_peak_part"] else "-"
    memory, peak = (f"{row[key]:.2f}" if row[key] is not None else "-" for key in ("memory_ratio", "peak_ratio"))
    cells = [row["problem"], row["dtype"], name, f"{about}{row['torch_ms']:.1f}", f"{row['logitless_ms']:.1f}",
             f"{about}{row['time_ratio']:.2f}", part, f"{about}{row['torch_extra_bytes'] / 2**20:.1f}",
             f"{row['logitless_extra_bytes'] / 2**20:.1f}", f"{about}{memory}", peak]
    return "| " + " | ".join(cells) + " |"


def run_problem(text, dtype, sides, here, options):
    shape = tuple(int(part[1:]) for part in text.split(":"))
    n, d, v = shape
    torch, ours = sides
    row = {"dtype": dtype, "grad_dtypes": [dtype] if dtype == "f32" else [dtype, "f32"], "trials": {}}
    for side in sides:
        side.ask("make", n=n, d=d, v=v, dtype=dtype, grad_dtypes=row["grad_dtypes"])
    threads = dict.fromkeys(("forward", "forward_backward"), here["cores"])
    tokens, slow = (n, False) if dtype == "f32" else affordable_tokens(torch, n, here["cores"], options.cap)
    if not slow:
        row["trials"] = best_threads(torch, n, thread_counts(here))
        threads = {name: min(times, key=times.get) for name, times in row["trials"].items()}
    row["threads"] = threads
    peaks = [fma_peak(options.program)]
    need = (n + v) * d * ELEMENT_BYTES[dtype]
    shared = "/dev/shm" if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 2 * need else None
    with tempfile.TemporaryDirectory(dir=shared) as scratch:
        compare(text, sides, row, scratch, tokens, threads, options)
    if slow:  # measured on fewer tokens than its workspace is for
        for measured in row["logitless"].values():
            measured["rise_bytes"] = max(measured["rise_bytes"], measured["workspace_bytes"])
        row["tokens"] = tokens
    times = {name: time_in_turn(name, row, sides, n, threads, options, not slow) for name in threads}
    peaks.append(fma_peak(options.program))
    peak = max((peak for peak in peaks if peak), default=None)
    return [one for name in threads for one in rows_of(text, dtype, name, times[name], row, peak, shape, n / tokens)]


def arguments():
    parser = argparse.ArgumentParser(description="logitless against PyTorch on this CPU; see bench/README.md")
    parser.add_argument("problems", nargs="*", metavar="nN:dD:vV", help="default: four usual shapes")
    parser.add_argument("--library", default=os.path.join(ROOT, "build", "liblogitless.so"))
    parser.add_argument("--program", help="measures the FMA peak; default: logitless beside the library")
    parser.add_argument("--quick", action="store_true", help="f32 and the first problem only")
    parser.add_argument("--dtypes", default="f32,bf16", help="default f32,bf16")
    parser.add_argument("--threads", type=int, default=0, help="of logitless; default: as the library chooses")
    parser.add_argument("--budget", default="0", help="workspace budget of logitless: MiB, 0 for the library's "
                        "default, or 'tenth' of what torch's forward+backward needs (0 where that is too little)")
    parser.add_argument("--rounds", type=int, default=3, help="A B rounds, three times as many for short calls")
    parser.add_argument("--cap", type=float, default=30, help="seconds for PyTorch's bf16 calls of a problem; "
                        "beyond: one run on fewer tokens, scaled and marked ~")
    parser.add_argument("--json", metavar="FILE", help="everything measured, for bench/results/")
    options = parser.parse_args()
    options.program = options.program or os.path.join(os.path.dirname(options.library), "logitless")
    options.problems = options.problems or PROBLEMS
    options.dtypes = options.dtypes.split(",")
    if not os.path.exists(options.library):
        parser.error(f"--library {options.library}: no such file; run make first")
    for text in options.problems:
        if not re.fullmatch(r"n[1-9]\d*:d[1-9]\d*:v[1-9]\d*", text):
            parser.error(f"found problem {text!r}, wanted nTOKENS:dHIDDEN:vVOCABULARY, all at least 1")
    for dtype in options.dtypes:
        if dtype not in GRADIENT_TOLERANCE:
            parser.error(f"--dtypes: found {dtype!r}, wanted f32, bf16 or both")
    if options.budget != "tenth":
        if not options.budget.isdigit():
            parser.error(f"--budget: found {options.budget!r}, wanted MiB or tenth")
        options.budget = int(options.budget) * 2**20
    if options.rounds < 1 or options.cap <= 0:
        parser.error("--rounds must be at least 1 and --cap more than 0")
    if options.quick:
        options.problems, options.dtypes = options.problems[:1], ["f32"]
    return options


def main():
    options, here, began = arguments(), machine(), time.time()
    # PyTorch's own switch for huge pages: without it, faulting in a fresh gradient of w costs it up to 5 times
    # its arithmetic where n is small. Both sides get their memory this way.
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}
    sides = [Side(name, os.path.abspath(options.library), environment) for name in ("torch", "logitless")]
    rows, code = [], 0
    try:
        versions = {"python": sys.version.split()[0]}
        for side in sides:
            versions.update(side.ask("versions"))
            side.ask("warm_up", threads=here["cores"] if side.name == "torch" else options.threads)
        peak = fma_peak(options.program)
        print(f"{here['cpu']}, {here['cores']} cores, {' '.join(here['isa'])}; logitless {versions['logitless']}, "
              f"torch {versions['torch']}; FMA peak {f'{peak:.0f} GFLOP/s' if peak else 'not measured'}; "
              f"load average {os.getloadavg()[0]:.1f}")
        print("| " + " | ".join(HEADER) + " |\n" + "|---|---|---" + "|---:" * (len(HEADER) - 3) + "|", flush=True)
        for text in options.problems:
            for dtype in options.dtypes:
                for row in run_problem(text, dtype, sides, here, options):
                    rows.append(row)
                    print(table_line(row), flush=True)
    except Failure as failure:
        print(f"peers_cpu: {failure}", file=sys.stderr)
        code = 1
    finally:
        for side in sides:
            side.close()
    if options.json and not code:
        command = shlex.join(["python", os.path.relpath(os.path.abspath(sys.argv[0]), ROOT), *sys.argv[1:]])
        result = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                  "command": command, "commit": output_of("git", "rev-parse", "HEAD"),
                  "modified": bool(output_of("git", "status", "--porcelain")), "machine": here, "versions": versions,
                  "seconds": round(time.time() - began, 1), "rows": rows}
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    return code


if __name__ == "__main__":
    sys.exit(main())

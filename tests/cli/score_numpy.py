"""`logitless score` on files made by NumPy, against the definition in float64 and, where PyTorch is
installed, against its cross_entropy. Usage: score_numpy.py LOGITLESS; exit code 77 (skip) without NumPy."""
import json
import os
import struct
import subprocess
import sys
import tempfile

try:
    import numpy as np
except ImportError:
    print("SKIP: this Python has no numpy")
    sys.exit(77)
try:
    import torch
except ImportError:
    torch = None

N, D, V = 130, 48, 333
IGNORE = -100
# The logits are f32 sums of D products: relative error of some 1e-6 on logits of about 10.
TOLERANCE = 5e-6


def logits_of(x, w, bias, temperature=1.0, softcap=0.0):
    z = x.astype(np.float64) @ w.astype(np.float64).T
    if bias is not None:
        z = z + bias.astype(np.float64)
    if softcap:
        z = softcap * np.tanh(z / softcap)
    return z / temperature


def definition(z, y, smoothing=0.0, rule="all", z_loss=0.0, class_weight=None):
    """Mean loss, mean nll, mean entropy; per-token nll, lse, entropy, argmax (0, 0, 0, -1 where ignored)."""
    n, v = z.shape
    top = z.max(axis=1)
    lse = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
    p = np.exp(z - lse[:, None])
    entropy = lse - (p * z).sum(axis=1)
    valid = y != IGNORE
    target = np.where(valid, y, 0)
    nll = lse - z[np.arange(n), target]
    cw = np.ones(v) if class_weight is None else class_weight.astype(np.float64)
    every = (cw * (lse[:, None] - z)).sum(axis=1)
    cw_y = cw[target]
    if rule == "all":
        smooth = every / v
    else:
        smooth = (every - cw_y * nll) / (v - 1)
    loss = (1 - smoothing) * cw_y * nll + smoothing * smooth + z_loss * lse**2
    mean = loss[valid].sum() / cw_y[valid].sum()
    token = [np.where(valid, a, 0) for a in (nll, lse, entropy)] + [np.where(valid, z.argmax(axis=1), -1)]
    return mean, nll[valid].mean(), entropy[valid].mean(), token


def read_safetensors(path):
    data = open(path, "rb").read()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    kinds = {"F32": np.float32, "I64": np.int64}
    return {
        name: np.frombuffer(data[8 + length :][slice(*entry["data_offsets"])], kinds[entry["dtype"]])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def write_safetensors(path, name, kind, array):
    header = json.dumps({name: {"dtype": kind, "shape": list(array.shape), "data_offsets": [0, array.nbytes]}})
    header += " " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode() + array.tobytes())


def to_bf16(array):
    """Bits of the upper halves, and the f32 values that they stand for."""
    bits = array.astype(np.float32).view(np.uint32) & 0xFFFF0000
    return (bits >> 16).astype(np.uint16), bits.view(np.float32)


class Check:
    def __init__(self, program):
        self.program, self.failed, self.count = program, 0, 0

    def run(self, *arguments):
        done = subprocess.run([self.program, "score", "--json", *arguments], capture_output=True, text=True)
        if done.returncode != 0:
            self.failed += 1
            print("FAIL", *arguments, "exit code", done.returncode, done.stderr)
            return None
        return json.loads(done.stdout)

    def near(self, what, found, wanted, tolerance=TOLERANCE):
        self.count += 1
        error = np.max(np.abs(np.asarray(found, np.float64) - wanted) / np.maximum(1, np.abs(wanted)))
        if not error <= tolerance:
            self.failed += 1
            print(f"FAIL {what}: error {error:.3g}, wanted at most {tolerance:g}")


def fnv(logp):
    digest = 0xCBF29CE484222325
    for byte in logp.astype("<f4").tobytes():
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    return f"{digest:016x}"


def main(program):
    check = Check(program)
    rng = np.random.default_rng(5)
    x = rng.standard_normal((N, D)).astype(np.float32)
    w = (0.4 * rng.standard_normal((V, D))).astype(np.float32)
    bias = rng.standard_normal(V).astype(np.float32)
    class_weight = rng.uniform(0, 2, V).astype(np.float32)
    y = rng.integers(0, V, N)
    y[::7] = IGNORE
    np.save("x.npy", x)
    np.save("x3.npy", x.reshape(10, 13, D))
    np.save("w.npy", w)
    np.save("bias.npy", bias)
    np.save("cw.npy", class_weight)
    np.save("y64.npy", y.astype(np.int64))
    np.save("y32.npy", y.reshape(10, 13).astype(np.int32))
    np.save("x16.npy", x.astype(np.float16))
    np.save("w16.npy", w.astype(np.float16))
    xb, xb_values = to_bf16(x)
    wb, wb_values = to_bf16(w)
    write_safetensors("xb.safetensors", "h", "BF16", xb)
    write_safetensors("wb.safetensors", "lm_head.weight", "BF16", wb)

    base = ["--hidden", "x.npy", "--weight", "w.npy", "--targets", "y64.npy"]
    plain = logits_of(x, w, None)
    with_bias = logits_of(x, w, bias)
    hot = logits_of(x, w, bias, temperature=0.7, softcap=5.0)
    half = logits_of(x.astype(np.float16), w.astype(np.float16), None)
    brain = logits_of(xb_values, wb_values, None)
    cases = [
        ("f32", plain, {}, base),
        ("i32 and 3-D", plain, {}, ["--hidden", "x3.npy", "--weight", "w.npy", "--targets", "y32.npy"]),
        ("f16", half, {}, ["--hidden", "x16.npy", "--weight", "w16.npy", "--targets", "y64.npy"]),
        ("bf16", brain, {}, ["--hidden", "xb.safetensors", "--weight", "wb.safetensors:lm_head.weight",
                             "--targets", "y64.npy"]),
        ("bias", with_bias, {}, [*base, "--bias", "bias.npy"]),
        ("softcap, temperature", hot, {},
         [*base, "--bias", "bias.npy", "--softcap", "5", "--temperature", "0.7"]),
        ("smoothing", plain, {"smoothing": 0.1}, [*base, "--label-smoothing", "0.1"]),
        ("smoothing over others", plain, {"smoothing": 0.1, "rule": "others"},
         [*base, "--label-smoothing", "0.1", "--smoothing-rule", "others"]),
        ("z-loss", plain, {"z_loss": 1e-2}, [*base, "--z-loss", "0.01"]),
        ("class weights, smoothing", plain, {"smoothing": 0.1, "class_weight": class_weight},
         [*base, "--class-weight", "cw.npy", "--label-smoothing", "0.1"]),
        ("padded", plain[:, :300], {}, [*base[:-1], "y300.npy", "--vocab-size", "300"]),
    ]
    np.save("y300.npy", np.where(y >= 300, IGNORE, y))
    for name, z, options, arguments in cases:
        targets = np.load("y300.npy") if name == "padded" else y
        loss, nll, entropy, token = definition(z, targets, **options)
        found = check.run(*arguments, "--entropy", "--out", "out.safetensors")
        if not found:
            continue
        check.near(f"{name}: loss", found["loss"], loss)
        check.near(f"{name}: mean_nll", found["mean_nll"], nll)
        check.near(f"{name}: perplexity", found["perplexity"], np.exp(nll), 1e-4)
        check.near(f"{name}: mean_entropy", found["mean_entropy"], entropy)
        out = read_safetensors("out.safetensors")
        for key, wanted in zip(("nll", "lse", "entropy", "argmax"), token):
            check.near(f"{name}: {key}", out[key], wanted)
        logp = np.where(out["nll"] == 0, np.float32(0), -out["nll"])
        check.near(f"{name}: digest", found["digest"] == fnv(logp), True)

    if torch:
        z = torch.from_numpy(x) @ torch.from_numpy(w).T
        y_torch = torch.from_numpy(y.astype(np.int64))
        for smoothing, weight in ((0.0, None), (0.1, None), (0.1, class_weight)):
            wanted = torch.nn.functional.cross_entropy(
                z, y_torch, label_smoothing=smoothing,
                weight=None if weight is None else torch.from_numpy(weight)).item()
            arguments = [*base, "--label-smoothing", str(smoothing)]
            if weight is not None:
                arguments += ["--class-weight", "cw.npy"]
            found = check.run(*arguments)
            if found:
                check.near(f"PyTorch, smoothing {smoothing}", found["loss"], wanted)
    print(f"{check.count} checked, {check.failed} failed, PyTorch {'compared' if torch else 'not installed'}")
    return 1 if check.failed else 0


if __name__ == "__main__":
    folder = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="logitless-numpy-") as work:
        program = os.path.abspath(sys.argv[1])
        os.chdir(work)
        code = main(program)
        os.chdir(folder)
    sys.exit(code)

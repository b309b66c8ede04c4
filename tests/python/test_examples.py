"""Each example runs as written, and so does every block of Python in docs/python.md and README.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def run(*command, **environment):
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_numpy_score(tmp_path):
    import numpy as np

    made_up = run(sys.executable, ROOT / "examples/numpy_score.py")
    assert "480 scored, 20 ignored" in made_up and "loss        3.438" in made_up
    rng = np.random.default_rng(1)
    arrays = {"h": rng.standard_normal((9, 8)), "w": rng.standard_normal((30, 8)), "y": rng.integers(0, 30, 9)}
    for name, array in arrays.items():
        np.save(tmp_path / name, array if name == "y" else array.astype(np.float32))
    out = run(sys.executable, ROOT / "examples/numpy_score.py", *(tmp_path / f"{name}.npy" for name in arrays))
    z = torch.tensor(arrays["h"] @ arrays["w"].T)
    want = torch.nn.functional.cross_entropy(z, torch.tensor(arrays["y"])).item()
    assert abs(float(re.search(r"loss +([\d.]+)", out)[1]) - want) < 1e-5


def test_grpo_step():
    out = run(sys.executable, ROOT / "examples/grpo_step.py")
    rewards = [float(r) for r in re.findall(r"reward ([\d.]+)", out)]
    assert "first ratios between 1.0000000 and 1.0000000" in out and rewards[-1] > rewards[0] + 0.3


def test_vocab_parallel_train():
    out = run(*TORCHRUN, "2", ROOT / "examples/vocab_parallel_train.py")
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] - 1 and "the same bits on all 2 ranks" in out


@pytest.mark.parametrize("file", ["README.md", "docs/python.md"])
def test_blocks_of_the_documents(file):
    """In their order, in one namespace."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / file).read_text(), re.M | re.S)
    blocks = [b for b in blocks if "logitless" in b]
    assert blocks
    run(sys.executable, "-c", "\n".join(blocks))

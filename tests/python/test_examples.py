"""Each example runs as written, and so does every block of Python in docs/python.md and README.md."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]


def example(name, capsys, monkeypatch, *arguments):
    """What examples/NAME prints when it is run as a program, here in this process."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return capsys.readouterr().out


def test_numpy_score(tmp_path, capsys, monkeypatch):
    made_up = example("numpy_score.py", capsys, monkeypatch)
    assert "480 scored, 20 ignored" in made_up and "loss        3.438" in made_up
    rng = np.random.default_rng(1)
    arrays = {"h": rng.standard_normal((9, 8)), "w": rng.standard_normal((30, 8)), "y": rng.integers(0, 30, 9)}
    for name, array in arrays.items():
        np.save(tmp_path / name, array if name == "y" else array.astype(np.float32))
    out = example("numpy_score.py", capsys, monkeypatch, *(tmp_path / f"{name}.npy" for name in arrays))
    z = torch.tensor(arrays["h"] @ arrays["w"].T)
    want = torch.nn.functional.cross_entropy(z, torch.tensor(arrays["y"])).item()
    assert abs(float(re.search(r"loss +([\d.]+)", out)[1]) - want) < 1e-5


def test_grpo_step(capsys, monkeypatch):
    out = example("grpo_step.py", capsys, monkeypatch)
    rewards = [float(r) for r in re.findall(r"reward ([\d.]+)", out)]
    assert "first ratios between 1.0000000 and 1.0000000" in out and rewards[-1] > rewards[0] + 0.3


def test_vocab_parallel_train():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, ROOT / "examples/vocab_parallel_train.py"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] - 1 and "the same bits on all 2 ranks" in done.stdout


@pytest.mark.parametrize("file", ["README.md", "docs/python.md"])
def test_blocks_of_the_documents(file):
    """In their order, in one namespace."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / file).read_text(), re.M | re.S)
    blocks = [b for b in blocks if "logitless" in b]
    assert blocks
    exec(compile("\n".join(blocks), file, "exec"), {})

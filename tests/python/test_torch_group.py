"""The vocabulary over the processes of a torch.distributed group (Gloo): what each rank checks stands in
group_worker.py."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKS = {
    2: [
        "shards",
        "modes",
        "no_group_is_one_rank",
        "errors",
        "adapters",
        "logits",
        "lookup",
        "ligers_shapes",
        "compiled",
        "dead_rank",
    ],
    4: ["shards", "modes", "errors", "adapters", "logits", "lookup", "ligers_shapes", "groups"],
}


PAIRS = [(size, check) for size, checks in CHECKS.items() for check in checks] + [(4, "ends")]
# Against packages that may not be installed, in processes of their own: they keep state and take long to import.
OTHERS = {"megatrons_own": ["megatron.core"], "verls_own": ["megatron.core", "verl"]}


@pytest.fixture(scope="module")
def outputs_of(tmp_path_factory):
    """Outputs of the ranks of a group, which do all checks of a list one after the other, once."""
    known = {}

    def run(size, checks):
        key = (size, *checks)
        if key not in known:
            meeting = tmp_path_factory.mktemp("group") / "meeting"
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            processes = [
                subprocess.Popen(
                    [sys.executable, HERE / "group_worker.py", str(rank), str(size), meeting, *checks],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
                for rank in range(size)
            ]
            try:
                known[key] = [process.communicate(timeout=240) for process in processes]
            finally:
                for process in processes:
                    process.kill()
        return known[key]

    return run


def compare(outputs, size, check):
    for rank, (out, err) in enumerate(outputs):
        assert f"ok {check}" in out.splitlines(), f"rank {rank} of {size}:\n{err[-2000:]}"


@pytest.mark.parametrize("size, check", PAIRS, ids=[f"{check}-{size} ranks" for size, check in PAIRS])
def test_group(outputs_of, size, check):
    compare(outputs_of(size, CHECKS[size]), size, check)


@pytest.mark.parametrize("check", OTHERS)
def test_the_frameworks_own_functions(outputs_of, check):
    for package in OTHERS[check]:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            pytest.skip(f"{package} is not installed")
    installed = [name for name in OTHERS if name == "megatrons_own" or importlib.util.find_spec("verl")]
    compare(outputs_of(2, installed), 2, check)

"""The vocabulary over the processes of a torch.distributed group (Gloo): what each rank checks stands in
group_worker.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKS = {
    2: ["shards", "modes", "no_group_is_one_rank", "errors", "adapters", "logits", "lookup", "compiled", "dead_rank"],
    4: ["shards", "modes", "errors", "adapters", "logits", "lookup", "groups"],
}


PAIRS = [(size, check) for size, checks in CHECKS.items() for check in checks] + [(4, "ends")]


@pytest.fixture(scope="module")
def outputs_of(tmp_path_factory):
    """Outputs of the ranks of a group, which do all checks of that size one after the other, once."""
    known = {}

    def run(size):
        if size not in known:
            meeting = tmp_path_factory.mktemp("group") / "meeting"
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            processes = [
                subprocess.Popen(
                    [sys.executable, HERE / "group_worker.py", str(rank), str(size), meeting, *CHECKS[size]],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
                for rank in range(size)
            ]
            try:
                known[size] = [process.communicate(timeout=240) for process in processes]
            finally:
                for process in processes:
                    process.kill()
        return known[size]

    return run


@pytest.mark.parametrize("size, check", PAIRS, ids=[f"{check}-{size} ranks" for size, check in PAIRS])
def test_group(outputs_of, size, check):
    for rank, (out, err) in enumerate(outputs_of(size)):
        assert f"ok {check}" in out.splitlines(), f"rank {rank} of {size}:\n{err[-2000:]}"

#!/usr/bin/env bash
# Makes .venv in the project's folder with what bench/peers_cpu.py needs: PyTorch and NumPy. Arguments go to
# pip, for example an index with CPU-only builds of PyTorch (--index-url URL), which are far smaller.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}

if ! [ -x "$root/.venv/bin/pip" ] && ! "$python" -m venv "$root/.venv"; then
    echo "setup: $python cannot make a venv; on Debian and Ubuntu: apt-get install python3-venv" >&2
    exit 1
fi
"$root/.venv/bin/pip" install --quiet "$@" torch numpy
"$root/.venv/bin/python" -c 'import torch; print("torch", torch.__version__, "is in .venv")'
echo "now: make && .venv/bin/python bench/peers_cpu.py"

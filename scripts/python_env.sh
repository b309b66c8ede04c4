#!/usr/bin/env bash
# python_env.sh VENV: makes VENV with what the tests of the Python package need, then builds the package and installs
# it there. Exit code 77, with the reason in the last line, where there is no Python 3.10, or no package index to
# be reached. A venv that has everything is kept; the package is built anew every time.
set -eu
cd "$(dirname "$0")/.."
venv=$1
requirements=tests/python/requirements.txt
alone=tests/python/requirements-alone.txt

python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "python: no Python 3.10 or later with venv (Debian and Ubuntu: apt-get install python3-venv)" >&2
    exit 77
fi

if ! cat "$requirements" "$alone" | cmp -s - "$venv/installed"; then
    "$python" -m venv --clear "$venv"
    # uv installs in seconds what takes pip minutes; where it is not to be had, pip does.
    if ! "$venv/bin/pip" install --quiet uv; then
        if ! "$venv/bin/pip" download --quiet --no-deps --dest "$venv/probe" hjson; then
            echo "python: no package index can be reached" >&2
            exit 77
        fi
    fi
    if [ -x "$venv/bin/uv" ]; then
        install() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"; }
    else
        install() { "$venv/bin/pip" install --quiet "$@"; }
    fi
    install -r "$requirements"
    DS_BUILD_OPS=0 install --no-deps --no-build-isolation -r "$alone"
    cat "$requirements" "$alone" >"$venv/installed"
fi

# The CUDA backend is compiled by the build in build/; compiling it once more would take minutes.
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/pip" wheel --quiet --no-deps --no-build-isolation --wheel-dir "$wheels" \
    --config-settings=build-dir=build/wheel --config-settings=cmake.define.LL_BUILD_CUDA=OFF \
    --config-settings=cmake.define.LL_WERROR=ON .
case $(echo "$wheels"/*.whl) in
    *-py3-none-linux_*.whl) ;;
    *) echo "python: the wheel is tagged $(basename "$wheels"/*.whl), wanted py3-none-linux" >&2 && exit 1 ;;
esac
"$venv/bin/pip" install --quiet --no-deps --force-reinstall "$wheels"/*.whl

#!/usr/bin/env bash
# Checks that what `make` (setup.sh build) or `make test` (setup.sh test) needs is there, and installs what is
# not with apt-get: as root or where sudo asks no password; else it prints the one command to run. Knows Debian
# 12 and Ubuntu 22.04 and 24.04. Touches nothing when all is there.
set -u
what=${1:-build}
missing=()

have() { command -v "$1" >/dev/null 2>&1; }
need() { have "$1" || missing+=("$2"); }
need_library() { { have pkg-config && pkg-config --exists "$1"; } || missing+=("$2"); }

{ have cc && have make; } || missing+=(build-essential)
need cmake cmake
need pkg-config pkg-config
need_library libcjson libcjson-dev
if [ "$what" = test ]; then
    need_library cmocka libcmocka-dev
    need g++ g++
    need clang clang
    need clang-tidy clang-tidy
    # The communicator over MPI; any MPI will do. `make` alone uses one that is there and needs none.
    { have mpicc && echo '#include <mpi.h>' | mpicc -x c -fsyntax-only - >/dev/null 2>&1; } || missing+=(libopenmpi-dev)
    need mpirun openmpi-bin
    need ip iproute2
    # One Python with NumPy is enough: the tests look at the same three.
    numpy=no
    for python in .venv/bin/python3 python3 /usr/bin/python3; do
        if "$python" -c 'import numpy' 2>/dev/null; then numpy=yes; fi
    done
    [ $numpy = yes ] || missing+=(python3-numpy)
    # The tests of the Python package make a venv (scripts/python_env.sh).
    python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
fi

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

install_missing() {
    [ ${#missing[@]} -gt 0 ] || return 0
    if ! have apt-get; then
        echo "setup: missing here: ${missing[*]} (Debian's package names); install them and run make again" >&2
        exit 1
    fi
    if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
        echo "setup: packages are missing and installing them needs root. Run this, then make again:" >&2
        echo "  sudo apt-get update && sudo apt-get install -y ${missing[*]}" >&2
        exit 1
    fi
    echo "setup: installing ${missing[*]}"
    as_root apt-get update -qq || exit 1
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
        >/dev/null || exit 1
    missing=()
}

install_missing

# The sanitizer run-times are part of clang on some releases and a package of their own, named after clang's
# version, on others.
if [ "$what" = test ]; then
    probe='int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { return (void)d, (int)(n & 0); }'
    if ! echo "$probe" | clang -x c -fsanitize=fuzzer,address - -o /dev/null 2>/dev/null; then
        version=$(clang -dumpversion)
        missing=("libclang-rt-${version%%.*}-dev")
        install_missing
    fi

    # Formatting is checked by version 14 only (scripts/format.sh); a system without it skips that check.
    if ! have clang-format-14 && apt-cache show clang-format-14 >/dev/null 2>&1 &&
        { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }; then
        missing=(clang-format-14)
        install_missing
    fi
fi

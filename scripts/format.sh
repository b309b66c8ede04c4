#!/usr/bin/env bash
# format.sh [--check]: formats our C files in place, or fails where one is not formatted. The output of
# clang-format differs between versions, so one version is the rule: 14. Exit code 77 where it is not installed.
set -eu
cd "$(dirname "$0")/.."

formatter=
for candidate in clang-format-14 clang-format; do
    if command -v "$candidate" >/dev/null && "$candidate" --version | grep -q 'version 14\.'; then
        formatter=$candidate
        break
    fi
done
if [ -z "$formatter" ]; then
    echo "format: clang-format 14 is not installed (apt-get install clang-format-14)" >&2
    exit 77
fi

options=(-i)
if [ "${1:-}" = --check ]; then options=(--dry-run -Werror); fi
find include src cli python tests bench examples \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) -print0 2>/dev/null | xargs -0 "$formatter" "${options[@]}"

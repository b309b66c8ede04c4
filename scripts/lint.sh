#!/usr/bin/env bash
# lint.sh [BUILD FOLDER]: the static analyser (clang-tidy, rules in .clang-tidy) over every C file that the
# build compiled, with the flags that it was compiled with; any warning is a failure.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-build}
sed -n 's/^ *"file": "\(.*\.c\)",\{0,1\}$/\1/p' "$folder/compile_commands.json" | sort -u |
    xargs -P "${JOBS:-$(nproc)}" -n 4 clang-tidy -p "$folder" --quiet --warnings-as-errors='*'

#!/usr/bin/env bash
# build.sh FOLDER [CMAKE OPTION...]: configures FOLDER and builds it (only TARGET, if that is set). A new folder
# has no tests unless LL_BUILD_TESTS=ON is among the options: `make` alone must not need the test tools.
set -eu
cd "$(dirname "$0")/.."
folder=$1
shift
unset MAKEFLAGS MAKELEVEL # this build is not part of the make that called

# A cache that was made for another folder (a copied tree) is of no use and CMake refuses it.
if [ -f "$folder/CMakeCache.txt" ] && ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "$folder/CMakeCache.txt"; then
    rm -rf "$folder/CMakeCache.txt" "$folder/CMakeFiles"
fi
options=(--log-level=NOTICE -DLL_WERROR=ON)
if [ ! -f "$folder/CMakeCache.txt" ]; then
    options+=(-DLL_BUILD_TESTS=OFF)
    if command -v ninja >/dev/null; then options+=(-G Ninja); fi
fi

cmake -S . -B "$folder" "${options[@]}" "$@"
cmake --build "$folder" --parallel "${JOBS:-$(nproc)}" ${TARGET:+--target "$TARGET"}

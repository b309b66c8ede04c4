#!/usr/bin/env bash
# run.sh BUILD FOLDER: installs a build into a folder of its own and uses what is there as a stranger would: by
# find_package (shared and static), by pkg-config, and as a program.
set -eu
build=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/moved" # an installed tree may be moved
prefix=$work/moved

cmake -S "$here" -B "$work/build" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
cmake --build "$work/build"
"$work/build/consumer_shared"
"$work/build/consumer_static"

pkgconfig=$(dirname "$(find "$prefix" -name logitless.pc)")
export PKG_CONFIG_PATH=$pkgconfig
# shellcheck disable=SC2046 # the flags are words
cc -std=c11 "$here/main.c" $(pkg-config --cflags --libs logitless) -lm -o "$work/consumer"
LD_LIBRARY_PATH=$(dirname "$pkgconfig") "$work/consumer"

"$prefix/bin/logitless" info

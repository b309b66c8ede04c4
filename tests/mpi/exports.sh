#!/usr/bin/env bash
# exports.sh LIBRARY: what liblogitless_mpi.so exports is what comm_mpi.h declares, and it needs MPI, libc and libm
# only (never liblogitless, which a program may hold linked statically).
set -eu
want='ll_comm_mpi_create ll_comm_mpi_describe ll_comm_mpi_open'
found=$(nm -D --defined-only "$1" | awk '{ print $3 }' | LC_ALL=C sort | xargs)
if [ "$found" != "$want" ]; then
    echo "exported: $found; want: $want"
    exit 1
fi
others=$(readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
    grep -vE '^(lib(mpi|mpich|pmpi|open-rte|open-pal)|libc|libm|libpthread|ld-linux[a-z0-9-]*)\.so\.') || exit 0
echo "needed besides MPI, libc and libm: $others"
exit 1

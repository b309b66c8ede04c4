#!/usr/bin/env bash
# nccl_exports.sh LIBRARY: what liblogitless_nccl.so exports is what comm_nccl.h declares, and it needs NCCL and the
# system's libraries only (never liblogitless, which a program may hold linked statically).
set -eu
found=$(nm -D --defined-only "$1" | awk '{ print $3 }' | LC_ALL=C sort | xargs)
if [ "$found" != ll_comm_nccl_create ]; then
    echo "exported: $found; want: ll_comm_nccl_create"
    exit 1
fi
others=$(readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
    grep -vE '^(libnccl|libstdc\+\+|libgcc_s|libc|libm|libdl|librt|libpthread|ld-linux[a-z0-9-]*)\.so\.') || exit 0
echo "needed besides NCCL and the system: $others"
exit 1

#!/usr/bin/env bash
# registers.sh [NVCC]: compiles the Hopper kernels and those of ce for sm_90a and fails where one runs out of registers:
# more than its share of a multiprocessor's, spilled ones beyond a kernel's allowance below, or products that the
# compiler makes wait for one another ("serialized"). Needs no GPU. Exit code 77 without nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."
nvcc=${1:-nvcc}
if ! command -v "$nvcc" >/dev/null; then
    echo "registers: there is no nvcc" >&2
    exit 77
fi
# A block of 384 threads starts with 168; 24 warps of ce share a multiprocessor (cuda/ce.h).
most() {
    case $1 in
    _Z4rows*) echo 80 ;;
    *) echo 168 ;;
    esac
}
# Bytes of spill stores. Plain statistics and products: none. With options: values outside the inner loops. Rows of ce
# without softcap or temperature: next to none, because what is local memory there once a row leaves the caches.
allowed() {
    case $1 in
    *fusedILb1*) echo 32 ;;
    *grad_products*) echo 176 ;; # addresses of sums, once a tile; rows beyond the float formula, in double
    *fused_dz*) echo 8 ;; # the tile's number, once a tile
    _Z4rows*ELb1EEv*) echo 16 ;;
    _Z4rows*) echo 96 ;;
    *) echo 0 ;;
    esac
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
kernels=0 faults=0
for file in src/cuda/*_sm90.cu src/cuda/ce_rows.cu; do
    "$nvcc" -O3 -std=c++20 -fmad=false --diag-suppress=177 -Iinclude -Isrc -gencode=arch=compute_90a,code=sm_90a \
        -Xptxas -v -cubin -o /dev/null "$file" 2>"$log"
    if grep -iE 'serializ|C75[0-9][0-9]' "$log" >&2; then
        echo "registers: $file: products wait for one another" >&2
        faults=$((faults + 1))
    fi
    kernel= spilled=
    while read -r line; do
        case $line in
        *"Compiling entry function"*) kernel=${line#*\'} kernel=${kernel%%\'*} ;;
        *"bytes spill stores"*) spilled=${line#*frame, } spilled=${spilled%% *} ;;
        *"Used "*" registers"*)
            used=${line#*Used } used=${used%% *}
            kernels=$((kernels + 1))
            echo "$kernel: $used registers, $spilled bytes spilled"
            if [ "$used" -gt "$(most "$kernel")" ] || [ "$spilled" -gt "$(allowed "$kernel")" ]; then
                echo "registers: $file: wanted at most $(most "$kernel") and $(allowed "$kernel")" >&2
                faults=$((faults + 1))
            fi
            ;;
        esac
    done <"$log"
done
if [ $kernels = 0 ]; then
    echo "registers: no kernel was found in what ptxas says" >&2
    exit 1
fi
[ $faults = 0 ]

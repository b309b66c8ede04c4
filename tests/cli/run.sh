#!/bin/sh
# Tests of the program from outside: run.sh LOGITLESS MAKE_NPY. Exit codes, one-line errors, numbers known
# beforehand, digests over threads and chunks, and what is left of --out after a failure.
make_npy=$2
. "$(dirname "$0")/common.sh"

# near NAME VALUE: the field is VALUE within 1e-6 of it, or of 1 if it is smaller.
near() {
    if field "$1" | awk -v want="$2" 'NR == 1 { d = $1 - want; s = want > 1 ? want : 1; ok = $1 != "null" && d * d <= s * s * 1e-12 } END { exit !ok }'; then
        pass
    else
        fail "$1: found $(field "$1"), wanted $2"
    fi
}

absent() {
    for name in "$@"; do
        if [ -e "$name" ]; then fail "$name is there, wanted nothing"; else pass; fi
    done
}

V=203
N=150
"$make_npy" h.npy f4 normal $N 24 && "$make_npy" w.npy f4 normal $V 24 && "$make_npy" w0.npy f4 0 $V 24 &&
    "$make_npy" y.npy i8 mod:$V $N && "$make_npy" y32.npy i4 mod:$V 10 15 && "$make_npy" h3.npy f4 normal 10 15 24 &&
    "$make_npy" bad.npy i8 $V $N && "$make_npy" ign.npy i8 -100 $N && "$make_npy" b.npy f4 normal $V &&
    "$make_npy" y128.npy i8 mod:128 $N && "$make_npy" b7.npy f4 0 7 && "$make_npy" w7.npy f4 0 $V 7 && "$make_npy" cw.npy f4 2 $V &&
    "$make_npy" cwneg.npy f4 -1 $V && "$make_npy" cw0.npy f4 0 $V && "$make_npy" tw.npy f4 3 $N &&
    "$make_npy" twnan.npy f4 nan $N && "$make_npy" h0.npy f4 0 0 24 && "$make_npy" y0.npy i8 0 0 &&
    "$make_npy" hnan.npy f4 nan $N 24 || exit 1
printf 'not a tensor' >junk.npy

# Usage.
wants 0 "usage: logitless COMMAND" --help
wants 0 "logitless 0." --version
wants 2 "found no command"
wants 2 'unknown command "scroe"' scroe
wants 2 'unknown option "--frobnicate"' --frobnicate
for command in score train check bench info; do
    wants 0 "usage: logitless $command" $command --help
    wants 2 "unknown option --frobnicate" $command --frobnicate
done
wants 0 "default 4096" score --help
wants 2 "--hidden FILE[:NAME] is required" score
wants 2 "--weight FILE[:NAME] is required" score --hidden h.npy --targets y.npy

score="--hidden h.npy --weight w.npy --targets y.npy"
wants 2 "--temperature: found \"warm\", wanted a number > 0" score $score --temperature warm
wants 2 "--temperature: found \"0\", wanted a number > 0" score $score --temperature 0
wants 2 "--temperature: found \"-1\"" score $score --temperature=-1
wants 2 "--temperature: found \"nan\"" score $score --temperature nan
wants 2 "--label-smoothing: found \"1.5\", wanted a number >= 0 and <= 1" score $score --label-smoothing 1.5
wants 2 "--softcap: found \"-3\"" score $score --softcap -3
wants 2 "--ignore-index: found \"1.5\", wanted an integer" score $score --ignore-index 1.5
wants 2 "--threads: found no value" score $score --threads
wants 2 "--threads: found \"0\"" score $score --threads 0
wants 2 "--chunk-tokens: found \"0\"" score $score --chunk-tokens 0
wants 2 "--backend: found \"gpu\", wanted auto|cpu|cuda|ref" score $score --backend gpu
wants 2 "takes no value" score $score --json=yes
wants 2 "found \"extra\", wanted an option" score $score extra

# Files.
wants 2 "missing.npy" score --hidden missing.npy --weight w.npy --targets y.npy
wants 2 "junk.npy" score --hidden junk.npy --weight w.npy --targets y.npy
wants 2 "." score --hidden . --weight w.npy --targets y.npy
wants 2 "--weight w7.npy: found f32 [$V, 7], wanted [vocabulary, 24]" score --hidden h.npy --weight w7.npy --targets y.npy
wants 2 "--hidden y.npy: found i64 [$N], wanted f32, bf16 or f16" score --hidden y.npy --weight w.npy --targets y.npy
wants 2 "--targets h.npy: found f32 [$N, 24], wanted i64 or i32" score --hidden h.npy --weight w.npy --targets h.npy
wants 2 "--targets y0.npy: found i64 [0], wanted $N elements" score --hidden h.npy --weight w.npy --targets y0.npy
wants 2 "row 0: found $V, wanted 0 to 202 or the ignored -100" score --hidden h.npy --weight w.npy --targets bad.npy
wants 2 "--bias b7.npy: found f32 [7], wanted [$V]" score $score --bias b7.npy
wants 2 "--class-weight cwneg.npy: row 0: found -1" score $score --class-weight cwneg.npy
wants 2 "--token-weight twnan.npy: row 0" score $score --token-weight twnan.npy
wants 2 "--vocab-size: found 204, wanted at most the $V rows" score $score --vocab-size 204
wants 2 "--out h.npy: found the file of --hidden" score $score --out h.npy
wants 2 "h.npy" score --hidden h.npy:name --weight w.npy --targets y.npy

# A zero weight: every class has probability 1 / V.
zero="--hidden h.npy --weight w0.npy --targets y.npy"
wants 0 "perplexity" score $zero
wants 0 '"digest"' score $zero --entropy --json
near loss 5.313205979 && near mean_nll 5.313205979 && near mean_entropy 5.313205979 && near perplexity 203
equals tokens $N && equals valid $N && equals ranks 1 && equals nonfinite_rows 0
wants 0 loss score --hidden h.npy --weight w0.npy --targets y128.npy --vocab-size 128 --json
near loss 4.852030264 && equals mean_entropy null
wants 2 "wanted 0 to 127" score --hidden h.npy --weight w0.npy --targets bad.npy --vocab-size 128
wants 0 loss score $zero --json --reduction sum
near loss 796.980896824
wants 0 loss score $zero --json --class-weight cw.npy
near loss 5.313205979
wants 0 loss score $zero --json --token-weight tw.npy
near loss 15.939617936
wants 0 loss score $zero --json --z-loss 0.5 --label-smoothing 0.25 --temperature 2 --softcap 3
near loss 19.428284866
wants 0 loss score --hidden h3.npy --weight w0.npy --targets y32.npy --json
near loss 5.313205979

# Nothing to average, nothing to score, nothing finite.
wants 0 loss score --hidden h.npy --weight w.npy --targets ign.npy --json
near loss 0 && equals mean_nll null && equals valid 0
ignored=$(field digest)
wants 0 loss score --hidden h0.npy --weight w.npy --targets y0.npy --json --out empty.safetensors
near loss 0 && equals tokens 0 && equals digest cbf29ce484222325
wants 0 loss score --hidden hnan.npy --weight w.npy --targets y.npy --json
equals loss null && equals nonfinite_rows $N
wants 0 loss score --hidden hnan.npy --weight w.npy --targets ign.npy --json
equals digest "$ignored"

# The same bits for every cut of the work.
wants 0 loss score $score --bias b.npy --json --threads 1
digest=$(field digest)
loss=$(field loss)
for cut in "--threads 2" "--threads 3 --chunk-tokens 7" "--chunk-tokens 1" "--chunk-tokens 64 --workspace-mb 1"; do
    wants 0 loss score $score --bias b.npy --json $cut
    equals digest "$digest" && equals loss "$loss"
done

# Kernels of one numerics id agree bit for bit; the reference has an id of its own.
"$program" info >stdout 2>stderr
for kernel in $(awk '/^  linear_ce_/ && /runs here$/ && $3 != "ref-f64-v1" { print $1 }' stdout); do
    export LL_KERNEL="$kernel"
    wants 0 loss score $score --bias b.npy --json
    equals kernel "$kernel" && equals digest "$digest" && equals loss "$loss"
    unset LL_KERNEL
done
export LL_KERNEL=nonsense
wants 2 'LL_KERNEL is "nonsense"' score $score
wants 2 'LL_KERNEL is "nonsense"' bench f:f32:n1:d1:v2
unset LL_KERNEL

# --out is whole or absent.
wants 0 written score $score --out out.safetensors
for name in nll lse entropy argmax; do
    if grep -q "\"$name\"" out.safetensors; then pass; else fail "out.safetensors has no $name"; fi
done
wants 2 "argmax" score --hidden out.safetensors:none --weight w.npy --targets y.npy
wants 0 loss score --hidden h.npy --weight w.npy --targets out.safetensors:argmax --json
mkdir full
(ulimit -f 1 && exec "$program" score $score --out full/out.safetensors) >stdout 2>stderr
found=$?
if [ $found -eq 3 ] && [ "$(wc -l <stderr)" -eq 1 ]; then pass; else fail "file size limit: exit code $found, wanted 3"; fi
if [ -z "$(ls -A full)" ]; then pass; else fail "left behind: $(ls -A full)"; fi
wants 2 "found a directory" score $score --out full
wants 3 "nowhere: No such file or directory" score $score --out nowhere/out.safetensors
absent nowhere
if [ -c /dev/full ]; then
    "$program" score $score --json >/dev/full 2>stderr
    found=$?
    if [ $found -eq 3 ]; then pass; else fail "stdout to a full device: exit code $found, wanted 3"; fi
fi

# info and bench.
wants 0 "CUDA: " info
wants 0 '"kernels"' info --json
wants 2 "not understood" bench f:f32:n4:q9
wants 2 "not understood" bench f:f32:n4:d8:v9 nonsense
wants 0 '"gflops"' bench --json --seconds 0 f:f32:n8:d16:v100
wants 0 "ce_cpu_" bench --seconds 0 ce:f32:n8:v100 cef:bf16:n8:v100:ids2 ceb:f16:n8:v100
wants 2 "bench repeats calls" bench --seconds 0 ce:f32:n8:v100:inplace
wants 2 "ce over ranks" bench --seconds 0 --ranks 2 ce:f32:n8:v100
wants 0 "fb:bf16:n8:d16:v100" bench --seconds 0 --threads 1 fb:bf16:n8:d16:v100 b:f32:n8:d16:v100

finish

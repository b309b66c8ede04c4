#!/bin/sh
# Tests of `logitless check`: check.sh LOGITLESS. PASS for dtypes, references and cuts; FAIL where the tolerance
# leaves no room for a rounding; exit codes; and errors in one line.
. "$(dirname "$0")/common.sh"

small="--tokens 40 --hidden-size 24 --vocab-size 700"

# line NAME: its verdict in the last run.
line() { awk -v name="$1" '$2 == name { print $1 }' stdout; }

# passes ARGUMENT...: exit code 0, every line a PASS.
passes() {
    wants 0 PASS check "$@"
    for name in output hidden_grad weight_grad bias_grad invariance ranks passes; do
        verdict=$(line $name)
        case "$*" in
        *--no-bias*) [ $name != bias_grad ] || [ "$verdict" != SKIP ] || verdict=PASS ;;
        esac
        same "check $*: $name" PASS "$verdict"
    done
    same "check $*: last line" PASS "$(tail -n 1 stdout)"
}

for dtype in fp32 bf16 fp16; do
    for mode in fp32 matching; do
        passes $small --dtype $dtype --reference-mode $mode
        passes $small --dtype $dtype --reference-mode $mode --ranks 2 --threads 2
        passes $small --dtype $dtype --reference-mode $mode --ranks 4 --uneven-shards
        passes $small --dtype $dtype --reference-mode $mode --ranks 3 --uneven-shards --no-bias --seed 7
    done
done
passes --ranks 3
passes --tokens 1 --hidden-size 1 --vocab-size 1 --ranks 3 --uneven-shards
passes --tokens 9 --hidden-size 5 --vocab-size 65 --ranks 70
passes $small --atol 0.01 --rtol 0.01 --ranks 2
passes $small --ranks 2 --run-stress --stress-tokens 60 --stress-hidden-size 40 --stress-vocab-size 900
same stress PASS "$(line stress)"
for text in "finite: yes" "second run equal: yes" "forward_backward" "peak resident memory"; do
    if grep -qF "$text" stdout; then pass; else fail "no \"$text\" in the stress phase"; fi
done

# The log-probs are those of one rank.
wants 0 PASS check $small --dtype bf16
digest=$(awk '$1 == "digest" { print $2 }' stdout)
for cut in "--ranks 2" "--ranks 5 --uneven-shards"; do
    wants 0 "digest        $digest" check $small --dtype bf16 $cut
done
export LL_COMM_DEBUG=1
wants 0 "digest        $digest" check $small --dtype bf16 --ranks 3 --uneven-shards
unset LL_COMM_DEBUG
export LL_KERNEL=linear_ce_cpu_plain
wants 0 "kernel        linear_ce_cpu_plain" check $small --ranks 2
unset LL_KERNEL

# fails LINE... -- ARGUMENT...: exit code 1, one line on stderr with these names, each a FAIL on stdout.
fails() {
    names=
    while [ "$1" != -- ]; do
        names="$names${names:+, }$1"
        shift
    done
    shift
    "$program" check "$@" >stdout 2>stderr
    same "check $*: exit code" 1 $?
    same "check $*: stderr" "logitless: check failed: $names" "$(cat stderr)"
    same "check $*: failed lines" "$names" "$(awk '$1 == "FAIL" && $2 { printf "%s%s", n++ ? ", " : "", $2 }' stdout)"
    same "check $*: last line" FAIL "$(tail -n 1 stdout)"
}
fails output hidden_grad weight_grad bias_grad -- $small --dtype bf16 --atol 0 --rtol 0
fails output hidden_grad weight_grad bias_grad -- $small --dtype bf16 --atol 0 --rtol 0 --ranks 3
fails output hidden_grad weight_grad -- $small --dtype fp16 --atol 0 --rtol 0 --ranks 2 --no-bias
# One rounding to bf16 is beyond a tolerance for fp32, in the gradients alone.
fails hidden_grad weight_grad bias_grad -- $small --dtype bf16 --atol 1e-5 --rtol 1e-5 --ranks 2
if grep -q "^      at grad_w\[[0-9]*, [0-9]*\] on rank [01]: got .*, want " stdout; then pass; else fail "no element named"; fi

# JSON says the same.
"$program" check $small --dtype bf16 --atol 0 --rtol 0 --json >stdout 2>stderr
same "exit code of JSON" 1 $?
equals pass false && equals equal_to_one_rank true && equals tolerance_used null
wants 0 '"passes_equal"' check $small --ranks 2 --uneven-shards --json --run-stress --stress-tokens 8 --stress-vocab-size 99
equals dtype fp32 && equals ranks 2 && equals equal_on_all_ranks true && equals second_run_equal true
for python in python3 /usr/bin/python3; do
    "$python" -c "import json" 2>/dev/null || continue
    if "$python" -c "import json; d = json.load(open('stdout')); assert d['pass'] and d['weight_grad']['pass'] and len(d['shards']) == 3" \
        2>stderr; then pass; else fail "JSON of check"; fi
    break
done

# Usage and failures.
wants 2 "unknown option --rank" check --rank 3
wants 2 '--dtype: found "f32", wanted fp32|bf16|fp16' check --dtype f32
wants 2 '--reference-mode: found "fp64"' check --reference-mode fp64
wants 2 '--tokens: found "0"' check --tokens 0
wants 2 '--vocab-size: found "1048577"' check --vocab-size 1048577
wants 2 '--ranks: found "0"' check --ranks 0
wants 2 '--atol: found "-1"' check --atol -1
wants 2 '--backend: found "gpu", wanted auto|cpu|cuda' check --backend gpu
wants 0 "PASS" check $small --backend cpu
wants 2 '--time-limit: found "0"' check --time-limit 0
wants 2 "--comm nccl: found with --backend auto, wanted cuda" check --comm nccl
wants 2 '--comm: found "gloo"' check --comm gloo
wants 2 "--ranks: found with --comm mpi, where the launcher (mpirun -n N) says how many" check --comm mpi --ranks 2
"$program" check --tokens 1000000000 --hidden-size 1048576 --vocab-size 1048576 >stdout 2>stderr # ASan has a word too
same "exit code without memory" 3 $?
same "the program's line without memory" "logitless: check: no memory for 1000000000 tokens and 1048576 rows of 1048576" \
    "$(grep '^logitless' stderr)"
export LL_NUM_THREADS=many
wants 2 'LL_NUM_THREADS is "many"' check $small
unset LL_NUM_THREADS
export LL_KERNEL=linear_ce_ref
wants 2 "runs on one rank" check $small --ranks 2
unset LL_KERNEL
wants 0 "threads  built in: ranks of one process" info
wants 0 "nccl     " info
wants 0 "LL_COMM_DEBUG" info

finish

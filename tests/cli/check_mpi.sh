#!/bin/sh
# Tests of `logitless check --comm mpi` under mpirun: check_mpi.sh LOGITLESS RUN, RUN being tests/mpi/run.sh. The
# same lines and digests as with threads; rank 0 alone speaks; and a rank that fails alone takes the others along
# with one sentence and its exit code. Skips itself (77) without mpirun.
run=$2
. "$(dirname "$0")/common.sh"
if ! command -v "${LL_MPIRUN:-mpirun}" >/dev/null; then
    echo "SKIP: no mpirun here"
    exit 77
fi
small="--tokens 40 --hidden-size 24 --vocab-size 700"

# ranks N COMMAND: a line of shell on N ranks, where $program is the program and $rank the rank.
ranks() {
    program=$program "$run" "$1" sh -c "rank=\${OMPI_COMM_WORLD_RANK:-\$PMI_RANK}; $2" >stdout 2>stderr
    code=$?
}

# passes N ARGUMENT...: exit code 0, one report, no FAIL, and the digest of the same check over threads.
passes() {
    n=$1
    shift
    ranks "$n" "\$program check --comm mpi $*"
    same "$n ranks, $*: exit code" 0 "$code"
    same "$n ranks, $*: reports" 1 "$(grep -c '^PASS$' stdout)"
    same "$n ranks, $*: failed lines" 0 "$(grep -c '^FAIL' stdout)"
    same "$n ranks, $*: lines" 7 "$(grep -cE '^(PASS|SKIP)  (output|(hidden|weight|bias)_grad|invariance|ranks|passes) ' stdout)"
    found=$(awk '$1 == "digest" { print $2 }' stdout)
    "$program" check --ranks 2 "$@" >stdout 2>stderr
    same "$n ranks, $*: digest" "$(awk '$1 == "digest" { print $2 }' stdout)" "$found"
}

# fails CODE TEXT N COMMAND: that exit code, and one line of the program on stderr, which holds TEXT.
fails() {
    wanted=$1
    text=$2
    ranks "$3" "$4"
    same "$4: exit code" "$wanted" "$code"
    same "$4: lines of the program" 1 "$(grep -c '^logitless: ' stderr)"
    if grep '^logitless: ' stderr | grep -qF -e "$text"; then pass; else fail "$4: no \"$text\" on stderr"; fi
}

passes 1 $small
passes 2 $small
passes 2 $small --dtype bf16 --reference-mode matching
passes 3 $small --dtype fp16 --uneven-shards --no-bias
passes 4 $small --uneven-shards --time-limit 30
ranks 2 "\$program check --comm mpi $small --run-stress --stress-tokens 50 --stress-hidden-size 30 --stress-vocab-size 500 --json"
same "stress: exit code" 0 "$code"
equals ranks 2 && equals equal_to_one_rank true && equals second_run_equal true && equals ranks_equal true
LL_MPI_HOSTS="A A B B" ranks 4 "\$program check --comm mpi $small --uneven-shards"
same "two hosts: exit code" 0 "$code"

fails 1 "check failed: output, hidden_grad, weight_grad, bias_grad" 2 \
    "\$program check --comm mpi $small --dtype bf16 --atol 0 --rtol 0"
same "one report of the failure" 1 "$(grep -c '^FAIL$' stdout)"
fails 2 "rank 1 has other inputs than rank 0" 2 "\$program check --comm mpi $small --seed \$rank"
fails 2 "differ in n_tokens_max: 60 and 61" 2 \
    "\$program check --comm mpi $small --run-stress --stress-hidden-size 30 --stress-vocab-size 500 --stress-tokens \$((60 + rank))"
fails 2 "--ranks: found with --comm mpi" 1 "\$program check --comm mpi --ranks 2"

# One rank that fails alone, and one that comes too late: whoever speaks, nobody hangs and the job fails.
ranks 3 "[ \$rank != 1 ] || export LL_KERNEL=nonsense; \$program check --comm mpi $small"
if [ "$code" -ne 0 ] && [ "$code" -ne 124 ]; then pass; else fail "bad LL_KERNEL on one rank: exit code $code"; fi
if grep -qF 'LL_KERNEL is "nonsense"' stderr; then pass; else fail "bad LL_KERNEL on one rank: not named"; fi
ranks 2 "[ \$rank != 1 ] || sleep 3; \$program check --comm mpi $small --time-limit 20"
same "a rank that starts late: exit code" 0 "$code"
ranks 2 "size=40; [ \$rank != 1 ] || size=4000; \$program check --comm mpi --tokens \$size --hidden-size 200 --vocab-size 3000 --time-limit 0.2"
same "a rank beyond the time limit: exit code" 3 "$code"
if grep -qF "the time limit" stderr; then pass; else fail "a rank beyond the time limit: not named"; fi

finish

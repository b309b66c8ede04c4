#!/usr/bin/env bash
# kill.sh RANKS PROGRAM: rank 1 of `PROGRAM killed FOLDER` is killed (SIGKILL) between two operations; every other
# rank writes "status milliseconds sentence" of its next one to FOLDER/<rank>.
#
#   as mpirun is        it ends the whole job at once: no hang, but no sentence of ours either
#   LL_MPI_SURVIVE=1    the survivors go on, their next operation fails within its limit of 2000 ms, and each one
#                       writes down how. Open MPI: mpirun --enable-recovery; MPICH: see run.sh
#
# Of Open MPI's options, orte_abort_on_non_zero_status 0 alone lets the survivors go on too, but then mpirun never
# ends. Survivors leave without MPI_Finalize, which may wait for the dead; without --enable-recovery the first one
# to do so would make mpirun end the others. On several hosts the survivors report in time too, but mpirun of Open
# MPI 4.1 does not end by itself after --enable-recovery.
set -u
here=$(cd "$(dirname "$0")" && pwd)
ranks=$1 program=$2
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT

start=$SECONDS code=0
LL_MPIRUN_SECONDS=60 "$here/run.sh" "$ranks" "$program" killed "$reports" >"$reports/.plain" 2>&1 || code=$?
if [ $code = 77 ]; then
    tail -n 1 "$reports/.plain"
    exit 77
fi
if [ $code = 0 ] || [ $code = 124 ]; then
    cat "$reports/.plain"
    echo "FAIL: mpirun ended with $code after $((SECONDS - start)) s, want an error of its own"
    exit 1
fi
echo "without options mpirun ended the job with $code in $((SECONDS - start)) s"
rm -f "$reports"/*

code=0
export LL_MPI_SURVIVE=1
LL_MPIRUN_SECONDS=60 "$here/run.sh" "$ranks" "$program" killed "$reports" >"$reports/.survive" 2>&1 || code=$?
failures=0
if [ $code = 124 ]; then
    echo "FAIL: survivors did not end"
    failures=1
fi
for ((rank = 0; rank < ranks; rank++)); do
    if [ "$rank" = 1 ]; then continue; fi
    if ! read -r status ms sentence <"$reports/$rank"; then
        echo "FAIL: rank $rank wrote nothing"
        failures=1
        continue
    fi
    echo "rank $rank: status $status after $ms ms: $sentence"
    # LL_STATUS_COMM, within the limit and what a rank may be late where CPUs are few.
    if [ "$status" != 6 ] || [ "$ms" -gt 6000 ] || [[ $sentence != *"2000 ms, the time limit"* ]]; then
        echo "FAIL: rank $rank, want status 6 within 6000 ms and a sentence on the time limit"
        failures=1
    fi
done
if [ $failures != 0 ]; then cat "$reports/.survive"; fi
exit $failures

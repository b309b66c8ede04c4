#!/usr/bin/env bash
# run.sh RANKS PROGRAM [ARGUMENT...]: PROGRAM under mpirun on this machine, however few CPUs it has; ends with
# mpirun's exit code, 77 without mpirun, 124 at the time limit. Environment:
#
#   LL_MPIRUN          mpirun of the MPI that the program was built with (default: mpirun)
#   LL_MPIRUN_OPTIONS  further words for mpirun
#   LL_MPIRUN_SECONDS  time limit (default: 240)
#   LL_MPI_SURVIVE     1: the job goes on when a rank is killed, and mpirun's exit code means nothing
#   LL_MPI_HOSTS       "A A B B": LL_COMM_HOST of ranks 0, 1, 2, 3, as if they ran on hosts A and B
set -u
ranks=$1
shift
mpirun=${LL_MPIRUN:-mpirun}
if ! command -v "$mpirun" >/dev/null; then
    echo "mpi: no mpirun here (apt-get install openmpi-bin)"
    exit 77
fi

# MPI's session and shared memory files go where they are removed, whatever happens to the ranks.
parent=/tmp
if [ -w /dev/shm ]; then parent=/dev/shm; fi
work=$(mktemp -d "$parent/ll-mpi-XXXXXX")
child=
# shellcheck disable=SC2317 # the traps call it
clean_up() {
    trap - EXIT INT TERM HUP
    if [ -n "$child" ]; then
        kill -TERM "$child" 2>/dev/null
        wait "$child" 2>/dev/null
    fi
    rm -rf "$work"
}
trap clean_up EXIT
trap 'clean_up; exit 130' INT TERM HUP
export TMPDIR=$work

options=()
survive=${LL_MPI_SURVIVE:-0}
if "$mpirun" --version 2>/dev/null | grep -qi 'open-mpi\.org'; then
    # Containers often forbid the system call behind single copies; ranks that are bound would share one CPU.
    options+=(--allow-run-as-root --oversubscribe --bind-to none --mca btl_vader_single_copy_mechanism none
        --mca btl_vader_backing_directory "$work")
    if [ "$survive" = 1 ]; then options+=(--enable-recovery); fi
else
    # mpiexec signals survivors (SIGUSR1), and ends the job all the same now and then unless a shell stands
    # between it and the rank.
    # shellcheck disable=SC2016 # for the shell of each rank
    if [ "$survive" = 1 ]; then
        options+=(-disable-auto-cleanup)
        set -- sh -c 'trap "" USR1; "$@"; exit 0' rank "$@"
    fi
    # MPICH over UCX warns of every message that the end of a dead group leaves behind.
    export UCX_LOG_LEVEL=${UCX_LOG_LEVEL:-error}
fi
read -ra more <<<"${LL_MPIRUN_OPTIONS:-}"
options+=(${more[@]+"${more[@]}"} -n "$ranks")

if [ -n "${LL_MPI_HOSTS:-}" ]; then
    export LL_MPI_HOSTS
    # shellcheck disable=SC2016 # for the shell of each rank
    set -- bash -c 'hosts=($LL_MPI_HOSTS)
        export LL_COMM_HOST=${hosts[${OMPI_COMM_WORLD_RANK:-$PMI_RANK}]}
        exec "$@"' rank "$@"
fi

timeout -k 5 "${LL_MPIRUN_SECONDS:-240}" "$mpirun" "${options[@]}" "$@" &
child=$!
wait "$child"
code=$?
child=
exit $code

#!/usr/bin/env bash
# netns.sh PROGRAM [ARGUMENT...]: PROGRAM under Open MPI's mpirun as 4 ranks on two "hosts": ranks 0 and 1 in one
# network namespace, 2 and 3 in another, with nothing but a pair of virtual network cards between them:
#
#   namespace a            198.18.0.1 ------------ 198.18.0.2            namespace b
#   mpirun, ranks 0, 1                                        orted, ranks 2, 3
#
# Instead of ssh, mpirun starts its daemon in b with a small agent. Ends with mpirun's exit code; 77 where Open MPI
# or the right to make namespaces is missing. Environment: that of run.sh, and
#
#   LL_NETNS_RANKS     ranks in each namespace (default: 2)
set -u
here=$(cd "$(dirname "$0")" && pwd)
skip() {
    echo "netns: $1"
    exit 77
}

# All namespaces live within one of mounts and one of networks of this script's own, so that they go with its
# last process, whatever ends it. Without root, a user namespace may give the right to do so.
if [ -z "${LL_NETNS_INSIDE:-}" ]; then
    mpirun=${LL_MPIRUN:-mpirun}
    command -v "$mpirun" >/dev/null || skip "no mpirun here (apt-get install openmpi-bin)"
    "$mpirun" --version 2>/dev/null | grep -qi 'open-mpi\.org' || skip "$mpirun is not Open MPI's"
    command -v ip >/dev/null || skip "no ip here (apt-get install iproute2)"
    export LL_NETNS_INSIDE=1
    for user in "" "--user --map-root-user"; do
        # shellcheck disable=SC2086 # the options are words
        if unshare $user --mount --net sh -c 'mount -t tmpfs tmpfs /run && ip netns add probe' 2>/dev/null; then
            exec unshare $user --mount --net "$0" "$@"
        fi
    done
    skip "network namespaces are not allowed here"
fi

mount -t tmpfs tmpfs /run || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP

ip netns add a && ip netns add b && ip link add card netns a type veth peer name card netns b || exit 1
for name in a b; do
    if [ $name = a ]; then address=198.18.0.1; else address=198.18.0.2; fi
    ip -n $name addr add $address/30 dev card && ip -n $name link set card up && ip -n $name link set lo up || exit 1
    echo "$address slots=${LL_NETNS_RANKS:-2}" >>"$work/hosts"
done

# agent HOST WORD...: the words are a command line for a shell over there, as with ssh.
cat >"$work/agent" <<'SH'
#!/bin/sh
case $1 in 198.18.0.1) name=a ;; *) name=b ;; esac
shift
exec ip netns exec $name sh -c "$*"
SH
chmod +x "$work/agent"

network=198.18.0.0/30
export LL_MPIRUN_OPTIONS="${LL_MPIRUN_OPTIONS:-} --hostfile $work/hosts --mca plm_rsh_agent $work/agent
    --mca btl tcp,self --mca btl_tcp_if_include $network --mca oob_tcp_if_include $network"
LL_MPIRUN_OPTIONS=${LL_MPIRUN_OPTIONS//$'\n'/ }
ip netns exec a "$here/run.sh" $((2 * ${LL_NETNS_RANKS:-2})) "$@" &
child=$!
trap 'kill -TERM $child; wait $child; exit 130' INT TERM HUP
wait $child

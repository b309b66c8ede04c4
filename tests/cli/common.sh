# Sourced by the scripts here, which are called as SCRIPT LOGITLESS ...: goes to an empty folder that is removed at
# the end, counts, and checks runs of the program. A script ends with `finish`.
set -u
program=$1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
passed=0
failed=0
skipped=0

pass() { passed=$((passed + 1)); }
fail() {
    failed=$((failed + 1))
    echo "FAIL $*"
    sed 's/^/     stderr: /' stderr
}
: >stderr

# wants CODE TEXT ARGUMENT...: the exit code; for a failure also one line on stderr that holds TEXT and nothing
# on stdout; for success nothing on stderr and TEXT on stdout.
wants() {
    code=$1
    text=$2
    shift 2
    "$program" "$@" >stdout 2>stderr
    found=$?
    if [ "$found" -ne "$code" ]; then
        fail "$*: exit code $found, wanted $code"
    elif [ "$code" -eq 0 ] && [ -s stderr ]; then
        fail "$*: stderr is not empty"
    elif [ "$code" -eq 0 ] && ! grep -qF -e "$text" stdout; then
        fail "$*: no \"$text\" on stdout"
    elif [ "$code" -ne 0 ] && [ "$(wc -l <stderr)" -ne 1 ]; then
        fail "$*: $(wc -l <stderr) lines on stderr, wanted 1"
    elif [ "$code" -ne 0 ] && [ -s stdout ]; then
        fail "$*: stdout is not empty"
    elif [ "$code" -ne 0 ] && ! grep -qF -e "$text" stderr; then
        fail "$*: no \"$text\" on stderr"
    else
        pass
    fi
}

# field NAME [FILE]: its last value in JSON, by default that on stdout of the last run.
field() {
    sed -n 's/^.*"'"$1"'":[[:space:]]*"\{0,1\}\([^",]*\)"\{0,1\},\{0,1\}$/\1/p' "${2:-stdout}" | tail -n 1
}

# same WHAT WANTED FOUND: and neither is empty.
same() { if [ -n "$2" ] && [ "$2" = "$3" ]; then pass; else fail "$1: found $3, wanted $2"; fi; }

# equals NAME TEXT: a field of the last run.
equals() { same "$1" "$2" "$(field "$1")"; }

finish() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
}

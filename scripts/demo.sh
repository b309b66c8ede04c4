#!/usr/bin/env bash
# demo.sh [FILE...]: trains a small language model on the licence texts that every Debian and Ubuntu system has
# (or on the given files), then scores the held-out text from the saved files with 1 and with 2 threads. The
# three digests, of the training program and of both scores, must be equal. Writes build/demo/.
set -euo pipefail
cd "$(dirname "$0")/.."
licences=/usr/share/common-licenses
program=build/logitless
demo=build/demo

texts=("$@")
if [ $# = 0 ]; then
    for file in "$licences"/*; do
        if [ -f "$file" ]; then texts+=("$file"); fi
    done
    if [ ${#texts[@]} = 0 ]; then
        echo "demo: no texts in $licences; give your own: make demo TEXT=\"FILE...\"" >&2
        exit 2
    fi
fi

# say COMMAND...: shows the command as the user would type it, and runs it.
say() {
    echo "\$ $*"
    "$@"
}

digest() { awk '$1 == "digest" { print $2 }' "$1"; }

mkdir -p $demo
rm -f $demo/*.safetensors $demo/*.txt
echo "1. Train: a small language model, its head by logitless"
echo "\$ $program train --text ${1:-$licences/*}${2:+ ...} --save $demo/model.safetensors --save-heldout $demo/heldout.safetensors"
$program train --text "${texts[@]}" --save $demo/model.safetensors --save-heldout $demo/heldout.safetensors |
    tee $demo/train.txt

for threads in 1 2; do
    echo
    echo "$((threads + 1)). Score the held-out text from the files, $threads thread$([ $threads = 1 ] || echo s)"
    say $program score --hidden $demo/heldout.safetensors:hidden --targets $demo/heldout.safetensors:targets \
        --weight $demo/model.safetensors:head.weight --bias $demo/model.safetensors:head.bias --entropy \
        --threads $threads | tee $demo/score-$threads.txt
done

echo
one=$(digest $demo/score-1.txt) two=$(digest $demo/score-2.txt) trained=$(digest $demo/train.txt)
if [ -z "$one" ] || [ "$one" != "$two" ] || [ "$one" != "$trained" ]; then
    echo "demo: the digests differ: 1 thread $one, 2 threads $two, train $trained" >&2
    exit 1
fi
echo "The digests are equal: 1 thread, 2 threads and the training gave every log-prob the same bits ($one)."

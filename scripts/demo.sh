#!/usr/bin/env bash
# demo.sh [FILE...]: trains a small language model on the licence texts that every Debian and Ubuntu system has
# (or on the given files), its vocabulary cut over 2 ranks, then scores the held-out text from the saved files on
# 1, 2 and 3 ranks and with an uneven cut. The digests of the training program and of all scores must be equal.
# Writes build/demo/.
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
echo "1. Train: a small language model, its head by logitless, the vocabulary on 2 ranks"
echo "\$ $program train --ranks 2 --text ${1:-$licences/*}${2:+ ...} --save $demo/model.safetensors --save-heldout $demo/heldout.safetensors"
$program train --ranks 2 --text "${texts[@]}" --save $demo/model.safetensors \
    --save-heldout $demo/heldout.safetensors | tee $demo/train.txt

# A cut that no equal division gives, inside the kernels' tiles of 64 words, and a rank without a word.
words=$(sed -n 's/^model  *vocabulary \([0-9]*\),.*/\1/p' $demo/train.txt)
uneven=0,$((words / 7 + 1)),$((words / 7 + 1)),$((words / 2 + 33)),$words

trained=$(digest $demo/train.txt)
step=2
for cut in "--ranks 1" "--ranks 2" "--ranks 3" "--shards $uneven"; do
    echo
    echo "$step. Score the held-out text from the files, $cut"
    # shellcheck disable=SC2086 # an option and its value
    say $program score --hidden $demo/heldout.safetensors:hidden --targets $demo/heldout.safetensors:targets \
        --weight $demo/model.safetensors:head.weight --bias $demo/model.safetensors:head.bias --entropy \
        $cut | tee $demo/score-$step.txt
    scored=$(digest $demo/score-$step.txt)
    if [ -z "$scored" ] || [ "$scored" != "$trained" ]; then
        echo "demo: the digests differ: train --ranks 2 $trained, score $cut $scored" >&2
        exit 1
    fi
    step=$((step + 1))
done

echo
echo "The digests are equal: the training on 2 ranks and every cut of the vocabulary gave every log-prob the"
echo "same bits ($trained)."

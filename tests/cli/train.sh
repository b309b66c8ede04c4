#!/bin/sh
# Tests of `logitless train` from outside: train.sh LOGITLESS. The loss falls, equal seeds give equal numbers for
# any number of threads, `score` on the saved files repeats the held-out loss digit for digit, repeated
# paragraphs do not count, and every bad input is one line and its exit code.
. "$(dirname "$0")/common.sh"

refuses() {
    code=$1
    text=$2
    shift 2
    wants "$code" "$text" train "$@"
}

# runs OUTPUT ARGUMENT...: exit code 0 and no word on stderr.
runs() {
    output=$1
    shift
    if "$program" "$@" >"$output" 2>stderr && [ ! -s stderr ]; then pass; else fail "$*: failed"; fi
}

text_field() { sed -n "s/^$1 \{1,\}\([0-9a-f.]*\).*/\1/p" "$2" | tail -n 1; }

# Sixty paragraphs of sentences whose next word mostly follows from the last two.
awk 'BEGIN {
    split("cat dog bird fish horse mouse", who); split("sees hears likes follows", does); split("small old red", how)
    for (p = 0; p < 60; p++) {
        for (s = 0; s < 4; s++) {
            a = (p * 7 + s * 5 + int(p * s / 3)) % 6; b = (a + 1 + s % 2) % 6
            printf "The %s %s %s the %s %s.%s", how[a % 3 + 1], who[a + 1], does[(a + b) % 4 + 1], how[b % 3 + 1],
                who[b + 1], s % 2 ? "\n" : " "
        }
        printf "Page %d: na\303\257ve caf\303\251 \351 xq%dz.\n\n", p, p
    }
}' >text.txt
small="--text text.txt --embed 6 --hidden-size 10 --context 3 --batch 32"

# Falls, and is the same for every number of threads and in every form of output.
runs one.json train $small --epochs 4 --lr 0.02 --seed 5 --threads 1 --json
runs two.json train $small --epochs 4 --lr 0.02 --seed 5 --threads 2 --json
runs other.json train $small --epochs 4 --lr 0.02 --seed 6 --threads 1 --json
runs bf16.json train $small --epochs 4 --lr 0.02 --seed 5 --dtype bf16 --json --save mb.safetensors \
    --save-heldout hb.safetensors
runs one.txt train $small --epochs 4 --lr 0.02 --seed 5 --save m.safetensors --save-heldout h.safetensors
losses() { grep -E '"(train|heldout)_loss"' "$1" | tr -d ' \t\n'; }
runs ranks.json train $small --epochs 4 --lr 0.02 --seed 5 --ranks 3 --json --save mr.safetensors \
    --save-heldout hr.safetensors
same "losses of 1 and 2 threads" "$(losses one.json)" "$(losses two.json)"
same "digest of 1 and 2 threads" "$(field digest one.json)" "$(field digest two.json)"
same "digest of JSON and text" "$(field digest one.json)" "$(text_field digest one.txt)"
same "epochs" 4 "$(field epoch one.json)"
if [ "$(losses one.json)" = "$(losses other.json)" ]; then fail "seeds 5 and 6: equal losses"; else pass; fi
if grep '"heldout_loss"' one.json | sed 's/[^0-9.]//g' |
    awk 'NR == 1 { first = $1 } NR > 1 && NR < 5 && $1 >= last { bad = 1 } { last = $1 }
         END { exit bad || NR < 5 || last > 0.7 * first }'; then pass; else fail "held-out loss does not fall"; fi

# Ranks add up gradients in another order: no longer the same bits, but the same model within rounding.
same "ranks" 3 "$(field ranks ranks.json)"
if awk -v a="$(field heldout_loss one.json)" -v b="$(field heldout_loss ranks.json)" \
    'BEGIN { d = a > b ? a - b : b - a; exit !(a > 0 && b > 0 && d < 0.01 * a) }'; then
    pass
else
    fail "held-out loss on 3 ranks: $(field heldout_loss ranks.json), on one $(field heldout_loss one.json)"
fi

# score repeats the numbers.
for kind in "one.json m h" "bf16.json mb hb" "ranks.json mr hr"; do
    set -- $kind
    runs score.json score --hidden $3.safetensors:hidden --weight $2.safetensors:head.weight \
        --bias $2.safetensors:head.bias --targets $3.safetensors:targets --json
    same "$1: loss of score" "$(field heldout_loss $1)" "$(field loss score.json)"
    same "$1: perplexity of score" "$(field perplexity $1)" "$(field perplexity score.json)"
    same "$1: digest of score" "$(field digest $1)" "$(field digest score.json)"
    for cut in "--ranks 2" "--ranks 5"; do
        runs score.json score --hidden $3.safetensors:hidden --weight $2.safetensors:head.weight \
            --bias $2.safetensors:head.bias --targets $3.safetensors:targets --json $cut
        same "$1: digest of score $cut" "$(field digest $1)" "$(field digest score.json)"
    done
done
runs score.txt score --hidden h.safetensors:hidden --weight m.safetensors:head.weight \
    --bias m.safetensors:head.bias --targets h.safetensors:targets
same "printed loss of score" "$(text_field "held-out loss" one.txt)" "$(text_field loss score.txt)"
same "printed perplexity of score" "$(text_field perplexity one.txt)" "$(text_field perplexity score.txt)"
if grep -q "na.*ve" m.safetensors; then pass; else fail "no words in the saved model"; fi

# A text given twice, or wrapped otherwise, is the same text. --steps counts, and ends within an epoch.
awk '{ gsub(/ /, "\n\t "); print }' text.txt >wrapped.txt
runs twice.json train --text text.txt wrapped.txt --steps 7 $small --json
runs once.json train $small --steps 7 --json
same "steps" 7 "$(field steps once.json)"
same "repeated text" "$(field digest once.json)" "$(field digest twice.json)"
ln -s text.txt link.txt
runs link.json train --text link.txt --steps 7 --embed 6 --hidden-size 10 --context 3 --batch 32 --json
same "a link" "$(field digest once.json)" "$(field digest link.json)"

# Bad input.
: >empty.txt
printf 'one\n\ntwo\n' >short.txt
printf 'a\0b\n' >binary.txt
refuses 2 "--text FILE... is required"
refuses 2 "unknown option --stepz" $small --stepz 3
refuses 2 '--steps: found "0"' $small --steps 0
refuses 2 '--lr: found "nan"' $small --lr nan
refuses 2 '--lr: found "0"' $small --lr 0
refuses 2 '--vocab: found "256"' $small --vocab 256
refuses 2 '--ranks: found "0"' $small --ranks 0
refuses 2 '--dtype: found "f64", wanted f32|bf16' $small --dtype f64
refuses 2 "--steps and --epochs: found both" $small --steps 3 --epochs 3
refuses 2 "missing.txt: No such file" --text text.txt missing.txt
refuses 2 "empty.txt: is empty" --text empty.txt
refuses 2 ".: is a directory" --text .
refuses 2 "binary.txt: byte 1 is 0" --text binary.txt
refuses 2 "too short: 2 different paragraphs" --text short.txt
refuses 3 "--save nowhere/m.safetensors: cannot write there: No such file" $small --steps 1 --save nowhere/m.safetensors
refuses 2 "--save link.txt: found a file of --text" $small --save link.txt
refuses 2 "--save-heldout .: found a directory" $small --save-heldout .
refuses 2 "--save-heldout a.st: found the file of --save" $small --save a.st --save-heldout a.st
refuses 3 "--lr: with 1e+38 " $small --lr 1e38 --steps 200 --json --save never.safetensors
if [ -e never.safetensors ]; then fail "a model that did not converge was written"; else pass; fi

# A full disk leaves nothing behind.
mkdir full
(ulimit -f 1 && exec "$program" train $small --steps 1 --json --save full/m.safetensors) >stdout 2>stderr
same "exit code of a full disk" 3 $?
if [ "$(wc -l <stderr)" -eq 1 ] && [ -z "$(ls -A full)" ]; then pass; else fail "full disk: $(ls -A full)"; fi

finish

#!/bin/sh
# Tests of score and bench with the vocabulary over ranks: ranks.sh LOGITLESS MAKE_NPY. Every number but the time
# is the same for every cut, also byte for byte in --out; and every bad cut is one line.
make_npy=$2
. "$(dirname "$0")/common.sh"

V=203
N=150
"$make_npy" h.npy f4 normal $N 24 && "$make_npy" w.npy f4 normal $V 24 && "$make_npy" y.npy i8 mod:$V $N &&
    "$make_npy" b.npy f4 normal $V && "$make_npy" cw.npy f4 0.5 $V && "$make_npy" y128.npy i8 mod:128 $N &&
    "$make_npy" bad.npy i8 $V $N && "$make_npy" h0.npy f4 0 0 24 && "$make_npy" y0.npy i8 0 0 &&
    "$make_npy" hnan.npy f4 nan $N 24 && "$make_npy" cw128.npy f4 0.5 128 || exit 1
score="--hidden h.npy --weight w.npy --targets y.npy --bias b.npy"

# Even, uneven, inside tiles of 64 columns, on their edges, empty ranks first, in the middle and last, more
# ranks than tiles, as many as rows, and one column each.
cuts="--ranks=1 --ranks=2 --ranks=3 --ranks=7 --shards=0,203 --shards=0,1,203 --shards=0,64,128,192,203
      --shards=0,63,65,203 --shards=0,0,100,203 --shards=0,90,90,203 --shards=0,90,203,203 --shards=0,0,0,203,203
      --shards=0,3,7,12,16,17,18,19,20,150,203 --ranks=203 --ranks=250"

numbers() { for name in tokens valid loss mean_nll perplexity mean_entropy nonfinite_rows digest; do field $name; done | tr '\n' ' '; }

# every LABEL ARGUMENT...: the same numbers for every cut as without one.
every() {
    label=$1
    shift
    wants 0 digest score "$@" --entropy --json
    wanted=$(numbers)
    for cut in $cuts; do
        wants 0 digest score "$@" --entropy --json "$cut"
        same "$label $cut" "$wanted" "$(numbers)"
    done
}

every plain $score
every options $score --class-weight cw.npy --softcap 4 --temperature 0.7 --label-smoothing 0.1 --smoothing-rule others \
    --z-loss 0.01
every smoothing $score --label-smoothing 0.2 --reduction sum
every chunks $score --chunk-tokens 7 --threads 3 --workspace-mb 1
every padded --hidden h.npy --weight w.npy --targets y128.npy --vocab-size 128 --class-weight cw128.npy
every nan --hidden hnan.npy --weight w.npy --targets y.npy
every nothing --hidden h0.npy --weight w.npy --targets y0.npy

wants 0 written score $score --out one.safetensors
for cut in $cuts; do
    wants 0 written score $score "$cut" --out cut.safetensors
    if cmp -s one.safetensors cut.safetensors; then pass; else fail "--out with $cut is another file"; fi
done

# What the report says of the cut.
wants 0 digest score $score --json --ranks 3
equals ranks 3
if tr -d ' \t\n' <stdout | grep -qF '"shards":[0,68,136,203]'; then pass; else fail "no shards 0,68,136,203 in JSON"; fi
wants 0 "ranks         4, shards 0,90,90,100,203" score $score --shards 0,90,90,100,203
wants 0 "ranks         1, shards 0,203" score $score

# Bad cuts.
wants 2 "--ranks and --shards: found both, wanted one" score $score --ranks 2 --shards 0,203
wants 2 '--ranks: found "0"' score $score --ranks 0
wants 2 '--ranks: found "257"' score $score --ranks 257
wants 2 '--ranks: found "two"' score $score --ranks two
wants 2 "--shards: found 202 as the last boundary, wanted 203, the rows of --weight w.npy" score $score --shards 0,7,202
wants 2 "--shards: found 204 as the last boundary, wanted 203" score $score --shards 0,204
wants 2 "--shards: found 1 as the first boundary, wanted 0" score $score --shards 1,203
wants 2 "--shards: found 6 behind 7, wanted boundaries that never fall" score $score --shards 0,7,6,203
for text in 203 0 "0," ",203" "0,,203" "0,a,203" "0, 7,203" "0,-7,203" "0,203," "0;203" "0,99999999999999999999,203"; do
    wants 2 "wanted 2 to 257 row numbers parted by commas, 0,...,203" score $score --shards "$text"
done
many=0$(awk 'BEGIN { for (i = 0; i < 257; i++) printf ",203" }')
wants 2 "wanted 2 to 257 row numbers" score $score --shards "$many"
wants 0 digest score $score --shards "${many%,203}"
wants 2 "--targets bad.npy: row 0: found 203" score --hidden h.npy --weight w.npy --targets bad.npy --ranks 3
wants 2 "runs on one rank" score $score --ranks 2 --backend ref

# bench: both sides in turn; the exchange does not grow with the vocabulary.
wants 0 '"ratio"' bench --ranks 2 --threads 2 --seconds 0 --json fb:f32:n32:d16:v1000
bytes=$(field integer_bytes_per_token)
equals gradient_bytes_per_token 64
for problem in fb:f32:n32:d16:v20000 fb:bf16:n32:d16:v64 fb:f32:n32:d16:v1001:bias:ls0.1 b:f32:n32:d16:v1000; do
    wants 0 '"ratio"' bench --ranks 3 --seconds 0 --json $problem
done
wants 0 '"ratio"' bench --ranks 2 --seconds 0 --json fb:f32:n32:d16:v20000
equals integer_bytes_per_token "$bytes"
wants 0 "int B/tok" bench --shards 0,500,500,1000 --seconds 0 f:f32:n32:d16:v1000
wants 2 "--shards: found 1000 as the last boundary, wanted 1001, the rows of problem f:f32:n32:d16:v1001" \
    bench --shards 0,1000 --seconds 0 f:f32:n32:d16:v1001
wants 2 "found both" bench --shards 0,9 --ranks 2 f:f32:n4:d8:v9
wants 2 '--ranks: found "0"' bench --ranks 0

finish

#!/usr/bin/env bash
# test.sh [STAGE...]: every check of the project, or the stages named; the last line sums them up as
# `N passed, N failed, N skipped`. A test is a cmocka test, a ctest test that is none, a fuzz target, or one of
# the checks below. Each stage stands for itself; logs are in build/logs.
#
#   release    gcc -O3, every test                  headers   the header alone, C11 and C++17, two compilers
#   asserts    clang -O3 without NDEBUG             symbols   what the shared library exports and needs
#   asan       address and undefined behaviour      install   installed tree, used by CMake and by pkg-config
#   tsan       data races, tests labelled threads   format    clang-format
#   fuzz       each reader for LL_FUZZ_SECONDS      lint      clang-tidy
#   python     the package built, installed into build/venv, style, types, clang-tidy, pytest
set -u
cd "$(dirname "$0")/.." || exit 2
unset MAKEFLAGS MAKELEVEL # what the checks build is not part of the make that called
export JOBS="${JOBS:-$(nproc)}"
LL_FUZZ_SECONDS=${LL_FUZZ_SECONDS:-30}
logs=$PWD/build/logs
mkdir -p "$logs"
rm -f "$logs/summary"
passed=0 failed=0 skipped=0

# item NAME COMMAND...: one check. Exit code 77 means that it could not be done here.
item() {
    local name=$1 log=$logs/${1//[^a-z0-9+]/-}.log start=$SECONDS code=0
    shift
    "$@" >"$log" 2>&1 </dev/null || code=$?
    case $code in
        0) passed=$((passed + 1)) && echo "passed   $name ($((SECONDS - start)) s)" ;;
        77) skipped=$((skipped + 1)) && echo "skipped  $name: $(tail -n 1 "$log")" ;;
        *)
            failed=$((failed + 1))
            echo "FAILED   $name ($((SECONDS - start)) s); the end of $log:"
            tail -n 40 "$log" | sed 's/^/    /'
            ;;
    esac
    return $code
}

# count_tests CTEST_OUTPUT LAST_TEST_LOG: cmocka tests where a program reports them, else the program as one.
# ctest's output knows how a program ended, its log has what the program said.
count_tests() {
    awk '
        FNR == NR && $2 == "Test" && $3 ~ /^#[0-9]+:$/ {
            end[$4] = $0 ~ / Passed / ? "ok" : $0 ~ /\*\*\*Skipped/ ? "skip" : "bad"
        }
        FNR == NR { next }
        $2 == "Test:" { name = $3 }
        /^\[  PASSED  \] [0-9]+ test\(s\)/ { ok[name] += $4 }
        /^\[  FAILED  \] [0-9]+ test\(s\)/ { bad[name] += $4 }
        /^\[  SKIPPED \] [0-9]+ test\(s\)/ { skip[name] += $4 }
        END {
            for (name in end) {
                passed += ok[name]
                failed += bad[name]
                skipped += skip[name]
                if (end[name] == "bad" && !bad[name]) failed++
                if (end[name] == "ok" && !ok[name] && !skip[name]) passed++
                if (end[name] == "skip") skipped++
            }
            print passed + 0, failed + 0, skipped + 0
        }' "$1" "$2"
}

# tests NAME FOLDER CTEST OPTION...: the tests of a build, counted one by one.
tests() {
    local name=$1 folder=$2 log=$logs/$1-tests.log start=$SECONDS code=0 counts
    shift 2
    rm -f "$folder/Testing/Temporary/LastTest.log"
    ${fixed_addresses[@]+"${fixed_addresses[@]}"} ctest --test-dir "$folder" --output-on-failure --no-tests=error \
        --parallel "$JOBS" "$@" >"$log" 2>&1 </dev/null || code=$?
    read -ra counts <<<"$(count_tests "$log" "$folder/Testing/Temporary/LastTest.log" 2>/dev/null || echo 0 0 0)"
    # ctest has the last word on failure: a program that never ran leaves nothing to count.
    if [ $code != 0 ] && [ "${counts[1]}" = 0 ]; then counts[1]=1; fi
    passed=$((passed + counts[0])) failed=$((failed + counts[1])) skipped=$((skipped + counts[2]))
    if [ $code = 0 ]; then
        echo "passed   $name tests: ${counts[0]} passed, ${counts[2]} skipped ($((SECONDS - start)) s)"
    else
        echo "FAILED   $name tests: ${counts[0]} passed, ${counts[1]} failed, ${counts[2]} skipped; the end of $log:"
        tail -n 80 "$log" | sed 's/^/    /'
    fi
    return $code
}

# The sanitizers place their shadow memory at fixed addresses, which kernels with much address randomisation
# give away now and then; without it they cannot meet.
fixed_addresses=()
if setarch "$(uname -m)" -R true 2>/dev/null; then fixed_addresses=(setarch "$(uname -m)" -R); fi

# Finding leaks needs ptrace, which some containers forbid.
leaks=1
if ! echo 'int main(void) { return 0; }' | cc -x c -fsanitize=address - -o "$logs/leak-probe" 2>/dev/null ||
    ! "$logs/leak-probe" >/dev/null 2>&1; then
    leaks=0
fi
# A refused allocation must reach the code under test as NULL, as the system would give it.
export ASAN_OPTIONS=detect_leaks=$leaks:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1

# Sanitized, but optimised too: the kernels would be some ten times slower at -O0.
debug=(-DLL_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_C_FLAGS_DEBUG=-O2 -g")
clang=-DCMAKE_C_COMPILER=clang

stage_release() {
    item "release build" scripts/build.sh build -DLL_BUILD_TESTS=ON && tests release build
}

# Bits over threads take minutes; release has them as they are and tsan with its own eyes. The longest of the reported
# faults are not run a third time: asan has the asserts too.
threads_and_bits='^core_kernel_bits$'
long_faults='^test_faults_(sizes|invariance|numerics|group)$'

stage_asserts() {
    item "asserts build" scripts/build.sh build/asserts -DLL_BUILD_TESTS=ON -DLL_BUILD_CUDA=OFF $clang -DCMAKE_C_FLAGS_RELEASE=-O3 &&
        tests asserts build/asserts -LE 'slow|mpi' -E "$threads_and_bits|$long_faults"
}

stage_asan() {
    item "asan build" scripts/build.sh build/asan "${debug[@]}" "-DLL_SANITIZE=address;undefined" &&
        tests asan build/asan -LE 'slow|mpi' -E "$threads_and_bits"
    if [ $leaks = 0 ]; then
        skipped=$((skipped + 1))
        echo "skipped  asan leaks: LeakSanitizer does not run here (ptrace is not allowed)"
    fi
}

stage_tsan() {
    TARGET=thread_tests item "tsan build" scripts/build.sh build/tsan "${debug[@]}" $clang -DLL_SANITIZE=thread &&
        tests tsan build/tsan -L threads -LE slow
}

stage_fuzz() {
    TARGET=fuzzers item "fuzz build" scripts/build.sh build/fuzz "${debug[@]}" $clang -DLL_FUZZ=ON \
        "-DLL_SANITIZE=address;undefined" "-DLL_FUZZ_SECONDS=$LL_FUZZ_SECONDS" && tests fuzz build/fuzz -L fuzz
}

stage_headers() {
    local compiler source=$logs/header.c strict=(-Wall -Wextra -Wpedantic -Werror -Iinclude -fsyntax-only)
    # Every macro that a caller writes is expanded, so that it compiles in both languages.
    cat >"$source" <<'C'
#include <logitless/comm_mpi.h>
#include <logitless/comm_nccl.h>
int header_use(void);
int header_use(void) {
    ll_loss loss = LL_LOSS_INIT;
    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    ll_linear_ce_args args = LL_LINEAR_CE_ARGS_INIT;
    args.x = ll_view_matrix(0, LL_DTYPE_F32, 0, 1, 0);
    args.target = ll_view_vector(0, LL_DTYPE_I64, 0, 0);
    ll_ce_args ce = LL_CE_ARGS_INIT;
    ll_ce_state state = LL_CE_STATE_INIT;
    ce.state = &state;
    ll_comm comm = LL_COMM_INIT;
    ll_comm_double script = LL_COMM_DOUBLE_INIT;
    desc.comm = &comm;
    desc.loss = &loss;
    return (int)(script.struct_bytes + args.struct_bytes + ce.struct_bytes + desc.struct_bytes) + LL_VERSION_MAJOR;
}
C
    for compiler in gcc clang; do
        item "header as C11, $compiler" "$compiler" -std=c11 "${strict[@]}" "$source"
    done
    for compiler in g++ clang++; do
        item "header as C++17, $compiler" "$compiler" -x c++ -std=c++17 "${strict[@]}" "$source"
    done
}

check_symbols() {
    scripts/build.sh build || return
    nm -D --defined-only build/liblogitless.so | awk '{ print $3 }' | LC_ALL=C sort | diff -u src/liblogitless.symbols -
}

check_needed() {
    local others
    scripts/build.sh build || return
    others=$(readelf -d build/liblogitless.so | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -vE '^(libc|libm|libpthread|libdl|ld-linux[a-z0-9-]*)\.so\.') || return 0
    echo "liblogitless.so may need libc, libm and threads only, but needs: $others"
    return 1
}

check_install() { scripts/build.sh build && tests/install/run.sh build; }

check_lint() { scripts/build.sh build -DLL_BUILD_TESTS=ON && scripts/lint.sh build; }

stage_symbols() {
    item "exported symbols are src/liblogitless.symbols" check_symbols
    item "library needs only libc, libm, threads" check_needed
}

stage_install() { item "installed tree" check_install; }

stage_format() { item "clang-format" scripts/format.sh --check; }

stage_lint() { item "clang-tidy" check_lint; }

# The Python tests, counted one by one from pytest's last line.
python_tests() {
    local log=$logs/python-tests.log start=$SECONDS code=0 last bad
    env -u PYTHONPATH -u LL_FFI_PATH build/venv/bin/python -m pytest -q -p no:cacheprovider tests/python >"$log" 2>&1 </dev/null ||
        code=$?
    last=$(tail -n 1 "$log")
    count() { grep -oE "[0-9]+ $1" <<<"$last" | grep -oE '[0-9]+' || echo 0; }
    passed=$((passed + $(count passed))) skipped=$((skipped + $(count skipped)))
    bad=$(($(count failed) + $(count error)))
    if [ $code != 0 ] && [ "$bad" = 0 ]; then bad=1; fi
    failed=$((failed + bad))
    if [ $code = 0 ]; then
        echo "passed   python tests: $last ($((SECONDS - start)) s)"
    else
        echo "FAILED   python tests: $last; the end of $log:"
        tail -n 80 "$log" | sed 's/^/    /'
    fi
    return $code
}

python_style() { build/venv/bin/ruff check . && build/venv/bin/ruff format --check .; }

python_types() { build/venv/bin/mypy --cache-dir build/mypy; }

python_lint() { clang-tidy -p build/wheel --quiet --warnings-as-errors='*' python/ffi/*.c; }

stage_python() {
    item "python package" scripts/python_env.sh build/venv || return
    item "python style" python_style
    item "python types" python_types
    item "python clang-tidy" python_lint
    python_tests
}

stages=(format headers release symbols install lint asserts asan tsan fuzz python)
for stage in "${@:-${stages[@]}}"; do
    if ! declare -F "stage_$stage" >/dev/null; then
        echo "test.sh: no stage '$stage'; there are: ${stages[*]}" >&2
        exit 2
    fi
    "stage_$stage"
done

echo "$passed passed, $failed failed, $skipped skipped" | tee "$logs/summary"
[ $failed = 0 ]

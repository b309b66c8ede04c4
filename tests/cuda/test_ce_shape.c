/* How rows of given logits are laid out on a GPU: the shapes fit, and are those that were measured. */
#include "cuda/ce.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static const lli_cuda_ce_chip h200 = {132, 60 << 20, 233472, 1024, 232448, 3400},
                              a100 = {108, 40 << 20, 167936, 1024, 166912, 3400},
                              small = {20, 3 << 20, 102400, 1024, 101376, 3400}; /* of sm_86 */

/* Blocks a multiprocessor of 64 warps and 65,536 registers. */
static int blocks_of(const lli_cuda_ce_chip *chip, const lli_cuda_ce_shape *shape) {
    const int bytes = shape->warps * shape->slots * kCeStepBytes + chip->own_bytes + chip->reserved_bytes;
    const int by_memory = chip->shared_bytes / bytes, by_registers = 65536 / (80 * 32) / (shape->warps + 1);
    return by_memory < by_registers ? by_memory : by_registers;
}

static void shapes_fit(void **state) {
    const lli_cuda_ce_chip *const chips[] = {&h200, &a100, &small};
    (void)state;
    for (int c = 0; c < 3; c++) {
        for (int64_t row_bytes = 2; row_bytes <= 4 << 20; row_bytes += 1 + row_bytes / 37) {
            const lli_cuda_ce_shape shape = lli_cuda_ce_shape_for(chips[c], row_bytes);
            const int64_t steps = (row_bytes + kCeStepBytes - 1) / kCeStepBytes;
            assert_in_range(shape.warps, 1, steps < kCeMostTileWarps ? steps : kCeMostTileWarps);
            assert_in_range(shape.slots, 1, kCeMostSlots);
            assert_true(shape.slots <= (steps + shape.warps - 1) / shape.warps); /* none is always empty */
            assert_true(shape.warps * shape.slots * kCeStepBytes + chips[c]->own_bytes <=
                        chips[c]->most_bytes);
            assert_true(blocks_of(chips[c], &shape) >= 1);
        }
    }
}

/* docs/cuda-ce.md, section 4. */
static void shapes_that_were_measured(void **state) {
    static const struct {
        int64_t row_bytes;
        int32_t warps, slots, blocks;
    } rows[] = {{2 * 32000, 4, 3, 4},
                {2 * 128256, 18, 3, 1},
                {2 * 262144, 18, 3, 1},
                {4 * 32000, 9, 3, 2},
                /* 8 with 3 were */ {4 * 128256, 18, 3, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const lli_cuda_ce_shape shape = lli_cuda_ce_shape_for(&h200, rows[i].row_bytes);
        assert_int_equal(shape.warps, rows[i].warps);
        assert_int_equal(shape.slots, rows[i].slots);
        assert_int_equal(blocks_of(&h200, &shape), rows[i].blocks);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes_fit),
        cmocka_unit_test(shapes_that_were_measured),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

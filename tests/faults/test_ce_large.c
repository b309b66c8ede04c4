/* ce where tokens times vocabulary pass 2^32 (B01, B04): the logits are pages of zeros that are reserved and
 * never written, so that the call reads all of them and the machine holds none. On the best kernel alone. */
#define _DEFAULT_SOURCE
#include "faults/ce_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <cmocka.h>

static void more_than_2_to_32_logits(void **state) {
    enum { kRows = 131075, kVocab = 32768 };
    const size_t bytes = (size_t)kRows * kVocab * 2;
    (void)state;
    void *logits =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (logits == MAP_FAILED) skip();
    struct ce_rig *rig = ce_rig_open(best_kernel_of("ce_"), kRows, 1, LL_DTYPE_BF16);
    const ll_view own = rig->args.logits;
    rig->args.logits = ll_view_matrix(logits, LL_DTYPE_BF16, kRows, kVocab, 0);
    rig->desc.v_total = rig->desc.v_local = kVocab;
    for (int64_t i = 0; i < kRows; ++i) rig->target[i] = i % kVocab;
    /* The rows beyond 2^31 and 2^32 elements have a logit of their own. */
    const int64_t marked[] = {65536, 131072, kRows - 1};
    for (int m = 0; m < 3; ++m) {
        lli_store(logits, LL_DTYPE_BF16, marked[m] * kVocab + rig->target[marked[m]], 10.0f);
    }
    ce_rig_run(rig, LL_PASS_FORWARD);
    for (int64_t i = 0; i < kRows; ++i) {
        const int is_marked = i == marked[0] || i == marked[1] || i == marked[2];
        if (!is_marked) ce_near("nll", rig->nll[i], 10.397207708, 1e-6, 0);
        if (is_marked) ce_near("nll of a marked row", rig->nll[i], 0.911326229, 1e-6, 0);
    }
    rig->args.logits = own;
    munmap(logits, bytes);
    ce_rig_close(rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(more_than_2_to_32_logits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

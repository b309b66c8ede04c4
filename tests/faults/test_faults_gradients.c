/* Reported faults of section 6: upstream gradients, repeated and partial passes, optional results. */
#include "harness.h"
#include "oracle.h"

static void b61_zero_then_one(void **state) {
    (void)state;
    const double z[6] = {1, 2, 3, 3, 1, 0};
    for (int by_loss = 0; by_loss < 2; by_loss++) {
        rig *r = rig_exact(2, 3, LL_DTYPE_F32, z);
        float *up = rig_tokens(r, 0);
        up[1] = 1;
        if (by_loss) r->options.reduction = LL_REDUCTION_NONE;
        r->args.up_loss = by_loss ? up : NULL;
        r->args.up_nll = by_loss ? NULL : up;
        rig_run(r);
        double sum = exp(3) + exp(1) + 1;
        int moved = 0;
        for (int k = 0; k < 4; k++) {
            assert_true(rig_get(&r->args.grad_x, 0, k) == 0);
            moved |= rig_get(&r->args.grad_x, 1, k) != 0;
        }
        assert_true(moved);
        for (int j = 0; j < 3; j++) {
            assert_true(rig_dz(r, 0, j) == 0);
            NEAR_TO(rig_dz(r, 1, j), exp(z[3 + j]) / sum - (j == 0), 1e-6, 1e-8);
        }
        rig_close(r);
    }
}

/* Random upstreams of every kind, alone and together. */
static void b61_random_upstreams(void **state) {
    (void)state;
    for (int mask = 1; mask < 16; mask++) {
        rig *r = rig_open(mask == 1 || mask == 15 ? 300 : 37, 6, 83, LL_DTYPE_F32);
        uint64_t seed = 61;
        rig_bias(r);
        rig_random(r, 61, 1, 1);
        r->options.reduction = LL_REDUCTION_NONE;
        const float **field[4] = {&r->args.up_nll, &r->args.up_lse, &r->args.up_entropy, &r->args.up_loss};
        for (int i = 0; i < 4; i++) {
            float *up = rig_tokens(r, 0);
            for (int64_t t = 0; t < r->n; t++) up[t] = (float)uniform(&seed);
            *field[i] = mask >> i & 1 ? up : NULL;
        }
        r->y[5] = -100;
        rig_run(r);
        oracle *o = oracle_of(r);
        oracle_check(o, r, 3e-6);
        oracle_free(o);
        rig_close(r);
    }
}

static uint64_t hash(const void *data, size_t bytes) {
    uint64_t h = 1;
    for (size_t i = 0; i < bytes; i++) h = h * 0x100000001b3u + ((const unsigned char *)data)[i];
    return h;
}

/* g = 1, g = 2, g = 1: exactly once, twice, once; the saved results of the forward stay as they are. */
static void b62_backward_repeats(void **state) {
    (void)state;
    rig *r = rig_open(20, 7, 150, LL_DTYPE_F32);
    rig_bias(r);
    rig_random(r, 62, 1, 1);
    float *up = rig_tokens(r, 1);
    r->args.up_loss = NULL;
    r->args.up_nll = r->args.up_entropy = r->args.up_lse = up;
    rig_run(r);
    uint64_t saved = hash(r->args.nll, 80) ^ hash(r->args.lse, 80) * 3 ^ hash(r->args.entropy, 80) * 5 ^
                     hash(r->args.lse_lo, 80) * 7;
    snapshot *first = snapshot_take(r);
    float once = ((float *)r->args.grad_w.data)[10];
    for (int t = 0; t < 20; t++) up[t] = 2;
    rig_backward(r);
    assert_true(((float *)r->args.grad_w.data)[10] == 2 * once && once != 0);
    const ll_view *grads[] = {&r->args.grad_x, &r->args.grad_w, &r->args.grad_bias};
    for (int i = 0; i < 3; i++)
        for (int64_t e = 0; e < grads[i]->rows * grads[i]->cols; e++) ((float *)grads[i]->data)[e] *= 0.5f;
    snapshot_equal(first, r);
    for (int t = 0; t < 20; t++) up[t] = 1;
    rig_backward(r);
    snapshot_equal(first, r);
    assert_true(saved == (hash(r->args.nll, 80) ^ hash(r->args.lse, 80) * 3 ^ hash(r->args.entropy, 80) * 5 ^
                          hash(r->args.lse_lo, 80) * 7));
    snapshot_free(first);
    rig_close(r);
}

/* Twice more onto what stands there: three times the gradient. */
static void b62_accumulate(void **state) {
    (void)state;
    rig *r = rig_open(20, 7, 150, LL_DTYPE_F32);
    rig_bias(r);
    rig_random(r, 63, 1, 1);
    rig_run(r);
    snapshot *once = snapshot_take(r);
    r->args.accumulate = LL_ACCUMULATE_X | LL_ACCUMULATE_W | LL_ACCUMULATE_BIAS;
    const ll_view *grads[] = {&r->args.grad_x, &r->args.grad_w, &r->args.grad_bias};
    for (int again = 0; again < 2; again++) {
        rig_backward(r);
        rig_forward_backward(r);
        for (int i = 0; i < 3; i++)
            for (int64_t e = 0; e < grads[i]->rows * grads[i]->cols; e++)
                ((float *)grads[i]->data)[e] /= 3; /* 1 + 1 + 1 */
        snapshot_near(once, r, 3e-7);
    }
    snapshot_free(once);
    rig_close(r);
}

static void b63_entropy_after_log_prob(void **state) {
    (void)state;
    rig *r = rig_open(33, 5, 200, LL_DTYPE_F32);
    float nll[33], entropy[33], *all_nll = r->args.nll, *all_entropy = r->args.entropy;
    rig_random(r, 63, 1, 2);
    rig_forward(r);
    memcpy(nll, all_nll, sizeof nll);
    memcpy(entropy, all_entropy, sizeof entropy);
    for (int order = 0; order < 2; order++) {
        for (int step = 0; step < 2; step++) {
            int is_nll = step == order;
            r->args.nll = is_nll ? all_nll : NULL;
            r->args.entropy = is_nll ? NULL : all_entropy;
            rig_forward(r);
        }
        assert_memory_equal(nll, all_nll, sizeof nll);
        assert_memory_equal(entropy, all_entropy, sizeof entropy);
    }
    rig_close(r);
}

/* Any subset of the gradients: what is asked has the same bits. */
static void b64_any_subset_of_gradients(void **state) {
    (void)state;
    rig *r = rig_open(9, 6, 140, LL_DTYPE_BF16);
    rig_bias(r);
    rig_random(r, 64, 1, 1);
    rig_run(r);
    snapshot *all = snapshot_take(r);
    const ll_view none = {0}, gx = r->args.grad_x, gw = r->args.grad_w, gb = r->args.grad_bias;
    for (int mask = 1; mask < 8; mask++) {
        for (int frozen = 0; frozen < 2; frozen++) {
            r->args.grad_x = mask & 1 ? gx : none;
            r->args.grad_w = mask & 2 ? gw : none;
            r->args.grad_bias = mask & 4 ? gb : none;
            r->desc.frozen = frozen ? 7 ^ mask : 0; /* the bits are X, W, BIAS in this order too */
            rig_plan(r);
            rig_run(r);
            snapshot_near(all, r, 1e-6);
            if (!frozen) snapshot_equal(all, r);
        }
    }
    r->args.grad_x = r->args.grad_w = r->args.grad_bias = none;
    r->desc.frozen = 7;
    rig_plan(r);
    rig_forward(r);
    snapshot_equal(all, r);
    snapshot_free(all);
    rig_close(r);
}

/* A frozen head costs no [v, d] of anything; nothing is allocated or run here. */
static void b65_frozen_head_memory(void **state) {
    (void)state;
    rig *r = rig_open(4, 1, 1, LL_DTYPE_BF16);
    r->desc.n_tokens_max = 8192;
    r->desc.n_hidden = 4096;
    r->desc.v_local = r->desc.v_total = 151936;
    r->desc.frozen = LL_FROZEN_W;
    r->desc.grad_x_dtype = r->desc.grad_w_dtype = LL_DTYPE_NONE;
    rig_plan_only(r);
    for (int pass = LL_PASS_FORWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
        size_t bytes = 0;
        OK(ll_plan_workspace(r->plan, (ll_pass)pass, &bytes));
        print_message("pass %d: %.1f MiB\n", pass, (double)bytes / 1048576);
        assert_true(bytes < (size_t)151936 * 4096 * 2);
        assert_true(bytes <= (size_t)512 << 20);
    }
    rig_close(r);
}

static void b67_upstream_of_log_prob(void **state) {
    (void)state;
    const double z[4] = {1, 2, 3, 4}, want[4] = {2.903824, -0.261433, -0.710648, -1.931743};
    rig *r = rig_exact(1, 4, LL_DTYPE_F32, z);
    r->args.up_loss = NULL;
    r->args.up_nll = rig_tokens(r, -3); /* logp = -nll */
    rig_run(r);
    NEAR(r->args.nll[0], 3.440190);
    for (int j = 0; j < 4; j++) NEAR_TO(rig_dz(r, 0, j), want[j], 1e-6, 5e-7); /* printed to 6 places */
    rig_close(r);
}

/* All 2^7 subsets of the optional results of a forward, and of forward_backward without the rest. */
static void b99_any_subset_of_results(void **state) {
    (void)state;
    rig *r = rig_open(6, 4, 90, LL_DTYPE_F32);
    r->options.z_loss = 1e-3f;
    rig_random(r, 99, 1, 1);
    rig_run(r);
    snapshot *all = snapshot_take(r);
    const ll_linear_ce_args full = r->args;
    for (int mask = 0; mask < 256; mask++) {
        r->args.loss = mask & 1 ? full.loss : NULL;
        r->args.nll = mask & 2 ? full.nll : NULL;
        r->args.lse = mask & 4 ? full.lse : NULL;
        r->args.lse_lo = mask & 8 ? full.lse_lo : NULL;
        r->args.entropy = mask & 16 ? full.entropy : NULL;
        r->args.z_loss = mask & 32 ? full.z_loss : NULL;
        r->args.argmax = mask & 64 ? full.argmax : NULL;
        r->args.sums = mask & 128 ? full.sums : NULL;
        if (mask) rig_forward(r);
        snapshot_equal(all, r);
        rig_forward_backward(r);
        snapshot_equal(all, r);
    }
    snapshot_free(all);
    rig_close(r);
}

int main(int argc, char **argv) {
    const fault_test tests[] = {
        FAULT(b61_zero_then_one),      FAULT(b61_random_upstreams),       FAULT(b62_backward_repeats),
        FAULT(b62_accumulate),         FAULT(b63_entropy_after_log_prob), FAULT(b64_any_subset_of_gradients),
        FAULT(b65_frozen_head_memory), FAULT(b67_upstream_of_log_prob),   FAULT(b99_any_subset_of_results),
    };
    return faults_main("faults: gradients", tests, COUNT(tests), argc, argv);
}

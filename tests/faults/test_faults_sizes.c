/* Reported faults of section 2 (tiles, padding, strides, alignment, empty shapes) and the small ones of
 * section 1 (index widths). The large ones are in test_faults_large.c. */
#define _DEFAULT_SOURCE
#include "harness.h"
#include "oracle.h"

#include <sys/mman.h>
#include <unistd.h>

/* All logits equal, one token or many: nll = entropy = ln V, dz = 1/V - [v = y], sum over the row 0. */
static void check_flat(rig *r) {
    double want = log((double)r->v), sum = 0;
    int64_t n = r->n, v = r->v;
    rig_run(r);
    for (int64_t t = 0; t < n; t++) {
        NEAR_TO(r->args.nll[t], want, 1e-6, 0);
        NEAR_TO(r->args.entropy[t], want, 1e-6, 0);
        assert_int_equal(r->args.argmax[t], 0);
    }
    NEAR_TO(r->args.loss[0], want * (double)n, 1e-6, 0);
    for (int64_t j = 0; j < v; j++) {
        double g = rig_get(&r->args.grad_bias, j, 0), flat = (double)n / (double)v;
        double hits = 0;
        if (n < 100 || j == r->y[0])
            for (int64_t t = 0; t < n; t++) hits += r->y[t] == j;
        sum += g;
        if (n < 100 || r->y[0] == r->y[n - 1]) NEAR_TO(g, flat - hits, 2e-6, 2e-6 * flat);
    }
    NEAR_TO(sum, 0, 0, 2e-6 * (double)n);
}

static void b07_many_rows_or_columns(void **state) {
    (void)state;
    const int64_t sizes[][2] = {{70000, 8}, {65536, 8}, {8, 70000}};
    for (size_t i = 0; i < COUNT(sizes); i++) {
        rig *r = rig_open(sizes[i][0], 1, sizes[i][1], LL_DTYPE_BF16);
        rig_bias(r);
        for (int64_t t = 0; t < r->n; t++) r->y[t] = r->v - 1;
        check_flat(r);
        rig_close(r);
    }
}

static void b11_phantom_columns(void **state) {
    (void)state;
    const int64_t v[] = {129, 129920, 63, 64, 65, 127, 1025};
    for (size_t i = 0; i < COUNT(v); i++) {
        rig *r = rig_open(3, 2, v[i], LL_DTYPE_F32);
        float *bias = rig_bias(r);
        for (int64_t j = 0; j < v[i]; j++) bias[j] = -20;
        r->y[1] = v[i] / 2;
        r->y[2] = v[i] - 1;
        check_flat(r);
        rig_close(r);
    }
}

/* Columns at or beyond v_total: present in w, infinite there, and never part of a result. */
static void b11_padded_vocabulary(void **state) {
    (void)state;
    const int64_t padded = 160, v = 129, d = 5;
    rig *a = rig_open(4, d, v, LL_DTYPE_F32), *b = rig_open(4, d, padded, LL_DTYPE_F32);
    rig_bias(a);
    rig_bias(b);
    rig_random(a, 11, 1, 1);
    b->desc.v_total = v;
    memcpy(b->args.x.data, a->args.x.data, sizeof(float) * 4 * (size_t)d);
    memcpy(b->args.w.data, a->args.w.data, sizeof(float) * (size_t)(v * d));
    memcpy(b->args.bias.data, a->args.bias.data, sizeof(float) * (size_t)v);
    memcpy(b->y, a->y, sizeof *a->y * 4);
    for (int64_t j = v; j < padded; j++) {
        rig_set(&b->args.bias, j, 0, j % 2 ? NAN : INFINITY);
        for (int64_t k = 0; k < d; k++) rig_set(&b->args.w, j, k, j % 3 ? 1e30 : NAN);
    }
    rig_run(a);
    rig_run(b);
    assert_memory_equal(a->args.nll, b->args.nll, sizeof(float) * 4);
    assert_memory_equal(a->args.entropy, b->args.entropy, sizeof(float) * 4);
    assert_memory_equal(a->args.argmax, b->args.argmax, sizeof(int64_t) * 4);
    assert_memory_equal(a->args.grad_x.data, b->args.grad_x.data, sizeof(float) * 4 * (size_t)d);
    assert_memory_equal(a->args.grad_w.data, b->args.grad_w.data, sizeof(float) * (size_t)(v * d));
    for (int64_t j = v; j < padded; j++) {
        assert_true(rig_get(&b->args.grad_bias, j, 0) == 0);
        for (int64_t k = 0; k < d; k++) assert_true(rig_get(&b->args.grad_w, j, k) == 0);
    }
    rig_close(a);
    rig_close(b);
}

static void b12_softcap_after_masking(void **state) {
    (void)state;
    const int64_t v[] = {65537, 33};
    for (size_t i = 0; i < COUNT(v); i++) {
        rig *r = rig_open(2, 1, v[i], LL_DTYPE_F32);
        float *bias = rig_bias(r);
        double sum = 0, slope = 1 - tanh(5) * tanh(5);
        for (int64_t j = 0; j < v[i]; j++) bias[j] = -5;
        r->options.softcap = 1;
        r->y[1] = v[i] - 1;
        rig_run(r);
        NEAR(r->args.nll[0], log((double)v[i]));
        NEAR(r->args.nll[1], log((double)v[i]));
        NEAR(r->args.entropy[0], log((double)v[i]));
        for (int64_t j = 0; j < v[i]; j++) sum += rig_get(&r->args.grad_bias, j, 0);
        NEAR_TO(sum, 0, 0, 2e-6 * slope);
        /* tanh(5) is 1 - 9e-5: 1 - tanh^2 in f32 has lost three digits */
        NEAR_TO(rig_get(&r->args.grad_bias, 0, 0), slope * (2 / (double)v[i] - 1), 1e-3, 0);
        rig_close(r);
    }
}

/* `bytes` bytes whose end is the end of a page; the next page may not be touched. */
static void *at_page_end(size_t bytes, char **map, size_t *map_bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), used = (bytes + page - 1) / page * page;
    *map_bytes = used + page;
    *map = mmap(NULL, *map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(*map != MAP_FAILED);
    assert_int_equal(mprotect(*map + used, page, PROT_NONE), 0);
    return *map + used - bytes;
}

static void b14_targets_at_page_end(void **state) {
    (void)state;
    const int64_t n[] = {1017, 91, 1};
    for (size_t i = 0; i < COUNT(n); i++) {
        for (int narrow = 0; narrow < 2; narrow++) {
            rig *r = rig_open(n[i], 3, 33, LL_DTYPE_F32);
            rig_random(r, 14, 1, 1);
            char *maps[3];
            size_t map_bytes[3], id_bytes = narrow ? 4 : 8;
            char *y = at_page_end(id_bytes * (size_t)n[i], &maps[0], &map_bytes[0]);
            char *x = at_page_end(sizeof(float) * (size_t)(n[i] * 3), &maps[1], &map_bytes[1]);
            char *w = at_page_end(sizeof(float) * 33 * 3, &maps[2], &map_bytes[2]);
            for (int64_t t = 0; t < n[i]; t++) {
                int32_t id = (int32_t)r->y[t];
                memcpy(y + (size_t)t * id_bytes, narrow ? (void *)&id : (void *)&r->y[t], id_bytes);
            }
            memcpy(x, r->args.x.data, sizeof(float) * (size_t)(n[i] * 3));
            memcpy(w, r->args.w.data, sizeof(float) * 33 * 3);
            rig_run(r);
            snapshot *plain = snapshot_take(r);
            r->args.target = ll_view_vector(y, narrow ? LL_DTYPE_I32 : LL_DTYPE_I64, n[i], 0);
            r->args.x.data = x;
            r->args.w.data = w;
            for (int run = 0; run < 100; run++) {
                rig_forward_backward(r);
                snapshot_equal(plain, r);
            }
            snapshot_free(plain);
            rig_close(r);
            for (int m = 0; m < 3; m++) munmap(maps[m], map_bytes[m]);
        }
    }
}

/* x is every second row of [4, 2, d], w the first columns of wider rows, gradients likewise. */
static void b15_row_strides(void **state) {
    (void)state;
    const ll_dtype dtypes[] = {LL_DTYPE_F32, LL_DTYPE_BF16, LL_DTYPE_F16};
    const int64_t n = 4, d = 24, v = 70;
    for (size_t i = 0; i < COUNT(dtypes); i++) {
        rig *r = rig_open(n, d, v, dtypes[i]);
        rig_random(r, 15, 1, 1);
        rig_run(r);
        ll_linear_ce_args plain = r->args;
        size_t bytes = ll_dtype_bytes(dtypes[i]);
        void *x = rig_alloc(r, bytes * (size_t)(n * 2 * d), 0xff);
        void *w = rig_alloc(r, bytes * (size_t)(v * (d + 8)), 0xff);
        float *gx = rig_alloc(r, sizeof(float) * (size_t)(n * 2 * d), 0);
        float *gw = rig_alloc(r, sizeof(float) * (size_t)(v * (d + 8)), 0);
        for (int64_t k = 0; k < n * 2 * d; k++) gx[k] = 77;
        for (int64_t k = 0; k < v * (d + 8); k++) gw[k] = 77;
        r->args.x = ll_view_matrix(x, dtypes[i], n, d, 2 * d);
        r->args.w = ll_view_matrix(w, dtypes[i], v, d, d + 8);
        for (int64_t t = 0; t < n; t++)
            for (int64_t k = 0; k < d; k++) rig_set(&r->args.x, t, k, rig_get(&plain.x, t, k));
        for (int64_t j = 0; j < v; j++)
            for (int64_t k = 0; k < d; k++) rig_set(&r->args.w, j, k, rig_get(&plain.w, j, k));
        ll_linear_ce_args a = r->args;
        a.grad_x = ll_view_matrix(gx, LL_DTYPE_F32, n, d, 2 * d);
        a.grad_w = ll_view_matrix(gw, LL_DTYPE_F32, v, d, d + 8);
        float loss = plain.loss[0];
        OK(ll_linear_ce_forward_backward(r->plan, &a, NULL));
        assert_true(same_bits(loss, a.loss[0]));
        for (int64_t t = 0; t < n; t++)
            for (int64_t k = 0; k < 2 * d; k++)
                assert_true(gx[t * 2 * d + k] == (k < d ? (float)rig_get(&plain.grad_x, t, k) : 77));
        for (int64_t j = 0; j < v; j++)
            for (int64_t k = 0; k < d + 8; k++)
                assert_true(gw[j * (d + 8) + k] == (k < d ? (float)rig_get(&plain.grad_w, j, k) : 77));
        rig_close(r);
    }
}

/* Every second target, weight-free vectors with a step, and a bias with one. */
static void b16_vector_steps(void **state) {
    (void)state;
    const int64_t n = 9, v = 66;
    for (int narrow = 0; narrow < 2; narrow++) {
        rig *r = rig_open(n, 6, v, LL_DTYPE_F32);
        rig_bias(r);
        rig_random(r, 16, 1, 1);
        rig_run(r);
        snapshot *plain = snapshot_take(r);
        int64_t *wide = rig_alloc(r, sizeof *wide * (size_t)(2 * n), 0xff);
        int32_t *slim = rig_alloc(r, sizeof *slim * (size_t)(2 * n), 0xff);
        float *bias = rig_alloc(r, sizeof *bias * (size_t)(3 * v), 0xff);
        for (int64_t t = 0; t < n; t++) {
            wide[2 * t] = r->y[t];
            slim[2 * t] = (int32_t)r->y[t];
        }
        for (int64_t j = 0; j < v; j++) bias[3 * j] = (float)rig_get(&r->args.bias, j, 0);
        r->args.target =
            narrow ? ll_view_vector(slim, LL_DTYPE_I32, n, 2) : ll_view_vector(wide, LL_DTYPE_I64, n, 2);
        r->args.bias = ll_view_vector(bias, LL_DTYPE_F32, v, 3);
        rig_run(r);
        snapshot_equal(plain, r);
        for (int pass = LL_PASS_FORWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
            ll_linear_ce_args a = rig_args(r, (ll_pass)pass);
            a.w.col_stride = 2;
            assert_int_equal(rig_pass(r->plan, (ll_pass)pass, &a), LL_STATUS_INVALID_ARG);
            assert_non_null(strstr(ll_last_error(), "w has column stride 2"));
        }
        snapshot_free(plain);
        rig_close(r);
    }
}

static void b18_narrow_rows(void **state) {
    (void)state;
    const int64_t v[] = {1, 2, 3, 31, 33, 1023};
    for (size_t i = 0; i < COUNT(v); i++) {
        rig *r = rig_open(1, 1, v[i], LL_DTYPE_F32);
        rig_bias(r);
        r->y[0] = v[i] - 1;
        check_flat(r);
        if (v[i] == 1) {
            assert_true(r->args.loss[0] == 0 && r->args.entropy[0] == 0 && r->args.nll[0] == 0);
            assert_true(rig_get(&r->args.grad_bias, 0, 0) == 0);
        }
        rig_close(r);
    }
}

static void b19_all_infinite_tiles(void **state) {
    (void)state;
    const int64_t v = 4096, finite[] = {v - 1, 0, 63, 64, 1000};
    for (size_t i = 0; i < COUNT(finite); i++) {
        for (int by_bias = 0; by_bias < 2; by_bias++) {
            double *z = malloc(sizeof *z * (size_t)v);
            assert_non_null(z);
            for (int64_t j = 0; j < v; j++) z[j] = j == finite[i] || by_bias ? 0 : -INFINITY;
            rig *r = rig_exact(1, v, LL_DTYPE_BF16, z);
            free(z);
            if (by_bias) {
                float *bias = rig_bias(r);
                for (int64_t j = 0; j < v; j++) bias[j] = j == finite[i] ? 0 : -INFINITY;
            }
            float *up_entropy = rig_tokens(r, 1);
            r->args.up_entropy = up_entropy;
            r->y[0] = finite[i];
            rig_run(r);
            assert_true(r->args.loss[0] == 0 && r->args.nll[0] == 0 && r->args.entropy[0] == 0);
            assert_int_equal(r->args.argmax[0], finite[i]);
            for (int64_t j = 0; j < v; j++) assert_true(rig_dz(r, 0, j) == 0);
            for (int64_t k = 0; k < r->d; k++) assert_true(rig_get(&r->args.grad_x, 0, k) == 0);
            rig_close(r);
        }
    }
}

/* x, w and grad_x begin one element after a 64-byte boundary, and nothing beyond their ends is read. */
static void b20_misaligned(void **state) {
    (void)state;
    const int64_t sizes[] = {7, 769, 3585}, n = 3;
    const ll_dtype dtypes[] = {LL_DTYPE_F32, LL_DTYPE_BF16, LL_DTYPE_F16};
    for (size_t i = 0; i < 9; i++) {
        int64_t d = sizes[i / 3], v = sizes[i % 3];
        ll_dtype dtype = dtypes[i % 3 == 2 ? 1 : (i + i / 3) % 3];
        size_t bytes = ll_dtype_bytes(dtype);
        rig *r = rig_open(n, d, v, dtype);
        rig_random(r, 20 + i, 1, 1);
        rig_run(r);
        snapshot *aligned = snapshot_take(r);
        char *x = rig_alloc(r, bytes * (size_t)(n * d + 1), 0),
             *w = rig_alloc(r, bytes * (size_t)(v * d + 1), 0);
        char *gx = rig_alloc(r, sizeof(float) * (size_t)(n * d + 1), 0);
        memcpy(x + bytes, r->args.x.data, bytes * (size_t)(n * d));
        memcpy(w + bytes, r->args.w.data, bytes * (size_t)(v * d));
        r->args.x.data = x + bytes;
        r->args.w.data = w + bytes;
        r->args.grad_x.data = gx + sizeof(float);
        rig_forward_backward(r);
        snapshot_equal(aligned, r);
        snapshot_free(aligned);
        rig_close(r);
    }
}

static void b21_random_shapes(void **state) {
    (void)state;
    uint64_t seed = 21;
    const ll_dtype dtypes[] = {LL_DTYPE_F32, LL_DTYPE_BF16, LL_DTYPE_F16};
    for (int i = 0; i < 201; i++) {
        int64_t n = 1 + below(&seed, 40), d = 1 + below(&seed, 140), v = 1 + below(&seed, 400);
        if (i == 0) n = 32, d = 128, v = 1024;
        rig *r = rig_open(n, d, v, dtypes[i % 3]);
        if (i % 2) rig_bias(r);
        rig_random(r, seed, 1, 1);
        rig_run(r);
        oracle *o = oracle_of(r);
        oracle_check(o, r, 3e-6);
        oracle_free(o);
        rig_close(r);
    }
}

static void b23_no_tokens(void **state) {
    (void)state;
    for (int reduction = LL_REDUCTION_MEAN; reduction <= LL_REDUCTION_NONE; reduction++) {
        for (int64_t n = 0; n < 2; n++) {
            rig *r = rig_open(n, 4, 5, LL_DTYPE_F32);
            r->options.reduction = reduction;
            rig_bias(r);
            r->args.accumulate = LL_ACCUMULATE_W | LL_ACCUMULATE_BIAS;
            for (int64_t j = 0; j < 20; j++) ((float *)r->args.grad_w.data)[j] = 7;
            for (int64_t j = 0; j < 5; j++) ((float *)r->args.grad_bias.data)[j] = 7;
            rig_forward(r);
            rig_backward(r);
            rig_forward_backward(r);
            assert_int_equal(r->sums.n_valid, n);
            NEAR(r->sums.loss, (double)n * log(5));
            if (reduction != LL_REDUCTION_NONE) NEAR(r->args.loss[0], (double)n * log(5));
            if (n == 1) NEAR(r->args.loss[0], log(5));
            for (int64_t j = 0; j < 20; j++) assert_true(rig_get(&r->args.grad_w, j / 4, j % 4) == 7);
            for (int64_t j = 0; j < 5; j++)
                NEAR(rig_get(&r->args.grad_bias, j, 0), 7 + 2 * (double)n * (0.2 - (j == 0)));
            rig_close(r);
        }
    }
}

int main(int argc, char **argv) {
    const fault_test tests[] = {
        FAULT(b07_many_rows_or_columns), FAULT(b11_phantom_columns),
        FAULT(b11_padded_vocabulary),    FAULT(b12_softcap_after_masking),
        FAULT(b14_targets_at_page_end),  FAULT(b15_row_strides),
        FAULT(b16_vector_steps),         FAULT(b18_narrow_rows),
        FAULT(b19_all_infinite_tiles),   FAULT(b20_misaligned),
        FAULT(b21_random_shapes),        FAULT(b23_no_tokens),
    };
    return faults_main("faults: sizes", tests, COUNT(tests), argc, argv);
}

/* Elements of any dtype, snapshots of results and their comparison. The dtype conversions are written
 * here a second time, through frexp and ldexp, so that a fault of the library's own cannot hide itself. */
#include "harness.h"

#include <stdio.h>

static uint16_t bf16_from(double value) {
    float narrow = (float)value;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    if (isnan(value)) return 0x7fc0;
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

static uint16_t f16_from(double value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double a = fabs(value);
    if (isnan(value)) return 0x7e00;
    int e = a > 0 ? ilogb(a) : -14;
    double quantum = ldexp(1, (e < -14 ? -14 : e) - 10), m = isinf(a) ? a : nearbyint(a / quantum) * quantum;
    if (m >= 65520) return sign | 0x7c00;
    if (m < 0x1p-14) return (uint16_t)(sign | (uint16_t)(m * 0x1p24));
    e = ilogb(m);
    return (uint16_t)(sign | (uint16_t)(((e + 15) << 10) + (int)(ldexp(m, 10 - e) - 1024)));
}

static double f16_to(uint16_t h) {
    int e = (h >> 10) & 31, m = h & 1023;
    double a = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return h & 0x8000 ? -a : a;
}

void rig_set(const ll_view *view, int64_t row, int64_t col, double value) {
    int64_t i = row * view->row_stride + col * view->col_stride;
    if (view->dtype == LL_DTYPE_F32) {
        ((float *)view->data)[i] = (float)value;
    } else {
        ((uint16_t *)view->data)[i] = view->dtype == LL_DTYPE_BF16 ? bf16_from(value) : f16_from(value);
    }
}

double rig_get(const ll_view *view, int64_t row, int64_t col) {
    int64_t i = row * view->row_stride + col * view->col_stride;
    if (view->dtype == LL_DTYPE_F32) return ((const float *)view->data)[i];
    uint16_t h = ((const uint16_t *)view->data)[i];
    if (view->dtype == LL_DTYPE_F16) return f16_to(h);
    uint32_t bits = (uint32_t)h << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

int same_bits(float a, float b) {
    return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0;
}

double uniform(uint64_t *state) {
    uint64_t s = (*state += 0x9e3779b97f4a7c15u);
    s = (s ^ (s >> 30)) * 0xbf58476d1ce4e5b9u;
    s = (s ^ (s >> 27)) * 0x94d049bb133111ebu;
    return (double)((s ^ (s >> 31)) >> 11) * 0x1p-52 - 1;
}

int64_t below(uint64_t *state, int64_t n) {
    return (int64_t)((uniform(state) + 1) * 0.5 * (double)n);
}

void near_at(double got, double want, double rel, double abs, const char *what, const char *file, int line) {
    if (got == want || fabs(got - want) <= rel * fabs(want) + abs) return;
    print_error("%s: got %.9g, want %.9g (off by %.3g)\n", what, got, want, got - want);
    _fail(file, line);
}

void ok_at(ll_status status, const char *what, const char *file, int line) {
    if (status == LL_STATUS_OK) return;
    print_error("%s: %s: %s\n", what, ll_status_name(status), ll_last_error());
    _fail(file, line);
}

/* ---- Snapshots ---- */

enum { kPartsMax = 11 };

typedef struct part {
    const char *name;
    const void *data;
    int64_t count, cols;
    int32_t dtype; /* NONE: 64-bit integers */
} part;

struct snapshot {
    part parts[kPartsMax];
};

static void parts_of(const rig *r, part *p) {
    const ll_linear_ce_args *a = &r->args;
    int64_t n_loss = r->options.reduction == LL_REDUCTION_NONE ? r->n : 1;
    int32_t none = LL_DTYPE_NONE, f32 = LL_DTYPE_F32;
    part all[kPartsMax] = {
        {"loss", a->loss, n_loss, 1, f32},
        {"nll", a->nll, r->n, 1, f32},
        {"lse", a->lse, r->n, 1, f32},
        {"lse_lo", a->lse_lo, r->n, 1, f32},
        {"entropy", a->entropy, r->n, 1, f32},
        {"z_loss", a->z_loss, r->n, 1, f32},
        {"argmax", a->argmax, r->n, 1, none},
        {"sums", a->sums, sizeof(ll_sums) / 8, 1, none},
        {"grad_x", a->grad_x.data, a->grad_x.rows * a->grad_x.row_stride, a->grad_x.row_stride,
         a->grad_x.dtype},
        {"grad_w", a->grad_w.data, a->grad_w.rows * a->grad_w.row_stride, a->grad_w.row_stride,
         a->grad_w.dtype},
        {"grad_bias", a->grad_bias.data, a->grad_bias.rows * a->grad_bias.row_stride, 1, a->grad_bias.dtype},
    };
    memcpy(p, all, sizeof all);
}

static size_t element_bytes(const part *p) {
    return p->dtype == LL_DTYPE_NONE ? 8 : ll_dtype_bytes((ll_dtype)p->dtype);
}

snapshot *snapshot_take(const rig *r) {
    snapshot *s = calloc(1, sizeof *s);
    assert_non_null(s);
    parts_of(r, s->parts);
    for (int i = 0; i < kPartsMax; i++) {
        part *p = &s->parts[i];
        size_t bytes = element_bytes(p) * (size_t)p->count;
        if (!p->data || !bytes) continue;
        void *copy = malloc(bytes);
        assert_non_null(copy);
        memcpy(copy, p->data, bytes);
        p->data = copy;
    }
    return s;
}

void snapshot_free(snapshot *s) {
    for (int i = 0; i < kPartsMax; i++)
        if (s->parts[i].count) free((void *)s->parts[i].data);
    free(s);
}

static double value_at(const part *p, int64_t i) {
    if (p->dtype == LL_DTYPE_NONE) return (double)((const int64_t *)p->data)[i];
    ll_view view = ll_view_vector(p->data, (ll_dtype)p->dtype, p->count, 1);
    return rig_get(&view, i, 0);
}

static void part_equal(const part *a, const part *b) {
    size_t size = element_bytes(a);
    if (!a->data || !b->data || !a->count) return;
    assert_int_equal(a->count, b->count);
    if (memcmp(a->data, b->data, size * (size_t)a->count) == 0) return;
    for (int64_t i = 0; i < a->count; i++) {
        const char *pa = (const char *)a->data + size * (size_t)i,
                   *pb = (const char *)b->data + size * (size_t)i;
        double va = value_at(a, i), vb = value_at(b, i);
        if (memcmp(pa, pb, size) == 0 || (a->dtype != LL_DTYPE_NONE && isnan(va) && isnan(vb))) continue;
        fail_msg("%s[%lld, %lld]: %.9g, then %.9g: the bits differ", a->name, (long long)(i / a->cols),
                 (long long)(i % a->cols), va, vb);
    }
}

void snapshot_equal(const snapshot *s, const rig *r) {
    part now[kPartsMax];
    parts_of(r, now);
    /* On a GPU these are sums over chunks of tokens, of another size in one pass than in two. */
    const int sums_differ = on_gpu() && r->n > 1024;
    for (int i = 0; i < kPartsMax; i++) {
        const char *name = s->parts[i].name;
        if (sums_differ && name && (strcmp(name, "grad_w") == 0 || strcmp(name, "grad_bias") == 0)) continue;
        part_equal(&s->parts[i], &now[i]);
    }
}

void snapshot_near(const snapshot *s, const rig *r, double rel) {
    part now[kPartsMax];
    parts_of(r, now);
    for (int i = 0; i < kPartsMax; i++) {
        const part *a = &s->parts[i], *b = &now[i];
        if (strncmp(a->name, "grad", 4) != 0) {
            part_equal(a, b);
            continue;
        }
        if (!a->data || !b->data) continue;
        double largest = 0;
        for (int64_t e = 0; e < a->count; e++) largest = fmax(largest, fabs(value_at(a, e)));
        for (int64_t e = 0; e < a->count; e++) {
            if (isnan(value_at(a, e)) && isnan(value_at(b, e))) continue;
            NEAR_TO(value_at(b, e), value_at(a, e), 0, rel * largest);
        }
    }
}

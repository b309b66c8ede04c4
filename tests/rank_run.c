/* See rank_run.h. */
#define _POSIX_C_SOURCE 200809L
#include "rank_run.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- Cuts --------------------------------------------------------------------------------------- */

static uint64_t random_next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static int by_value(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

struct rank_cut rank_cut_make(enum rank_cut_kind kind, int32_t n, int64_t n_rows, uint64_t seed) {
    struct rank_cut cut = {.n = n};
    int64_t edges[kRanksMax + 1] = {0};
    uint64_t state = seed * 2654435761u + (uint64_t)n * 97u + (uint64_t)kind + 1u;
    for (int32_t r = 1; r < n; r++) {
        if (kind == CUT_EVEN) edges[r] = n_rows / n * r + (r < n_rows % n ? r : n_rows % n);
        if (kind == CUT_UNEVEN || kind == CUT_EMPTY || kind == CUT_PERMUTED) {
            edges[r] = (int64_t)(random_next(&state) % (uint64_t)(n_rows + 1));
        }
        if (kind == CUT_TINY) edges[r] = r < n_rows ? r : n_rows;
    }
    edges[n] = n_rows;
    qsort(edges, (size_t)n, sizeof *edges, by_value);
    for (int32_t r = 1; kind == CUT_EMPTY && r < n; r += 2) edges[r] = edges[r - 1];
    for (int32_t r = 0; r < n; r++) {
        cut.begin[r] = edges[r];
        cut.count[r] = edges[r + 1] - edges[r];
    }
    for (int32_t r = n - 1; kind == CUT_PERMUTED && r > 0; r--) {
        const int32_t other = (int32_t)(random_next(&state) % (uint64_t)(r + 1));
        const int64_t begin = cut.begin[r], count = cut.count[r];
        cut.begin[r] = cut.begin[other];
        cut.count[r] = cut.count[other];
        cut.begin[other] = begin;
        cut.count[other] = count;
    }
    return cut;
}

const char *rank_cut_text(const struct rank_cut *cut) {
    static char text[1024];
    size_t used = 0;
    text[0] = 0;
    for (int32_t r = 0; r < cut->n && used + 64 < sizeof text; r++) {
        used += (size_t)snprintf(text + used, sizeof text - used, "%s[%" PRId64 ",%" PRId64 ")", r ? " " : "",
                                 cut->begin[r], cut->begin[r] + cut->count[r]);
    }
    return text;
}

/* ---- One rank ----------------------------------------------------------------------------------- */

/* A result that every rank has: rank 0's own, the others' copy. */
struct copy {
    const char *name;
    const void *first; /* rank 0's */
    void *mine;        /* NULL: not asked for */
    size_t bytes;
};

enum { kCopies = 9 };

struct rank {
    struct rank_run *run;
    const ll_plan_desc *desc;
    const ll_linear_ce_args *args;
    ll_pass pass;
    int32_t rank;
    ll_comm comm;
    struct copy copies[kCopies];
    pthread_t thread;
};

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static size_t element_bytes(const ll_view *view) {
    return ll_dtype_bytes((ll_dtype)view->dtype);
}

static void cut_rows(ll_view *view, int64_t begin, int64_t count) {
    if (!view->dtype) return;
    if (view->data)
        view->data = (char *)view->data + (size_t)(begin * view->row_stride) * element_bytes(view);
    view->rows = count;
}

/* A pointer of the whole becomes one to this rank's copy, which starts with what accumulation adds to. */
static void *copied(struct rank *r, int slot, const char *name, void *first, size_t bytes) {
    struct copy *copy = &r->copies[slot];
    *copy = (struct copy){name, first, first, bytes};
    if (!first || r->rank == 0) return first;
    copy->mine = malloc(bytes ? bytes : 1);
    if (bytes) memcpy(copy->mine, first, bytes);
    return copy->mine;
}

static ll_linear_ce_args rank_args(struct rank *r) {
    ll_linear_ce_args a = *r->args;
    const struct rank_cut *cut = r->run->cut;
    const int64_t begin = cut->begin[r->rank], count = cut->count[r->rank], n = a.x.rows;
    cut_rows(&a.w, begin, count);
    cut_rows(&a.bias, begin, count);
    cut_rows(&a.grad_w, begin, count);
    cut_rows(&a.grad_bias, begin, count);
    const size_t floats = sizeof(float) * (size_t)n;
    const bool none = r->desc->loss && r->desc->loss->reduction == LL_REDUCTION_NONE;
    a.loss = copied(r, 0, "loss", a.loss, none ? floats : sizeof(float));
    a.nll = copied(r, 1, "nll", a.nll, floats);
    a.lse = copied(r, 2, "lse", a.lse, floats);
    a.lse_lo = copied(r, 3, "lse_lo", a.lse_lo, floats);
    a.entropy = copied(r, 4, "entropy", a.entropy, floats);
    a.z_loss = copied(r, 5, "z_loss", a.z_loss, floats);
    a.argmax = copied(r, 6, "argmax", a.argmax, sizeof(int64_t) * (size_t)n);
    a.sums = copied(r, 7, "sums", a.sums, sizeof(ll_sums));
    a.grad_x.data =
        copied(r, 8, "grad_x", a.grad_x.data, (size_t)(n * a.grad_x.row_stride) * element_bytes(&a.grad_x));
    return a;
}

static ll_status run_pass(const struct rank *r, const ll_plan *plan, ll_linear_ce_args a) {
    ll_status status = ll_plan_workspace(plan, r->pass, &a.workspace_bytes);
    const size_t rounded = (a.workspace_bytes + 64) / 64 * 64;
    if (status == LL_STATUS_OK) a.workspace = aligned_alloc(64, rounded);
    if (a.workspace) memset(a.workspace, 0xff, rounded); /* its contents must not matter */
    const double begin = seconds_now();
    if (r->pass == LL_PASS_FORWARD) status = ll_linear_ce_forward(plan, &a, NULL);
    if (r->pass == LL_PASS_BACKWARD) status = ll_linear_ce_backward(plan, &a, NULL);
    if (r->pass == LL_PASS_FORWARD_BACKWARD) status = ll_linear_ce_forward_backward(plan, &a, NULL);
    r->run->seconds[r->rank] = seconds_now() - begin;
    free(a.workspace);
    return status;
}

static void *rank_main(void *argument) {
    struct rank *r = argument;
    struct rank_run *run = r->run;
    ll_comm outer = r->comm, joined = r->comm;
    ll_plan *plan = NULL;
    ll_status status = run->join ? run->join(run->context, r->rank, &r->comm, &joined) : LL_STATUS_OK;
    outer = joined;
    if (status == LL_STATUS_OK && run->script) status = ll_comm_double_create(&joined, run->script, &outer);
    ll_plan_desc desc = *r->desc;
    desc.comm = &outer;
    desc.v_begin = run->cut->begin[r->rank];
    desc.v_local = run->cut->count[r->rank];
    ll_linear_ce_args args = rank_args(r);
    if (run->change) run->change(run->context, r->rank, &desc, &args);
    if (status == LL_STATUS_OK) status = ll_plan_create(&desc, &plan);
    if (status == LL_STATUS_OK && !(run->stay_away && run->stay_away(run->context, r->rank))) {
        status = run_pass(r, plan, args);
    }
    run->status[r->rank] = status;
    snprintf(run->sentence[r->rank], kRankTextBytes, "%s", status == LL_STATUS_OK ? "" : ll_last_error());
    ll_plan_destroy(plan);
    if (run->script) {
        ll_comm_double_counts(&outer, &run->counts[r->rank]);
        ll_comm_destroy(&outer);
    }
    if (run->join) ll_comm_destroy(&joined);
    return NULL;
}

/* ---- All ranks ---------------------------------------------------------------------------------- */

static void compare(struct rank_run *run, const struct rank *r) {
    for (int c = 0; c < kCopies; c++) {
        const struct copy *copy = &r->copies[c];
        if (!copy->mine || copy->bytes == 0 || memcmp(copy->first, copy->mine, copy->bytes) == 0) continue;
        size_t at = 0;
        while (((const char *)copy->first)[at] == ((const char *)copy->mine)[at]) at++;
        snprintf(run->difference, sizeof run->difference, "%s of ranks 0 and %d differs at byte %zu",
                 copy->name, r->rank, at);
        return;
    }
}

ll_status ranks_run(struct rank_run *run, const ll_plan_desc *desc, const ll_linear_ce_args *args,
                    ll_pass pass) {
    const int32_t n = run->cut->n;
    struct rank *ranks = calloc((size_t)n, sizeof *ranks);
    ll_comm *comms = calloc((size_t)n, sizeof *comms);
    ll_status result = ranks && comms ? ll_comm_threads(n, run->timeout_ms, comms) : LL_STATUS_MEMORY;
    run->difference[0] = 0;
    for (int32_t r = 0; result == LL_STATUS_OK && r < n; r++) {
        ranks[r] =
            (struct rank){.run = run, .desc = desc, .args = args, .pass = pass, .rank = r, .comm = comms[r]};
    }
    int32_t started = 0;
    while (result == LL_STATUS_OK && started < n &&
           pthread_create(&ranks[started].thread, NULL, rank_main, &ranks[started]) == 0) {
        started++;
    }
    for (int32_t r = 0; r < started; r++) pthread_join(ranks[r].thread, NULL);
    if (result == LL_STATUS_OK && started < n) result = LL_STATUS_MEMORY;
    for (int32_t r = 0; r < started; r++) {
        if (result == LL_STATUS_OK) result = run->status[r];
    }
    for (int32_t r = 1; result == LL_STATUS_OK && r < started; r++) compare(run, &ranks[r]);
    if (run->difference[0]) result = LL_STATUS_INTERNAL;
    for (int32_t r = 1; r < started; r++) {
        for (int c = 0; c < kCopies; c++) free(ranks[r].copies[c].mine);
    }
    for (int32_t r = 0; comms && r < n; r++) ll_comm_destroy(&comms[r]);
    free(comms);
    free(ranks);
    return result;
}

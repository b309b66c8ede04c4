/* A communicator that does another's operations late, in pieces, with its ranks reversed, or not at all, as a
 * script says, and counts them: what code that communicates must stand, and must not depend on. */
#define _GNU_SOURCE /* nanosleep */
#include "comm/comm_internal.h"
#include "core/problem.h"
#include "core/status.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kPiecesMax = 65536 };

typedef struct twin {
    ll_comm inner;
    bool owns_inner; /* a group's */
    ll_comm_double script;
    int32_t rank, size;
    int64_t n_operations;
    ll_comm_counts counts;
    char sentence[kCommSentenceBytes]; /* "": the last failure is inner's */
    int64_t pieces[];                  /* script.pieces + 1 cuts, then script.pieces piece numbers */
} twin;

/* splitmix64: a random number of every state, and the state moves on. */
static uint64_t draw(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void sleep_us(uint64_t us) {
    struct timespec time = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    while (us && nanosleep(&time, &time) == -1 && errno == EINTR) continue;
}

/* FNV-1a over eight bytes. */
static uint64_t hash(uint64_t order, uint64_t number) {
    for (int i = 0; i < 8; i++) order = (order ^ (number >> (8 * i) & 255)) * 0x100000001b3u;
    return order;
}

static void count(twin *t, lli_comm_kind kind, int64_t n) {
    ll_comm_counts *c = &t->counts;
    const struct {
        int64_t *operations, *bytes;
        int64_t element_bytes;
    } sums[] = {
        [LLI_COMM_MAX_I32] = {&c->max_i32, &c->max_bytes, 4},
        [LLI_COMM_SUM_I64] = {&c->sum_i64, &c->sum_bytes, 8},
        [LLI_COMM_ALL_GATHER] = {&c->all_gather, &c->gather_bytes, 1},
        [LLI_COMM_SUM_F32] = {&c->sum_f32, &c->grad_bytes, 4},
    };
    ++*sums[kind].operations;
    if (n > 0) *sums[kind].bytes += n * sums[kind].element_bytes;
    c->order = hash(hash(c->order, (uint64_t)kind), (uint64_t)n);
}

/* What comes before every operation: it is counted, is late, or fails. */
static ll_status begin(twin *t, lli_comm_kind kind, int64_t n) {
    const ll_comm_double *script = &t->script;
    const int64_t number = ++t->n_operations;
    t->sentence[0] = 0;
    count(t, kind, n);
    if (script->fail_at > 0 && number >= script->fail_at) {
        snprintf(t->sentence, sizeof t->sentence,
                 "%s: operation %lld of rank %d fails by the test double's script (fail_at %lld)",
                 lli_comm_kind_names[kind], (long long)number, t->rank, (long long)script->fail_at);
        return lli_fail(LL_STATUS_COMM, "%s", t->sentence);
    }
    uint64_t state = script->seed ^ (uint64_t)t->rank << 40 ^ (uint64_t)number;
    if (script->delay_us > 0) sleep_us(draw(&state) % ((uint64_t)script->delay_us + 1));
    if (number == script->stall_at) sleep_us((uint64_t)script->stall_ms * 1000);
    return LL_STATUS_OK;
}

static ll_status inner_part(twin *t, lli_comm_kind kind, void *values, int64_t from, int64_t n,
                            ll_stream stream) {
    if (kind == LLI_COMM_MAX_I32) {
        return t->inner.max_i32(t->inner.self, n ? (int32_t *)values + from : values, n, stream);
    }
    return t->inner.sum_i64(t->inner.self, n ? (int64_t *)values + from : values, n, stream);
}

static int compare(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Cuts and order come from the seed and the operation's number alone: equal on all ranks. */
static ll_status in_pieces(twin *t, lli_comm_kind kind, void *values, int64_t n, ll_stream stream) {
    LLI_TRY(begin(t, kind, n));
    if (t->script.pieces <= 1 || n <= 1 || !values) return inner_part(t, kind, values, 0, n, stream);
    uint64_t state = t->script.seed + 0x632be59bd9b4e019u * (uint64_t)t->n_operations;
    const int32_t n_pieces = 1 + (int32_t)(draw(&state) % (uint64_t)t->script.pieces);
    int64_t *cuts = t->pieces, *order = t->pieces + t->script.pieces + 1;
    cuts[0] = 0;
    for (int32_t i = 1; i < n_pieces; i++) cuts[i] = (int64_t)(draw(&state) % (uint64_t)(n + 1));
    cuts[n_pieces] = n;
    qsort(cuts, (size_t)n_pieces + 1, sizeof *cuts, compare);
    for (int32_t i = 0; i < n_pieces; i++) {
        const int32_t place = (int32_t)(draw(&state) % (uint64_t)(i + 1));
        order[i] = order[place];
        order[place] = i;
    }
    for (int32_t i = 0; i < n_pieces; i++) {
        const int64_t from = cuts[order[i]], to = cuts[order[i] + 1];
        if (from < to) LLI_TRY(inner_part(t, kind, values, from, to - from, stream));
    }
    return LL_STATUS_OK;
}

static ll_status double_max_i32(void *self, int32_t *values, int64_t n, ll_stream stream) {
    return in_pieces(self, LLI_COMM_MAX_I32, values, n, stream);
}

static ll_status double_sum_i64(void *self, int64_t *values, int64_t n, ll_stream stream) {
    return in_pieces(self, LLI_COMM_SUM_I64, values, n, stream);
}

static ll_status double_sum_f32(void *self, float *values, int64_t n, ll_stream stream) {
    twin *t = self;
    LLI_TRY(begin(t, LLI_COMM_SUM_F32, n));
    return t->inner.sum_f32(t->inner.self, values, n, stream);
}

static void swap_bytes(char *a, char *b, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        const char kept = a[i];
        a[i] = b[i];
        b[i] = kept;
    }
}

static ll_status double_all_gather(void *self, const void *mine, void *all, size_t bytes) {
    twin *t = self;
    LLI_TRY(begin(t, LLI_COMM_ALL_GATHER, (int64_t)bytes));
    LLI_TRY(t->inner.all_gather(t->inner.self, mine, all, bytes));
    for (size_t low = 0, high = (size_t)t->size - 1; t->script.reverse && bytes && low < high;
         low++, high--) {
        swap_bytes((char *)all + low * bytes, (char *)all + high * bytes, bytes);
    }
    return LL_STATUS_OK;
}

static void double_abort(void *self, const char *sentence) {
    twin *t = self;
    if (t->inner.abort) t->inner.abort(t->inner.self, sentence);
}

static const char *double_error(void *self) {
    twin *t = self;
    if (*t->sentence || !t->inner.error) return t->sentence;
    return t->inner.error(t->inner.self);
}

static void double_destroy(void *self) {
    twin *t = self;
    if (t->owns_inner) ll_comm_destroy(&t->inner);
    free(t);
}

static ll_status double_group(void *self, const int32_t *ranks, int32_t n_ranks, ll_comm *group);

/* False: no memory. */
static bool make_double(const ll_comm *inner, bool owns_inner, const ll_comm_double *script, ll_comm *comm) {
    const size_t pieces = script->pieces > 1 ? 2 * (size_t)script->pieces + 1 : 0;
    twin *t = calloc(1, sizeof *t + pieces * sizeof t->pieces[0]);
    if (!t) return false;
    t->inner = *inner;
    t->owns_inner = owns_inner;
    t->script = *script;
    t->rank = script->reverse ? inner->size - 1 - inner->rank : inner->rank;
    t->size = inner->size;
    t->counts.order = 0xcbf29ce484222325u;
    *comm = (ll_comm){.struct_bytes = sizeof *comm,
                      .rank = t->rank,
                      .size = t->size,
                      .debug = inner->debug,
                      .memory = inner->memory,
                      .self = t,
                      .max_i32 = double_max_i32,
                      .sum_i64 = double_sum_i64,
                      .all_gather = double_all_gather,
                      .sum_f32 = double_sum_f32,
                      .abort = double_abort,
                      .error = double_error,
                      .group = inner->group ? double_group : NULL,
                      .destroy = double_destroy};
    return true;
}

/* The group's double is reversed as well: its rank i is rank n - 1 - i of the inner group, and this list's
 * rank r is rank size - 1 - r of the inner world. */
static ll_status double_group(void *self, const int32_t *ranks, int32_t n_ranks, ll_comm *group) {
    twin *t = self;
    t->sentence[0] = 0;
    ll_status status = LL_STATUS_MEMORY;
    ll_comm inner = LL_COMM_INIT;
    int32_t *mapped = malloc((size_t)n_ranks * sizeof *mapped);
    if (!mapped) goto fail;
    for (int32_t i = 0; i < n_ranks; i++) {
        mapped[i] = t->script.reverse ? t->size - 1 - ranks[n_ranks - 1 - i] : ranks[i];
    }
    status = t->inner.group(t->inner.self, mapped, n_ranks, &inner);
    free(mapped);
    if (status != LL_STATUS_OK) return status;
    if (make_double(&inner, true, &t->script, group)) return LL_STATUS_OK;
    status = LL_STATUS_MEMORY;
    ll_comm_destroy(&inner);
fail:
    snprintf(t->sentence, sizeof t->sentence, "group: no memory for the double of a group of %d ranks",
             n_ranks);
    return lli_fail(status, "%s", t->sentence);
}

static ll_status check_script(const ll_comm_double *s) {
    LLI_REQUIRE(s->delay_us >= 0, LL_STATUS_INVALID_ARG,
                "ll_comm_double_create: script.delay_us is %lld, want 0 or more", (long long)s->delay_us);
    LLI_REQUIRE(s->pieces >= 0 && s->pieces <= kPiecesMax, LL_STATUS_INVALID_ARG,
                "ll_comm_double_create: script.pieces is %d, want 0 .. %d", s->pieces, kPiecesMax);
    LLI_REQUIRE(s->reverse == 0 || s->reverse == 1, LL_STATUS_INVALID_ARG,
                "ll_comm_double_create: script.reverse is %d, want 0 or 1", s->reverse);
    LLI_REQUIRE(s->fail_at >= 0, LL_STATUS_INVALID_ARG,
                "ll_comm_double_create: script.fail_at is %lld, want 0 or more", (long long)s->fail_at);
    LLI_REQUIRE(s->stall_at >= 0, LL_STATUS_INVALID_ARG,
                "ll_comm_double_create: script.stall_at is %lld, want 0 or more", (long long)s->stall_at);
    LLI_REQUIRE(s->stall_ms >= 0 && s->stall_ms <= INT64_MAX / 1000, LL_STATUS_INVALID_ARG,
                "ll_comm_double_create: script.stall_ms is %lld, want 0 .. %lld", (long long)s->stall_ms,
                (long long)(INT64_MAX / 1000));
    return LL_STATUS_OK;
}

ll_status ll_comm_double_create(const ll_comm *inner, const ll_comm_double *script, ll_comm *comm) {
    LLI_REQUIRE(comm, LL_STATUS_INVALID_ARG, "ll_comm_double_create: comm is NULL");
    LLI_REQUIRE(comm != inner, LL_STATUS_INVALID_ARG,
                "ll_comm_double_create: comm is inner, want another struct");
    memset(comm, 0, sizeof *comm);
    LLI_TRY(lli_comm_check(inner, "ll_comm_double_create: inner"));
    LLI_REQUIRE(script, LL_STATUS_INVALID_ARG, "ll_comm_double_create: script is NULL");
    ll_comm_double whole;
    LLI_TRY(lli_struct_copy(&whole, sizeof whole, script, sizeof(size_t), "ll_comm_double_create: script"));
    LLI_TRY(check_script(&whole));
    LLI_REQUIRE(make_double(inner, false, &whole, comm), LL_STATUS_MEMORY,
                "ll_comm_double_create: no memory for the double");
    return LL_STATUS_OK;
}

ll_status ll_comm_double_counts(const ll_comm *comm, ll_comm_counts *counts) {
    LLI_REQUIRE(comm, LL_STATUS_INVALID_ARG, "ll_comm_double_counts: comm is NULL");
    LLI_REQUIRE(counts, LL_STATUS_INVALID_ARG, "ll_comm_double_counts: counts is NULL");
    LLI_REQUIRE(comm->max_i32 == double_max_i32 && comm->self, LL_STATUS_INVALID_ARG,
                "ll_comm_double_counts: comm is not a communicator of ll_comm_double_create");
    *counts = ((const twin *)comm->self)->counts;
    return LL_STATUS_OK;
}

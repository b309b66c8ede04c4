/* The communicator of one rank: what it hands in is the result. It has no state, so nothing can be dead and
 * abort, which is for peers, does nothing. */
#include "comm/comm_internal.h"
#include "core/status.h"

#include <string.h>

/* There is no end of one's own to keep a sentence in; ends of one thread fail only by misuse. */
static _Thread_local const char *last_sentence = "";

static ll_status misuse(const char *sentence) {
    last_sentence = sentence;
    return lli_fail(LL_STATUS_COMM, "%s", sentence);
}

static ll_status self_max_i32(void *self, int32_t *values, int64_t n, ll_stream stream) {
    (void)self, (void)stream;
    return n < 0 || (n > 0 && !values) ? misuse("max_i32: want values and n >= 0") : LL_STATUS_OK;
}

static ll_status self_sum_i64(void *self, int64_t *values, int64_t n, ll_stream stream) {
    (void)self, (void)stream;
    return n < 0 || (n > 0 && !values) ? misuse("sum_i64: want values and n >= 0") : LL_STATUS_OK;
}

static ll_status self_sum_f32(void *self, float *values, int64_t n, ll_stream stream) {
    (void)self, (void)stream;
    return n < 0 || (n > 0 && !values) ? misuse("sum_f32: want values and n >= 0") : LL_STATUS_OK;
}

static ll_status self_all_gather(void *self, const void *mine, void *all, size_t bytes) {
    (void)self;
    if (!bytes) return LL_STATUS_OK;
    if (!mine || !all) return misuse("all_gather: want mine and all");
    memcpy(all, mine, bytes);
    return LL_STATUS_OK;
}

static void self_abort(void *self, const char *sentence) {
    (void)self, (void)sentence;
}

static const char *self_error(void *self) {
    (void)self;
    return last_sentence;
}

static ll_status self_group(void *self, const int32_t *ranks, int32_t n_ranks, ll_comm *group) {
    (void)self;
    if (!ranks || !group || n_ranks != 1 || ranks[0] != 0) return misuse("group: one rank has only {0}");
    return ll_comm_self(group);
}

ll_status ll_comm_self(ll_comm *comm) {
    LLI_REQUIRE(comm, LL_STATUS_INVALID_ARG, "ll_comm_self: comm is NULL");
    *comm = (ll_comm){.struct_bytes = sizeof *comm,
                      .size = 1,
                      .memory = LL_COMM_MEMORY_ANY,
                      .max_i32 = self_max_i32,
                      .sum_i64 = self_sum_i64,
                      .all_gather = self_all_gather,
                      .sum_f32 = self_sum_f32,
                      .abort = self_abort,
                      .error = self_error,
                      .group = self_group};
    return LL_STATUS_OK;
}

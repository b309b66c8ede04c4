/* What ll_comm_open loads in its tests: a library with the entry point and nothing of liblogitless. FAKE_COMM
 * in the environment says what it does; by default it gives the communicator of one rank. */
#include <logitless/comm.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef FAKE_ENTRY
#define FAKE_ENTRY ll_comm_mpi_open
#endif

static char sentence[40]; /* the time limit that it was opened with */

static ll_status nothing_i32(void *self, int32_t *values, int64_t n, ll_stream stream) {
    (void)self, (void)values, (void)n, (void)stream;
    return LL_STATUS_OK;
}
static ll_status nothing_i64(void *self, int64_t *values, int64_t n, ll_stream stream) {
    (void)self, (void)values, (void)n, (void)stream;
    return LL_STATUS_OK;
}
static ll_status nothing_f32(void *self, float *values, int64_t n, ll_stream stream) {
    (void)self, (void)values, (void)n, (void)stream;
    return LL_STATUS_OK;
}
static ll_status copy(void *self, const void *mine, void *all, size_t bytes) {
    (void)self;
    memcpy(all, mine, bytes);
    return LL_STATUS_OK;
}
static const char *error(void *self) {
    (void)self;
    return sentence;
}

LL_API int32_t FAKE_ENTRY(int32_t timeout_ms, ll_comm *comm, char *why, size_t why_bytes);

int32_t FAKE_ENTRY(int32_t timeout_ms, ll_comm *comm, char *why, size_t why_bytes) {
    const char *mode = getenv("FAKE_COMM");
    if (!mode) mode = "";
    if (strcmp(mode, "refuse") == 0) {
        snprintf(why, why_bytes, "rank 3 of 8: no network, 100%% sure: %%s");
        return LL_STATUS_COMM;
    }
    if (strcmp(mode, "refuse endlessly") == 0) {
        memset(why, 'x', why_bytes);
        return LL_STATUS_MEMORY;
    }
    if (strcmp(mode, "refuse silently") == 0) return LL_STATUS_UNSUPPORTED;
    snprintf(sentence, sizeof sentence, "opened with %d ms", timeout_ms);
    ll_comm made = {.struct_bytes = sizeof made,
                    .size = strcmp(mode, "no ranks") == 0 ? 0 : 1,
                    .max_i32 = nothing_i32,
                    .sum_i64 = nothing_i64,
                    .all_gather = copy,
                    .sum_f32 = nothing_f32,
                    .error = error};
    *comm = made;
    return LL_STATUS_OK;
}

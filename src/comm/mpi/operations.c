/* The four operations, in pieces through the end's bounce buffers.
 *
 * sum_f32 with `size` ranks cuts a piece into `size` slices. Each level of ranks, first the innermost,
 * exchanges slices so that every rank holds one slice of all ranks of the level, adds them in ascending
 * ranks, and goes on with the sum; then the levels hand their sums back in reverse. A slice is added up on
 * one rank only and copied to the others, so all have the same bits; its chain of additions does not depend
 * on where a piece or a slice begins.
 *
 *   2 hosts of 2 ranks          row: exchange, add     column: exchange, add     column, row: gather
 *   rank 0  a0 a1 a2 a3         a0+b0  a1+b1           (a0+b0)+(c0+d0)           s0 s1  then  s0 s1 s2 s3
 *   rank 1  b0 b1 b2 b3         a2+b2  a3+b3           (a2+b2)+(c2+d2)           s2 s3
 *   rank 2  c0 c1 c2 c3         c0+d0  c1+d1           (a1+b1)+(c1+d1)           s0 s1
 *   rank 3  d0 d1 d2 d3         c2+d2  c3+d3           (a3+b3)+(c3+d3)           s2 s3 */
#include "comm/mpi/end.h"

#include <fenv.h>
#include <string.h>

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Integers: exact in any order, so MPI may choose its algorithm. */
static ll_status reduce(lli_mpi_end *end, const lli_mpi_call *call, void *values, int64_t n,
                        MPI_Datatype type, size_t elem_bytes, MPI_Op operation) {
    const int64_t piece_elems = (int64_t)(kPieceBytes / elem_bytes);
    for (int64_t first = 0; first < n; first += piece_elems) {
        const int64_t count = least(piece_elems, n - first);
        char *at = (char *)values + (size_t)first * elem_bytes;
        memcpy(end->piece, at, (size_t)count * elem_bytes);
        MPI_Request request;
        const int code =
            MPI_Iallreduce(MPI_IN_PLACE, end->piece, (int)count, type, operation, end->data, &request);
        const ll_status status = lli_mpi_wait(end, call, code, &request);
        if (status != LL_STATUS_OK) return status;
        memcpy(at, end->piece, (size_t)count * elem_bytes);
    }
    return LL_STATUS_OK;
}

ll_status lli_mpi_max_i32(void *self, int32_t *values, int64_t n, ll_stream stream) {
    lli_mpi_call call;
    const ll_status status = lli_mpi_begin(self, "max_i32", stream, &call);
    return status ? status : reduce(self, &call, values, n, MPI_INT32_T, sizeof *values, MPI_MAX);
}

ll_status lli_mpi_sum_i64(void *self, int64_t *values, int64_t n, ll_stream stream) {
    lli_mpi_call call;
    const ll_status status = lli_mpi_begin(self, "sum_i64", stream, &call);
    return status ? status : reduce(self, &call, values, n, MPI_INT64_T, sizeof *values, MPI_SUM);
}

ll_status lli_mpi_gather(lli_mpi_end *end, const lli_mpi_call *call, const void *mine, void *all,
                         size_t bytes) {
    const size_t piece_bytes = kPieceBytes / (size_t)end->size;
    for (size_t first = 0; first < bytes; first += piece_bytes) {
        const size_t count = bytes - first < piece_bytes ? bytes - first : piece_bytes;
        memcpy(end->piece, (const char *)mine + first, count);
        MPI_Request request;
        const int code = MPI_Iallgather(end->piece, (int)count, MPI_BYTE, end->received, (int)count, MPI_BYTE,
                                        end->data, &request);
        const ll_status status = lli_mpi_wait(end, call, code, &request);
        if (status != LL_STATUS_OK) return status;
        for (int32_t rank = 0; rank < end->size; rank++)
            memcpy((char *)all + (size_t)rank * bytes + first, end->received + (size_t)rank * count, count);
    }
    return LL_STATUS_OK;
}

ll_status lli_mpi_all_gather(void *self, const void *mine, void *all, size_t bytes) {
    lli_mpi_call call;
    const ll_status status = lli_mpi_begin(self, "all_gather", NULL, &call);
    return status ? status : lli_mpi_gather(self, &call, mine, all, bytes);
}

/* The sum of `parts` slices of slice[elems], in their order and from the first one on (0 + -0 would be +0).
 */
static void add_slices(const float *slices, int32_t parts, int64_t elems, float *sum) {
    memcpy(sum, slices, (size_t)elems * sizeof *sum);
    for (int32_t part = 1; part < parts; part++) {
        const float *slice = slices + part * elems;
        for (int64_t i = 0; i < elems; i++) sum[i] += slice[i];
    }
}

/* The piece of size * slice elements in end->piece becomes the sum over all ranks. */
static ll_status sum_piece(lli_mpi_end *end, const lli_mpi_call *call, int64_t slice) {
    float *base = (float *)(void *)end->piece, *received = (float *)(void *)end->received;
    int64_t elems = slice * end->size;
    MPI_Request request;
    for (int32_t i = 0; i < end->n_levels; i++) {
        const lli_mpi_level *level = &end->levels[i];
        elems /= level->size;
        const int code = MPI_Ialltoall(base, (int)elems, MPI_FLOAT, received, (int)elems, MPI_FLOAT,
                                       level->comm, &request);
        const ll_status status = lli_mpi_wait(end, call, code, &request);
        if (status != LL_STATUS_OK) return status;
        base += level->rank * elems;
        add_slices(received, level->size, elems, base);
    }
    for (int32_t i = end->n_levels - 1; i >= 0; i--) {
        const lli_mpi_level *level = &end->levels[i];
        base -= level->rank * elems;
        const int code = MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, base, (int)elems, MPI_FLOAT,
                                        level->comm, &request);
        const ll_status status = lli_mpi_wait(end, call, code, &request);
        if (status != LL_STATUS_OK) return status;
        elems *= level->size;
    }
    return LL_STATUS_OK;
}

static ll_status sum_pieces(lli_mpi_end *end, const lli_mpi_call *call, float *values, int64_t n) {
    const int64_t piece_elems = (int64_t)(kPieceBytes / sizeof *values) / end->size * end->size;
    for (int64_t first = 0; first < n; first += piece_elems) {
        const int64_t count = least(piece_elems, n - first);
        const int64_t slice = (count + end->size - 1) / end->size;
        memcpy(end->piece, values + first, (size_t)count * sizeof *values);
        memset(end->piece + (size_t)count * sizeof *values, 0,
               (size_t)(slice * end->size - count) * sizeof *values);
        const ll_status status = sum_piece(end, call, slice);
        if (status != LL_STATUS_OK) return status;
        memcpy(values + first, end->piece, (size_t)count * sizeof *values);
    }
    return LL_STATUS_OK;
}

ll_status lli_mpi_sum_f32(void *self, float *values, int64_t n, ll_stream stream) {
    lli_mpi_call call;
    ll_status status = lli_mpi_begin(self, "sum_f32", stream, &call);
    if (status != LL_STATUS_OK) return status;
    /* A caller that rounds otherwise or flushes subnormals would get other bits for the slices added here. */
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    status = sum_pieces(self, &call, values, n);
    fesetenv(&callers);
    return status;
}

/* Memory of test operands between guard bytes, so that a write or a read beside it is seen. */
#ifndef LL_TESTS_GUARDED_H
#define LL_TESTS_GUARDED_H

#include "core/dtype.h"

#include <logitless/logitless.h>

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* One allocation with guard bytes on both sides. */
struct guarded {
    char *raw, *data;
    size_t bytes;
};

enum { kGuardBytes = 64, kGuardByte = 0xff }; /* 0xff...: NaN in every float type, -1 as a token id */

static inline void *guarded_alloc(struct guarded *buffer, int64_t count, size_t element_bytes,
                                  bool misaligned) {
    size_t shift = misaligned ? element_bytes : 0;
    buffer->bytes = (size_t)count * element_bytes;
    size_t total = (buffer->bytes + shift + (size_t)3 * kGuardBytes - 1) / kGuardBytes * kGuardBytes;
    buffer->raw = aligned_alloc(kGuardBytes, total);
    if (!buffer->raw) return NULL;
    memset(buffer->raw, kGuardByte, total);
    buffer->data = buffer->raw + kGuardBytes + shift;
    return buffer->data;
}

static inline bool guarded_intact(const struct guarded *buffer) {
    if (!buffer->raw) return true;
    for (const char *c = buffer->raw; c < buffer->data; ++c) {
        if ((uint8_t)*c != kGuardByte) return false;
    }
    for (int64_t c = 0; c < kGuardBytes; ++c) {
        if ((uint8_t)buffer->data[buffer->bytes + (size_t)c] != kGuardByte) return false;
    }
    return true;
}

static inline void guarded_free(struct guarded *buffers, int64_t count) {
    for (int64_t b = 0; b < count; ++b) free(buffers[b].raw);
}

/* Rows of `cols` elements, `gap` guard elements between them. */
static inline bool guarded_matrix(struct guarded *buffer, ll_view *view, ll_dtype dtype, int64_t rows,
                                  int64_t cols, int64_t gap, bool misaligned) {
    void *data = guarded_alloc(buffer, rows * (cols + gap), ll_dtype_bytes(dtype), misaligned);
    if (data) *view = ll_view_matrix(data, dtype, rows, cols, cols + gap);
    return data != NULL;
}

static inline bool guarded_vector(struct guarded *buffer, ll_view *view, ll_dtype dtype, int64_t n,
                                  int64_t step) {
    void *data = guarded_alloc(buffer, n * step, ll_dtype_bytes(dtype), false);
    if (data) *view = ll_view_vector(data, dtype, n, step);
    return data != NULL;
}

static inline bool guarded_gaps_intact(const ll_view *view) {
    size_t element_bytes = ll_dtype_bytes((ll_dtype)view->dtype);
    for (int64_t r = 0; view->data && r < view->rows; ++r) {
        const char *row = lli_row(view, r);
        for (size_t c = (size_t)view->cols * element_bytes; c < (size_t)view->row_stride * element_bytes;
             ++c) {
            if ((uint8_t)row[c] != kGuardByte) return false;
        }
    }
    return true;
}

/* FNV-1a over 8-byte words, the last one filled up with zeros. */
static inline uint64_t guarded_hash(const struct guarded *buffer, uint64_t hash) {
    for (size_t c = 0; buffer->raw && c < buffer->bytes; c += sizeof hash) {
        uint64_t word = 0;
        memcpy(&word, buffer->data + c, buffer->bytes - c < sizeof word ? buffer->bytes - c : sizeof word);
        hash = (hash ^ word) * 0x100000001b3u;
    }
    return hash;
}

#endif

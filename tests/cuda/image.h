/* Operands and results of a call in device memory, each with guard bytes around it and as misaligned as on
 * the host. Needs no CUDA header: the tests are C. */
#ifndef LL_TESTS_CUDA_IMAGE_H
#define LL_TESTS_CUDA_IMAGE_H

#include <logitless/logitless.h>

#include <stdbool.h>

enum { kImagePieces = 40 };

struct image_piece {
    void *host;
    size_t start, bytes;            /* in the slab */
    size_t row_bytes, stride_bytes; /* of a matrix; 0: no gaps */
    bool out;
};

struct image {
    ll_linear_ce_args args; /* the call's, with device pointers; of ce, its workspace alone */
    ll_ce_args ce;          /* of ce */
    struct image_piece pieces[kImagePieces];
    int n_pieces;
    char *slab, *staging, *workspace; /* on the device, its copy on the host, on the device */
    size_t bytes;
    bool rows_only; /* what lies between rows is not the call's: other ranks write it */
};

/* Copies everything that `host` points to for a call of `pass` with n_tokens rows of x, v_total classes and
 * this reduction; outputs too, since gaps between rows are part of them. False if the device is out of
 * memory. */
bool image_create(const ll_linear_ce_args *host, int64_t v_total, bool loss_by_token, struct image *image);
/* The same of a call of ce. `state` stays the host's. */
bool image_create_ce(const ll_ce_args *host, int64_t v_total, int32_t n_top, bool loss_by_token,
                     struct image *image);
/* Copies the host's memory over again. */
void image_refresh(struct image *image);
/* Waits, then copies results back. False if guard bytes changed, or CUDA reports a fault (printed). */
bool image_fetch(struct image *image);
void image_destroy(struct image *image);

/* Device memory and streams by other names, for tests without CUDA's headers. */
void *device_take(size_t bytes);
void device_release(void *data);
void device_fill(void *data, int byte, size_t bytes);
void device_write(void *to, const void *from, size_t bytes);
void device_read(void *to, const void *from, size_t bytes);
bool device_wait(void); /* false: a fault, printed */
int device_count(void);
void device_use(int device);
int device_current(void);
ll_stream stream_open(void);
ll_stream stream_open_blocking(void); /* ordered with the default stream */
void stream_close(ll_stream stream);
bool stream_wait(ll_stream stream);
/* Capture on a stream; a graph is launched on it. NULL where the capture failed. */
bool capture_begin(ll_stream stream);
bool capture_begin_local(ll_stream stream); /* other threads may do what a capture forbids */
void *capture_end(ll_stream stream);
bool graph_launch(void *graph, ll_stream stream);
void graph_close(void *graph);

#endif

/* See image.h. */
#include "cuda/image.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kGuard = 256, kByte = 0x5c };

static bool fine(cudaError_t status, const char *what) {
    if (status != cudaSuccess) printf("FAIL %s: %s\n", what, cudaGetErrorString(status));
    return status == cudaSuccess;
}

void *device_take(size_t bytes) {
    void *data = NULL;
    if (!fine(cudaMalloc(&data, bytes ? bytes : 1), "cudaMalloc")) {
        (void)cudaGetLastError();
        return NULL;
    }
    return data;
}
void device_release(void *data) {
    (void)cudaFree(data);
}
void device_fill(void *data, int byte, size_t bytes) {
    (void)fine(cudaMemset(data, byte, bytes), "cudaMemset");
    (void)cudaDeviceSynchronize();
}
void device_write(void *to, const void *from, size_t bytes) {
    (void)fine(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copy to the device");
    (void)cudaDeviceSynchronize(); /* streams that do not wait for the default one may run ahead of its last
                                      part */
}
void device_read(void *to, const void *from, size_t bytes) {
    (void)fine(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy from the device");
}
bool device_wait(void) {
    return fine(cudaDeviceSynchronize(), "the device's work");
}
int device_count(void) {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
void device_use(int device) {
    (void)fine(cudaSetDevice(device), "cudaSetDevice");
}
int device_current(void) {
    int device = -1;
    (void)cudaGetDevice(&device);
    return device;
}
ll_stream stream_open(void) {
    cudaStream_t stream = NULL;
    (void)fine(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return stream;
}
ll_stream stream_open_blocking(void) {
    cudaStream_t stream = NULL;
    (void)fine(cudaStreamCreate(&stream), "cudaStreamCreate");
    return stream;
}
void stream_close(ll_stream stream) {
    (void)cudaStreamDestroy(stream);
}
bool stream_wait(ll_stream stream) {
    return fine(cudaStreamSynchronize(stream), "a stream's work");
}
bool capture_begin(ll_stream stream) {
    return fine(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin of a capture");
}
bool capture_begin_local(ll_stream stream) {
    return fine(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin of a capture");
}
void *capture_end(ll_stream stream) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    const cudaError_t status = cudaStreamEndCapture(stream, &graph);
    if (status != cudaSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    (void)fine(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    (void)cudaGraphDestroy(graph);
    return exec;
}
bool graph_launch(void *graph, ll_stream stream) {
    return fine(cudaGraphLaunch(graph, stream), "cudaGraphLaunch");
}
void graph_close(void *graph) {
    (void)cudaGraphExecDestroy(graph);
}

/* ---- Images ------------------------------------------------------------------------------------- */

/* slab:  guard | shift | piece | guard | shift | piece | ... | guard      a piece starts as far from 16 bytes
 * as on the host */
static void *put(struct image *image, const void *host, size_t bytes, bool out) {
    if (!host) return NULL;
    struct image_piece *piece = &image->pieces[image->n_pieces++];
    const size_t start = (image->bytes + kGuard + 255) / 256 * 256 + (uintptr_t)host % 16;
    *piece =
        (struct image_piece){.host = (void *)(uintptr_t)host, .start = start, .bytes = bytes, .out = out};
    image->bytes = start + bytes + kGuard;
    return image->slab + start;
}

static size_t view_bytes(const ll_view *view) {
    if (!view->data || view->rows <= 0) return 0;
    return ll_dtype_bytes((ll_dtype)view->dtype) *
           (size_t)((view->rows - 1) * view->row_stride + (view->cols - 1) * view->col_stride + 1);
}

static void put_view(struct image *image, ll_view *view, bool out) {
    if (!view->data) return;
    view->data = put(image, view->data, view_bytes(view), out);
    if (view->row_stride <= view->cols) return;
    struct image_piece *piece = &image->pieces[image->n_pieces - 1];
    piece->row_bytes = (size_t)view->cols * ll_dtype_bytes((ll_dtype)view->dtype);
    piece->stride_bytes = (size_t)view->row_stride * ll_dtype_bytes((ll_dtype)view->dtype);
}

static void start(struct image *image) {
    image->n_pieces = 0;
    image->bytes = 0;
}

static void lay_out(const ll_linear_ce_args *host, int64_t v_total, bool loss_by_token, struct image *image) {
    start(image);
    image->args = *host;
    ll_linear_ce_args *a = &image->args;
    const size_t n = (size_t)(host->x.rows > 0 ? host->x.rows : 0), f = sizeof(float);
    const size_t n_loss = loss_by_token ? n : 1;
    put_view(image, &a->x, false);
    put_view(image, &a->w, false);
    put_view(image, &a->bias, false);
    put_view(image, &a->target, false);
    a->class_weight = put(image, host->class_weight, (size_t)v_total * f, false);
    a->token_weight = put(image, host->token_weight, n * f, false);
    a->divisor = put(image, host->divisor, sizeof(double), false);
    a->loss = put(image, host->loss, n_loss * f, true);
    a->nll = put(image, host->nll, n * f, true);
    a->lse = put(image, host->lse, n * f, true);
    a->lse_lo = put(image, host->lse_lo, n * f, true);
    a->entropy = put(image, host->entropy, n * f, true);
    a->z_loss = put(image, host->z_loss, n * f, true);
    a->argmax = put(image, host->argmax, n * sizeof(int64_t), true);
    a->sums = put(image, host->sums, sizeof(ll_sums), true);
    a->up_loss = put(image, host->up_loss, n_loss * f, false);
    a->up_nll = put(image, host->up_nll, n * f, false);
    a->up_lse = put(image, host->up_lse, n * f, false);
    a->up_entropy = put(image, host->up_entropy, n * f, false);
    put_view(image, &a->grad_x, true);
    put_view(image, &a->grad_w, true);
    put_view(image, &a->grad_bias, true);
    a->bad_targets = put(image, host->bad_targets, sizeof(int64_t), true);
}

static void lay_out_ce(const ll_ce_args *host, int64_t v_total, int32_t n_top, bool loss_by_token,
                       struct image *image) {
    start(image);
    image->ce = *host;
    ll_ce_args *a = &image->ce;
    const size_t n = (size_t)(host->logits.rows > 0 ? host->logits.rows : 0), f = sizeof(float);
    const size_t n_loss = loss_by_token ? n : 1, n_ids = n * (size_t)host->ids.cols,
                 n_tops = n * (size_t)n_top;
    put_view(image, &a->logits, host->in_place);
    put_view(image, &a->target, false);
    a->class_weight = put(image, host->class_weight, (size_t)v_total * f, false);
    a->token_weight = put(image, host->token_weight, n * f, false);
    a->divisor = put(image, host->divisor, sizeof(double), false);
    a->loss = put(image, host->loss, n_loss * f, true);
    a->nll = put(image, host->nll, n * f, true);
    a->lse = put(image, host->lse, n * f, true);
    a->lse_lo = put(image, host->lse_lo, n * f, true);
    a->entropy = put(image, host->entropy, n * f, true);
    a->z_loss = put(image, host->z_loss, n * f, true);
    a->argmax = put(image, host->argmax, n * sizeof(int64_t), true);
    a->sums = put(image, host->sums, sizeof(ll_sums), true);
    a->up_loss = put(image, host->up_loss, n_loss * f, false);
    a->up_nll = put(image, host->up_nll, n * f, false);
    a->up_lse = put(image, host->up_lse, n * f, false);
    a->up_entropy = put(image, host->up_entropy, n * f, false);
    if (host->in_place) {
        a->grad_logits.data = a->logits.data;
    } else {
        put_view(image, &a->grad_logits, true);
    }
    put_view(image, &a->ids, false);
    a->id_logp = put(image, host->id_logp, n_ids * f, true);
    a->id_rank = put(image, host->id_rank, n_ids * sizeof(int64_t), true);
    a->top_ids = put(image, host->top_ids, n_tops * sizeof(int64_t), true);
    a->top_logp = put(image, host->top_logp, n_tops * f, true);
    a->bad_targets = put(image, host->bad_targets, sizeof(int64_t), true);
}

void image_refresh(struct image *image) {
    memset(image->staging, kByte, image->bytes);
    for (int i = 0; i < image->n_pieces; i++) {
        const struct image_piece *piece = &image->pieces[i];
        if (piece->bytes) memcpy(image->staging + piece->start, piece->host, piece->bytes);
    }
    device_write(image->slab, image->staging, image->bytes);
}

static bool take_slab(struct image *image) {
    image->slab = device_take(image->bytes);
    image->staging = malloc(image->bytes);
    return image->slab && image->staging;
}

static bool take_workspace(struct image *image, const void *host, size_t bytes) {
    image->args.workspace_bytes = bytes;
    if (!host) return true;
    image->workspace = device_take(bytes + kGuard);
    if (!image->workspace) return false;
    device_fill(image->workspace, 0xff, bytes); /* its contents must not matter */
    device_fill(image->workspace + bytes, kByte, kGuard);
    image->args.workspace = image->workspace;
    image->ce.workspace = image->workspace;
    return true;
}

bool image_create(const ll_linear_ce_args *host, int64_t v_total, bool loss_by_token, struct image *image) {
    *image = (struct image){0};
    lay_out(host, v_total, loss_by_token, image); /* to count */
    if (!take_slab(image)) return false;
    lay_out(host, v_total, loss_by_token, image);
    image_refresh(image);
    return take_workspace(image, host->workspace, host->workspace_bytes);
}

bool image_create_ce(const ll_ce_args *host, int64_t v_total, int32_t n_top, bool loss_by_token,
                     struct image *image) {
    *image = (struct image){0};
    lay_out_ce(host, v_total, n_top, loss_by_token, image); /* to count */
    if (!take_slab(image)) return false;
    lay_out_ce(host, v_total, n_top, loss_by_token, image);
    image_refresh(image);
    return take_workspace(image, host->workspace, host->workspace_bytes);
}

static bool all_guard(const char *bytes, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (bytes[i] != kByte) return false;
    }
    return true;
}

/* Rows to the host, where others write between them at the same time; an input, and what lies between the
 * rows of an output, is still what was sent. */
static bool fetch_rows(const struct image_piece *piece, const char *sent, const char *data) {
    bool same = piece->out || memcmp(sent, data, piece->bytes) == 0;
    for (size_t at = 0, next; piece->out && at < piece->bytes; at = next) {
        const size_t gap = at + piece->row_bytes;
        next = at + piece->stride_bytes;
        memcpy((char *)piece->host + at, data + at, piece->row_bytes);
        if (next < piece->bytes && memcmp(sent + gap, data + gap, next - gap) != 0) same = false;
    }
    return same;
}

/* What was sent to the device; NULL: not needed, or no memory (*ok is then false). */
static char *copy_of_staging(const struct image *image, bool *ok) {
    char *sent = image->rows_only ? malloc(image->bytes) : NULL;
    if (sent) memcpy(sent, image->staging, image->bytes);
    if (image->rows_only && !sent) *ok = false;
    return sent;
}

static bool fetch(struct image *image, const char *sent) {
    char guard[kGuard];
    size_t end = 0;
    bool ok = device_wait();
    if (ok) device_read(image->staging, image->slab, image->bytes);
    for (int i = 0; ok && i < image->n_pieces; i++) {
        const struct image_piece *piece = &image->pieces[i];
        const char *data = image->staging + piece->start;
        if (!all_guard(image->staging + end, piece->start - end)) {
            printf("FAIL bytes before piece %d (%zu bytes) were written\n", i, piece->bytes);
            ok = false;
        }
        end = piece->start + piece->bytes;
        if (!piece->bytes) continue;
        if (sent && piece->row_bytes) {
            if (fetch_rows(piece, sent + piece->start, data)) continue;
            printf("FAIL piece %d: an input or other ranks' columns were written\n", i);
            ok = false;
        } else if (piece->out) {
            memcpy(piece->host, data, piece->bytes);
        } else if (memcmp(piece->host, data, piece->bytes) != 0) {
            printf("FAIL piece %d: an input was written\n", i);
            ok = false;
        }
    }
    if (ok && !all_guard(image->staging + end, image->bytes - end)) {
        printf("FAIL bytes behind the last piece were written\n");
        ok = false;
    }
    if (!ok || !image->workspace) return ok;
    device_read(guard, image->workspace + image->args.workspace_bytes, kGuard);
    if (!all_guard(guard, kGuard)) {
        printf("FAIL the workspace was written beyond its %zu bytes\n", image->args.workspace_bytes);
        return false;
    }
    return true;
}

bool image_fetch(struct image *image) {
    bool ok = true;
    char *sent = copy_of_staging(image, &ok);
    ok = ok && fetch(image, sent);
    free(sent);
    return ok;
}

void image_destroy(struct image *image) {
    device_release(image->slab);
    device_release(image->workspace);
    free(image->staging);
    *image = (struct image){0};
}

/* bench_cuda_ranks [--comm nccl|threads] [--ranks N] [--rounds N] [nN:dD:vV ...]: the passes of linear_ce
 * with the vocabulary over GPUs, rank r on GPU r modulo those there are, in turn with one rank on GPU 0, A B
 * A B, in one process. A sample is kCalls calls queued on a stream, by the host's clock from a barrier until
 * every rank's stream is empty. bf16, gradients in bf16. Before the times: every rank's nll, lse and entropy
 * have the bits of one rank's, grad_x is the same on all ranks, and grad_w is compared with one rank's rows.
 * Prints one JSON object. */
#define _POSIX_C_SOURCE 200809L
#include "bench_cuda.h"

#include "core/dtype.h"

#include <logitless/comm.h>

#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <time.h>

enum { kRanksMax = 8, kRoundsMax = 64, kCalls = 3, kPasses = 3 };

typedef struct shape {
    int64_t n, d, v;
} shape;

/* ---- Data --------------------------------------------------------------------------------------- */

static uint16_t *stretches[2]; /* of x and of w */

/* Elements [first, first + count) of x or w. */
static void *filled(int which, int64_t first, int64_t count) {
    uint16_t *data = take((size_t)count * 2);
    fill(data, first, count, stretches[which]);
    return data;
}

/* ---- A rank's calls ----------------------------------------------------------------------------- */

typedef struct caller {
    shape s;
    int64_t begin, count; /* its columns */
    ll_plan *plan;
    ll_linear_ce_args args[kPasses];
    size_t workspace_bytes[kPasses];
    float *rows[4]; /* nll, lse, lse_lo, entropy */
    void *grad_x, *grad_w;
    cudaStream_t stream;
} caller;

static void open_caller(const shape *s, int64_t begin, int64_t count, const ll_comm *comm, caller *c) {
    *c = (caller){.s = *s, .begin = begin, .count = count};
    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    desc.backend = LL_BACKEND_CUDA;
    desc.n_tokens_max = s->n, desc.n_hidden = s->d;
    desc.v_begin = begin, desc.v_local = count, desc.v_total = s->v;
    desc.x_dtype = desc.w_dtype = LL_DTYPE_BF16;
    desc.comm = comm;
    CHECK(ll_plan_create(&desc, &c->plan));
    CHECK(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
    size_t most = 0;
    for (int pass = 0; pass < kPasses; pass++) {
        CHECK(ll_plan_workspace(c->plan, (ll_pass)pass, &c->workspace_bytes[pass]));
        if (c->workspace_bytes[pass] > most) most = c->workspace_bytes[pass];
    }
    void *workspace = take(most), *x = filled(0, 0, s->n * s->d), *w = filled(1, begin * s->d, count * s->d);
    int64_t *host_target = malloc((size_t)s->n * sizeof *host_target), *target = take((size_t)s->n * 8);
    for (int64_t i = 0; i < s->n; i++) host_target[i] = i * 7919 % s->v;
    CHECK(cudaMemcpy(target, host_target, (size_t)s->n * 8, cudaMemcpyHostToDevice));
    free(host_target);
    for (int i = 0; i < 4; i++) c->rows[i] = take((size_t)s->n * 4);
    const float one = 1.0f;
    float *up = take(4), *loss = take(4);
    CHECK(cudaMemcpy(up, &one, 4, cudaMemcpyHostToDevice));
    c->grad_x = take((size_t)(s->n * s->d) * 2);
    c->grad_w = take((size_t)(count * s->d) * 2);
    for (int pass = 0; pass < kPasses; pass++) {
        ll_linear_ce_args *a = &c->args[pass];
        *a = (ll_linear_ce_args)LL_LINEAR_CE_ARGS_INIT;
        a->x = ll_view_matrix(x, LL_DTYPE_BF16, s->n, s->d, 0);
        a->w = ll_view_matrix(w, LL_DTYPE_BF16, count, s->d, 0);
        a->target = ll_view_vector(target, LL_DTYPE_I64, s->n, 0);
        a->nll = c->rows[0], a->lse = c->rows[1], a->lse_lo = c->rows[2], a->entropy = c->rows[3];
        if (pass != LL_PASS_BACKWARD) a->loss = loss;
        a->workspace = workspace, a->workspace_bytes = most;
        if (pass == LL_PASS_FORWARD) continue;
        a->up_loss = up;
        a->grad_x = ll_view_matrix(c->grad_x, LL_DTYPE_BF16, s->n, s->d, 0);
        a->grad_w = ll_view_matrix(c->grad_w, LL_DTYPE_BF16, count, s->d, 0);
    }
}

static void queue(const caller *c, int pass) {
    if (pass == LL_PASS_FORWARD) CHECK(ll_linear_ce_forward(c->plan, &c->args[pass], c->stream));
    if (pass == LL_PASS_BACKWARD) CHECK(ll_linear_ce_backward(c->plan, &c->args[pass], c->stream));
    if (pass == LL_PASS_FORWARD_BACKWARD) {
        CHECK(ll_linear_ce_forward_backward(c->plan, &c->args[pass], c->stream));
    }
}

static void call(const caller *c, int pass, int times) {
    for (int i = 0; i < times; i++) queue(c, pass);
    CHECK(cudaStreamSynchronize(c->stream));
}

static void *fetched(const void *device, size_t bytes) {
    void *host = malloc(bytes);
    CHECK(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
    return host;
}

/* ---- All ranks ---------------------------------------------------------------------------------- */

static struct {
    shape s;
    int32_t n_ranks, rounds, n_devices;
    bool nccl;
    ll_comm threads[kRanksMax];
    caller alone, ranks[kRanksMax];
    pthread_barrier_t barrier;
    double one_ms[kPasses][kRoundsMax], ranks_ms[kPasses][kRoundsMax];
    void *one_rows[4], *one_grad_x, *one_grad_w;
    bool same_rows[kRanksMax];
    double grad_w_worst[kRanksMax], grad_x_worst;
    size_t one_bytes[kPasses], ranks_bytes[kPasses];
} b;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

/* The largest difference relative to the largest value. */
static double worst_of(const uint16_t *got, const uint16_t *want, int64_t n) {
    double worst = 0, most = 0;
    for (int64_t i = 0; i < n; i++) {
        const double w = (double)lli_bf16_to_f32(want[i]), off = fabs((double)lli_bf16_to_f32(got[i]) - w);
        if (!(off <= worst)) worst = off; /* NaN stays */
        if (fabs(w) > most) most = fabs(w);
    }
    return worst / most;
}

static void compare(int32_t r) {
    const caller *c = &b.ranks[r];
    b.same_rows[r] = true;
    for (int i = 0; i < 4; i++) {
        void *rows = fetched(c->rows[i], (size_t)b.s.n * 4);
        b.same_rows[r] = b.same_rows[r] && memcmp(rows, b.one_rows[i], (size_t)b.s.n * 4) == 0;
        free(rows);
    }
    uint16_t *grad_w = fetched(c->grad_w, (size_t)(c->count * b.s.d) * 2);
    b.grad_w_worst[r] = worst_of(grad_w, (uint16_t *)b.one_grad_w + c->begin * b.s.d, c->count * b.s.d);
    free(grad_w);
}

static void compare_grad_x(void) {
    const size_t bytes = (size_t)(b.s.n * b.s.d) * 2;
    uint16_t *first = fetched(b.ranks[0].grad_x, bytes);
    b.grad_x_worst = worst_of(first, b.one_grad_x, b.s.n * b.s.d);
    for (int32_t r = 1; r < b.n_ranks; r++) {
        uint16_t *other = fetched(b.ranks[r].grad_x, bytes);
        if (memcmp(first, other, bytes) != 0) b.grad_x_worst = NAN; /* not the same on all ranks */
        free(other);
    }
    free(first);
}

static void *rank_main(void *argument) {
    const int32_t r = (int32_t)(intptr_t)argument;
    ll_comm nccl;
    CHECK(cudaSetDevice(r % b.n_devices));
    if (b.nccl) CHECK(ll_comm_nccl(&b.threads[r], 0, &nccl));
    const int64_t begin = b.s.v * r / b.n_ranks, end = b.s.v * (r + 1) / b.n_ranks;
    open_caller(&b.s, begin, end - begin, b.nccl ? &nccl : &b.threads[r], &b.ranks[r]);
    if (r == 0) {
        open_caller(&b.s, 0, b.s.v, NULL, &b.alone);
        for (int pass = 0; pass < kPasses; pass++) call(&b.alone, pass, 1);
        for (int i = 0; i < 4; i++) b.one_rows[i] = fetched(b.alone.rows[i], (size_t)b.s.n * 4);
        b.one_grad_x = fetched(b.alone.grad_x, (size_t)(b.s.n * b.s.d) * 2);
        b.one_grad_w = fetched(b.alone.grad_w, (size_t)(b.s.v * b.s.d) * 2);
        memcpy(b.one_bytes, b.alone.workspace_bytes, sizeof b.one_bytes);
        memcpy(b.ranks_bytes, b.ranks[0].workspace_bytes, sizeof b.ranks_bytes);
    }
    pthread_barrier_wait(&b.barrier); /* one rank's results are there */
    for (int pass = 0; pass < kPasses; pass++) call(&b.ranks[r], pass, 1);
    compare(r);
    pthread_barrier_wait(&b.barrier); /* every rank's gradients are there */
    if (r == 0) compare_grad_x();
    for (int round = 0; round < b.rounds; round++) {
        for (int pass = 0; pass < kPasses; pass++) {
            double start = now_ms();
            if (r == 0) call(&b.alone, pass, kCalls);
            if (r == 0) b.one_ms[pass][round] = (now_ms() - start) / kCalls;
            pthread_barrier_wait(&b.barrier); /* both GPUs are idle */
            start = now_ms();
            call(&b.ranks[r], pass, kCalls);
            pthread_barrier_wait(&b.barrier); /* and again */
            if (r == 0) b.ranks_ms[pass][round] = (now_ms() - start) / kCalls;
        }
    }
    ll_plan_destroy(b.ranks[r].plan);
    if (r == 0) ll_plan_destroy(b.alone.plan);
    if (b.nccl) ll_comm_destroy(&nccl);
    CHECK(cudaDeviceSynchronize());
    return NULL;
}

static void report(bool first) {
    static const char *const names[kPasses] = {"forward", "backward", "forward_backward"};
    bool same = true;
    double worst_w = 0;
    for (int32_t r = 0; r < b.n_ranks; r++) {
        same = same && b.same_rows[r];
        if (!(b.grad_w_worst[r] <= worst_w)) worst_w = b.grad_w_worst[r];
    }
    printf("%s{\"n\": %lld, \"d\": %lld, \"v\": %lld, \"ranks\": %d, \"devices\": %d, \"comm\": \"%s\", "
           "\"rounds\": %d, \"row_bits_equal\": %s, \"grad_x_off\": %.3g, \"grad_w_off\": %.3g",
           first ? "" : ",\n", (long long)b.s.n, (long long)b.s.d, (long long)b.s.v, (int)b.n_ranks,
           (int)(b.n_devices < b.n_ranks ? b.n_devices : b.n_ranks), b.nccl ? "nccl" : "threads",
           (int)b.rounds, same ? "true" : "false", b.grad_x_worst, worst_w);
    double sums[2] = {0};
    for (int pass = 0; pass < kPasses; pass++) {
        const double one = median(b.one_ms[pass], b.rounds), all = median(b.ranks_ms[pass], b.rounds);
        printf(", \"%s\": {\"one_rank_ms\": %.4f, \"ranks_ms\": %.4f, \"ratio\": %.4f, "
               "\"one_rank_mib\": %.1f, \"rank_mib\": %.1f}",
               names[pass], one, all, all / one, (double)b.one_bytes[pass] / 0x1p20,
               (double)b.ranks_bytes[pass] / 0x1p20);
        if (pass < 2) sums[0] += one, sums[1] += all;
    }
    printf(", \"forward_and_backward_ratio\": %.4f}", sums[1] / sums[0]);
    fflush(stdout);
}

static void run(const char *text, bool first) {
    long long n, d, v;
    if (sscanf(text, "n%lld:d%lld:v%lld", &n, &d, &v) != 3) {
        fprintf(stderr, "bench_cuda_ranks: %s is no nN:dD:vV\n", text);
        exit(2);
    }
    b.s = (shape){n, d, v};
    stretches[0] = make_stretch(1.0f, 1);
    stretches[1] = make_stretch(2.0f / sqrtf((float)d), 2);
    pthread_t threads[kRanksMax];
    CHECK(ll_comm_threads(b.n_ranks, 0, b.threads));
    CHECK(pthread_barrier_init(&b.barrier, NULL, (unsigned)b.n_ranks));
    for (int32_t r = 0; r < b.n_ranks; r++) {
        CHECK(pthread_create(&threads[r], NULL, rank_main, (void *)(intptr_t)r));
    }
    for (int32_t r = 0; r < b.n_ranks; r++) CHECK(pthread_join(threads[r], NULL));
    for (int32_t r = 0; r < b.n_ranks; r++) ll_comm_destroy(&b.threads[r]);
    report(first);
    free(stretches[0]);
    free(stretches[1]);
}

int main(int argc, char **argv) {
    static const char *const usual[] = {"n4096:d4096:v131072"};
    int at = 1;
    CHECK(cudaGetDeviceCount(&b.n_devices));
    b.n_ranks = b.n_devices < 2 ? 2 : b.n_devices;
    b.nccl = b.n_devices >= 2;
    b.rounds = 9;
    for (; at + 1 < argc && argv[at][0] == '-'; at += 2) {
        if (strcmp(argv[at], "--comm") == 0) b.nccl = strcmp(argv[at + 1], "nccl") == 0;
        if (strcmp(argv[at], "--ranks") == 0) b.n_ranks = atoi(argv[at + 1]);
        if (strcmp(argv[at], "--rounds") == 0) b.rounds = atoi(argv[at + 1]);
    }
    if (b.n_ranks < 1 || b.n_ranks > kRanksMax || b.rounds < 1 || b.rounds > kRoundsMax) return 2;
    printf("{\"problems\": [\n");
    if (at >= argc) run(usual[0], true);
    for (int i = at; i < argc; i++) run(argv[i], i == at);
    printf("\n]}\n");
    return 0;
}

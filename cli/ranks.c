/* Ranks as threads of this process. Threads are started anew for every call: some 20 us a rank, where a call
 * takes milliseconds, and nothing is left running between calls. */
#include "ranks.h"

#include "core/dtype.h"
#include "core/status.h"
#include "gpu.h"
#include "machine.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* No rank of this process can get lost: one that fails aborts the group. So the limit must not end a run
 * whose cut is very uneven, where the ranks with few rows wait long for the one with many. */
enum { kTimeoutMs = 24 * 3600 * 1000, kNcclTimeoutMs = 120 * 1000 };

typedef struct rank_thread {
    cli_rank_work *work;
    void *context;
    const ll_comm *comm;
    int32_t rank;
    pthread_t thread;
    bool started;
    ll_status status;
    char sentence[512]; /* ll_last_error belongs to the thread and dies with it */
} rank_thread;

static void *run_rank(void *argument) {
    rank_thread *self = argument;
    self->status = self->work(self->context, self->rank);
    if (self->status != LL_STATUS_OK) {
        snprintf(self->sentence, sizeof self->sentence, "%s", ll_last_error());
        if (self->comm) ll_comm_abort(self->comm, self->sentence);
    }
    return NULL;
}

static void refuse_rank(rank_thread *self) {
    self->status = LL_STATUS_MEMORY;
    snprintf(self->sentence, sizeof self->sentence, "the system gave no thread for rank %d", (int)self->rank);
    ll_comm_abort(self->comm, self->sentence);
}

ll_status cli_ranks_at_once(const ll_comm *comms, int32_t n_ranks, cli_rank_work *work, void *context) {
    if (n_ranks <= 1) return work(context, 0);
    rank_thread *threads = calloc((size_t)n_ranks, sizeof *threads);
    LLI_REQUIRE(threads, LL_STATUS_MEMORY, "out of memory for %d ranks", (int)n_ranks);
    for (int32_t r = 0; r < n_ranks; r++) {
        threads[r] = (rank_thread){.work = work, .context = context, .comm = &comms[r], .rank = r};
    }
    for (int32_t r = 1; r < n_ranks; r++) {
        threads[r].started = pthread_create(&threads[r].thread, NULL, run_rank, &threads[r]) == 0;
        if (!threads[r].started) refuse_rank(&threads[r]);
    }
    run_rank(&threads[0]);
    const rank_thread *blamed = NULL;
    for (int32_t r = 0; r < n_ranks; r++) {
        if (threads[r].started) pthread_join(threads[r].thread, NULL);
        if (threads[r].status == LL_STATUS_OK) continue;
        bool better = blamed && blamed->status == LL_STATUS_COMM && threads[r].status != LL_STATUS_COMM;
        if (!blamed || better) blamed = &threads[r];
    }
    ll_status status = blamed ? lli_fail(blamed->status, "%s", blamed->sentence) : LL_STATUS_OK;
    free(threads);
    return status;
}

ll_status cli_ranks_threads(int32_t total, int32_t n_ranks, int32_t *n_threads) {
    if (total == 0) LLI_TRY(cli_default_threads(&total));
    *n_threads = total / n_ranks > 1 ? total / n_ranks : 1;
    return LL_STATUS_OK;
}

/* Results of a rank that nobody reads: the library wants the same ones on every rank. */
typedef struct scratch {
    float *floats; /* loss, nll, lse, lse_lo, entropy, z_loss: n_tokens_max each */
    int64_t *argmax;
    void *grad_x;
    ll_sums sums;
} scratch;

typedef struct rank_state {
    ll_plan *plan;
    ll_comm nccl, counter; /* over the threads; zeros: not used */
    void *workspace;
    size_t workspace_bytes;
    cli_gpu *gpu;             /* NULL: operands stay where they are */
    ll_linear_ce_args on_gpu; /* the last call, in its memory */
    scratch spare;
} rank_state;

struct cli_ranks {
    int32_t n_ranks, n_threads, passes; /* n_threads of one rank */
    bool counting, nccl;
    int64_t *begins;
    ll_plan_desc desc;
    ll_comm *comms;
    rank_state *states;
    ll_pass pass; /* of the call in progress */
    const ll_linear_ce_args *args;
};

static bool allocate_spare(const cli_ranks *ranks, scratch *spare) {
    const ll_plan_desc *desc = &ranks->desc;
    const bool wants_grad =
        !(desc->frozen & LL_FROZEN_X) && (ranks->passes & (CLI_BACKWARD | CLI_FORWARD_BACKWARD));
    size_t n = (size_t)desc->n_tokens_max + 1; /* never 0 bytes */
    int32_t dtype = desc->grad_x_dtype ? desc->grad_x_dtype : desc->x_dtype;
    spare->floats = malloc(6 * n * sizeof *spare->floats);
    spare->argmax = malloc(n * sizeof *spare->argmax);
    if (wants_grad) spare->grad_x = malloc(n * (size_t)desc->n_hidden * ll_dtype_bytes((ll_dtype)dtype));
    return spare->floats && spare->argmax && (spare->grad_x || !wants_grad);
}

/* The threads of ranks are new in every call. */
static ll_status use_device(const cli_ranks *ranks, int32_t rank) {
    const bool spread = ranks->n_ranks > 1 && ranks->desc.backend == LL_BACKEND_CUDA;
    return spread ? cli_gpu_use(rank) : LL_STATUS_OK;
}

/* The rank's communicator: threads, or NCCL over them, and a counter around it. */
static ll_status join(cli_ranks *ranks, int32_t rank, const ll_comm **comm) {
    static const ll_comm_double script = {.struct_bytes = sizeof script};
    rank_state *state = &ranks->states[rank];
    *comm = &ranks->comms[rank];
    if (ranks->nccl) {
        LLI_TRY(ll_comm_nccl(*comm, kNcclTimeoutMs, &state->nccl));
        *comm = &state->nccl;
    }
    if (ranks->counting) {
        LLI_TRY(ll_comm_double_create(*comm, &script, &state->counter));
        *comm = &state->counter;
    }
    return LL_STATUS_OK;
}

static ll_status create_rank(void *context, int32_t rank) {
    cli_ranks *ranks = context;
    rank_state *state = &ranks->states[rank];
    ll_plan_desc desc = ranks->desc;
    desc.v_begin = ranks->begins[rank];
    desc.v_local = ranks->begins[rank + 1] - ranks->begins[rank];
    desc.n_threads = ranks->n_threads;
    LLI_TRY(use_device(ranks, rank));
    if (ranks->n_ranks > 1) LLI_TRY(join(ranks, rank, &desc.comm));
    LLI_TRY(ll_plan_create(&desc, &state->plan));
    for (int pass = LL_PASS_FORWARD; pass <= LL_PASS_FORWARD_BACKWARD; pass++) {
        size_t bytes;
        if (!(ranks->passes & 1 << pass)) continue;
        LLI_TRY(ll_plan_workspace(state->plan, (ll_pass)pass, &bytes));
        if (bytes > state->workspace_bytes) state->workspace_bytes = bytes;
    }
    const bool on_gpu = cli_gpu_wanted(state->plan);
    if (!on_gpu) state->workspace = aligned_alloc(64, (state->workspace_bytes + 64) / 64 * 64);
    LLI_REQUIRE((state->workspace || on_gpu) && (rank == 0 || allocate_spare(ranks, &state->spare)),
                LL_STATUS_MEMORY, "out of memory for a workspace of %zu bytes and %lld tokens",
                state->workspace_bytes, (long long)desc.n_tokens_max);
    return on_gpu ? cli_gpu_open(&desc, state->workspace_bytes, &state->gpu) : LL_STATUS_OK;
}

ll_status cli_ranks_create(const ll_plan_desc *desc, const cli_cut *cut, int32_t passes, bool count_bytes,
                           cli_ranks **result) {
    const size_t n = (size_t)cut->n_ranks;
    cli_ranks *ranks = calloc(1, sizeof *ranks);
    ll_status status = LL_STATUS_OK;
    *result = ranks;
    LLI_REQUIRE(ranks, LL_STATUS_MEMORY, "out of memory for %d ranks", (int)cut->n_ranks);
    ranks->n_ranks = cut->n_ranks;
    ranks->passes = passes;
    ranks->desc = *desc;
    ranks->counting = count_bytes && n > 1;
    ranks->begins = malloc((n + 1) * sizeof *ranks->begins);
    ranks->states = calloc(n, sizeof *ranks->states);
    ranks->comms = calloc(n, sizeof *ranks->comms);
    ranks->nccl = cut->nccl && n > 1;
    if (!ranks->begins || !ranks->states || !ranks->comms) {
        status = LL_STATUS_MEMORY;
        (void)lli_fail(status, "out of memory for %d ranks", (int)cut->n_ranks);
    } else {
        memcpy(ranks->begins, cut->begins, (n + 1) * sizeof *ranks->begins);
        status = cli_ranks_threads(desc->n_threads, ranks->n_ranks, &ranks->n_threads);
    }
    if (status == LL_STATUS_OK && n > 1) status = ll_comm_threads(ranks->n_ranks, kTimeoutMs, ranks->comms);
    if (status == LL_STATUS_OK) {
        status = cli_ranks_at_once(ranks->comms, ranks->n_ranks, create_rank, ranks);
    }
    if (status != LL_STATUS_OK) {
        cli_ranks_destroy(ranks);
        *result = NULL;
    }
    return status;
}

/* NCCL's end is reached by all ranks together. */
static ll_status leave_rank(void *context, int32_t rank) {
    cli_ranks *ranks = context;
    ll_comm_destroy(&ranks->states[rank].counter);
    ll_comm_destroy(&ranks->states[rank].nccl);
    return LL_STATUS_OK;
}

void cli_ranks_destroy(cli_ranks *ranks) {
    if (!ranks) return;
    for (int32_t r = 0; ranks->states && r < ranks->n_ranks; r++) {
        rank_state *state = &ranks->states[r];
        cli_gpu_close(state->gpu);
        ll_plan_destroy(state->plan);
        free(state->workspace);
        free(state->spare.grad_x);
        free(state->spare.argmax);
        free(state->spare.floats);
    }
    if (ranks->states && ranks->comms) {
        (void)cli_ranks_at_once(ranks->comms, ranks->n_ranks, leave_rank, ranks);
    }
    for (int32_t r = 0; ranks->comms && r < ranks->n_ranks; r++) ll_comm_destroy(&ranks->comms[r]);
    free(ranks->comms);
    free(ranks->states);
    free(ranks->begins);
    free(ranks);
}

/* Rows [first, first + count) of a matrix or vector; a view that is not given stays so. */
static void slice(ll_view *view, int64_t first, int64_t count) {
    if (!view->dtype) return;
    if (view->data) view->data = (void *)lli_row(view, first);
    view->rows = count;
}

/* Every result that the caller wants goes to rank 0; the others get room of their own. The backward reads
 * nll, lse, lse_lo and entropy, which all ranks share. */
static void use_spare(const cli_ranks *ranks, scratch *spare, ll_linear_ce_args *args) {
    const int64_t n = ranks->desc.n_tokens_max;
    float **floats[] = {&args->loss, &args->nll, &args->lse, &args->lse_lo, &args->entropy, &args->z_loss};
    for (int i = 0; i < 6; i++) {
        bool is_input = ranks->pass == LL_PASS_BACKWARD;
        if (*floats[i] && !is_input) *floats[i] = spare->floats + i * n;
    }
    if (args->argmax) args->argmax = spare->argmax;
    if (args->sums) args->sums = &spare->sums;
    if (!args->grad_x.dtype) return;
    args->grad_x.data = spare->grad_x;
    args->grad_x.row_stride = args->grad_x.cols;
}

static ll_status (*const passes[])(const ll_plan *, const ll_linear_ce_args *, ll_stream) = {
    ll_linear_ce_forward, ll_linear_ce_backward, ll_linear_ce_forward_backward};

static ll_status call_rank(void *context, int32_t rank) {
    const cli_ranks *ranks = context;
    rank_state *state = &ranks->states[rank];
    const int64_t first = ranks->begins[rank], count = ranks->begins[rank + 1] - first;
    ll_linear_ce_args args = *ranks->args;
    slice(&args.w, first, count);
    slice(&args.bias, first, count);
    slice(&args.grad_w, first, count);
    slice(&args.grad_bias, first, count);
    if (rank > 0) use_spare(ranks, &state->spare, &args);
    LLI_TRY(use_device(ranks, rank));
    if (state->gpu) {
        LLI_TRY(cli_gpu_bind(state->gpu, &args, &state->on_gpu));
        LLI_TRY(passes[ranks->pass](state->plan, &state->on_gpu, NULL));
        return cli_gpu_fetch(state->gpu);
    }
    args.workspace = state->workspace;
    args.workspace_bytes = state->workspace_bytes;
    return passes[ranks->pass](state->plan, &args, NULL);
}

ll_status cli_ranks_run(cli_ranks *ranks, ll_pass pass, const ll_linear_ce_args *args) {
    ranks->pass = pass;
    ranks->args = args;
    return cli_ranks_at_once(ranks->comms, ranks->n_ranks, call_rank, ranks);
}

static ll_status call_rank_again(void *context, int32_t rank) {
    const cli_ranks *ranks = context;
    rank_state *state = &ranks->states[rank];
    if (!state->gpu) return call_rank(context, rank);
    LLI_TRY(use_device(ranks, rank));
    LLI_TRY(passes[ranks->pass](state->plan, &state->on_gpu, NULL));
    return cli_gpu_wait(state->gpu);
}

ll_status cli_ranks_again(cli_ranks *ranks) {
    return cli_ranks_at_once(ranks->comms, ranks->n_ranks, call_rank_again, ranks);
}

const ll_plan *cli_ranks_plan(const cli_ranks *ranks) {
    return ranks->states[0].plan;
}

int32_t cli_ranks_n_threads(const cli_ranks *ranks) {
    int32_t sum = 0;
    for (int32_t r = 0; r < ranks->n_ranks; r++) sum += ll_plan_threads(ranks->states[r].plan);
    return sum;
}

size_t cli_ranks_workspace_bytes(const cli_ranks *ranks) {
    size_t sum = 0;
    for (int32_t r = 0; r < ranks->n_ranks; r++) sum += ranks->states[r].workspace_bytes;
    return sum;
}

ll_status cli_ranks_counts(const cli_ranks *ranks, ll_comm_counts *counts) {
    *counts = (ll_comm_counts){0};
    return ranks->counting ? ll_comm_double_counts(&ranks->states[0].counter, counts) : LL_STATUS_OK;
}

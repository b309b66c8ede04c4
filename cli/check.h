/* The pieces of `logitless check`:
 *
 *   options -> world (once a process)        inputs, the reference, the results of one rank
 *           -> every rank: its shard's calls -> a record: errors, first differences, hash, memory
 *           -> records of all ranks gathered -> report and exit code, the same on every rank
 */
#ifndef LL_CLI_CHECK_H
#define LL_CLI_CHECK_H

#include "cut.h"

#include <logitless/comm.h>

typedef struct check_options {
    const char *dtype, *reference_mode, *comm, *backend;
    int64_t tokens, hidden_size, vocab_size, ranks, threads, seed; /* ranks, threads: 0: not given */
    int64_t stress_tokens, stress_hidden_size, stress_vocab_size;
    double atol, rtol; /* < 0: not given */
    double time_limit; /* seconds */
    bool uneven_shards, no_bias, run_stress, json;
} check_options;

/* ---- Inputs and results ------------------------------------------------------------------------- */

typedef struct check_shape {
    ll_dtype dtype; /* of x, w, bias and the gradients */
    int64_t n_tokens, n_hidden, n_vocab;
    bool bias;
    uint64_t seed;
} check_shape;

/* Standard deviation of the logits. Of 2^34 logits none is expected to reach CHECK_LOGIT_MAX. */
#define CHECK_LOGIT_STD 2.5
#define CHECK_LOGIT_MAX 16.0

/* Equal shapes give equal numbers on every machine, whichever rows of w a rank asks for. */
typedef struct check_inputs {
    check_shape shape;
    int64_t v_begin, v_local; /* the rows of w and bias that are here */
    int64_t n_valid;
    void *x, *w, *bias; /* [n_tokens, n_hidden], [v_local, n_hidden], [v_local] or NULL */
    int64_t *target;
    float up_loss, *up_nll, *up_lse, *up_entropy;
} check_inputs;

/* MEMORY. Free it in every case. */
ll_status check_inputs_create(const check_shape *shape, int64_t v_begin, int64_t v_local,
                              check_inputs *inputs);
void check_inputs_free(check_inputs *inputs);
uint64_t check_inputs_hash(const check_inputs *inputs);

typedef struct check_results {
    ll_dtype grad_dtype;
    float loss, *nll, *lse, *lse_lo, *entropy;
    int64_t *argmax;
    void *grad_x, *grad_w, *grad_bias; /* [n_tokens, n_hidden], [v_local, n_hidden], [v_local] or NULL */
} check_results;

ll_status check_results_create(const check_shape *shape, int64_t v_local, ll_dtype grad_dtype,
                               check_results *results);
void check_results_free(check_results *results);

/* By words of 8 bytes, the last one filled up with zeros. Start with CHECK_HASH. */
#define CHECK_HASH 0xcbf29ce484222325u
uint64_t check_hash(uint64_t hash, const void *data, size_t bytes);
/* Of what every rank has: loss, nll, lse, entropy, argmax, grad_x. */
uint64_t check_hash_shared(const check_shape *shape, const check_results *results);
/* Of a shard's gradients. */
uint64_t check_hash_shard(const check_shape *shape, int64_t v_local, const check_results *results);

/* A plan on the rows [v_begin, v_begin + v_local) of the vocabulary, which `inputs` must hold. */
typedef struct check_call {
    const check_inputs *inputs;
    int64_t v_begin, v_local;
    const ll_comm *comm; /* NULL: one rank */
    ll_backend backend;
    ll_dtype grad_dtype;
    int32_t n_threads;
    ll_plan *plan;
    void *workspace;
    size_t workspace_bytes;
    struct cli_gpu *gpu; /* NULL: operands stay in host memory */
} check_call;

/* Fill in the fields above `plan` first. Free it in every case. */
ll_status check_call_create(check_call *call);
ll_status check_call_run(const check_call *call, ll_pass pass, check_results *results);
void check_call_free(check_call *call);

/* What is right: in double precision from the inputs as they are, gradients in f32; or (matching) what a
 * framework without fusion computes in the inputs' dtype. */
ll_status check_reference(const check_inputs *inputs, bool matching, check_results *want);

/* ---- Comparison --------------------------------------------------------------------------------- */

typedef enum check_line_id {
    CHECK_OUTPUT = 0, /* nll, lse, entropy, loss, and the logit at argmax */
    CHECK_HIDDEN_GRAD = 1,
    CHECK_WEIGHT_GRAD = 2,
    CHECK_BIAS_GRAD = 3,
    CHECK_LINES = 4
} check_line_id;

/* What an element belongs to; names in check_part_names. */
typedef enum check_part {
    CHECK_NLL = 0,
    CHECK_LSE = 1,
    CHECK_ENTROPY = 2,
    CHECK_LOSS = 3,
    CHECK_ARGMAX = 4,
    CHECK_GRAD_X = 5,
    CHECK_GRAD_W = 6,
    CHECK_GRAD_BIAS = 7
} check_part;

/* PASS: |got - want| <= atol s + rtol |want| for every element, s the scale of its row (check_scale.c).
 * max_rel is the largest |got - want| / max(|want|, rms), rms that of the reference. */
typedef struct check_line {
    double atol, rtol, rms;
    double max_abs, max_rel;
    double used; /* the largest |got - want| / (atol s + rtol |want|); the rest is about that element */
    double got, want;
    int64_t row, col;
    int32_t part, rank; /* check_part */
} check_line;

/* The first place where bits differ from what they should equal. */
typedef struct check_difference {
    int32_t differs, part;
    int64_t row, col; /* row of the arrays at hand; col 0 where there are no columns */
    uint64_t got, want;
} check_difference;

/* What a rank found; gathered on all ranks as bytes. */
typedef struct check_record {
    check_line lines[CHECK_LINES];
    check_difference one_rank, passes; /* against one rank; forward + backward against forward_backward */
    uint64_t inputs_hash, shared_hash;
    uint64_t workspace_bytes;
    int32_t n_threads, reserved;
} check_record;

extern const char *const check_line_names[CHECK_LINES];
extern const char *const check_part_names[];

typedef struct check_scales {
    double *token, *column; /* [n_tokens], [n_vocab] */
} check_scales;

/* Of a process. Read-only once the ranks run. */
typedef struct check_world {
    const check_options *options;
    check_shape shape, stress_shape;
    cli_cut cut, stress_cut;
    int32_t one_rank_threads, n_threads; /* of one rank alone; of each of the ranks */
    check_inputs inputs;
    check_results want, one_rank;
    check_scales scales;
} check_world;

/* Scales of the rows of grad_x, and of grad_w and grad_bias. MEMORY. */
ll_status check_scales_create(const check_options *options, const check_inputs *inputs,
                              const check_results *want, check_scales *scales);
void check_scales_free(check_scales *scales);
/* Clears the lines and sets atol, rtol and rms. */
void check_tolerances(const check_options *options, const check_shape *shape, const check_results *want,
                      check_line lines[CHECK_LINES]);
/* got: results of the shard of `call`. */
void check_compare(const check_world *world, const check_call *call, const check_results *got,
                   check_line lines[CHECK_LINES]);
double check_logit(const check_inputs *inputs, int64_t token, int64_t column);
/* nll, lse, entropy, argmax; then (check_all_bits) the gradients of v_local rows as well. */
check_difference check_bits(const check_shape *shape, const check_results *got, const check_results *want);
check_difference check_all_bits(const check_shape *shape, int64_t v_local, const check_results *got,
                                const check_results *want);
bool check_line_passes(const check_line *line);
/* Whether the results under test are made on a GPU. */
bool check_on_gpu(const check_options *options);
/* The communicator of a rank's plan: on a GPU one rank goes without. */
const ll_comm *check_plan_comm(const check_options *options, const ll_comm *comm);

/* ---- Phases and report -------------------------------------------------------------------------- */

typedef struct check_stress {
    double seconds[2];
    uint64_t workspace_bytes, data_bytes; /* data: inputs and gradients */
    uint64_t peak_bytes;                  /* of the process */
    uint64_t shared_hash, rank_hash[2];   /* the shared results of the first run; everything of both */
    int32_t n_not_finite, rank;
} check_stress;

/* All records, and what follows from them; the same on every rank. */
typedef struct check_report {
    check_record *records; /* [n_ranks] */
    check_stress *stress;  /* [n_ranks] */
    check_line lines[CHECK_LINES];
    int32_t one_rank_at, passes_at, shared_at; /* the first rank that differs; -1: none */
    bool stress_ran;
    char kernel[64], numerics[64];
    uint64_t digest;
} check_report;

/* A rank's part: collective. `mine` tells a failure of this rank alone from one that all ranks agree on.
 * Rank 0 prints each phase as soon as it is over, unless it is to be JSON. */
ll_status check_rank(const check_world *world, const ll_comm *comm, check_report *report, bool *mine);
/* The stress phase of a rank, and its record. */
ll_status check_stress_run(const check_world *world, const ll_comm *comm, check_stress *record, bool *mine);
/* all[r] = rank r's record. */
ll_status check_gather(const ll_comm *comm, const void *mine, void *all, size_t bytes);

bool check_report_create(int32_t n_ranks, check_report *report);
void check_report_free(check_report *report);

void check_print_header(const check_world *world, const ll_comm *comm, const check_report *report);
void check_print_lines(const check_world *world, const check_report *report);
void check_print_stress(const check_world *world, const check_report *report);
/* Says the verdict (or prints the JSON object) where `speaks`; the exit code. */
int check_print_verdict(const check_world *world, const check_report *report, bool speaks);

#endif

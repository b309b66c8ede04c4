/* logitless: loss and log-probabilities of a language-model head without the logits.
 *
 *   z[i,v]  = softcap(x_i . w_v + b_v) / T        x [n_tokens, n_hidden], w [v_local, n_hidden]
 *   lse[i]  = ln sum_v exp z[i,v]                 v over the whole vocabulary [0, v_total)
 *   nll[i]  = lse[i] - z[i, y_i]                  y_i: global token id; log p = -nll
 *   H[i]    = lse[i] - sum_v p[i,v] z[i,v]        entropy in nats, p = softmax(z)
 *   softcap(r) = C tanh(r / C), or r itself when C = 0
 *
 * Two operations: linear_ce forms the logits from x and w and never holds them; ce takes raw logits
 * [n_tokens, v_local] that the caller has, in place of x_i . w_v + b_v, and may write their gradient over
 * them.
 *
 * Life of a plan: fill ll_plan_desc -> ll_plan_create (every check, picks the kernel) ->
 * ll_plan_workspace -> ll_linear_ce_forward / _backward / _forward_backward (or ll_ce_...), many times ->
 * ll_plan_destroy. The caller owns all memory: operands, results and workspace. Execution
 * allocates nothing and reads no environment. A plan is immutable: any threads may share it, each
 * call in flight with its own workspace.
 *
 * The vocabulary may be cut over the ranks of a group (comm.h): every rank makes a plan with its shard and
 * the same communicator, and ll_plan_create and the three passes become collective. nll, lse, entropy,
 * argmax, loss and sums come out on every rank, grad_x comes out summed over ranks on every rank, grad_w,
 * grad_bias and grad_logits are the shard's.
 *
 * Results do not depend on how work is cut: nll, lse, entropy and argmax of a row have the same bits
 * alone or in any batch, for any chunk, thread count, rank count and cut of the vocabulary; the reduced loss
 * is a correctly rounded exact sum; grad_w and grad_bias are equal from run to run, for every thread count
 * and every cut; grad_x is equal from run to run, for every thread count and on all ranks. The numerics id of
 * a kernel (ll_plan_numerics) names the arithmetic; docs/numerics.md derives it.
 *
 * Every struct that a caller fills starts with struct_bytes, set by its _INIT macro; a field that is
 * zero means its default unless its comment says otherwise. Sizes count elements unless their name
 * ends in _bytes. The library never prints, exits or aborts. */
#ifndef LOGITLESS_LOGITLESS_H
#define LOGITLESS_LOGITLESS_H

#include <stddef.h>
#include <stdint.h>

#if defined(LL_STATIC)
#define LL_API
#elif defined(__GNUC__)
#define LL_API __attribute__((visibility("default")))
#else
#define LL_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define LL_VERSION_MAJOR 0
#define LL_VERSION_MINOR 1
#define LL_VERSION_PATCH 0

/* Largest v_total. The integer softmax sums are proved free of overflow up to here (docs/numerics.md). */
#define LL_VOCAB_MAX ((int64_t)1 << 20)

/* ---- Status ------------------------------------------------------------------------------------- */

/* Values are part of the ABI and never change. */
typedef enum ll_status {
    LL_STATUS_OK = 0,
    LL_STATUS_INVALID_ARG = 1, /* the caller's fault: ll_last_error names the argument */
    LL_STATUS_UNSUPPORTED = 2, /* a sound request that no kernel here takes */
    LL_STATUS_WORKSPACE = 3,   /* workspace missing, misaligned or smaller than ll_plan_workspace said */
    LL_STATUS_MEMORY = 4,      /* the system gave no memory or no thread (ll_plan_create only) */
    LL_STATUS_CUDA = 5,
    LL_STATUS_COMM = 6,
    LL_STATUS_INTERNAL = 7,
    LL_STATUS_IO = 8 /* the system refused to read or write a file (the program only) */
} ll_status;

/* "LL_STATUS_OK", ...; "LL_STATUS_UNKNOWN" for any other number. Never NULL. */
LL_API const char *ll_status_name(ll_status status);

/* Sentence on the last call of this thread that did not return LL_STATUS_OK: function, argument, value
 * found, value wanted. "" before the first failure. Valid until this thread's next failing call. */
LL_API const char *ll_last_error(void);

/* "MAJOR.MINOR.PATCH" of the library that runs (the macros give the header's). */
LL_API const char *ll_version(void);

/* ---- Views of the caller's memory --------------------------------------------------------------- */

typedef enum ll_dtype {
    LL_DTYPE_NONE = 0,
    LL_DTYPE_F32 = 1,
    LL_DTYPE_BF16 = 2, /* upper half of an f32 */
    LL_DTYPE_F16 = 3,  /* IEEE binary16 */
    LL_DTYPE_I32 = 4,
    LL_DTYPE_I64 = 5
} ll_dtype;

/* Bytes of one element; 0 for LL_DTYPE_NONE and unknown values. */
LL_API size_t ll_dtype_bytes(ll_dtype dtype);
/* "f32", "bf16", "f16", "i32", "i64", "none". Never NULL. */
LL_API const char *ll_dtype_name(ll_dtype dtype);

/* A borrowed matrix: element (r, c) lies at data + (r * row_stride + c * col_stride) elements.
 *   matrices   col_stride is 1 and row_stride >= cols (larger: padded or sliced rows); anything else is
 *              refused, never read wrongly
 *   vectors    cols is 1; row_stride >= 1 is the step between elements (1: contiguous)
 * data is aligned to its element. All zeros means "not given". */
typedef struct ll_view {
    void *data; /* only read where an argument's comment says read */
    int64_t rows, cols;
    int64_t row_stride, col_stride;
    int32_t dtype; /* ll_dtype */
    int32_t reserved;
} ll_view;

/* Contiguous or row-padded matrix [rows, cols]; row_stride in elements, 0 for cols. */
static inline ll_view ll_view_matrix(const void *data, ll_dtype dtype, int64_t rows, int64_t cols,
                                     int64_t row_stride) {
    ll_view view = {(void *)data, rows, cols, row_stride ? row_stride : cols, 1, (int32_t)dtype, 0};
    return view;
}

/* Vector of n elements, `step` elements apart (0: contiguous). */
static inline ll_view ll_view_vector(const void *data, ll_dtype dtype, int64_t n, int64_t step) {
    ll_view view = {(void *)data, n, 1, step ? step : 1, 1, (int32_t)dtype, 0};
    return view;
}

/* ---- The loss ----------------------------------------------------------------------------------- */

typedef enum ll_reduction {
    LL_REDUCTION_MEAN = 0, /* divided by *divisor, or by the sum of class_weight[y] over valid tokens */
    LL_REDUCTION_SUM = 1,
    LL_REDUCTION_NONE = 2 /* one loss a token */
} ll_reduction;

typedef enum ll_smoothing {
    LL_SMOOTHING_ALL = 0,   /* mass a spread over all v_total classes (PyTorch) */
    LL_SMOOTHING_OTHERS = 1 /* mass a spread over the v_total - 1 other classes (Megatron) */
} ll_smoothing;

/* Loss of a valid token i (target != ignore_index), cw = class_weight (all 1 when not given):
 *
 *   ce[i]     = (1 - a) cw[y] nll[i] + a / V sum_v cw[v] (lse[i] - z[i,v])            LL_SMOOTHING_ALL
 *             = (1 - a) cw[y] nll[i] + a / (V-1) sum_{v != y} cw[v] (lse[i] - z[i,v]) LL_SMOOTHING_OTHERS
 *   z_loss[i] = c lse[i]^2
 *   loss[i]   = s[i] (ce[i] + z_loss[i]),   s[i] = token_weight[i] * (token_scaling ? p[i, y_i] : 1)
 *   sum:  L = sum_i loss[i]      mean:  L = sum_i loss[i] / divisor
 *
 * The divisor of the mean is the caller's (gradient accumulation, data parallelism), else
 * sum_i cw[y_i] over valid tokens, i.e. their count without class weights; token_weight and
 * token_scaling scale the numerator only. s[i] is a constant for the gradient (detached).
 * Class weights follow PyTorch: they scale the smoothed part too; a class of weight 0 takes no part in
 * the smoothed sum. A factor of exactly 0 (token_weight, c, cw[y], an upstream) removes its term, also where
 * the other factor is infinite or NaN: weights of 0 mask. An ignored token has loss 0 and every gradient
 * exactly 0, whatever its row of x holds; its class stays in the softmax of the other tokens even if
 * ignore_index lies in [0, v_total). With no valid token the loss is 0 (not NaN) and gradients are exactly 0.
 */
typedef struct ll_loss {
    size_t struct_bytes;
    int64_t ignore_index;   /* LL_LOSS_INIT: -100; any value, also inside or beyond the vocabulary */
    float temperature;      /* T; LL_LOSS_INIT: 1. Finite, > 0, and 1/T finite; 0 is an error */
    float softcap;          /* C; finite, >= 0; 0: none */
    float label_smoothing;  /* a; 0 <= a <= 1 */
    float z_loss;           /* c; finite, >= 0 */
    int32_t smoothing_rule; /* ll_smoothing; LL_SMOOTHING_OTHERS with a > 0 needs v_total >= 2 */
    int32_t reduction;      /* ll_reduction */
    int32_t token_scaling;  /* 0 or 1: scale by the detached p[i, y_i] */
    int32_t reserved;
} ll_loss;

/* ll_loss loss = LL_LOSS_INIT; every other option at its zero default. */
#ifdef __cplusplus
#define LL_LOSS_INIT lli_loss_init()
static inline ll_loss lli_loss_init(void) {
    ll_loss loss = ll_loss();
    loss.struct_bytes = sizeof(ll_loss);
    loss.ignore_index = -100;
    loss.temperature = 1.0f;
    return loss;
}
#else
#define LL_LOSS_INIT                                                                                         \
    { .struct_bytes = sizeof(ll_loss), .ignore_index = -100, .temperature = 1.0f }
#endif

/* ---- Plan --------------------------------------------------------------------------------------- */

typedef enum ll_op {
    LL_OP_LINEAR_CE = 0, /* logits from x and w: ll_linear_ce_forward, ... */
    LL_OP_CE = 1         /* logits given: ll_ce_forward, ... */
} ll_op;

typedef enum ll_backend {
    LL_BACKEND_AUTO =
        0, /* the best CPU kernel that takes the problem: a plan cannot see where pointers lie */
    LL_BACKEND_CPU = 1,
    LL_BACKEND_REF = 2, /* the definition in double precision: slow, takes everything */
    /* An NVIDIA GPU, the calling thread's current device at ll_plan_create. Every pointer of a call is device
     * memory of it, the workspace too. Needs liblogitless_cuda.so.0: in the folder LL_CUDA_PATH, beside this
     * library or the program, or where the system looks; UNSUPPORTED with the reason where it does not load.
     */
    LL_BACKEND_CUDA = 3
} ll_backend;

typedef enum ll_pass { LL_PASS_FORWARD = 0, LL_PASS_BACKWARD = 1, LL_PASS_FORWARD_BACKWARD = 2 } ll_pass;

/* Most ids a row, and largest k of the top-k, of LL_OP_CE: what they take of the workspace stays small. */
#define LL_CE_IDS_MAX 1024
#define LL_CE_TOP_MAX 128

/* Bits of ll_plan_desc.frozen: a gradient that no call of this plan will ask for. */
enum { LL_FROZEN_X = 1, LL_FROZEN_W = 2, LL_FROZEN_BIAS = 4 };

struct ll_comm;     /* communicator of a vocabulary-parallel group: logitless/comm.h */
struct CUstream_st; /* what CUDA's cudaStream_t points to */
typedef struct CUstream_st *ll_stream;

/* The shard: this rank holds w rows of the global columns [v_begin, v_begin + v_local). v_total counts
 * real entries; columns at or beyond v_total are padding: never part of a result, gradient 0. Without a
 * communicator the shard must cover the vocabulary: v_begin = 0, v_local >= v_total. With one, the shards of
 * all ranks must cover [0, v_total) once: any sizes, any order of ranks, empty shards (v_local 0) too.
 *
 * For LL_OP_CE n_hidden, the dtypes of x, w, bias and their gradients, and frozen are 0, and v_local counts
 * the columns of the logits; for LL_OP_LINEAR_CE the fields from logits_dtype on are 0.
 *
 * In a group these must be equal on all ranks: op, n_tokens_max, n_hidden, v_total, x_dtype, w_dtype,
 * bias_dtype, grad_x_dtype, LL_FROZEN_X, logits_dtype, n_ids, n_top, loss. The rest is each rank's own. */
typedef struct ll_plan_desc {
    size_t struct_bytes;
    int32_t op;           /* ll_op */
    int32_t backend;      /* ll_backend */
    int64_t n_tokens_max; /* calls may have 0 .. n_tokens_max tokens; >= 0 */
    int64_t n_hidden;     /* linear_ce: required, >= 1 */
    int64_t v_begin, v_local;
    int64_t v_total;          /* required, 1 .. LL_VOCAB_MAX */
    int32_t x_dtype, w_dtype; /* linear_ce: required, f32, bf16 or f16; the two may differ on a CPU */
    int32_t bias_dtype;       /* f32, bf16 or f16; LL_DTYPE_NONE: no bias */
    int32_t grad_x_dtype;     /* that of the input (also when NONE) or f32 */
    int32_t grad_w_dtype;     /* likewise */
    int32_t grad_bias_dtype;  /* likewise */
    int32_t frozen;           /* LL_FROZEN_ bits: a smaller workspace, and those gradients are refused */
    int32_t n_threads;        /* CPU; 0: LL_NUM_THREADS if set, else the CPUs this process may use */
    /* Upper bound for each pass's workspace; the plan fits its chunks into it or refuses with the
     * least that would do. A bound that is given is used: larger chunks pass over grad_w less often. 0: about
     * 100 MiB of logits within 512 MiB, exceeded only if the least needed is more. */
    size_t workspace_budget_bytes;
    const ll_loss *loss;        /* copied; NULL: LL_LOSS_INIT */
    const struct ll_comm *comm; /* NULL: one rank. Copied; what it points to must outlive the plan */
    int32_t logits_dtype;       /* ce: required, f32, bf16 or f16 */
    int32_t grad_logits_dtype;  /* that of the logits (also when NONE) or f32 */
    int32_t n_ids;              /* most ids a row that a call asks about; 0 .. LL_CE_IDS_MAX */
    int32_t n_top;              /* k of the top-k; 0 .. LL_CE_TOP_MAX, at most v_total */
} ll_plan_desc;

#ifdef __cplusplus
#define LL_PLAN_DESC_INIT lli_plan_desc_init()
static inline ll_plan_desc lli_plan_desc_init(void) {
    ll_plan_desc desc = ll_plan_desc();
    desc.struct_bytes = sizeof(ll_plan_desc);
    return desc;
}
#else
#define LL_PLAN_DESC_INIT                                                                                    \
    { .struct_bytes = sizeof(ll_plan_desc) }
#endif

typedef struct ll_plan ll_plan;

/* Checks the description, picks the kernel (LL_KERNEL=<name> in the environment forces one for plans of its
 * operation, whatever desc.backend says) and starts n_threads - 1 worker threads that sleep between calls.
 * *plan is NULL on failure. Errors: INVALID_ARG, UNSUPPORTED, WORKSPACE (budget too small; the sentence gives
 * the least), MEMORY. Local without a communicator. Collective with one: three all_gathers; an error of one
 * rank, shards that overlap or leave a gap, or descriptions that differ are the same error on every rank;
 * COMM if a rank does not come. A plan with a communicator takes one call at a time. */
LL_API ll_status ll_plan_create(const ll_plan_desc *desc, ll_plan **plan);

/* Stops the workers and frees the plan. No call may be in flight. NULL is fine. Local. */
LL_API void ll_plan_destroy(ll_plan *plan);

/* Bytes of workspace that `pass` needs, for every call of up to n_tokens_max tokens. The workspace must
 * be 64-byte aligned; its contents before a call do not matter and after it mean nothing. */
LL_API ll_status ll_plan_workspace(const ll_plan *plan, ll_pass pass, size_t *bytes);

/* Writes what was asked and chosen, and why every better kernel refused, as lines of text, cut to
 * text_bytes with the terminating 0. Errors: INVALID_ARG (text NULL or text_bytes 0). */
LL_API ll_status ll_plan_describe(const ll_plan *plan, char *text, size_t text_bytes);

/* Name of the chosen kernel and of its arithmetic ("cpu-fma-v1"): equal numerics ids on equal inputs
 * give equal bits. Valid as long as the plan; NULL for a NULL plan. */
LL_API const char *ll_plan_kernel(const ll_plan *plan);
LL_API const char *ll_plan_numerics(const ll_plan *plan);
/* Threads a call uses at most. */
LL_API int32_t ll_plan_threads(const ll_plan *plan);

/* One kernel of this build; why_not is "" where this machine can run it, else a sentence. */
typedef struct ll_kernel_info {
    const char *name, *backend, *numerics;
    char why_not[160];
} ll_kernel_info;

/* Kernel number `index` (0, 1, ...): those of linear_ce in order of preference, then those of ce, then those
 * of libraries opened on demand. A name starts with its operation's. INVALID_ARG beyond the last one. */
LL_API ll_status ll_kernel_get(int32_t index, ll_kernel_info *info);

/* ---- linear_ce ---------------------------------------------------------------------------------- */

/* Sums over the tokens of a call, for means over data shards: add them over shards, then divide
 * (a mean of means is wrong). Each double is the exact sum rounded once. */
typedef struct ll_sums {
    double loss;       /* sum_i loss[i], undivided, also under LL_REDUCTION_NONE */
    double z_loss;     /* sum_i s[i] z_loss[i] */
    double weight;     /* sum_i class_weight[y_i] over valid tokens (their count without class weights) */
    int64_t n_valid;   /* tokens that are not ignored */
    int64_t n_ignored; /* the others */
} ll_sums;

/* Operands and results of the three passes. F forward, B backward, FB forward_backward; n = n_tokens,
 * the rows of x. A field that a pass does not take must be left zero.
 *
 *   field          shape, dtype                     F     B     FB
 *   x              [n, n_hidden] x_dtype            read  read  read
 *   w              [v_local, n_hidden] w_dtype      read  read  read
 *   bias           [v_local] bias_dtype             read  read  read   given iff bias_dtype is
 *   target         [n] i32 or i64, any step >= 1    read  read  read   global ids or ignore_index
 *   class_weight   [v_total] f32, finite, >= 0      read  read  read   or NULL: all 1
 *   token_weight   [n] f32, finite                  read  read  read   or NULL: all 1
 *   divisor        [1] f64, finite, > 0             read  read  read   or NULL; reduction mean only
 *   loss           [1], or [n] (reduction none) f32 out   -     out    or NULL; 0 where ignored
 *   nll            [n] f32                          out   read  out    NULL in F, FB: not wanted
 *   lse, entropy   [n] f32                          out   read  out    likewise
 *   lse_lo         [n] f32                          out   read  out    likewise
 *   z_loss         [n] f32, c lse^2 (0 if c = 0)    out   -     out    likewise
 *   argmax         [n] i64, lowest index on ties    out   -     out    likewise; -1 where ignored
 *   sums           [1] ll_sums                      out   -     out    likewise
 *   up_loss        [1], or [n] (reduction none) f32 -     read  read   dJ/dloss    NULL: 0
 *   up_nll         [n] f32                          -     read  read   dJ/dnll     NULL: 0
 *   up_lse         [n] f32                          -     read  read   dJ/dlse     NULL: 0
 *   up_entropy     [n] f32                          -     read  read   dJ/dentropy NULL: 0
 *   grad_x         [n, n_hidden] grad_x_dtype       -     out   out    all zeros: not wanted
 *   grad_w         [v_local, n_hidden] grad_w_dtype -     out   out    likewise
 *   grad_bias      [v_local] grad_bias_dtype        -     out   out    likewise
 *
 * "out" is overwritten, every element (gradients: added to instead where `accumulate` says so), and
 * nothing else is written. With n = 0 the data of per-token arguments may be NULL. Ignored tokens: loss, nll,
 * lse, lse_lo, entropy, z_loss are 0. lse + lse_lo is the log-sum-exp to some 48 bits: nll and gradients keep
 * full precision when all logits share a large offset. No output may overlap an input, another output or the
 * workspace. */
typedef struct ll_linear_ce_args {
    size_t struct_bytes;
    ll_view x, w, bias, target;
    const float *class_weight, *token_weight;
    const double *divisor;
    float *loss;
    float *nll, *lse, *lse_lo, *entropy;
    float *z_loss;
    int64_t *argmax;
    ll_sums *sums;
    const float *up_loss, *up_nll, *up_lse, *up_entropy;
    ll_view grad_x, grad_w, grad_bias;
    int32_t accumulate; /* LL_ACCUMULATE_ bits; 0: every gradient is overwritten */
    int32_t reserved;
    void *workspace; /* 64-byte aligned */
    size_t workspace_bytes;
    int64_t *bad_targets; /* [1], CUDA: added to, once for each target outside [0, v_total); or NULL */
} ll_linear_ce_args;

enum { LL_ACCUMULATE_X = 1, LL_ACCUMULATE_W = 2, LL_ACCUMULATE_BIAS = 4 };

#ifdef __cplusplus
#define LL_LINEAR_CE_ARGS_INIT lli_linear_ce_args_init()
static inline ll_linear_ce_args lli_linear_ce_args_init(void) {
    ll_linear_ce_args args = ll_linear_ce_args();
    args.struct_bytes = sizeof(ll_linear_ce_args);
    return args;
}
#else
#define LL_LINEAR_CE_ARGS_INIT                                                                               \
    { .struct_bytes = sizeof(ll_linear_ce_args) }
#endif

/* Per-token nll, lse, entropy, z_loss, argmax and the reduced loss; one GEMM, no logits in memory.
 *
 * A row with a NaN or +inf logit is NaN (argmax -1) and no other row is touched by it; a -inf logit
 * has probability 0; a row of -inf only is NaN. A target whose logit is -inf has nll +inf.
 * Errors at the call, nothing written: INVALID_ARG (NULL or wrong shape, stride, dtype; a target
 * outside [0, v_total) that is not ignore_index, with its row; a weight or divisor that is not
 * finite), WORKSPACE. None later: the call returns when the results are written (CPU).
 * CUDA: the call queues its work on `stream` (NULL: the default one) and returns; it allocates nothing, never
 * waits, and may be captured in a graph. What the host cannot see is not refused: a target outside [0,
 * v_total) makes its row NaN, is counted in *bad_targets and counts as valid with class weight 1; weights and
 * divisor are used as they are. Errors at the call: CUDA too, where a launch fails.
 * In a group: x, target, weights, divisor, upstreams and saved results are the same on every rank; a rank may
 * ask for fewer results. All errors above are then the same on every rank; also INVALID_ARG where ranks
 * differ in n_tokens, target, divisor or in what is given; COMM where a rank does not come or the
 * communicator fails, the results are then undefined. stream: NULL on a CPU; of the plan's device on CUDA.
 * There contents are not compared at the call: a row whose target, or all rows where the divisor, is not the
 * same on every rank are NaN and counted in *bad_targets; a communicator in host memory makes the call wait
 * for the stream, and INVALID_ARG where that is being captured. Method: fused blocked GEMM and softmax after
 * Cut Cross-Entropy (Wijmans et al., 2024), with order-free integer sums (docs/numerics.md). */
LL_API ll_status ll_linear_ce_forward(const ll_plan *plan, const ll_linear_ce_args *args, ll_stream stream);

/* Gradients of J for any per-token upstream, from the forward's saved results; recomputes the logits
 * (4 GEMMs over forward and backward), changes no input and may be repeated.
 *
 *   dz[i,v]  = up_nll (p - [v = y]) + up_lse p + up_entropy p (lse - H - z) + up_loss dL/dz[i,v]
 *   dr       = dz (1 - tanh^2(r / C)) / T          r = x . w + b, the raw logit
 *   grad_x   = dr w      grad_w = dr^T x      grad_bias[v] = sum_i dr[i,v]
 *
 * In a group grad_x is the sum over all ranks' columns and is asked for on all ranks or on none.
 * Sums are kept in f32 or better and rounded once. lse is always needed; nll where up_nll or up_loss is
 * given (it makes p[y] - 1 exact for confident tokens); entropy where up_entropy is; lse_lo is
 * optional: without it p has a relative error of up to half an ulp of lse. At least one upstream and
 * one gradient must be given. Errors: as for the forward. */
LL_API ll_status ll_linear_ce_backward(const ll_plan *plan, const ll_linear_ce_args *args, ll_stream stream);

/* Forward and gradients in one call, for upstreams known beforehand (up_loss: {1} gives dL); the same
 * bits as forward followed by backward with nll, lse, lse_lo and entropy passed on. Three GEMMs where the
 * workspace budget holds the logits of 256 tokens (for grad_w below f32: and an f32 copy of grad_w, or else
 * the logits of n_tokens_max tokens), otherwise four; ll_plan_describe says which.
 * CUDA: three GEMMs, and a fourth for the columns of which a chunk of tokens cannot keep within the budget
 * what it needs; ll_plan_describe says how many. grad_w and grad_bias are sums over chunks of tokens there,
 * and chunks are of other sizes in one pass than in two: beyond one chunk their last bits may differ from
 * forward followed by backward. Until the call's work is done, the memory of grad_w and grad_x may hold what
 * is no gradient; without `accumulate` and gaps between rows it is of most use. */
LL_API ll_status ll_linear_ce_forward_backward(const ll_plan *plan, const ll_linear_ce_args *args,
                                               ll_stream stream);

/* ---- Utilities ---------------------------------------------------------------------------------- */

/* *sum = the exact sum of values[0], values[step], ..., rounded once to double: the same for every order
 * and grouping. NaN if a value is NaN or both infinities occur. n >= 0, step >= 1; n <= 2^40. */
LL_API ll_status ll_sum_f32(const float *values, int64_t n, int64_t step, double *sum);

#ifdef __cplusplus
}
#endif

#include <logitless/ce.h> /* the passes of LL_OP_CE: a part of this header in a file of its own */
#endif

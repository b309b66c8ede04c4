/* Rig of the reported-fault tests: one linear_ce problem with all its operands, results and guard bytes,
 * and the runner that repeats every test for each kernel of this machine. Only the public API is used.
 * Leaves out expected values: those stand in the tests, or come from oracle.h. */
#ifndef TESTS_FAULTS_HARNESS_H
#define TESTS_FAULTS_HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>

#include <cmocka.h>

#include <logitless/logitless.h>

/* ---- Runner ---- */

typedef struct fault_test {
    const char *name;
    CMUnitTestFunction run;
    enum { FAULT_ALL, FAULT_FAST, FAULT_IN_GROUP } kernels;
} fault_test;

#define FAULT(function)                                                                                      \
    { #function, function, FAULT_ALL }
/* Too large for the reference and, where there is a better one, the plain C kernel. */
#define FAULT_HEAVY(function)                                                                                \
    { #function, function, FAULT_FAST }
/* Over ranks, which the reference does not take. */
#define FAULT_RANKS(function)                                                                                \
    { #function, function, FAULT_IN_GROUP }

/* Runs every test once per runnable kernel, named "test [kernel]", with LL_KERNEL set. argv[1], if given,
 * is a filter with * and ?. Returns the number of failures. */
int faults_main(const char *group, const fault_test *tests, size_t n_tests, int argc, char **argv);
/* The reference or plain C: tests that repeat themselves do so less often there. */
int on_slow_kernel(void);
/* On a GPU, where some promises are of another kind: a bad target is no error, x and w have one dtype, and
 * grad_w is a sum over chunks of tokens. */
int on_gpu(void);
/* A kernel that leaves many problems to another one: what it refuses is skipped. */
int on_partial_kernel(void);
/* Largest relative error of a dz that the kernel rounds to the operands' dtype before grad_x and grad_w; 0:
 * it does not. */
double dz_rounding(ll_dtype operands);

/* ---- Memory with guards ---- */

enum { kGuardBytes = 64, kGuardsMax = 48 };

typedef struct guarded {
    unsigned char *base; /* guard | bytes | guard; base + kGuardBytes is 64-byte aligned */
    size_t bytes, mapped_bytes;
} guarded;

/* ---- Rig ---- */

typedef struct rig {
    ll_plan_desc desc; /* may be changed until rig_plan; desc.loss is &options */
    ll_loss options;
    ll_linear_ce_args args; /* everything; each pass is given the fields that it takes */
    int64_t n, d, v;
    int64_t *y; /* the targets, i64 */
    float *up_loss;
    ll_sums sums;
    ll_plan *plan;
    size_t workspace_bytes;
    guarded guards[kGuardsMax];
    int n_guards;
} rig;

/* n tokens, d hidden, v classes; x and w of `dtype`, all 0; targets 0; all results wanted, gradients in
 * f32; up_loss all 1; reduction sum; 2 threads. */
rig *rig_open(int64_t n, int64_t d, int64_t v, ll_dtype dtype);
/* Logits z[n * v] exactly: x[t] is 1 in column 2t, w[:, 2t] = z[t, :]. -inf comes from an overflow in
 * column 2t+1 (f32 and bf16 only), so that no operand is infinite. */
rig *rig_exact(int64_t n, int64_t v, ll_dtype dtype, const double *z);
/* Checks the guards and frees all. */
void rig_close(rig *r);

void *rig_alloc(rig *r, size_t bytes, int fill);
/* Adds an f32 bias of zeros and its gradient; returns the bias. */
float *rig_bias(rig *r);
/* n floats of `value`, for a per-token input. */
float *rig_tokens(rig *r, float value);
/* Uniform x in +-x_scale, w and bias in +-w_scale, uniform targets. */
void rig_random(rig *r, uint64_t seed, double x_scale, double w_scale);

/* (Re)creates plan and workspace after a change of desc or options. The passes call it when needed. */
void rig_plan(rig *r);
void rig_plan_only(rig *r); /* no workspace */

/* One pass: results are filled with NaN bytes before it, guards and inputs checked after it. */
ll_status rig_call(rig *r, ll_pass pass);
/* Its parts: the arguments that the pass takes, NaN bytes into its results, the call. */
ll_linear_ce_args rig_args(const rig *r, ll_pass pass);
void rig_spoil(const rig *r, const ll_linear_ce_args *a, ll_pass pass);
ll_status rig_pass(const ll_plan *plan, ll_pass pass, const ll_linear_ce_args *args);
void rig_forward(rig *r);
void rig_backward(rig *r);
void rig_forward_backward(rig *r);
/* forward, backward, then forward_backward, which must give the same bits. */
void rig_run(rig *r);

void rig_set(const ll_view *view, int64_t row, int64_t col, double value);
double rig_get(const ll_view *view, int64_t row, int64_t col);
/* dr[t, v] of a rig_exact. */
double rig_dz(const rig *r, int64_t t, int64_t v);

/* ---- Comparing ---- */

typedef struct snapshot snapshot;
snapshot *snapshot_take(const rig *r);
/* Bits of every result in both (two NaN are equal); prints the first difference and fails. */
void snapshot_equal(const snapshot *a, const rig *r);
/* As above for the results of a forward pass; gradients may differ by `rel` of their largest element. */
void snapshot_near(const snapshot *a, const rig *r, double rel);
void snapshot_free(snapshot *a);

int same_bits(float a, float b);

void near_at(double got, double want, double rel, double abs, const char *what, const char *file, int line);
#define NEAR(got, want)              near_at((got), (want), 1e-6, 1e-30, #got, __FILE__, __LINE__)
#define NEAR_TO(got, want, rel, abs) near_at((got), (want), (rel), (abs), #got, __FILE__, __LINE__)
#define OK(call)                     ok_at((call), #call, __FILE__, __LINE__)
void ok_at(ll_status status, const char *what, const char *file, int line);

/* Uniform in [-1, 1), and an integer in [0, n). */
double uniform(uint64_t *state);
int64_t below(uint64_t *state, int64_t n);

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

#endif

#define _POSIX_C_SOURCE 200809L
#include "rank_case.h"
#include "kernel_run.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

void rank_case_open(const char *text, struct rank_case *c) {
    *c = (struct rank_case){0};
    const char *why = problem_parse(text, &c->problem);
    if (why) fail_msg("%s: %s", text, why);
    if (!operands_create(&c->problem, &c->operands)) fail_msg("out of memory");
}

void rank_case_expect(struct rank_case *c) {
    const struct expect_rounding rounding = expect_rounding_here(&c->problem);
    if (!expectation_create_for(&c->problem, &c->operands, &rounding, &c->expect)) fail_msg("out of memory");
}

void rank_case_want(struct rank_case *c) {
    rank_case_results(c, &c->want);
    const ll_linear_ce_args args =
        problem_args(&c->problem, &c->operands, &c->want, LL_PASS_FORWARD_BACKWARD);
    assert_int_equal(kernel_run(c->kernel, &c->problem, LL_PASS_FORWARD_BACKWARD, &args), LL_STATUS_OK);
}

void rank_case_close(struct rank_case *c) {
    if (!operands_intact(&c->operands)) fail_msg("%s: an input changed", c->problem.text);
    if (c->expect.problem) expectation_destroy(&c->expect);
    operands_destroy(&c->operands);
}

void rank_case_results(const struct rank_case *c, struct results *results) {
    if (!results_create(&c->problem, results)) fail_msg("out of memory");
}

static void fail_case(struct rank_case *c, const struct rank_cut *cut, const char *what, const char *why) {
    printf("FAIL %s %s: %d ranks %s: %s: %s\n", c->problem.text, c->kernel, cut->n, rank_cut_text(cut), what,
           why);
    c->failed++;
}

bool rank_case_run(struct rank_case *c, struct rank_run *rank_run, const struct results *results,
                   ll_pass pass, const char *what) {
    ll_plan_desc desc;
    problem_desc(&c->problem, &desc);
    const ll_linear_ce_args args = problem_args(&c->problem, &c->operands, results, pass);
    if (ranks_run(rank_run, &desc, &args, pass) == LL_STATUS_OK) return true;
    const char *why = rank_run->difference;
    for (int32_t r = 0; r < rank_run->cut->n && !*why; r++) why = rank_run->sentence[r];
    fail_case(c, rank_run->cut, what, why);
    return false;
}

void rank_case_same(struct rank_case *c, const struct rank_cut *cut, const char *what,
                    const struct results *got, const struct results *want, int32_t fields) {
    char label[256];
    c->checked++;
    snprintf(label, sizeof label, "%d ranks, %.160s, %s", cut->n, rank_cut_text(cut), what);
    if (!results_same_bits(&c->problem, c->kernel, label, got, want, fields, 0, c->problem.n_tokens) ||
        !results_intact(got)) {
        fail_case(c, cut, what, "not the same bits, or guard bytes changed");
    }
}

void rank_case_cut(struct rank_case *c, const struct rank_cut *cut, const ll_comm_double *script,
                   int32_t sums) {
    struct results both, apart;
    struct rank_run both_run = {.cut = cut, .script = script}, apart_run = both_run;
    rank_case_results(c, &both);
    rank_case_results(c, &apart);
    if (rank_case_run(c, &both_run, &both, LL_PASS_FORWARD_BACKWARD, "forward_backward")) {
        rank_case_same(c, cut, "forward_backward", &both, &c->want, FIELDS_ALL & ~sums);
        expectation_check(&c->expect, c->kernel, "ranks", &both, sums, &c->stats);
    }
    if (rank_case_run(c, &apart_run, &apart, LL_PASS_FORWARD, "forward") &&
        rank_case_run(c, &apart_run, &apart, LL_PASS_BACKWARD, "backward")) {
        rank_case_same(c, cut, "forward then backward", &apart, &both, FIELDS_ALL);
    }
    results_destroy(&apart);
    results_destroy(&both);
}

/* A program of someone else's, built against the installed library only: a forward over equal logits, whose
 * nll is ln V exactly known. Exit code 0 where it is. */
#include <logitless/logitless.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { kTokens = 3, kHidden = 8, kVocab = 100 };

int main(void) {
    static const float x[kTokens * kHidden], w[kVocab * kHidden];
    static const int64_t target[kTokens] = {0, 42, 99};
    float nll[kTokens];

    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    desc.n_tokens_max = kTokens;
    desc.n_hidden = kHidden;
    desc.v_local = desc.v_total = kVocab;
    desc.x_dtype = desc.w_dtype = LL_DTYPE_F32;
    desc.n_threads = 1;

    ll_plan *plan = NULL;
    size_t bytes = 0;
    ll_linear_ce_args args = LL_LINEAR_CE_ARGS_INIT;
    args.x = ll_view_matrix(x, LL_DTYPE_F32, kTokens, kHidden, 0);
    args.w = ll_view_matrix(w, LL_DTYPE_F32, kVocab, kHidden, 0);
    args.target = ll_view_vector(target, LL_DTYPE_I64, kTokens, 0);
    args.nll = nll;

    int code = 1;
    if (ll_plan_create(&desc, &plan) != LL_STATUS_OK) goto done;
    if (ll_plan_workspace(plan, LL_PASS_FORWARD, &bytes) != LL_STATUS_OK) goto done;
    bytes = (bytes + 63) / 64 * 64;
    args.workspace_bytes = bytes;
    args.workspace = bytes ? aligned_alloc(64, bytes) : NULL;
    if (ll_linear_ce_forward(plan, &args, NULL) != LL_STATUS_OK) goto done;

    code = 0;
    for (int i = 0; i < kTokens; ++i) {
        if (!(fabs(nll[i] - log((double)kVocab)) < 1e-6)) code = 1;
    }
    printf("logitless %s: nll %.7f, ln V %.7f\n", ll_version(), (double)nll[0], log((double)kVocab));
done:
    if (code) fprintf(stderr, "failed: %s\n", ll_last_error());
    free(args.workspace);
    ll_plan_destroy(plan);
    return code;
}

/* Mean loss and both gradients of a head with 32,000 words for 4 tokens.
 *   cc minimal.c $(pkg-config --cflags --libs logitless) */
#include <logitless/logitless.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
    enum { kTokens = 4, kHidden = 64, kVocab = 32000 };
    static float x[kTokens * kHidden], w[kVocab * kHidden], grad_x[kTokens * kHidden],
        grad_w[kVocab * kHidden];
    const int64_t target[kTokens] = {5, 31999, -100, 0}; /* -100: ignored */
    for (int i = 0; i < kTokens * kHidden; i++) x[i] = (float)(i % 7 - 3);
    for (int i = 0; i < kVocab * kHidden; i++) w[i] = 0.01f * (float)(i % 11 - 5);

    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    desc.n_tokens_max = kTokens, desc.n_hidden = kHidden, desc.v_local = desc.v_total = kVocab;
    desc.x_dtype = desc.w_dtype = LL_DTYPE_F32;
    ll_plan *plan;
    size_t bytes;
    if (ll_plan_create(&desc, &plan) || ll_plan_workspace(plan, LL_PASS_FORWARD_BACKWARD, &bytes)) goto fail;

    float loss, one = 1.0f;
    ll_linear_ce_args args = LL_LINEAR_CE_ARGS_INIT;
    args.x = ll_view_matrix(x, LL_DTYPE_F32, kTokens, kHidden, 0);
    args.w = ll_view_matrix(w, LL_DTYPE_F32, kVocab, kHidden, 0);
    args.target = ll_view_vector(target, LL_DTYPE_I64, kTokens, 0);
    args.loss = &loss, args.up_loss = &one;
    args.grad_x = ll_view_matrix(grad_x, LL_DTYPE_F32, kTokens, kHidden, 0);
    args.grad_w = ll_view_matrix(grad_w, LL_DTYPE_F32, kVocab, kHidden, 0);
    args.workspace = aligned_alloc(64, (bytes + 63) / 64 * 64), args.workspace_bytes = bytes;
    if (ll_linear_ce_forward_backward(plan, &args, NULL)) goto fail;
    printf("loss %.6f with %s, %zu bytes of workspace\n", (double)loss, ll_plan_kernel(plan), bytes);
    free(args.workspace);
    ll_plan_destroy(plan);
    return 0;
fail:
    fprintf(stderr, "%s\n", ll_last_error());
    return 1;
}

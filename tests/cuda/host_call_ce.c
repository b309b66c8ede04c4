/* What host_call.c does for linear_ce: the passes of ce for operands in host memory. */
#include "cuda/image.h"

#include "core/plan.h"

#include <string.h>

typedef ll_status pass_fn(const ll_plan *plan, const ll_ce_args *args, ll_stream stream);

pass_fn __real_ll_ce_forward, __real_ll_ce_backward, __real_ll_ce_forward_backward;
pass_fn __wrap_ll_ce_forward, __wrap_ll_ce_backward, __wrap_ll_ce_forward_backward;

/* Nothing is copied for a call that its checks refuse: what it points to may not be there. */
static bool refused(const ll_plan *plan, const ll_ce_args *args, pass_fn *call, ll_pass pass,
                    ll_status *status) {
    ll_ce_args none;
    if (!plan || !args || args->struct_bytes != sizeof *args) {
        *status = call(plan, args, NULL);
        return true;
    }
    /* No workspace is the last thing that is looked at. */
    none = *args;
    none.workspace_bytes = 0;
    *status = call(plan, &none, NULL);
    if (*status != LL_STATUS_WORKSPACE) return true;
    if (args->workspace_bytes >= plan->workspace_bytes[pass] && args->workspace &&
        (uintptr_t)args->workspace % 64 == 0) {
        return false;
    }
    *status = call(plan, args, NULL);
    return true;
}

static ll_status host_call(const ll_plan *plan, const ll_ce_args *args, ll_stream stream, pass_fn *call,
                           ll_pass pass) {
    const char *kernel = ll_plan_kernel(plan);
    ll_status status;
    if (stream || !kernel || strncmp(kernel, "ce_cuda", 7) != 0) return call(plan, args, stream);
    if (refused(plan, args, call, pass, &status)) return status;
    struct image image;
    const bool by_token = plan->problem.loss.reduction == LL_REDUCTION_NONE;
    status = LL_STATUS_MEMORY;
    if (image_create_ce(args, plan->problem.v_total, plan->problem.n_top, by_token, &image)) {
        /* The state knows the logits by where they lie: on the device now, on the host for the test. */
        if (args->state && args->state->logits == args->logits.data)
            args->state->logits = image.ce.logits.data;
        image.rows_only = plan->group != NULL;
        status = call(plan, &image.ce, NULL);
        if (args->state && args->state->logits == image.ce.logits.data)
            args->state->logits = args->logits.data;
        if (!image_fetch(&image) && status == LL_STATUS_OK) status = LL_STATUS_INTERNAL;
    }
    image_destroy(&image);
    return status;
}

ll_status __wrap_ll_ce_forward(const ll_plan *plan, const ll_ce_args *args, ll_stream stream) {
    return host_call(plan, args, stream, __real_ll_ce_forward, LL_PASS_FORWARD);
}

ll_status __wrap_ll_ce_backward(const ll_plan *plan, const ll_ce_args *args, ll_stream stream) {
    return host_call(plan, args, stream, __real_ll_ce_backward, LL_PASS_BACKWARD);
}

ll_status __wrap_ll_ce_forward_backward(const ll_plan *plan, const ll_ce_args *args, ll_stream stream) {
    return host_call(plan, args, stream, __real_ll_ce_forward_backward, LL_PASS_FORWARD_BACKWARD);
}

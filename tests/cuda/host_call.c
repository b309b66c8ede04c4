/* The passes for operands in host memory: the linker's --wrap puts these functions in front of the library's,
 * so that the problems and reported faults that every kernel is tested with run on a GPU as they are. Calls
 * on other kernels, and those with a stream, go through. */
#include "cuda/image.h"

#include "core/plan.h"

#include <stdio.h>
#include <string.h>

typedef ll_status pass_fn(const ll_plan *plan, const ll_linear_ce_args *args, ll_stream stream);

pass_fn __real_ll_linear_ce_forward, __real_ll_linear_ce_backward, __real_ll_linear_ce_forward_backward;
pass_fn __wrap_ll_linear_ce_forward, __wrap_ll_linear_ce_backward, __wrap_ll_linear_ce_forward_backward;

/* Nothing is copied for a call that its checks refuse: what it points to may not be there. */
static bool refused(const ll_plan *plan, const ll_linear_ce_args *args, pass_fn *call, ll_status *status) {
    ll_linear_ce_args none = *args;
    if (!plan || !args || args->struct_bytes != sizeof *args) {
        *status = call(plan, args, NULL);
        return true;
    }
    /* No workspace is the last thing that is looked at. */
    none.workspace_bytes = 0;
    *status = call(plan, &none, NULL);
    if (*status != LL_STATUS_WORKSPACE) return true;
    const size_t needed =
        plan->workspace_bytes[call == __real_ll_linear_ce_forward    ? LL_PASS_FORWARD
                              : call == __real_ll_linear_ce_backward ? LL_PASS_BACKWARD
                                                                     : LL_PASS_FORWARD_BACKWARD];
    if (args->workspace_bytes >= needed && args->workspace && (uintptr_t)args->workspace % 64 == 0)
        return false;
    *status = call(plan, args, NULL);
    return true;
}

static ll_status host_call(const ll_plan *plan, const ll_linear_ce_args *args, ll_stream stream,
                           pass_fn *call) {
    const char *kernel = ll_plan_kernel(plan);
    ll_status status;
    if (stream || !kernel || strncmp(kernel, "linear_ce_cuda", 14) != 0) return call(plan, args, stream);
    if (refused(plan, args, call, &status)) return status;
    struct image image;
    const bool by_token = plan->problem.loss.reduction == LL_REDUCTION_NONE;
    status = LL_STATUS_MEMORY;
    if (image_create(args, plan->problem.v_total, by_token, &image)) {
        status = call(plan, &image.args, NULL);
        if (!image_fetch(&image) && status == LL_STATUS_OK) status = LL_STATUS_INTERNAL;
    }
    image_destroy(&image);
    return status;
}

ll_status __wrap_ll_linear_ce_forward(const ll_plan *plan, const ll_linear_ce_args *args, ll_stream stream) {
    return host_call(plan, args, stream, __real_ll_linear_ce_forward);
}

ll_status __wrap_ll_linear_ce_backward(const ll_plan *plan, const ll_linear_ce_args *args, ll_stream stream) {
    return host_call(plan, args, stream, __real_ll_linear_ce_backward);
}

ll_status __wrap_ll_linear_ce_forward_backward(const ll_plan *plan, const ll_linear_ce_args *args,
                                               ll_stream stream) {
    return host_call(plan, args, stream, __real_ll_linear_ce_forward_backward);
}

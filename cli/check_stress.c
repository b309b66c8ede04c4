/* The stress phase of `logitless check`: a problem of real size without a reference. Each rank makes its own
 * rows of w only, calls forward_backward twice, and looks for values that are not finite and for bits that
 * differ between the runs. */
#include "check.h"

#include "core/dtype.h"
#include "core/status.h"

#include <math.h>
#include <string.h>
#include <sys/resource.h>

static int64_t not_finite(const void *data, ll_dtype dtype, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += !isfinite(lli_load(data, (int32_t)dtype, i));
    return count;
}

static int64_t count_not_finite(const check_call *call, const check_results *results) {
    const check_shape *shape = &call->inputs->shape;
    const int64_t n = shape->n_tokens, d = shape->n_hidden;
    int64_t count = !isfinite(results->loss);
    count += not_finite(results->nll, LL_DTYPE_F32, n) + not_finite(results->lse, LL_DTYPE_F32, n);
    count += not_finite(results->entropy, LL_DTYPE_F32, n);
    count += not_finite(results->grad_x, results->grad_dtype, n * d);
    count += not_finite(results->grad_w, results->grad_dtype, call->v_local * d);
    if (shape->bias) count += not_finite(results->grad_bias, results->grad_dtype, call->v_local);
    return count;
}

static ll_status run_twice(const check_call *call, check_results *results, check_stress *record) {
    const check_shape *shape = &call->inputs->shape;
    for (int run = 0; run < 2; run++) {
        double begin_s = cli_seconds();
        LLI_TRY(check_call_run(call, LL_PASS_FORWARD_BACKWARD, results));
        record->seconds[run] = cli_seconds() - begin_s;
        uint64_t shared = check_hash_shared(shape, results);
        if (run == 0) record->shared_hash = shared;
        record->rank_hash[run] = shared ^ check_hash_shard(shape, call->v_local, results);
    }
    int64_t count = count_not_finite(call, results);
    record->n_not_finite = count < INT32_MAX ? (int32_t)count : INT32_MAX;
    return LL_STATUS_OK;
}

static uint64_t data_bytes(const check_call *call) {
    const check_shape *shape = &call->inputs->shape;
    uint64_t elements = (uint64_t)(shape->n_tokens + call->v_local) * (uint64_t)shape->n_hidden;
    if (shape->bias) elements += (uint64_t)call->v_local;
    return 2 * elements * ll_dtype_bytes(shape->dtype); /* each with its gradient */
}

ll_status check_stress_run(const check_world *world, const ll_comm *comm, check_stress *record, bool *mine) {
    const check_shape *shape = &world->stress_shape;
    const int64_t *begins = world->stress_cut.begins + comm->rank;
    check_inputs inputs;
    check_results results = {0};
    check_call call = {.inputs = &inputs,
                       .v_begin = begins[0],
                       .v_local = begins[1] - begins[0],
                       .comm = check_plan_comm(world->options, comm),
                       .backend = cli_backend(world->options->backend),
                       .grad_dtype = shape->dtype,
                       .n_threads = world->n_threads};
    struct rusage usage;
    ll_status status = check_inputs_create(shape, call.v_begin, call.v_local, &inputs);
    if (status == LL_STATUS_OK) status = check_results_create(shape, call.v_local, shape->dtype, &results);
    *mine = status != LL_STATUS_OK;
    if (status == LL_STATUS_OK) {
        status = check_call_create(&call);
        *mine = status == LL_STATUS_MEMORY;
    }
    if (status == LL_STATUS_OK) status = run_twice(&call, &results, record);
    record->rank = comm->rank;
    record->workspace_bytes = call.workspace_bytes;
    record->data_bytes = data_bytes(&call);
    if (getrusage(RUSAGE_SELF, &usage) == 0) record->peak_bytes = (uint64_t)usage.ru_maxrss * 1024;
    check_call_free(&call);
    check_results_free(&results);
    check_inputs_free(&inputs);
    return status;
}

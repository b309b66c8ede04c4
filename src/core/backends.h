/* Kernels in libraries of their own, opened when asked for, so that liblogitless needs libc alone. */
#ifndef LLI_CORE_BACKENDS_H
#define LLI_CORE_BACKENDS_H

#include "core/plan.h"

/* What a backend library uses of this one. The program links this library statically and a plug-in must not
 * bring a second copy of a thread's last error, so functions are handed over. */
typedef struct lli_host {
    size_t struct_bytes;
    const char *version;
    /* What the two sides read of each other's structs. */
    size_t problem_bytes, call_bytes, plan_bytes, kernel_bytes, config_bytes, args_bytes, ce_args_bytes,
        group_bytes;
    ll_status (*fail)(ll_status status, const char *format, ...);
    const char *const *pass_names; /* lli_pass_names */
    /* The operations of a plan's group (core/group.h). */
    ll_status (*group_max)(lli_group *group, int32_t *values, int64_t n, ll_stream stream);
    ll_status (*group_sum)(lli_group *group, int64_t *values, int64_t n, ll_stream stream);
    ll_status (*group_sum_f32)(lli_group *group, float *values, int64_t n, ll_stream stream);
} lli_host;

/* Memory of a device, for programs that have their operands in host memory. */
typedef struct lli_device_memory {
    ll_status (*take)(size_t bytes, void **data);
    void (*release)(void *data);
    ll_status (*to_device)(void *to, const void *from, size_t bytes);
    ll_status (*to_host)(void *to, const void *from, size_t bytes); /* after everything queued before it */
    ll_status (*wait)(void);
    int32_t (*count)(void);           /* of devices */
    ll_status (*use)(int32_t device); /* this thread's from here on */
} lli_device_memory;

typedef struct lli_backend_library {
    const lli_kernel *const *kernels; /* NULL at the end */
    const lli_device_memory *memory;
    /* One line on driver and devices. */
    void (*describe)(char *text, size_t text_bytes);
} lli_backend_library;

/* The entry of liblogitless_cuda. NULL and a sentence where `host` is not of its own version. */
typedef const lli_backend_library *lli_backend_entry(const lli_host *host, char *why, size_t why_bytes);

/* Opens liblogitless_cuda.so.0 once: from LL_CUDA_PATH, beside this library, beside the program, or where the
 * system looks. NULL and a sentence if that fails; a failure is tried again the next time. */
const lli_backend_library *lli_cuda_library(char *why, size_t why_bytes);

/* Kernel `index` of all: this library's, then CUDA's. Where the CUDA library does not load, its place is
 * taken by a record that says why. NULL behind the last. */
const lli_kernel *lli_kernel_at(int32_t index);

#endif

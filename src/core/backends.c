/* Opening liblogitless_cuda (backends.h). */
#include "core/backends.h"
#include "core/library.h"
#include "core/problem.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static const char library_file[] = "liblogitless_cuda.so.0";
static const char library_entry[] = "lli_cuda_backend";

static const lli_host host = {
    .struct_bytes = sizeof(lli_host),
    .problem_bytes = sizeof(lli_problem),
    .call_bytes = sizeof(lli_call),
    .plan_bytes = sizeof(ll_plan),
    .kernel_bytes = sizeof(lli_kernel),
    .config_bytes = sizeof(lli_config),
    .args_bytes = sizeof(ll_linear_ce_args),
    .ce_args_bytes = sizeof(ll_ce_args),
    .group_bytes = sizeof(lli_group),
    .fail = lli_fail,
    .pass_names = lli_pass_names,
    .group_max = lli_group_max,
    .group_sum = lli_group_sum,
    .group_sum_f32 = lli_group_sum_f32,
};

static const lli_backend_library *load(char *why, size_t why_bytes) {
    lli_library found;
    lli_library_find("LL_CUDA_PATH", library_file, &found);
    void *handle = dlopen(found.path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *reason = dlerror();
        if (found.present) {
            snprintf(why, why_bytes, "%s does not load: %s", library_file, reason);
        } else {
            snprintf(why, why_bytes, "no %s in LL_CUDA_PATH, beside the library or in the system's folders",
                     library_file);
        }
        return NULL;
    }
    void *symbol = dlsym(handle, library_entry);
    lli_backend_entry *entry;
    memcpy(&entry, &symbol, sizeof entry);
    lli_host filled = host;
    filled.version = ll_version();
    const lli_backend_library *library = NULL;
    if (entry) {
        library = entry(&filled, why, why_bytes);
    } else {
        snprintf(why, why_bytes, "%s has no function %s", library_file, library_entry);
    }
    if (!library) dlclose(handle);
    return library; /* it stays loaded: plans point into it, and CUDA leaves threads behind */
}

const lli_backend_library *lli_cuda_library(char *why, size_t why_bytes) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static const lli_backend_library *loaded;
    pthread_mutex_lock(&lock);
    if (!loaded) loaded = load(why, why_bytes);
    const lli_backend_library *library = loaded;
    pthread_mutex_unlock(&lock);
    return library;
}

static bool missing_machine_ok(char *why, size_t why_bytes) {
    return lli_cuda_library(why, why_bytes) != NULL;
}

/* In the places of the library's kernels where it does not load: one for each operation, so that a plan of
 * either is told why. */
static const lli_kernel missing[] = {
    {.name = "linear_ce_cuda",
     .numerics = "none",
     .op = LL_OP_LINEAR_CE,
     .backend = LL_BACKEND_CUDA,
     .machine_ok = missing_machine_ok},
    {.name = "ce_cuda",
     .numerics = "none",
     .op = LL_OP_CE,
     .backend = LL_BACKEND_CUDA,
     .machine_ok = missing_machine_ok},
};
enum { kMissing = sizeof missing / sizeof missing[0] };

const lli_kernel *lli_kernel_at(int32_t index) {
    int32_t built_in = 0;
    char why[160];
    while (lli_kernel_built_in(built_in)) built_in++;
    if (index < built_in) return lli_kernel_built_in(index);
    index -= built_in;
    const lli_backend_library *library = lli_cuda_library(why, sizeof why);
    if (!library) return index < kMissing ? &missing[index] : NULL;
    for (int32_t i = 0; library->kernels[i]; i++) {
        if (i == index) return library->kernels[i];
    }
    return NULL;
}

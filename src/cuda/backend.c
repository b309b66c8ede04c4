/* The entry of liblogitless_cuda, driver and devices, and device memory for programs. */
#include "cuda/backend.h"

#include <cuda_runtime_api.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static lli_host host;

ll_status lli_fail(ll_status status, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return host.fail(status, "%s", text);
}

ll_status lli_cuda_fail(int cuda_status, const char *pass, const char *what) {
    const ll_status status = cuda_status == cudaErrorMemoryAllocation ? LL_STATUS_MEMORY : LL_STATUS_CUDA;
    return lli_fail(status, "%s: %s failed: %s", pass, what, cudaGetErrorString((cudaError_t)cuda_status));
}

const lli_host *lli_cuda_host(void) {
    return &host;
}

const char *lli_cuda_pass_name(ll_pass pass) {
    return host.pass_names[pass];
}

/* ---- Devices ------------------------------------------------------------------------------------ */

static int32_t arch_of(int device) {
    int major = 0, minor = 0;
    (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return 10 * major + minor;
}

bool lli_cuda_here(char *why, size_t why_bytes, int32_t *device, int32_t *arch) {
    int count = 0, current = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorInsufficientDriver) {
        snprintf(why, why_bytes, "no NVIDIA driver, or one that is older than CUDA %d.%d",
                 CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
        return false;
    }
    if (status == cudaSuccess && count > 0) status = cudaGetDevice(&current);
    if (status != cudaSuccess || count == 0) {
        snprintf(why, why_bytes, "no NVIDIA GPU: %s",
                 status == cudaSuccess ? "the driver shows none" : cudaGetErrorString(status));
        return false;
    }
    *device = current;
    *arch = arch_of(current);
    if (*arch < 80) {
        snprintf(why, why_bytes, "GPU %d has compute capability %d.%d, wanted 8.0 or later", current,
                 *arch / 10, *arch % 10);
        return false;
    }
    return true;
}

bool lli_cuda_machine_ok(char *why, size_t why_bytes) {
    int32_t device, arch;
    return lli_cuda_here(why, why_bytes, &device, &arch);
}

bool lli_cuda_takes(const lli_problem *problem, char *why, size_t why_bytes) {
    if (problem->n_tokens_max > (int64_t)1 << 30) {
        snprintf(why, why_bytes, "n_tokens_max is above 2^30");
        return false;
    }
    return true;
}

const char *lli_cuda_numerics(const char *prefix, int32_t version) {
    static _Thread_local char text[32];
    int32_t device, arch = 0;
    char why[160];
    if (lli_cuda_here(why, sizeof why, &device, &arch)) {
        snprintf(text, sizeof text, "%s-sm%d-v%d", prefix, arch, version);
    } else {
        snprintf(text, sizeof text, "%s-v%d", prefix, version);
    }
    return text;
}

ll_status lli_cuda_on_device(int32_t device, const char *pass, ll_status (*queue)(const void *context),
                             const void *context) {
    int callers = 0;
    int status = (int)cudaGetDevice(&callers);
    if (!status && callers != device) status = (int)cudaSetDevice(device);
    if (status) return lli_cuda_fail(status, pass, "choosing the plan's device");
    const ll_status result = queue(context);
    if (callers != device) (void)cudaSetDevice(callers);
    return result;
}

static void describe(char *text, size_t text_bytes) {
    int count = 0, driver = 0;
    char why[160];
    int32_t current = 0, arch = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        (void)lli_cuda_here(why, sizeof why, &current, &arch);
        snprintf(text, text_bytes, "%s", why);
        return;
    }
    (void)cudaDriverGetVersion(&driver);
    size_t used = (size_t)snprintf(text, text_bytes, "driver for CUDA %d.%d, runtime %d.%d", driver / 1000,
                                   driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    for (int i = 0; i < count && used < text_bytes; i++) {
        struct cudaDeviceProp p;
        if (cudaGetDeviceProperties(&p, i) != cudaSuccess) continue;
        used += (size_t)snprintf(text + used, text_bytes - used,
                                 "; GPU %d: %s, compute capability %d.%d, %zu MiB", i, p.name, p.major,
                                 p.minor, p.totalGlobalMem >> 20);
    }
}

/* ---- Memory ------------------------------------------------------------------------------------- */

static ll_status memory_status(cudaError_t status, const char *what) {
    return status == cudaSuccess ? LL_STATUS_OK : lli_cuda_fail((int)status, "device memory", what);
}

static ll_status take(size_t bytes, void **data) {
    *data = NULL;
    return memory_status(cudaMalloc(data, bytes ? bytes : 1), "cudaMalloc");
}

static void release(void *data) {
    (void)cudaFree(data);
}

static ll_status to_device(void *to, const void *from, size_t bytes) {
    return memory_status(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "a copy to the GPU");
}

static ll_status to_host(void *to, const void *from, size_t bytes) {
    return memory_status(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "a copy from the GPU");
}

static ll_status wait_for_all(void) {
    return memory_status(cudaDeviceSynchronize(), "the work queued before");
}

static int32_t device_count(void) {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

static ll_status use_device(int32_t device) {
    return memory_status(cudaSetDevice(device), "choosing a GPU");
}

/* ---- Entry -------------------------------------------------------------------------------------- */

#define TEXT_OF(x)    #x
#define VERSION_OF(x) TEXT_OF(x)
static const char version[] =
    VERSION_OF(LL_VERSION_MAJOR) "." VERSION_OF(LL_VERSION_MINOR) "." VERSION_OF(LL_VERSION_PATCH);

static bool same_build(const lli_host *h) {
    return h->struct_bytes == sizeof(lli_host) && strcmp(h->version, version) == 0 &&
           h->problem_bytes == sizeof(lli_problem) && h->call_bytes == sizeof(lli_call) &&
           h->plan_bytes == sizeof(ll_plan) && h->kernel_bytes == sizeof(lli_kernel) &&
           h->config_bytes == sizeof(lli_config) && h->args_bytes == sizeof(ll_linear_ce_args) &&
           h->ce_args_bytes == sizeof(ll_ce_args) && h->group_bytes == sizeof(lli_group);
}

LL_API const lli_backend_library *lli_cuda_backend(const lli_host *from, char *why, size_t why_bytes);

const lli_backend_library *lli_cuda_backend(const lli_host *from, char *why, size_t why_bytes) {
    static const lli_kernel *const kernels[] = {&lli_linear_ce_cuda_sm90, &lli_linear_ce_cuda, &lli_ce_cuda,
                                                NULL};
    static const lli_device_memory memory = {take,         release,      to_device, to_host,
                                             wait_for_all, device_count, use_device};
    static const lli_backend_library library = {kernels, &memory, describe};
    if (!same_build(from)) {
        snprintf(why, why_bytes,
                 "liblogitless_cuda is of version %s and of another build than this liblogitless %s", version,
                 from->struct_bytes == sizeof(lli_host) ? from->version : "");
        return NULL;
    }
    host = *from;
    return &library;
}

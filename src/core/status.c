/* Status names and the thread's last error sentence. */
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];

ll_status lli_fail(ll_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

const char *ll_last_error(void) {
    return last_error;
}

const char *ll_status_name(ll_status status) {
    switch (status) {
    case LL_STATUS_OK:
        return "LL_STATUS_OK";
    case LL_STATUS_INVALID_ARG:
        return "LL_STATUS_INVALID_ARG";
    case LL_STATUS_UNSUPPORTED:
        return "LL_STATUS_UNSUPPORTED";
    case LL_STATUS_WORKSPACE:
        return "LL_STATUS_WORKSPACE";
    case LL_STATUS_MEMORY:
        return "LL_STATUS_MEMORY";
    case LL_STATUS_CUDA:
        return "LL_STATUS_CUDA";
    case LL_STATUS_COMM:
        return "LL_STATUS_COMM";
    case LL_STATUS_INTERNAL:
        return "LL_STATUS_INTERNAL";
    case LL_STATUS_IO:
        return "LL_STATUS_IO";
    }
    return "LL_STATUS_UNKNOWN";
}

#define LLI_TEXT(x)    #x
#define LLI_VERSION(x) LLI_TEXT(x)

const char *ll_version(void) {
    return LLI_VERSION(LL_VERSION_MAJOR) "." LLI_VERSION(LL_VERSION_MINOR) "." LLI_VERSION(LL_VERSION_PATCH);
}

/* logitless info: what was built, what this machine can run, and why not the rest. */
#include "machine.h"
#include "options.h"

#include "core/backends.h"
#include "core/library.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__clang__)
static const char kCompiler[] = __VERSION__;
#elif defined(__GNUC__)
static const char kCompiler[] = "GCC " __VERSION__;
#else
static const char kCompiler[] = "unknown";
#endif
static const struct {
    const char *name, *about;
} variables[] = {
    {"LL_KERNEL", "name of the kernel to force"},
    {"LL_NUM_THREADS", "threads of a plan that does not say"},
    {"LL_CUDA_PATH", "folder with liblogitless_cuda.so.0"},
    {"LL_COMM_PATH", "folder of the communicators' libraries"},
    {"LL_COMM_HOST", "name of this rank's host for MPI, instead of the machine's"},
    {"LL_COMM_DEBUG", "1: ranks compare all inputs and announce every operation"},
};
enum { kVariables = sizeof variables / sizeof variables[0] };

/* Driver and devices, or why there are none. */
static const char *cuda_text(void) {
    static char text[1024];
    const lli_backend_library *library = lli_cuda_library(text, sizeof text);
    if (library) library->describe(text, sizeof text);
    return text;
}

/* Communicators; file: of its library, NULL: built in. */
static const struct {
    const char *name, *file, *about;
} comms[] = {
    {"self", NULL, "built in: one rank"},
    {"threads", NULL, "built in: ranks of one process"},
    {"mpi", "liblogitless_mpi.so.0", ""},
    {"nccl", "liblogitless_nccl.so.0", ""},
};
enum { kComms = sizeof comms / sizeof comms[0], kCommText = kLibraryPathBytes + 200 };

/* Only looks for the file: loading it may start threads. */
static const char *about_comm(int i, char text[kCommText]) {
    lli_library library;
    if (!comms[i].file) return comms[i].about;
    lli_library_find("LL_COMM_PATH", comms[i].file, &library);
    if (library.present) {
        snprintf(text, kCommText, "found: %s", library.path);
    } else {
        snprintf(text, kCommText,
                 "not found: %s is neither in LL_COMM_PATH nor beside the program; the system's folders are "
                 "tried when it is opened",
                 comms[i].file);
    }
    return text;
}

static void print_text(const cli_machine *machine, int32_t n_threads) {
    ll_kernel_info kernel;
    char text[kCommText];
    printf("version    %s\n", ll_version());
    printf("compiler   %s\n", kCompiler);
    printf("backends   cpu, ref; CUDA: %s\n", cuda_text());
    printf("cpu        %s\n", machine->cpu);
    printf("features   %s\n", machine->features[0] ? machine->features : "unknown");
    if (n_threads) {
        printf("threads    %d\n", (int)n_threads);
    } else {
        printf("threads    unknown: %s\n", ll_last_error());
    }
    printf("\nkernels of each operation, best first:\n");
    for (int32_t i = 0; ll_kernel_get(i, &kernel) == LL_STATUS_OK; i++) {
        printf("  %-28s %-4s %-16s %s\n", kernel.name, kernel.backend, kernel.numerics,
               kernel.why_not[0] ? kernel.why_not : "runs here");
    }
    printf("\ncommunicators:\n");
    for (int i = 0; i < kComms; i++) printf("  %-8s %s\n", comms[i].name, about_comm(i, text));
    printf("\nenvironment:\n");
    for (int i = 0; i < kVariables; i++) {
        const char *value = getenv(variables[i].name);
        printf("  %-16s %-12s %s\n", variables[i].name, value ? value : "(not set)", variables[i].about);
    }
}

static cJSON *kernels_json(void) {
    ll_kernel_info kernel;
    cJSON *list = cJSON_CreateArray();
    for (int32_t i = 0; ll_kernel_get(i, &kernel) == LL_STATUS_OK; i++) {
        cJSON *item = cJSON_CreateObject();
        cJSON_AddStringToObject(item, "name", kernel.name);
        cJSON_AddStringToObject(item, "backend", kernel.backend);
        cJSON_AddStringToObject(item, "numerics", kernel.numerics);
        cJSON_AddBoolToObject(item, "runs_here", !kernel.why_not[0]);
        cJSON_AddStringToObject(item, "why_not", kernel.why_not);
        cJSON_AddItemToArray(list, item);
    }
    return list;
}

static int print_json(const cli_machine *machine, int32_t n_threads) {
    char text[kCommText];
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "version", ll_version());
    cJSON_AddStringToObject(object, "compiler", kCompiler);
    cJSON *backends = cJSON_AddObjectToObject(object, "backends");
    cJSON_AddStringToObject(backends, "cpu", "built");
    cJSON_AddStringToObject(backends, "ref", "built");
    cJSON_AddStringToObject(backends, "cuda", cuda_text());
    cJSON_AddStringToObject(object, "cpu", machine->cpu);
    cJSON_AddStringToObject(object, "features", machine->features);
    cJSON_AddNumberToObject(object, "threads", n_threads);
    cJSON_AddItemToObject(object, "kernels", kernels_json());
    cJSON *communicators = cJSON_AddObjectToObject(object, "communicators");
    for (int i = 0; i < kComms; i++) {
        cJSON_AddStringToObject(communicators, comms[i].name, about_comm(i, text));
    }
    cJSON *environment = cJSON_AddObjectToObject(object, "environment");
    for (int i = 0; i < kVariables; i++) {
        const char *value = getenv(variables[i].name);
        if (value) {
            cJSON_AddStringToObject(environment, variables[i].name, value);
        } else {
            cJSON_AddNullToObject(environment, variables[i].name);
        }
    }
    return cli_print_json(object);
}

int ll_cmd_info(int argc, char **argv) {
    bool json = false;
    const cli_option options[] = {
        {.name = "json", .type = CLI_FLAG, .value = &json, .help = "print one JSON object; default off"},
        {0},
    };
    const cli_usage usage = {
        "info [options]",
        "Version, backends, CPU, kernels and communicators; what does not run here says why.\n", options,
        NULL};
    int code = cli_options_parse(&usage, argc, argv);
    if (code != CLI_GO_ON) return code;
    cli_machine machine = cli_machine_read();
    int32_t n_threads;
    (void)cli_default_threads(&n_threads); /* without a plan: 0, and ll_last_error is printed */
    if (json) return print_json(&machine, n_threads);
    print_text(&machine, n_threads);
    return CLI_EXIT_OK;
}

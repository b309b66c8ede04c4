/* The machine: CPU name and features as Linux reports them, default threads, memory read bandwidth. What a
 * kernel can use is decided by the library's own detection and not here: this is for the reader. */
#define _POSIX_C_SOURCE 200809L
#include "machine.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const kFeatures[] = {"avx",         "f16c",        "fma",      "avx2",     "avx512f",
                                        "avx512bw",    "avx512dq",    "avx512vl", "avx_vnni", "avx512_vnni",
                                        "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd",
                                        "fphp",        "bf16",        "sve"};

/* Text behind the colon of a "key : text" line; NULL if the line has another key. */
static const char *value_of(const char *line, const char *key) {
    size_t length = strlen(key);
    if (strncmp(line, key, length) != 0) return NULL;
    line += length + strspn(line + length, " \t");
    return *line == ':' ? line + 1 + strspn(line + 1, " \t") : NULL;
}

static void append_known(char *line, char *features, size_t features_bytes) {
    char *rest = NULL;
    for (char *word = strtok_r(line, " \t\n", &rest); word; word = strtok_r(NULL, " \t\n", &rest)) {
        for (size_t i = 0; i < sizeof kFeatures / sizeof kFeatures[0]; i++) {
            if (strcmp(word, kFeatures[i]) != 0) continue;
            size_t used = strlen(features);
            snprintf(features + used, features_bytes - used, "%s%s", used ? " " : "", word);
        }
    }
}

cli_machine cli_machine_read(void) {
    cli_machine machine = {"unknown", ""};
    char line[8192];
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (!file) return machine;
    while (fgets(line, sizeof line, file) && (!machine.features[0] || !strcmp(machine.cpu, "unknown"))) {
        const char *model = value_of(line, "model name"), *flags = value_of(line, "flags");
        if (!flags) flags = value_of(line, "Features");
        if (model) snprintf(machine.cpu, sizeof machine.cpu, "%.*s", (int)strcspn(model, "\n"), model);
        if (flags) append_known(line + (flags - line), machine.features, sizeof machine.features);
    }
    fclose(file);
    return machine;
}

ll_status cli_default_threads(int32_t *n_threads) {
    ll_plan *plan = NULL;
    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    desc.n_tokens_max = 1 << 16;
    desc.n_hidden = 64;
    desc.v_local = desc.v_total = 1024;
    desc.x_dtype = desc.w_dtype = LL_DTYPE_F32;
    ll_status status = ll_plan_create(&desc, &plan);
    *n_threads = ll_plan_threads(plan); /* 0 without a plan */
    ll_plan_destroy(plan);
    return status;
}

enum { kReadBytes = 512 << 20, kLanes = 16, kPasses = 4 };

typedef struct read_share {
    const uint64_t *words;
    size_t n_words;
    uint64_t sum;
} read_share;

static void *read_words(void *argument) {
    read_share *share = argument;
    uint64_t sums[kLanes] = {0};
    for (size_t i = 0; i + kLanes <= share->n_words; i += kLanes) {
        for (int lane = 0; lane < kLanes; lane++) sums[lane] += share->words[i + (size_t)lane];
    }
    for (int lane = 0; lane < kLanes; lane++) share->sum += sums[lane];
    return NULL;
}

/* Seconds of one pass; a thread that cannot be started has its share read here. */
static double read_pass(read_share *shares, pthread_t *threads, bool *started, int32_t n_threads) {
    double begin_s = cli_seconds();
    for (int32_t t = 1; t < n_threads; t++) {
        started[t] = pthread_create(&threads[t], NULL, read_words, &shares[t]) == 0;
    }
    read_words(&shares[0]);
    for (int32_t t = 1; t < n_threads; t++) {
        if (started[t]) {
            pthread_join(threads[t], NULL);
        } else {
            read_words(&shares[t]);
        }
    }
    return cli_seconds() - begin_s;
}

double cli_read_bandwidth(int32_t n_threads) {
    /* Written once: pages that were never written all map to one page of zeros, which stays in the cache. */
    uint64_t *words = malloc(kReadBytes);
    read_share *shares = calloc((size_t)n_threads, sizeof *shares);
    pthread_t *threads = calloc((size_t)n_threads, sizeof *threads);
    bool *started = calloc((size_t)n_threads, sizeof *started);
    double best_s = 0;
    if (words && shares && threads && started) {
        const size_t n_words = kReadBytes / sizeof *words, part = n_words / (size_t)n_threads;
        for (size_t i = 0; i < n_words; i++) words[i] = i;
        for (int32_t t = 0; t < n_threads; t++) shares[t] = (read_share){words + (size_t)t * part, part, 0};
        for (int pass = 0; pass < kPasses; pass++) {
            double seconds = read_pass(shares, threads, started, n_threads);
            if (best_s == 0 || seconds < best_s) best_s = seconds;
        }
        /* A use of the sums, without which the compiler may leave the reads out. */
        uint64_t total = 0;
        for (int32_t t = 0; t < n_threads; t++) total += shares[t].sum;
        if (total == 0) best_s = 0;
    }
    free(started);
    free(threads);
    free(shares);
    free(words);
    return best_s > 0 ? (double)kReadBytes / best_s * 1e-9 : 0;
}

/* logitless bench: speed of the kernel that a plan picks, one line a problem, beside what the machine can
 * do at most. Other libraries are left out: bench/peers_cpu.py runs them in turn with this one; the cut over
 * ranks is in bench_ranks.c. */
#define _POSIX_C_SOURCE 200809L
#include "bench.h"
#include "ce_problems.h"
#include "gpu.h"
#include "machine.h"

#include "core/status.h"
#include "cpu/cpu.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char kAbout[] =
    "A problem is PASS:DTYPE:nTOKENS:dHIDDEN:vVOCABULARY, for example fb:bf16:n2048:d1024:v50257, with\n"
    "  PASS   f forward (loss, nll, lse); b backward (gradients from saved lse); fb both in one call\n"
    "  DTYPE  f32, bf16 or f16, of hidden states and weight\n"
    "and more options of tests/problems.h behind it; or ce:DTYPE:nTOKENS:vVOCABULARY (cef, ceb): cross-\n"
    "entropy over given logits, forward with gradient (forward; backward), on a CPU, GB/s of reading the\n"
    "logits once and writing their gradient once. Without a problem: four usual shapes, f32 and\n"
    "bf16, f and fb; that takes some minutes and 6 GiB.\n"
    "Columns: median time of a call after a warm-up; GFLOP/s of the products that the pass needs (f 1,\n"
    "b and fb 3, each 2 n d v); GB/s of reading hidden states and weight once and writing gradients\n"
    "once; the rate as part of the FMA peak, measured right before the problem; workspace in MiB. A\n"
    "loss that is not finite is an error, exit code 1. bench/peers_cpu.py compares with PyTorch.\n"
    "With --ranks or --shards: the vocabulary over ranks of this process, in turn with one rank with as\n"
    "many threads in all. Columns: median time of one rank and of the ranks, their ratio, workspaces in\n"
    "MiB, and bytes that each rank hands to the others per token: integers, which do not depend on the\n"
    "vocabulary, and sums of grad_x. log-probs with other bits than one rank's are an error, exit code 1.\n";

static const char *const kShapes[] = {"n2048:d1024:v50257", "n1024:d2048:v128256", "n4096:d768:v50257",
                                      "n1:d4096:v151936"};
static const char *const kDtypes[] = {"f32", "bf16"}, *const kPasses[] = {"f", "fb"};
typedef struct bench_run {
    const ll_plan *plan;
    ll_linear_ce_args args;
    ll_pass pass;
    cli_gpu *gpu; /* args are its: in device memory, and a call has to be waited for */
} bench_run;

static ll_status queue(const bench_run *run) {
    if (run->pass == LL_PASS_FORWARD) return ll_linear_ce_forward(run->plan, &run->args, NULL);
    if (run->pass == LL_PASS_BACKWARD) return ll_linear_ce_backward(run->plan, &run->args, NULL);
    return ll_linear_ce_forward_backward(run->plan, &run->args, NULL);
}

static ll_status call(void *context) {
    const bench_run *run = context;
    LLI_TRY(queue(run));
    return run->gpu ? cli_gpu_wait(run->gpu) : LL_STATUS_OK;
}

static int compare_doubles(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

double bench_median(double *times, int count) {
    qsort(times, (size_t)count, sizeof times[0], compare_doubles);
    return times[count / 2];
}

ll_status bench_time(bench_call *call, void *context, double seconds, bench_row *row) {
    double times[kMaxRepeats], begin_s;
    LLI_TRY(call(context));
    begin_s = cli_seconds();
    do {
        double call_s = cli_seconds();
        LLI_TRY(call(context));
        times[row->repeats++] = cli_seconds() - call_s;
    } while (row->repeats < kMaxRepeats && (row->repeats < kMinRepeats || cli_seconds() - begin_s < seconds));
    row->median_ms = 1e3 * bench_median(times, row->repeats);
    return LL_STATUS_OK;
}

ll_linear_ce_args bench_args(const struct problem *problem, const struct operands *operands,
                             const struct results *results, ll_pass pass) {
    ll_linear_ce_args args = problem_args(problem, operands, results, pass);
    args.z_loss = NULL;
    args.argmax = NULL;
    args.sums = NULL;
    if (!problem->upstream) args.entropy = NULL;
    return args;
}

static void rate(const struct problem *problem, const bench_run *run, double peak_gflops, bench_row *row) {
    const double n = (double)problem->n_tokens, d = (double)problem->n_hidden;
    const double v = (double)problem->v_total, seconds = 1e-3 * row->median_ms;
    const double products = run->pass == LL_PASS_FORWARD ? 1 : 3;
    double bytes =
        n * d * (double)ll_dtype_bytes(problem->x_dtype) + v * d * (double)ll_dtype_bytes(problem->w_dtype);
    const ll_view *gradients[] = {&run->args.grad_x, &run->args.grad_w, &run->args.grad_bias};
    for (int i = 0; i < 3; i++) {
        const ll_view *view = gradients[i];
        if (view->data)
            bytes += (double)view->rows * (double)view->cols * (double)ll_dtype_bytes((ll_dtype)view->dtype);
    }
    row->gflops = products * 2 * n * d * v / seconds * 1e-9;
    row->gbytes_per_s = bytes / seconds * 1e-9;
    row->peak_part = peak_gflops > 0 ? row->gflops / peak_gflops : 0;
}

/* Forward for the saved values, then the pass itself in one workspace. */
static int run_plan(const struct problem *problem, const ll_plan_desc *desc, const ll_plan *plan,
                    double seconds, double peak_gflops, bench_row *row) {
    struct operands operands = {0};
    struct results results = {0};
    void *workspace = NULL;
    size_t forward_bytes = 0, pass_bytes = 0;
    int code = CLI_EXIT_OK;
    ll_status status = ll_plan_workspace(plan, LL_PASS_FORWARD, &forward_bytes);
    if (status == LL_STATUS_OK) status = ll_plan_workspace(plan, problem->pass, &pass_bytes);
    const size_t bytes = forward_bytes > pass_bytes ? forward_bytes : pass_bytes;
    bool made = operands_create(problem, &operands) && results_create(problem, &results);
    if (!made || posix_memalign(&workspace, 64, bytes + 64) != 0) {
        code = cli_fail(CLI_EXIT_RUNTIME, "problem %s: out of memory", row->problem);
        goto release;
    }
    bench_run run = {plan, bench_args(problem, &operands, &results, LL_PASS_FORWARD), LL_PASS_FORWARD, NULL};
    run.args.workspace = workspace;
    run.args.workspace_bytes = bytes;
    if (status == LL_STATUS_OK && cli_gpu_wanted(plan)) status = cli_gpu_open(desc, bytes, &run.gpu);
    if (status == LL_STATUS_OK && problem->pass == LL_PASS_BACKWARD) {
        status = run.gpu ? cli_gpu_run(run.gpu, plan, LL_PASS_FORWARD, &run.args) : call(&run);
    }
    run.args = bench_args(problem, &operands, &results, problem->pass);
    run.args.workspace = workspace;
    run.args.workspace_bytes = bytes;
    run.pass = problem->pass;
    ll_linear_ce_args on_host = run.args;
    if (status == LL_STATUS_OK && run.gpu) status = cli_gpu_bind(run.gpu, &on_host, &run.args);
    if (status == LL_STATUS_OK) status = bench_time(call, &run, seconds, row);
    if (status == LL_STATUS_OK && run.gpu) status = cli_gpu_fetch(run.gpu);
    cli_gpu_close(run.gpu);
    if (status != LL_STATUS_OK) {
        code = cli_fail_status(status);
        goto release;
    }
    rate(problem, &run, peak_gflops, row);
    row->workspace_mb = (double)pass_bytes / 0x1p20;
    row->loss = results.loss[0];
    if (!isfinite(row->loss) && !problem->nan_every) {
        code = cli_fail(CLI_EXIT_CHECK, "problem %s: found a loss of %g, wanted a finite number",
                        row->problem, row->loss);
    }
release:
    free(workspace);
    results_destroy(&results);
    operands_destroy(&operands);
    return code;
}

/* "f:" and "b:" are short for the "fwd:" and "bwd:" of tests/problems.h. */
int bench_parse(const char *text, struct problem *problem) {
    char longer[kTextBytes + 2];
    bool is_short = (text[0] == 'f' || text[0] == 'b') && text[1] == ':';
    snprintf(longer, sizeof longer, "%c%s%s", text[0], is_short ? "wd" : "", text[0] ? text + 1 : "");
    const char *why = problem_parse(longer, problem);
    if (!why && problem->n_tokens < 1) why = "n must be given";
    /* They would find their own gradient in place of the logits. */
    if (!why && problem->in_place) why = "inplace: bench repeats calls";
    if (!why) return CLI_EXIT_OK;
    return cli_fail(CLI_EXIT_USAGE,
                    "%s; wanted PASS:DTYPE:nTOKENS:dHIDDEN:vVOCABULARY or ce:DTYPE:nTOKENS:vVOCABULARY", why);
}

static int run_problem(const bench_options *options, const char *text, bench_row *row) {
    struct problem problem;
    ll_plan_desc desc;
    ll_plan *plan = NULL;
    int code = bench_parse(text, &problem);
    if (code != CLI_EXIT_OK) return code;
    *row = (bench_row){0};
    snprintf(row->problem, sizeof row->problem, "%s", text);
    if (options->n_threads) problem.n_threads = options->n_threads;
    if (problem.op == LL_OP_CE) {
        ce_problem_desc(&problem, &desc);
    } else {
        problem_desc(&problem, &desc);
    }
    desc.backend = cli_backend(options->backend);
    ll_status status = ll_plan_create(&desc, &plan);
    if (status != LL_STATUS_OK) return cli_fail_status(status);
    snprintf(row->kernel, sizeof row->kernel, "%s", ll_plan_kernel(plan));
    if (problem.op == LL_OP_CE) {
        code = bench_ce(&problem, plan, options->seconds, row);
        ll_plan_destroy(plan);
        return code;
    }
    double peak_gflops = cli_gpu_wanted(plan) ? 0 : lli_cpu_fma_peak(ll_plan_threads(plan)); /* a CPU's */
    code = run_plan(&problem, &desc, plan, options->seconds, peak_gflops, row);
    ll_plan_destroy(plan);
    return code;
}

static void print_row(const bench_row *row) {
    char gflops[16] = "-", part[16] = "-"; /* ce multiplies no matrices */
    if (row->gflops > 0) {
        snprintf(gflops, sizeof gflops, "%.1f", row->gflops);
        snprintf(part, sizeof part, "%.1f", 100 * row->peak_part);
    }
    printf("%-32s | %-24s | %10.2f | %8s | %6.1f | %5s | %9.1f\n", row->problem, row->kernel, row->median_ms,
           gflops, row->gbytes_per_s, part, row->workspace_mb);
    fflush(stdout);
}

static cJSON *row_json(const bench_row *row) {
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "problem", row->problem);
    cJSON_AddStringToObject(object, "kernel", row->kernel);
    cJSON_AddNumberToObject(object, "median_ms", row->median_ms);
    cJSON_AddNumberToObject(object, "repeats", row->repeats);
    cJSON_AddNumberToObject(object, "gflops", row->gflops);
    cJSON_AddNumberToObject(object, "gbytes_per_s", row->gbytes_per_s);
    cJSON_AddNumberToObject(object, "fma_peak_part", row->peak_part);
    cJSON_AddNumberToObject(object, "workspace_mb", row->workspace_mb);
    cJSON_AddNumberToObject(object, "loss", row->loss);
    return object;
}

static cJSON *print_header(int32_t n_threads, bool json) {
    cli_machine machine = cli_machine_read();
    double peak_gflops = lli_cpu_fma_peak(n_threads), read_gbytes = cli_read_bandwidth(n_threads);
    if (!json) {
        printf("logitless %s on %s, %d threads: FMA peak %.1f GFLOP/s, read %.1f GB/s\n", ll_version(),
               machine.cpu, (int)n_threads, peak_gflops, read_gbytes);
        printf("%-32s | %-24s | %10s | %8s | %6s | %5s | %9s\n", "problem", "kernel", "median ms", "GFLOP/s",
               "GB/s", "% FMA", "workspace");
        fflush(stdout);
        return NULL;
    }
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "version", ll_version());
    cJSON_AddStringToObject(object, "cpu", machine.cpu);
    cJSON_AddNumberToObject(object, "threads", n_threads);
    cJSON_AddNumberToObject(object, "fma_peak_gflops", peak_gflops);
    cJSON_AddNumberToObject(object, "read_gbytes_per_s", read_gbytes);
    return object;
}

static int run_all(const bench_options *options, const char *const *texts, int count) {
    int32_t header_threads = options->n_threads;
    ll_status status = header_threads ? LL_STATUS_OK : cli_default_threads(&header_threads);
    if (status != LL_STATUS_OK) return cli_fail_status(status);
    cJSON *object = print_header(header_threads, options->json);
    cJSON *rows = options->json ? cJSON_AddArrayToObject(object, "problems") : NULL;
    int code = CLI_EXIT_OK;
    for (int i = 0; i < count && code == CLI_EXIT_OK; i++) {
        bench_row row;
        code = run_problem(options, texts[i], &row);
        if (code != CLI_EXIT_OK) break;
        if (options->json) {
            cJSON_AddItemToArray(rows, row_json(&row));
        } else {
            print_row(&row);
        }
    }
    if (options->json && code == CLI_EXIT_OK) return cli_print_json(object);
    cJSON_Delete(object);
    return code;
}

static int run_texts(const bench_options *options, const char *const *texts, int count) {
    const bool over_ranks = options->cut.ranks || options->cut.shards;
    return over_ranks ? bench_ranks(options, texts, count) : run_all(options, texts, count);
}

/* Room for every shape in every dtype and pass. */
static int run_default(const bench_options *options) {
    enum { kShapeCount = 4, kDefaults = kShapeCount * 4 };
    char texts[kDefaults][64];
    const char *list[kDefaults];
    for (int i = 0; i < kDefaults; i++) {
        snprintf(texts[i], sizeof texts[i], "%s:%s:%s", kPasses[i % 2], kDtypes[i / 2 % 2], kShapes[i / 4]);
        list[i] = texts[i];
    }
    return run_texts(options, list, kDefaults);
}

int ll_cmd_bench(int argc, char **argv) {
    bench_options o = {.seconds = 2, .backend = "auto", .cut = {.comm = "threads"}};
    int64_t n_threads = 0;
    cli_strings problems = {0};
    const cli_option options[] = {
        {.name = "threads",
         .type = CLI_INT64,
         .value = &n_threads,
         .metavar = "N",
         .help = "default LL_NUM_THREADS if set, else the CPUs of this process",
         .min = 1,
         .max = 1024},
        {.name = "backend",
         .type = CLI_STRING,
         .value = &o.backend,
         .metavar = CLI_BACKENDS,
         .help = "cuda: operands on the GPU, a call timed to its end; auto is a CPU's; default auto"},
        CLI_CUT_OPTIONS(o.cut),
        {.name = "seconds",
         .type = CLI_DOUBLE,
         .value = &o.seconds,
         .metavar = "S",
         .help = "time for the repeats of a problem, at least 3 of them; default 2",
         .min = 0,
         .max = 86400},
        {.name = "json", .type = CLI_FLAG, .value = &o.json, .help = "print one JSON object; default off"},
        {0},
    };
    const cli_usage usage = {"bench [PROBLEM...] [options]", kAbout, options, &problems};
    int code = cli_options_parse(&usage, argc, argv);
    /* All problems are read before the first runs: a mistake in the last one is known at once. */
    for (int i = 0; code == CLI_GO_ON && i < problems.count; i++) {
        struct problem problem;
        int parsed = bench_parse(problems.items[i], &problem);
        if (parsed != CLI_EXIT_OK) code = parsed;
        if (parsed == CLI_EXIT_OK && problem.op == LL_OP_CE && (o.cut.ranks || o.cut.shards)) {
            code = cli_fail(CLI_EXIT_USAGE, "problem %s: ce over ranks is not timed", problems.items[i]);
        }
    }
    o.n_threads = (int32_t)n_threads;
    if (code == CLI_GO_ON) {
        code = problems.count ? run_texts(&o, problems.items, problems.count) : run_default(&o);
    }
    free(problems.items);
    return code;
}

/* logitless check: is this machine, or this cluster, computing the right numbers? A problem with a known
 * answer on the ranks of a group, and a large one for memory and repeatability. docs/runbook.md says in which
 * order to run it and what to do when a line fails. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include "core/status.h"
#include "gpu.h"
#include "ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char kAbout[] =
    "Runs forward, backward and forward_backward of a random problem, cut over the ranks of a group, and\n"
    "compares with a reference. Prints PASS or FAIL for\n"
    "  output       nll, lse, entropy, loss, argmax        hidden_grad, weight_grad, bias_grad\n"
    "  invariance   the same bits as one rank alone        ranks   the same bits on every rank\n"
    "  passes       forward + backward give the bits of forward_backward\n"
    "  stress       with --run-stress: a large problem twice: finite, equal bits, time, memory\n"
    "The reference is, by --reference-mode,\n"
    "  fp32         double precision on the inputs as they are\n"
    "  matching     materialised logits rounded to the dtype, as a framework without fusion computes\n"
    "max_rel is the largest |got - want| / max(|want|, rms of the reference). The bounds are derived in\n"
    "docs/runbook.md; --atol and --rtol replace them. Every process builds the whole reference.\n"
    "Over MPI: mpirun -n N logitless check --comm mpi [the same options on every rank]\n"
    "Exit codes: 0 all PASS; 1 a FAIL; 2 bad usage; 3 a failure at run time.\n";

static ll_dtype dtype_of(const char *name) {
    return strcmp(name, "bf16") == 0   ? LL_DTYPE_BF16
           : strcmp(name, "fp16") == 0 ? LL_DTYPE_F16
                                       : LL_DTYPE_F32;
}

/* Ranks of very different sizes, the second of three or more without a row, and no edge on a multiple of 64:
 * the canonical tiles of the kernels are cut. */
static bool cut_unevenly(int64_t n_rows, int32_t n_ranks, cli_cut *cut) {
    int64_t sum = 0, total = 0;
    if (!cli_cut_even(n_rows, n_ranks, cut)) return false;
    for (int pass = 0; pass < 2; pass++) {
        total = sum;
        sum = 0;
        for (int32_t r = 0; r < n_ranks; r++) {
            if (pass == 1) {
                int64_t begin = n_rows * sum / total;
                cut->begins[r] = begin > 0 && begin % 64 == 0 ? begin + 1 : begin;
            }
            sum += n_ranks >= 3 && r == 1 ? 0 : 2 + 3 * (r % 3);
        }
    }
    return true;
}

static ll_status make_cut(const check_world *world, int32_t n_ranks, int64_t n_rows, cli_cut *cut) {
    bool ok = world->options->uneven_shards ? cut_unevenly(n_rows, n_ranks, cut)
                                            : cli_cut_even(n_rows, n_ranks, cut);
    LLI_REQUIRE(ok, LL_STATUS_MEMORY, "check: no memory for %d ranks", (int)n_ranks);
    return LL_STATUS_OK;
}

static ll_status run_one_rank(check_world *world) {
    check_call call = {.inputs = &world->inputs,
                       .v_local = world->shape.n_vocab,
                       .backend = cli_backend(world->options->backend),
                       .grad_dtype = world->shape.dtype,
                       .n_threads = world->one_rank_threads};
    ll_status status =
        check_results_create(&world->shape, world->shape.n_vocab, world->shape.dtype, &world->one_rank);
    if (status == LL_STATUS_OK) status = check_call_create(&call);
    if (status == LL_STATUS_OK) status = check_call_run(&call, LL_PASS_FORWARD_BACKWARD, &world->one_rank);
    check_call_free(&call);
    return status;
}

/* What a process does alone. `processes`: the ranks are processes of their own, with all of its threads. */
static ll_status world_create(int32_t n_ranks, bool processes, bool shows, check_world *world) {
    const check_options *o = world->options;
    cli_progress progress = cli_progress_begin("check", shows ? 3 : 0);
    world->shape = (check_shape){dtype_of(o->dtype), o->tokens,   o->hidden_size,
                                 o->vocab_size,      !o->no_bias, (uint64_t)o->seed};
    world->stress_shape = world->shape;
    world->stress_shape.n_tokens = o->stress_tokens;
    world->stress_shape.n_hidden = o->stress_hidden_size;
    world->stress_shape.n_vocab = o->stress_vocab_size;
    ll_status status = make_cut(world, n_ranks, o->vocab_size, &world->cut);
    if (status == LL_STATUS_OK) status = make_cut(world, n_ranks, o->stress_vocab_size, &world->stress_cut);
    if (status == LL_STATUS_OK) status = cli_ranks_threads((int32_t)o->threads, 1, &world->one_rank_threads);
    if (status == LL_STATUS_OK) {
        status = cli_ranks_threads(world->one_rank_threads, processes ? 1 : n_ranks, &world->n_threads);
    }
    if (status == LL_STATUS_OK) {
        status = check_inputs_create(&world->shape, 0, world->shape.n_vocab, &world->inputs);
    }
    cli_progress_update(&progress, 1);
    if (status == LL_STATUS_OK) {
        status = check_reference(&world->inputs, strcmp(o->reference_mode, "matching") == 0, &world->want);
    }
    cli_progress_update(&progress, 2);
    if (status == LL_STATUS_OK) status = check_scales_create(o, &world->inputs, &world->want, &world->scales);
    if (status == LL_STATUS_OK) status = run_one_rank(world);
    cli_progress_end(&progress);
    return status;
}

static void world_free(check_world *world) {
    check_results_free(&world->one_rank);
    check_scales_free(&world->scales);
    check_results_free(&world->want);
    check_inputs_free(&world->inputs);
    cli_cut_free(&world->stress_cut);
    cli_cut_free(&world->cut);
}

static int32_t limit_ms(const check_options *options) {
    return (int32_t)(options->time_limit * 1000);
}

/* ---- Ranks as threads ---------------------------------------------------------------------------- */

typedef struct thread_ranks {
    const check_world *world;
    ll_comm *comms;
    check_report *reports;
} thread_ranks;

static ll_status run_thread_rank(void *context, int32_t rank) {
    const thread_ranks *ranks = context;
    const check_options *options = ranks->world->options;
    ll_comm nccl = {0};
    const ll_comm *comm = &ranks->comms[rank];
    bool mine;
    if (strcmp(options->comm, "nccl") == 0) {
        LLI_TRY(cli_gpu_use(rank));
        LLI_TRY(ll_comm_nccl(comm, limit_ms(options), &nccl));
        comm = &nccl;
    }
    const ll_status status = check_rank(ranks->world, comm, &ranks->reports[rank], &mine);
    ll_comm_destroy(&nccl);
    return status;
}

static ll_status run_threads(const check_world *world, thread_ranks *ranks) {
    const int32_t n = world->cut.n_ranks;
    ranks->comms = calloc((size_t)n, sizeof *ranks->comms);
    ranks->reports = calloc((size_t)n, sizeof *ranks->reports);
    bool ok = ranks->comms && ranks->reports;
    for (int32_t r = 0; ok && r < n; r++) ok = check_report_create(n, &ranks->reports[r]);
    LLI_REQUIRE(ok, LL_STATUS_MEMORY, "check: no memory for %d ranks", (int)n);
    LLI_TRY(ll_comm_threads(n, limit_ms(world->options), ranks->comms));
    return cli_ranks_at_once(ranks->comms, n, run_thread_rank, ranks);
}

static int check_threads(const check_options *options) {
    const int32_t n = options->ranks ? (int32_t)options->ranks : 1;
    check_world world = {.options = options};
    thread_ranks ranks = {.world = &world};
    ll_status status = world_create(n, false, true, &world);
    if (status == LL_STATUS_OK) status = run_threads(&world, &ranks);
    int code = status == LL_STATUS_OK ? check_print_verdict(&world, &ranks.reports[0], true)
                                      : cli_fail_status(status);
    for (int32_t r = 0; ranks.reports && r < n; r++) check_report_free(&ranks.reports[r]);
    for (int32_t r = 0; ranks.comms && r < n; r++) ll_comm_destroy(&ranks.comms[r]);
    free(ranks.reports);
    free(ranks.comms);
    world_free(&world);
    return code;
}

/* ---- Ranks as processes -------------------------------------------------------------------------- */

/* A rank that fails alone, or whose group is broken, tells the others and leaves at once: to end MPI as usual
 * would wait for ranks that may never come. */
static void leave_group(const ll_comm *comm, ll_status status) {
    char sentence[512];
    snprintf(sentence, sizeof sentence, "%s", ll_last_error());
    int code = cli_fail(cli_exit_code(status), "rank %d: %s", (int)comm->rank, sentence);
    ll_comm_abort(comm, sentence);
    fflush(stdout);
    _exit(code);
}

static int check_processes(const check_options *options) {
    ll_comm comm;
    check_world world = {.options = options};
    check_report report = {0};
    ll_status status = ll_comm_open(options->comm, limit_ms(options), &comm);
    if (status != LL_STATUS_OK) return cli_fail_status(status);
    const bool speaks = comm.rank == 0;
    bool mine = true;
    status = world_create(comm.size, true, speaks, &world);
    if (status == LL_STATUS_OK && !check_report_create(comm.size, &report)) {
        status = lli_fail(LL_STATUS_MEMORY, "check: no memory for %d ranks", (int)comm.size);
    }
    if (status == LL_STATUS_OK) status = check_rank(&world, &comm, &report, &mine);
    if (status == LL_STATUS_COMM || (status != LL_STATUS_OK && mine)) leave_group(&comm, status);
    int code = cli_exit_code(status); /* a failure that all ranks agree on is rank 0's to report */
    if (status == LL_STATUS_OK) code = check_print_verdict(&world, &report, speaks);
    if (status != LL_STATUS_OK && speaks) code = cli_fail_status(status);
    check_report_free(&report);
    world_free(&world);
    ll_comm_destroy(&comm);
    return code;
}

static int run_check(const check_options *options) {
    if (strcmp(options->comm, "nccl") == 0 && !check_on_gpu(options)) {
        return cli_fail(CLI_EXIT_USAGE, "--comm nccl: found with --backend %s, wanted cuda",
                        options->backend);
    }
    if (strcmp(options->comm, "mpi") != 0) return check_threads(options);
    if (options->ranks) {
        return cli_fail(CLI_EXIT_USAGE,
                        "--ranks: found with --comm %s, where the launcher (mpirun -n N) says how many",
                        options->comm);
    }
    return check_processes(options);
}

int ll_cmd_check(int argc, char **argv) {
    check_options o = {.dtype = "fp32",
                       .reference_mode = "fp32",
                       .comm = "threads",
                       .backend = "auto",
                       .tokens = 128,
                       .hidden_size = 256,
                       .vocab_size = 4096,
                       .seed = 1234,
                       .stress_tokens = 4096,
                       .stress_hidden_size = 1024,
                       .stress_vocab_size = 50257,
                       .atol = -1,
                       .rtol = -1,
                       .time_limit = LL_COMM_TIMEOUT_MS / 1e3};
    const double any = 1e9, huge = 1e300;
    const cli_option options[] = {
        {"dtype", CLI_STRING, &o.dtype, "fp32|bf16|fp16", .help = "of inputs and gradients; default fp32"},
        {"tokens", CLI_INT64, &o.tokens, "N", "default 128", .min = 1, .max = any},
        {"hidden-size", CLI_INT64, &o.hidden_size, "N", "default 256", .min = 1, .max = 1 << 20},
        {"vocab-size", CLI_INT64, &o.vocab_size, "N", "default 4096", .min = 1, .max = LL_VOCAB_MAX},
        {"ranks", CLI_INT64, &o.ranks, "N", "ranks of --comm threads and nccl; default 1", .min = 1,
         .max = kRanksMax},
        {"uneven-shards", CLI_FLAG, &o.uneven_shards,
         .help = "very different shards with edges inside tiles, one of three or more empty; default even"},
        {"no-bias", CLI_FLAG, &o.no_bias, .help = "no bias; default with one"},
        {"reference-mode", CLI_STRING, &o.reference_mode, "fp32|matching", .help = "see above; default fp32"},
        {"seed", CLI_INT64, &o.seed, "N", "of the random inputs; default 1234", .max = 1e18},
        {"atol", CLI_DOUBLE, &o.atol, "X", "absolute tolerance of every line; default by dtype and mode",
         .max = huge},
        {"rtol", CLI_DOUBLE, &o.rtol, "X", "relative tolerance of every line; default by dtype and mode",
         .max = huge},
        {"comm", CLI_STRING, &o.comm, "threads|mpi|nccl",
         .help = "what joins the ranks: threads of this process in host memory, processes of mpirun, or NCCL "
                 "between "
                 "threads with a GPU each; default threads"},
        {"backend", CLI_STRING, &o.backend, "auto|cpu|cuda",
         .help =
             "cuda: all but the reference on GPUs, rank r on GPU r modulo their number; default auto, a CPU"},
        {"threads", CLI_INT64, &o.threads, "N",
         "of this process; default LL_NUM_THREADS if set, else the CPUs of this process", .min = 1,
         .max = 1024},
        {"time-limit", CLI_DOUBLE, &o.time_limit, "SECONDS",
         "longest wait for the slowest rank in one operation; default 60", .min = 0.001, .max = 86400},
        {"run-stress", CLI_FLAG, &o.run_stress, .help = "the stress phase as well; default off"},
        {"stress-tokens", CLI_INT64, &o.stress_tokens, "N", "default 4096", .min = 1, .max = any},
        {"stress-hidden-size", CLI_INT64, &o.stress_hidden_size, "N", "default 1024", .min = 1,
         .max = 1 << 20},
        {"stress-vocab-size", CLI_INT64, &o.stress_vocab_size, "N", "default 50257", .min = 1,
         .max = LL_VOCAB_MAX},
        {"json", CLI_FLAG, &o.json, .help = "print one JSON object; default off"},
        {0},
    };
    const cli_usage usage = {"check [options]", kAbout, options, NULL};
    int code = cli_options_parse(&usage, argc, argv);
    return code == CLI_GO_ON ? run_check(&o) : code;
}

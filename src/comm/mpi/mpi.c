/* Life of an end: made over MPI_COMM_WORLD, over the caller's communicator or from a list of ranks of another
 * end; destroyed, and MPI with the last one if it was initialised here. */
#define _POSIX_C_SOURCE 200809L /* stat */
#include "comm/mpi/end.h"
#include "comm/mpi/levels.h"
#include "comm/refuse.h"

#include <logitless/comm_mpi.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* How long a dead end's destroy may take to get its abort on its way. */
enum { kLeaveFlushMs = 500 };

/* MPI as a whole, which a process has once. */
static bool initialised_here;
static int32_t n_ends;
/* Ends that died or were not finished: MPI may still write to them. */
static lli_mpi_end *kept;

/* ---- An end's memory and MPI objects ------------------------------------------------------------ */

static void release_memory(lli_mpi_end *end) {
    free(end->host_of);
    free(end->piece);
    free(end->received);
    free(end->notices);
    free(end);
}

static lli_mpi_end *new_end(int32_t rank, int32_t size, int32_t timeout_ms) {
    lli_mpi_end *end = calloc(1, sizeof *end);
    if (!end) return NULL;
    end->rank = rank;
    end->size = size;
    end->timeout_ms = timeout_ms;
    end->data = end->control = MPI_COMM_NULL;
    end->levels[0].comm = end->levels[1].comm = MPI_COMM_NULL;
    end->host_of = calloc((size_t)size, sizeof *end->host_of);
    end->piece = malloc(kPieceBytes);
    end->received = malloc(kPieceBytes);
    end->notices = malloc((size_t)size * sizeof(MPI_Request));
    if (end->host_of && end->piece && end->received && end->notices) return end;
    release_memory(end);
    return NULL;
}

static void keep(lli_mpi_end *end) {
    end->next = kept;
    kept = end;
}

static void free_comm(MPI_Comm *comm) {
    if (*comm != MPI_COMM_NULL) MPI_Comm_free(comm);
}

/* MPI_Comm_free waits for no peer in Open MPI and MPICH, though the standard calls it collective. */
static void mpi_destroy(void *self) {
    lli_mpi_end *end = self;
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized && !end->dead) lli_mpi_heard(end);
    if (end->dead) {
        if (!finalized) lli_mpi_flush(end, kLeaveFlushMs);
        keep(end);
    } else {
        if (!finalized) {
            if (end->n_levels == 2) {
                free_comm(&end->levels[1].comm);
                free_comm(&end->levels[0].comm);
            }
            free_comm(&end->control);
            free_comm(&end->data);
        }
        release_memory(end);
    }
    /* Not after a death: the ranks that MPI_Finalize waits for may be gone, and it has no time limit. */
    if (--n_ends == 0 && initialised_here && !finalized && !lli_mpi_any_died()) MPI_Finalize();
}

static ll_status adopt(lli_mpi_end *waiter, const lli_mpi_call *call, MPI_Comm comm) {
    return lli_mpi_check(waiter, call->operation, MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN));
}

/* Into *to, a field of `end`, with the limit and the peers of `waiter`. */
static ll_status duplicate(lli_mpi_end *waiter, const lli_mpi_call *call, MPI_Comm from, lli_mpi_end *end,
                           MPI_Comm *to) {
    MPI_Request request;
    const int code = MPI_Comm_idup(from, &end->duplicate, &request);
    ll_status status = lli_mpi_wait(waiter, call, code, &request);
    if (status == LL_STATUS_OK) status = adopt(waiter, call, end->duplicate);
    if (status == LL_STATUS_OK) *to = end->duplicate;
    return status;
}

/* ---- Levels ------------------------------------------------------------------------------------- */

/* Ranks with equal labels share a host. A hash is enough: two hosts with one label would only be summed as
 * one, on all ranks alike. */
static uint64_t host_label(void) {
    char name[MPI_MAX_PROCESSOR_NAME + 32] = "";
    const char *label = getenv("LL_COMM_HOST");
    if (!label || !*label) {
        /* Network namespaces of one machine (containers) have its name or not, and share no memory with each
         * other as a rule. */
        int length = 0;
        struct stat net;
        MPI_Get_processor_name(name, &length);
        const uintmax_t space = stat("/proc/self/ns/net", &net) == 0 ? (uintmax_t)net.st_ino : 0;
        snprintf(name + length, sizeof name - (size_t)length, " %" PRIuMAX, space);
        label = name;
    }
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    for (; *label; label++) hash = (hash ^ (unsigned char)*label) * 0x100000001b3u;
    return hash;
}

/* The communicator of the ranks with the same `color`, in the order of their keys, as end->levels[i]. */
static ll_status split(lli_mpi_end *waiter, const lli_mpi_call *call, lli_mpi_end *end, int32_t i,
                       int32_t color, int32_t key) {
    lli_mpi_level *level = &end->levels[i];
    ll_status status =
        lli_mpi_check(waiter, call->operation, MPI_Comm_split(end->data, color, key, &level->comm));
    if (status == LL_STATUS_OK) status = adopt(waiter, call, level->comm);
    return status;
}

/* From end->host_of; the same on every rank. */
static ll_status make_levels(lli_mpi_end *waiter, const lli_mpi_call *call, lli_mpi_end *end) {
    lli_levels levels;
    lli_place *places = malloc((size_t)end->size * sizeof *places);
    if (!places || !lli_levels_derive(end->host_of, end->size, places, &levels)) {
        free(places);
        lli_mpi_fail(waiter, "%s: rank %d has no memory for a table of %d ranks", call->operation,
                     waiter->rank, end->size);
        return LL_STATUS_MEMORY;
    }
    const lli_place mine = places[end->rank];
    free(places);
    memcpy(end->levels_sentence, levels.sentence, sizeof end->levels_sentence);
    end->n_levels = levels.n_levels;
    end->levels[0] = (lli_mpi_level){end->data, mine.column, levels.n_columns};
    if (levels.n_levels == 1) return LL_STATUS_OK;
    end->levels[1] = (lli_mpi_level){MPI_COMM_NULL, mine.row, levels.n_rows};
    const ll_status status = split(waiter, call, end, 0, mine.row, mine.column);
    return status ? status : split(waiter, call, end, 1, mine.column, mine.row);
}

/* ---- Groups ------------------------------------------------------------------------------------- */

/* This rank's place in the list, or -1 with the sentence in end->sentence. */
static int32_t find_myself(lli_mpi_end *end, const int32_t *ranks, int32_t n_ranks) {
    int32_t mine = -1;
    uint64_t seen[LL_COMM_RANKS_MAX / 64] = {0};
    for (int32_t i = 0; i < n_ranks; i++) {
        const bool inside = ranks[i] >= 0 && ranks[i] < end->size;
        if (!inside || seen[ranks[i] / 64] >> (ranks[i] % 64) & 1) {
            snprintf(end->sentence, sizeof end->sentence, "group: ranks[%d] is %d, want %s", i, ranks[i],
                     inside ? "every rank once" : "a rank of the communicator");
            return -1;
        }
        seen[ranks[i] / 64] |= (uint64_t)1 << (ranks[i] % 64);
        if (ranks[i] == end->rank) mine = i;
    }
    if (mine < 0) {
        snprintf(end->sentence, sizeof end->sentence, "group: rank %d is not in the list of %d ranks",
                 end->rank, n_ranks);
    }
    return mine;
}

/* One tag for the messages about a list, 1 .. 32767 (what MPI promises at least). Lists that share a tag do
 * no harm, nor does a list that comes again: messages between two ranks keep their order, and two ranks make
 * the groups that both are in in the same order. */
static int tag_of(const int32_t *ranks, int32_t n_ranks) {
    uint32_t hash = 0x811c9dc5u;
    for (int32_t i = 0; i < n_ranks; i++) hash = (hash ^ (uint32_t)ranks[i]) * 0x01000193u;
    return (int)(1 + (hash ^ hash >> 15) % 32767);
}

/* Returns when every member of the list is here, in the time that MPI_Comm_create_group does not limit: round
 * k tells the member 2^k places on, who knows by then of the 2^k before it. */
static ll_status arrive(lli_mpi_end *end, const lli_mpi_call *call, const int32_t *ranks, int32_t n_ranks,
                        int32_t mine, int tag) {
    for (int32_t step = 1; step < n_ranks; step *= 2) {
        const int to = ranks[(mine + step) % n_ranks], from = ranks[(mine - step + n_ranks) % n_ranks];
        MPI_Request sent, came;
        int code = MPI_Isend(NULL, 0, MPI_BYTE, to, tag, end->control, &sent);
        ll_status status = lli_mpi_wait(end, call, code, &sent);
        if (status != LL_STATUS_OK) return status;
        code = MPI_Irecv(NULL, 0, MPI_BYTE, from, tag, end->control, &came);
        status = lli_mpi_wait(end, call, code, &came);
        if (status != LL_STATUS_OK) return status;
    }
    return lli_mpi_heard(end) ? LL_STATUS_COMM : LL_STATUS_OK;
}

/* The members' communicator, which nobody else takes part in making. */
static ll_status create_members(lli_mpi_end *end, const lli_mpi_call *call, const int32_t *ranks,
                                int32_t n_ranks, int tag, MPI_Comm *members) {
    MPI_Group all, some = MPI_GROUP_NULL;
    ll_status status = lli_mpi_check(end, call->operation, MPI_Comm_group(end->data, &all));
    if (status != LL_STATUS_OK) return status;
    int code = MPI_Group_incl(all, n_ranks, ranks, &some);
    if (code == MPI_SUCCESS) code = MPI_Comm_create_group(end->data, some, tag, members);
    status = lli_mpi_check(end, call->operation, code);
    if (some != MPI_GROUP_NULL) MPI_Group_free(&some);
    MPI_Group_free(&all);
    return status ? status : adopt(end, call, *members);
}

static ll_status fill_group(lli_mpi_end *parent, const lli_mpi_call *call, const int32_t *ranks,
                            lli_mpi_end *end) {
    const int32_t n_ranks = end->size, tag = tag_of(ranks, n_ranks);
    for (int32_t i = 0; i < n_ranks; i++) end->host_of[i] = parent->host_of[ranks[i]];
    ll_status status = arrive(parent, call, ranks, n_ranks, end->rank, tag);
    if (status == LL_STATUS_OK) status = create_members(parent, call, ranks, n_ranks, tag, &end->data);
    if (status == LL_STATUS_OK) status = duplicate(parent, call, end->data, end, &end->control);
    if (status == LL_STATUS_OK) status = make_levels(parent, call, end);
    return status;
}

static void hand_over(lli_mpi_end *end, ll_comm *comm);

/* A failure kills this end, not only the group: a member that comes late must not wait for the others in a
 * call without limit. */
static ll_status mpi_group(void *self, const int32_t *ranks, int32_t n_ranks, ll_comm *group) {
    lli_mpi_end *parent = self;
    lli_mpi_call call;
    ll_status status = lli_mpi_begin(parent, "group", NULL, &call);
    if (status != LL_STATUS_OK) return status;
    const int32_t mine = find_myself(parent, ranks, n_ranks);
    if (mine < 0) return LL_STATUS_INVALID_ARG;
    lli_mpi_end *end = new_end(mine, n_ranks, parent->timeout_ms);
    if (!end) {
        lli_mpi_fail(parent, "group: rank %d has no memory for a group of %d ranks", parent->rank, n_ranks);
        return LL_STATUS_MEMORY;
    }
    status = fill_group(parent, &call, ranks, end);
    if (status == LL_STATUS_OK) {
        hand_over(end, group);
    } else {
        keep(end);
    }
    return status;
}

/* ---- Entry points ------------------------------------------------------------------------------- */

static void mpi_abort(void *self, const char *sentence) {
    lli_mpi_fail(self, "%s", sentence ? sentence : "");
}

static const char *mpi_error(void *self) {
    return ((lli_mpi_end *)self)->sentence;
}

static void hand_over(lli_mpi_end *end, ll_comm *comm) {
    n_ends++;
    *comm = (ll_comm){.struct_bytes = sizeof *comm,
                      .rank = end->rank,
                      .size = end->size,
                      .self = end,
                      .max_i32 = lli_mpi_max_i32,
                      .sum_i64 = lli_mpi_sum_i64,
                      .all_gather = lli_mpi_all_gather,
                      .sum_f32 = lli_mpi_sum_f32,
                      .abort = mpi_abort,
                      .error = mpi_error,
                      .group = mpi_group,
                      .destroy = mpi_destroy};
}

static ll_status check_arguments(int32_t timeout_ms, const ll_comm *comm, reason why) {
    if (!comm) return refuse(why, LL_STATUS_INVALID_ARG, "comm is NULL");
    if (comm->struct_bytes != sizeof *comm) {
        return refuse(why, LL_STATUS_INVALID_ARG, "comm->struct_bytes is %zu, want %zu (LL_COMM_INIT)",
                      comm->struct_bytes, sizeof *comm);
    }
    if (timeout_ms < 0) {
        return refuse(why, LL_STATUS_INVALID_ARG, "timeout_ms is %d, want 0 (for %d) or more", timeout_ms,
                      LL_COMM_TIMEOUT_MS);
    }
    return LL_STATUS_OK;
}

static ll_status make_end(lli_mpi_end *end, MPI_Comm from) {
    lli_mpi_call call;
    ll_status status = lli_mpi_begin(end, "open", NULL, &call);
    if (status == LL_STATUS_OK) status = duplicate(end, &call, from, end, &end->data);
    if (status == LL_STATUS_OK) status = duplicate(end, &call, end->data, end, &end->control);
    const uint64_t mine = host_label();
    if (status == LL_STATUS_OK) status = lli_mpi_gather(end, &call, &mine, end->host_of, sizeof mine);
    if (status == LL_STATUS_OK) status = make_levels(end, &call, end);
    return status;
}

static ll_status create_over(MPI_Comm from, int32_t timeout_ms, ll_comm *comm, reason why) {
    int rank = 0, size = 0, inter = 0;
    MPI_Comm_test_inter(from, &inter);
    if (inter) return refuse(why, LL_STATUS_INVALID_ARG, "mpi_comm is an intercommunicator, want one group");
    MPI_Comm_rank(from, &rank);
    MPI_Comm_size(from, &size);
    if (size > LL_COMM_RANKS_MAX) {
        return refuse(why, LL_STATUS_INVALID_ARG, "the communicator has %d ranks, want %d at most", size,
                      LL_COMM_RANKS_MAX);
    }
    lli_mpi_end *end = new_end(rank, size, timeout_ms ? timeout_ms : LL_COMM_TIMEOUT_MS);
    if (!end) return refuse(why, LL_STATUS_MEMORY, "no memory for a communicator of %d ranks", size);
    const ll_status status = make_end(end, from);
    if (status != LL_STATUS_OK) {
        keep(end);
        return refuse(why, status, "%s", end->sentence);
    }
    hand_over(end, comm);
    return LL_STATUS_OK;
}

static ll_status need_running_mpi(reason why) {
    int initialized = 0, finalized = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (!initialized) return refuse(why, LL_STATUS_INVALID_ARG, "MPI is not initialised");
    if (finalized) return refuse(why, LL_STATUS_COMM, "MPI has been finalised, which a process does once");
    return LL_STATUS_OK;
}

int32_t ll_comm_mpi_create(const void *mpi_comm, int32_t timeout_ms, ll_comm *comm, char *why,
                           size_t why_bytes) {
    const reason reason_why = {why, why_bytes};
    if (!mpi_comm) {
        return refuse(reason_why, LL_STATUS_INVALID_ARG, "mpi_comm is NULL, want a pointer to an MPI_Comm");
    }
    ll_status status = check_arguments(timeout_ms, comm, reason_why);
    if (status == LL_STATUS_OK) status = need_running_mpi(reason_why);
    if (status != LL_STATUS_OK) return status;
    return create_over(*(const MPI_Comm *)mpi_comm, timeout_ms, comm, reason_why);
}

int32_t ll_comm_mpi_open(int32_t timeout_ms, ll_comm *comm, char *why, size_t why_bytes) {
    const reason reason_why = {why, why_bytes};
    ll_status status = check_arguments(timeout_ms, comm, reason_why);
    if (status != LL_STATUS_OK) return status;
    int initialized = 0;
    MPI_Initialized(&initialized);
    if (!initialized) {
        int provided = 0;
        const int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided);
        if (code != MPI_SUCCESS)
            return refuse(reason_why, LL_STATUS_COMM, "MPI_Init_thread gave error %d", code);
        initialised_here = true;
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    }
    status = need_running_mpi(reason_why);
    return status ? status : create_over(MPI_COMM_WORLD, timeout_ms, comm, reason_why);
}

int32_t ll_comm_mpi_describe(const ll_comm *comm, char *text, size_t text_bytes) {
    if (!comm || comm->destroy != mpi_destroy || !comm->self || !text || !text_bytes) {
        return LL_STATUS_INVALID_ARG;
    }
    snprintf(text, text_bytes, "%s", ((const lli_mpi_end *)comm->self)->levels_sentence);
    return LL_STATUS_OK;
}

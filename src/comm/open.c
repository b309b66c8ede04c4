/* Communicators in libraries of their own, so that liblogitless needs neither MPI nor anything else that a
 * machine may lack. */
#include "comm/comm_internal.h"
#include "core/library.h"
#include "core/status.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef struct named_comm {
    const char *name;
    lli_comm_library library; /* file NULL: built in */
} named_comm;

static const named_comm named_comms[] = {
    {"self", {NULL, NULL, NULL}},
    {"mpi",
     {"liblogitless_mpi.so.0", "ll_comm_mpi_open", "build it with MPI's development package installed"}},
};
enum { kNamed = sizeof named_comms / sizeof *named_comms };

/* The library's function; `where` is the caller's name, for its sentences. */
static ll_status load(const lli_comm_library *library, const char *where, void **symbol) {
    lli_library found;
    lli_library_find("LL_COMM_PATH", library->file, &found);
    /* Open MPI opens plugins that take its own symbols from the global scope, so the library must be there
     * with RTLD_GLOBAL, or MPI_Init ends the program. NOW: a missing symbol is a sentence here, no crash
     * later. */
    void *handle = dlopen(found.path, RTLD_NOW | RTLD_GLOBAL);
    LLI_REQUIRE(handle || !found.present, LL_STATUS_COMM, "%s: %s could not be loaded: %.400s", where,
                library->file, dlerror());
    LLI_REQUIRE(handle, LL_STATUS_COMM, "%s: no %s that loads in %sthe system's folders: %.140s; %s", where,
                library->file, found.looked, dlerror(), library->hint);
    *symbol = dlsym(handle, library->entry);
    if (*symbol) return LL_STATUS_OK;
    dlclose(handle);
    return lli_fail(LL_STATUS_COMM, "%s: %s has no function %s", where, library->file, library->entry);
}

/* What the function made. From here on the library stays for good: its communicator's functions are in it,
 * and MPI leaves threads and exit handlers behind that would run in memory that is gone. */
static ll_status take(const lli_comm_library *library, const char *where, ll_status status,
                      const ll_comm *made, char *why, ll_comm *comm) {
    why[kCommSentenceBytes - 1] = 0;
    if (status != LL_STATUS_OK) {
        const char *said = *why ? why : ll_status_name(status);
        const size_t length = strlen(where);
        if (strncmp(said, where, length) == 0) return lli_fail(status, "%.450s", said);
        return lli_fail(status, "%s: %.450s", where, said);
    }
    if (lli_comm_check(made, "the communicator") != LL_STATUS_OK) {
        snprintf(why, kCommSentenceBytes, "%s", ll_last_error());
        return lli_fail(LL_STATUS_COMM, "%s: %s: %.400s", where, library->file, why);
    }
    *comm = *made;
    return LL_STATUS_OK;
}

ll_status lli_comm_load(const lli_comm_library *library, int32_t timeout_ms, ll_comm *comm) {
    lli_comm_entry *entry;
    void *symbol;
    ll_comm made = LL_COMM_INIT;
    char why[kCommSentenceBytes] = "";
    LLI_TRY(load(library, "ll_comm_open", &symbol));
    memcpy(&entry, &symbol, sizeof entry);
    const ll_status status = (ll_status)entry(timeout_ms, &made, why, sizeof why);
    return take(library, "ll_comm_open", status, &made, why, comm);
}

/* Of a library whose communicator stands on another one. */
typedef int32_t lli_comm_over_entry(const ll_comm *host, int32_t timeout_ms, ll_comm *comm, char *why,
                                    size_t why_bytes);

ll_status ll_comm_nccl(const ll_comm *host, int32_t timeout_ms, ll_comm *comm) {
    static const lli_comm_library library = {
        "liblogitless_nccl.so.0", "ll_comm_nccl_create",
        "build it with NCCL's development package and CUDA installed, and let the loader find libnccl.so.2"};
    lli_comm_over_entry *entry;
    void *symbol;
    ll_comm made = LL_COMM_INIT;
    char why[kCommSentenceBytes] = "";
    LLI_REQUIRE(comm, LL_STATUS_INVALID_ARG, "ll_comm_nccl: comm is NULL");
    LLI_REQUIRE(comm != host, LL_STATUS_INVALID_ARG, "ll_comm_nccl: comm is host, want another struct");
    memset(comm, 0, sizeof *comm);
    LLI_TRY(lli_comm_check(host, "ll_comm_nccl: host"));
    LLI_REQUIRE(timeout_ms >= 0, LL_STATUS_INVALID_ARG,
                "ll_comm_nccl: timeout_ms is %d, want 0 (for %d) or more", timeout_ms, LL_COMM_TIMEOUT_MS);
    const ll_status loaded = load(&library, "ll_comm_nccl", &symbol);
    if (loaded != LL_STATUS_OK) {
        ll_comm_abort(host, ll_last_error()); /* the others may have the library, and would wait */
        return loaded;
    }
    memcpy(&entry, &symbol, sizeof entry);
    const ll_status status = (ll_status)entry(host, timeout_ms, &made, why, sizeof why);
    return take(&library, "ll_comm_nccl", status, &made, why, comm);
}

ll_status ll_comm_open(const char *name, int32_t timeout_ms, ll_comm *comm) {
    LLI_REQUIRE(comm, LL_STATUS_INVALID_ARG, "ll_comm_open: comm is NULL");
    memset(comm, 0, sizeof *comm);
    LLI_REQUIRE(name, LL_STATUS_INVALID_ARG, "ll_comm_open: name is NULL");
    LLI_REQUIRE(timeout_ms >= 0, LL_STATUS_INVALID_ARG,
                "ll_comm_open: timeout_ms is %d, want 0 (for %d) or more", timeout_ms, LL_COMM_TIMEOUT_MS);
    char names[80] = "";
    for (int i = 0; i < kNamed; i++) {
        const named_comm *known = &named_comms[i];
        if (strcmp(name, known->name) == 0) {
            if (!known->library.file) return ll_comm_self(comm);
            return lli_comm_load(&known->library, timeout_ms ? timeout_ms : LL_COMM_TIMEOUT_MS, comm);
        }
        const size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s\"%s\"", i ? ", " : "", known->name);
    }
    return lli_fail(LL_STATUS_INVALID_ARG, "ll_comm_open: name is \"%.100s\", want one of %s", name, names);
}

/* Communicators in libraries of their own, so that liblogitless needs neither MPI nor anything else that a
 * machine may lack. Folders are tried in turn: LL_COMM_PATH, that of the file which holds this function (the
 * shared library, or the program), that of the program, then the system's. The first file that is there is
 * the one: if it does not load, its reason is the answer, not another copy further on. */
#define _GNU_SOURCE /* dladdr, secure_getenv */
#include "comm/comm_internal.h"
#include "core/status.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/* Open MPI opens plugins that take its own symbols from the global scope, so the library must be there with
 * RTLD_GLOBAL, or MPI_Init ends the program. NOW: a missing symbol is a sentence here, no crash later. */
static void *open_library(const char *path) {
    return dlopen(path, RTLD_NOW | RTLD_GLOBAL);
}

/* Cuts the file's name off; false where the path has no folder. */
static bool keep_folder(char *path) {
    char *slash = strrchr(path, '/');
    if (slash) *slash = 0;
    return slash && slash != path;
}

typedef bool folder_fn(char folder[PATH_MAX]);

static bool setting(char folder[PATH_MAX]) {
    const char *path = secure_getenv("LL_COMM_PATH");
    if (!path || !*path || strlen(path) >= PATH_MAX) return false;
    strcpy(folder, path);
    return true;
}

static bool beside_library(char folder[PATH_MAX]) {
    Dl_info info;
    if (!dladdr((void *)(uintptr_t)ll_comm_open, &info)) return false;
    if (!info.dli_fname || strlen(info.dli_fname) >= PATH_MAX) return false;
    strcpy(folder, info.dli_fname);
    return keep_folder(folder);
}

static bool beside_program(char folder[PATH_MAX]) {
    const ssize_t length = readlink("/proc/self/exe", folder, PATH_MAX - 1);
    if (length <= 0) return false;
    folder[length] = 0;
    return keep_folder(folder);
}

static folder_fn *const folders[] = {setting, beside_library, beside_program};
enum { kFolders = sizeof folders / sizeof *folders };

/* NULL: dlerror knows why. *present: there is such a file, but it does not load. looked: the folders tried,
 * ", " after each. */
static void *find_library(const char *file, bool *present, char *looked, size_t looked_bytes) {
    char folder[PATH_MAX], last[PATH_MAX] = "", path[PATH_MAX + 80];
    size_t used = 0;
    for (int i = 0; i < kFolders; i++) {
        if (!folders[i](folder) || strcmp(folder, last) == 0) continue;
        strcpy(last, folder);
        if (used < looked_bytes) {
            used += (size_t)snprintf(looked + used, looked_bytes - used, "%.90s, ", folder);
        }
        snprintf(path, sizeof path, "%s/%s", folder, file);
        *present = access(path, F_OK) == 0;
        if (*present) return open_library(path);
    }
    return open_library(file);
}

ll_status lli_comm_load(const lli_comm_library *library, int32_t timeout_ms, ll_comm *comm) {
    bool present = false;
    char looked[220] = "";
    void *handle = find_library(library->file, &present, looked, sizeof looked);
    LLI_REQUIRE(handle || !present, LL_STATUS_COMM, "ll_comm_open: %s could not be loaded: %.400s",
                library->file, dlerror());
    LLI_REQUIRE(handle, LL_STATUS_COMM,
                "ll_comm_open: no %s that loads in %sthe system's folders: %.140s; %s", library->file, looked,
                dlerror(), library->hint);
    lli_comm_entry *entry;
    void *symbol = dlsym(handle, library->entry);
    if (!symbol) {
        dlclose(handle);
        return lli_fail(LL_STATUS_COMM, "ll_comm_open: %s has no function %s", library->file, library->entry);
    }
    memcpy(&entry, &symbol, sizeof entry);
    ll_comm made = LL_COMM_INIT;
    char why[kCommSentenceBytes] = "";
    const ll_status status = (ll_status)entry(timeout_ms, &made, why, sizeof why);
    why[sizeof why - 1] = 0;
    /* From here on the library stays for good: its communicator's functions are in it, and MPI leaves threads
     * and exit handlers behind that would run in memory that is gone. */
    if (status != LL_STATUS_OK) {
        return lli_fail(status, "ll_comm_open: %.450s", *why ? why : ll_status_name(status));
    }
    if (lli_comm_check(&made, "the communicator") != LL_STATUS_OK) {
        snprintf(why, sizeof why, "%s", ll_last_error());
        return lli_fail(LL_STATUS_COMM, "ll_comm_open: %s: %.400s", library->file, why);
    }
    *comm = made;
    return LL_STATUS_OK;
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

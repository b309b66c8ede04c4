/* Looking for a library that is opened on demand (library.h). */
#define _GNU_SOURCE /* dladdr, secure_getenv */
#include "core/library.h"

#include <assert.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static_assert(kLibraryPathBytes >= PATH_MAX + 80, "a folder and the name of a file");

/* Cuts the file's name off; false where the path has no folder. */
static bool keep_folder(char *path) {
    char *slash = strrchr(path, '/');
    if (slash) *slash = 0;
    return slash && slash != path;
}

typedef bool folder_fn(const char *variable, char folder[PATH_MAX]);

static bool setting(const char *variable, char folder[PATH_MAX]) {
    const char *path = secure_getenv(variable);
    if (!path || !*path || strlen(path) >= PATH_MAX) return false;
    strcpy(folder, path);
    return true;
}

static bool beside_library(const char *variable, char folder[PATH_MAX]) {
    (void)variable;
    Dl_info info;
    char path[PATH_MAX]; /* of a program as it was called, so it may be relative */
    if (!dladdr((void *)(uintptr_t)lli_library_find, &info)) return false;
    if (!info.dli_fname || strlen(info.dli_fname) >= PATH_MAX) return false;
    strcpy(path, info.dli_fname);
    return keep_folder(path) && realpath(path, folder);
}

static bool beside_program(const char *variable, char folder[PATH_MAX]) {
    (void)variable;
    const ssize_t length = readlink("/proc/self/exe", folder, PATH_MAX - 1);
    if (length <= 0) return false;
    folder[length] = 0;
    return keep_folder(folder);
}

static folder_fn *const folders[] = {setting, beside_library, beside_program};
enum { kFolders = sizeof folders / sizeof *folders };

void lli_library_find(const char *variable, const char *file, lli_library *library) {
    char folder[PATH_MAX], last[PATH_MAX] = "";
    size_t used = 0;
    library->present = false;
    library->looked[0] = 0;
    for (int i = 0; i < kFolders; i++) {
        if (!folders[i](variable, folder) || strcmp(folder, last) == 0) continue;
        strcpy(last, folder);
        if (used < sizeof library->looked) {
            used +=
                (size_t)snprintf(library->looked + used, sizeof library->looked - used, "%.90s, ", folder);
        }
        snprintf(library->path, sizeof library->path, "%s/%s", folder, file);
        library->present = access(library->path, F_OK) == 0;
        if (library->present) return;
    }
    snprintf(library->path, sizeof library->path, "%s", file);
}

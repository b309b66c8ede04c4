/* Where a library that is opened on demand lies. */
#ifndef LLI_CORE_LIBRARY_H
#define LLI_CORE_LIBRARY_H

#include <stdbool.h>

enum { kLibraryPathBytes = 4176, kLibraryLookedBytes = 220 };

typedef struct lli_library {
    bool present;                 /* there is such a file in one of the folders, whether it loads or not */
    char path[kLibraryPathBytes]; /* of the first one; else the file's name, for the system's folders */
    char looked[kLibraryLookedBytes]; /* folders tried, ", " after each */
} lli_library;

/* Looks for `file` in the folder named by the environment variable `variable`, in that of the file which
 * holds this function (the shared library, or the program) and in that of the program; loads nothing. The
 * first file that is there is the one: if it does not load, its reason is the answer, not another copy
 * further on. */
void lli_library_find(const char *variable, const char *file, lli_library *library);

#endif

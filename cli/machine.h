/* What the program says about the machine it runs on. */
#ifndef LL_CLI_MACHINE_H
#define LL_CLI_MACHINE_H

#include "cli.h"

typedef struct cli_machine {
    char cpu[128];      /* "unknown" where the system does not tell */
    char features[256]; /* those that matter to kernels, by blanks */
} cli_machine;

cli_machine cli_machine_read(void);

/* Threads that a plan gets by default here; 0, and why, if no plan can be made. */
ll_status cli_default_threads(int32_t *n_threads);

/* GB/s of reading memory in order with n_threads threads, best of a few passes over 512 MiB; 0 without
 * memory. */
double cli_read_bandwidth(int32_t n_threads);

/* Where the library of a communicator lies: true and its path, or false and why it is not there. Only looks
 * for the file, in LL_COMM_PATH and beside the program: loading it would start MPI. */
bool cli_find_comm(const char *file, char *text, size_t text_bytes);

#endif

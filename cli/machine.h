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

#endif

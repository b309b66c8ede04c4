/* A progress bar on stderr, drawn at most ten times a second and only on a terminal, so that logs and
 * tests never see it. */
#define _POSIX_C_SOURCE 200809L
#include "cli.h"

#include <stdio.h>
#include <unistd.h>

enum { kBarColumns = 30 };

cli_progress cli_progress_begin(const char *label, int64_t total) {
    double now = cli_seconds();
    cli_progress progress = {label, total, now, now - 1, total > 0 && isatty(STDERR_FILENO)};
    cli_progress_update(&progress, 0);
    return progress;
}

void cli_progress_update(cli_progress *progress, int64_t done) {
    double now = cli_seconds();
    if (!progress->on || now - progress->last_s < 0.1) return;
    progress->last_s = now;
    double part = (double)done / (double)progress->total;
    int filled = (int)(part * kBarColumns);
    fprintf(stderr, "\r%s [", progress->label);
    for (int i = 0; i < kBarColumns; i++) fputc(i < filled ? '#' : '.', stderr);
    double left_s = part > 0 ? (now - progress->begin_s) * (1 - part) / part : 0;
    fprintf(stderr, "] %3.0f %%  %.0f s left \033[K", 100 * part, left_s);
    fflush(stderr);
}

void cli_progress_end(cli_progress *progress) {
    if (progress->on) fputs("\r\033[K", stderr);
    progress->on = false;
}

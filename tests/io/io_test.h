/* Files for the tests of src/io: made in a directory of their own, removed at the end. */
#ifndef LLI_TESTS_IO_TEST_H
#define LLI_TESTS_IO_TEST_H

#include "io/tensor_file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char io_directory[64];
static char io_path[128]; /* the one file of the test that runs */

static int io_setup(void **state) {
    (void)state;
    snprintf(io_directory, sizeof io_directory, "/tmp/logitless-io-XXXXXX");
    if (!mkdtemp(io_directory)) return -1;
    snprintf(io_path, sizeof io_path, "%s/file", io_directory);
    return 0;
}

static int io_teardown(void **state) {
    (void)state;
    unlink(io_path);
    return rmdir(io_directory); /* fails, and with it the run, if a temporary file was left behind */
}

static inline void io_write(const void *bytes, size_t n_bytes) {
    FILE *out = fopen(io_path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(bytes, 1, n_bytes, out), n_bytes);
    assert_int_equal(fclose(out), 0);
}

static inline lli_tensor_file *io_open(void) {
    lli_tensor_file *file;
    if (lli_tensor_file_open(io_path, &file) != LL_STATUS_OK) fail_msg("%s", ll_last_error());
    return file;
}

/* The last sentence is one line and has `part` in it. */
static inline void io_sentence(const char *part) {
    if (!strstr(ll_last_error(), part)) fail_msg("\"%s\" does not say \"%s\"", ll_last_error(), part);
    assert_null(strchr(ll_last_error(), '\n'));
}

/* Opening the file fails and the sentence has the path and `part`. */
static inline void io_refused(const char *part) {
    lli_tensor_file *file;
    assert_int_equal(lli_tensor_file_open(io_path, &file), LL_STATUS_INVALID_ARG);
    assert_null(file);
    io_sentence(part);
    io_sentence(io_path);
}

#endif

/* ll_comm_open: names, where a library is looked for, and what is said where it is not to be had.
 * COMM_LIBRARIES has folders with files that are all named as the library over MPI is; none of them is it. */
#define _GNU_SOURCE /* setenv */
#include "comm/comm_internal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define TEXT(x)    #x
#define TEXT_OF(x) TEXT(x)
#define MAX_TEXT   TEXT_OF(LL_COMM_RANKS_MAX)

static const ll_comm zero;

/* Opens "mpi" from a folder of COMM_LIBRARIES, the library in the given mode. */
static ll_status open_fake(const char *folder, const char *mode, int32_t timeout_ms, ll_comm *comm) {
    char path[4096] = COMM_LIBRARIES "/";
    strncat(path, folder, sizeof path - strlen(path) - 1);
    setenv("LL_COMM_PATH", path, 1);
    setenv("FAKE_COMM", mode, 1);
    const ll_status status = ll_comm_open("mpi", timeout_ms, comm);
    unsetenv("LL_COMM_PATH");
    unsetenv("FAKE_COMM");
    return status;
}

static void assert_contains(const char *text, const char *part) {
    if (!strstr(text, part)) fail_msg("\"%s\" does not contain \"%s\"", text, part);
}

static void names(void **unused) {
    (void)unused;
    ll_comm comm;
    assert_int_equal(ll_comm_open("self", 0, &comm), LL_STATUS_OK);
    assert_int_equal(comm.size, 1);
    ll_comm_destroy(&comm);
    memset(&comm, 1, sizeof comm);
    assert_int_equal(ll_comm_open("nccl", 0, &comm), LL_STATUS_INVALID_ARG);
    assert_string_equal(ll_last_error(), "ll_comm_open: name is \"nccl\", want one of \"self\", \"mpi\"");
    assert_memory_equal(&comm, &zero, sizeof comm);
    assert_int_equal(ll_comm_open("", 0, &comm), LL_STATUS_INVALID_ARG);
    assert_int_equal(ll_comm_open(NULL, 0, &comm), LL_STATUS_INVALID_ARG);
    assert_string_equal(ll_last_error(), "ll_comm_open: name is NULL");
    assert_int_equal(ll_comm_open("self", 0, NULL), LL_STATUS_INVALID_ARG);
    assert_string_equal(ll_last_error(), "ll_comm_open: comm is NULL");
    assert_int_equal(ll_comm_open("self", -5, &comm), LL_STATUS_INVALID_ARG);
    assert_string_equal(ll_last_error(), "ll_comm_open: timeout_ms is -5, want 0 (for 60000) or more");
}

/* What is wrong before any library is looked for. */
static void nccl_arguments(void **unused) {
    (void)unused;
    ll_comm self, comm, none = {0};
    assert_int_equal(ll_comm_self(&self), LL_STATUS_OK);
    assert_int_equal(ll_comm_nccl(&self, 0, NULL), LL_STATUS_INVALID_ARG);
    assert_string_equal(ll_last_error(), "ll_comm_nccl: comm is NULL");
    assert_int_equal(ll_comm_nccl(&self, 0, &self), LL_STATUS_INVALID_ARG);
    assert_string_equal(ll_last_error(), "ll_comm_nccl: comm is host, want another struct");
    assert_int_equal(ll_comm_nccl(NULL, 0, &comm), LL_STATUS_INVALID_ARG);
    assert_string_equal(ll_last_error(), "ll_comm_nccl: host is NULL");
    assert_int_equal(ll_comm_nccl(&none, 0, &comm), LL_STATUS_INVALID_ARG);
    assert_int_equal(ll_comm_nccl(&self, -1, &comm), LL_STATUS_INVALID_ARG);
    assert_string_equal(ll_last_error(), "ll_comm_nccl: timeout_ms is -1, want 0 (for 60000) or more");
    assert_memory_equal(&comm, &zero, sizeof comm);
}

/* A plan on a CPU has host memory, and says so before any operation. */
static void device_memory_is_not_for_a_cpu(void **unused) {
    (void)unused;
    ll_comm comm;
    ll_plan *plan = NULL;
    ll_plan_desc desc = LL_PLAN_DESC_INIT;
    desc.n_tokens_max = desc.n_hidden = desc.v_local = desc.v_total = 8;
    desc.x_dtype = desc.w_dtype = LL_DTYPE_F32;
    desc.comm = &comm;
    assert_int_equal(ll_comm_self(&comm), LL_STATUS_OK);
    assert_int_equal(comm.memory, LL_COMM_MEMORY_ANY);
    assert_int_equal(ll_plan_create(&desc, &plan), LL_STATUS_OK);
    ll_plan_destroy(plan);
    comm.memory = LL_COMM_MEMORY_DEVICE;
    assert_int_equal(ll_plan_create(&desc, &plan), LL_STATUS_INVALID_ARG);
    assert_contains(ll_last_error(), "comm.memory is LL_COMM_MEMORY_DEVICE");
}

static void opened(void **unused) {
    (void)unused;
    ll_comm comm;
    int32_t mine = 7, all = 0;
    assert_int_equal(open_fake("mpi", "", 1234, &comm), LL_STATUS_OK);
    assert_int_equal(comm.size, 1);
    assert_string_equal(comm.error(comm.self), "opened with 1234 ms");
    assert_int_equal(comm.all_gather(comm.self, &mine, &all, sizeof mine), LL_STATUS_OK);
    assert_int_equal(all, 7);
    ll_comm_destroy(&comm);
    assert_int_equal(open_fake("mpi", "", 0, &comm), LL_STATUS_OK);
    assert_string_equal(comm.error(comm.self), "opened with 60000 ms");
    ll_comm_destroy(&comm);
}

static void refused(void **unused) {
    (void)unused;
    ll_comm comm;
    assert_int_equal(open_fake("mpi", "refuse", 0, &comm), LL_STATUS_COMM);
    assert_string_equal(ll_last_error(), "ll_comm_open: rank 3 of 8: no network, 100% sure: %s");
    assert_memory_equal(&comm, &zero, sizeof comm);
    assert_int_equal(open_fake("mpi", "refuse endlessly", 0, &comm), LL_STATUS_MEMORY);
    assert_contains(ll_last_error(), "ll_comm_open: xxxxx");
    assert_int_equal(open_fake("mpi", "refuse silently", 0, &comm), LL_STATUS_UNSUPPORTED);
    assert_string_equal(ll_last_error(), "ll_comm_open: LL_STATUS_UNSUPPORTED");
    assert_int_equal(open_fake("mpi", "no ranks", 0, &comm), LL_STATUS_COMM);
    assert_string_equal(
        ll_last_error(),
        "ll_comm_open: liblogitless_mpi.so.0: the communicator.size is 0, want 1 .. " MAX_TEXT);
    assert_memory_equal(&comm, &zero, sizeof comm);
}

/* A file that is there but does not load is the answer, whatever other folders have. */
static void broken_files(void **unused) {
    (void)unused;
    ll_comm comm;
    assert_int_equal(open_fake("text", "", 0, &comm), LL_STATUS_COMM);
    assert_contains(ll_last_error(), "ll_comm_open: liblogitless_mpi.so.0 could not be loaded: ");
    assert_contains(ll_last_error(), "text/liblogitless_mpi.so.0");
    assert_int_equal(open_fake("no_entry", "", 0, &comm), LL_STATUS_COMM);
    assert_string_equal(ll_last_error(),
                        "ll_comm_open: liblogitless_mpi.so.0 has no function ll_comm_mpi_open");
    assert_memory_equal(&comm, &zero, sizeof comm);
}

/* By names that no machine has, so that it does not matter whether the library over MPI is installed. */
static void missing(void **unused) {
    (void)unused;
    const lli_comm_library none = {"liblogitless_none.so.0", "ll_comm_none_open", "build it with care"};
    ll_comm comm;
    setenv("LL_COMM_PATH", "/nonexistent", 1);
    assert_int_equal(lli_comm_load(&none, 0, &comm), LL_STATUS_COMM);
    unsetenv("LL_COMM_PATH");
    assert_contains(ll_last_error(), "ll_comm_open: no liblogitless_none.so.0 that loads in /nonexistent, ");
    assert_contains(ll_last_error(), ", the system's folders: liblogitless_none.so.0: cannot open");
    assert_contains(ll_last_error(), "; build it with care");
    setenv("LL_COMM_PATH", "", 1);
    assert_int_equal(lli_comm_load(&none, 0, &comm), LL_STATUS_COMM);
    unsetenv("LL_COMM_PATH");
    assert_null(strstr(ll_last_error(), "/nonexistent"));
    assert_contains(ll_last_error(), "; build it with care");
}

/* Beside the program, when LL_COMM_PATH is not set or its folder has none. */
static void beside(void **unused) {
    (void)unused;
    const lli_comm_library library = {"liblogitless_test_beside.so.0", "ll_comm_mpi_open", ""};
    ll_comm comm;
    for (int with_path = 0; with_path < 2; with_path++) {
        if (with_path) setenv("LL_COMM_PATH", "/nonexistent", 1);
        assert_int_equal(lli_comm_load(&library, 9, &comm), LL_STATUS_OK);
        assert_string_equal(comm.error(comm.self), "opened with 9 ms");
        ll_comm_destroy(&comm);
    }
    unsetenv("LL_COMM_PATH");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names),
        cmocka_unit_test(nccl_arguments),
        cmocka_unit_test(device_memory_is_not_for_a_cpu),
        cmocka_unit_test(opened),
        cmocka_unit_test(refused),
        cmocka_unit_test(broken_files),
        cmocka_unit_test(missing),
        cmocka_unit_test(beside),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

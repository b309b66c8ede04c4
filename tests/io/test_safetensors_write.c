/* Writing .safetensors files: what is written is read back, and every failure leaves nothing new behind. */
#define _DEFAULT_SOURCE /* mkdtemp, setitimer */
#include "io_test.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>

static void written(const lli_tensor *tensors, int64_t count, const char *const *metadata,
                    int64_t n_metadata) {
    if (lli_safetensors_write(io_path, tensors, count, metadata, n_metadata) != LL_STATUS_OK)
        fail_msg("%s", ll_last_error());
}

static int files_in_directory(void) {
    DIR *directory = opendir(io_directory);
    assert_non_null(directory);
    int n = 0;
    for (struct dirent *entry; (entry = readdir(directory));)
        n += strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..");
    closedir(directory);
    return n;
}

static void is_old_file(void) {
    char bytes[8] = "";
    FILE *in = fopen(io_path, "rb");
    assert_non_null(in);
    assert_int_equal(fread(bytes, 1, sizeof bytes, in), 3);
    fclose(in);
    assert_string_equal(bytes, "old");
    assert_int_equal(files_in_directory(), 1);
}

static void round_trip_with_every_type_aligned(void **state) {
    (void)state;
    static const float nll[3] = {1, 2, 3};
    static const int64_t argmax[3] = {4, 5, 6};
    static const uint16_t half[1] = {7};
    static const int32_t ids[1] = {8};
    const lli_tensor tensors[] = {
        {"odd \"half\" \\ \n \xc3\xa9", half, LL_DTYPE_BF16, 1, {1}},
        {"nll", nll, LL_DTYPE_F32, 1, {3}},
        {"half", half, LL_DTYPE_F16, 0, {0}},
        {"argmax", argmax, LL_DTYPE_I64, 2, {1, 3}},
        {"ids", ids, LL_DTYPE_I32, 1, {1}},
        {"empty", NULL, LL_DTYPE_F32, 2, {0, 9}},
    };
    static const char *const metadata[] = {"format", "pt", "quote\"", "\t"};
    written(tensors, 6, metadata, 2);
    assert_int_equal(files_in_directory(), 1);
    lli_tensor_file *file = io_open();
    assert_int_equal(lli_tensor_file_count(file), 6);
    for (int i = 0; i < 6; i++) {
        lli_tensor found;
        assert_int_equal(lli_tensor_file_find(file, tensors[i].name, &found), LL_STATUS_OK);
        assert_int_equal(found.dtype, tensors[i].dtype);
        assert_int_equal(found.n_dims, tensors[i].n_dims);
        assert_memory_equal(found.dims, tensors[i].dims, sizeof(int64_t) * (size_t)found.n_dims);
    }
    lli_tensor found;
    assert_int_equal(lli_tensor_file_find(file, "nll", &found), LL_STATUS_OK);
    assert_memory_equal(found.data, nll, sizeof nll);
    assert_int_equal(lli_tensor_file_find(file, "argmax", &found), LL_STATUS_OK);
    assert_memory_equal(found.data, argmax, sizeof argmax);
    assert_string_equal(lli_tensor_file_at(file, 0).name, "argmax");
    lli_tensor_file_close(file);
    struct stat info;
    assert_int_equal(stat(io_path, &info), 0);
    assert_int_equal(info.st_mode & 0600, 0600);
}

static void nothing_is_a_file_too(void **state) {
    (void)state;
    written(NULL, 0, NULL, 0);
    lli_tensor_file *file = io_open();
    assert_int_equal(lli_tensor_file_count(file), 0);
    lli_tensor_file_close(file);
}

static void header_ends_on_8_for_every_name_length(void **state) {
    (void)state;
    static const int64_t value[1] = {42};
    char name[16] = "";
    for (int i = 0; i < 9; i++) {
        name[i] = 'n';
        const lli_tensor tensor = {name, value, LL_DTYPE_I64, 1, {1}};
        written(&tensor, 1, NULL, 0);
        lli_tensor_file *file = io_open();
        lli_tensor found;
        assert_int_equal(lli_tensor_file_find(file, NULL, &found), LL_STATUS_OK);
        assert_int_equal(*(const int64_t *)found.data, 42);
        lli_tensor_file_close(file);
    }
}

static void bad_arguments_write_nothing(void **state) {
    (void)state;
    static const float one[1] = {1};
    const lli_tensor good = {"w", one, LL_DTYPE_F32, 1, {1}};
    const struct {
        lli_tensor tensor;
        const char *part;
    } cases[] = {
        {{NULL, one, LL_DTYPE_F32, 1, {1}}, "tensor name '' is missing"},
        {{"a\xff", one, LL_DTYPE_F32, 1, {1}}, "tensor name 'a?' is not UTF-8"},
        {{"w", one, LL_DTYPE_F32, 1, {1}}, "tensor name 'w' is given twice"},
        {{"__metadata__", one, LL_DTYPE_F32, 1, {1}}, "reserved"},
        {{"v", NULL, LL_DTYPE_F32, 1, {1}}, "tensor 'v': data is NULL"},
        {{"v", one, LL_DTYPE_NONE, 1, {1}}, "tensor 'v': dtype 0"},
        {{"v", one, (ll_dtype)77, 1, {1}}, "tensor 'v': dtype 77"},
        {{"v", one, LL_DTYPE_F32, 9, {1}}, "tensor 'v': 9 dims"},
        {{"v", one, LL_DTYPE_F32, -1, {1}}, "tensor 'v': -1 dims"},
        {{"v", one, LL_DTYPE_F32, 1, {-1}}, "tensor 'v': a dim is negative"},
        {{"v", one, LL_DTYPE_F32, 2, {INT64_MAX, 2}}, "beyond 2^63"},
    };
    io_write("old", 3);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const lli_tensor tensors[] = {good, cases[i].tensor};
        assert_int_equal(lli_safetensors_write(io_path, tensors, 2, NULL, 0), LL_STATUS_INVALID_ARG);
        io_sentence(cases[i].part);
        io_sentence(io_path);
    }
    static const char *const twice[] = {"a", "1", "a", "2"}, *const missing[] = {"a", NULL};
    assert_int_equal(lli_safetensors_write(io_path, &good, 1, twice, 2), LL_STATUS_INVALID_ARG);
    io_sentence("metadata key 'a' is given twice");
    assert_int_equal(lli_safetensors_write(io_path, &good, 1, missing, 1), LL_STATUS_INVALID_ARG);
    io_sentence("metadata value 0 is missing");
    is_old_file();
}

static const float zeros[1 << 16];
static const lli_tensor large = {"large", zeros, LL_DTYPE_F32, 1, {1 << 16}};

/* A file size limit stands for a full disk: write() first comes back short, then fails. */
static void out_of_space_keeps_the_old_file(void **state) {
    (void)state;
    struct rlimit before, limit;
    io_write("old", 3);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    static const rlim_t limits[] = {0, 5, 100, 200000};
    for (int i = 0; i < 4; i++) {
        limit = before;
        limit.rlim_cur = limits[i];
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        ll_status status = lli_safetensors_write(io_path, &large, 1, NULL, 0);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        assert_int_equal(status, LL_STATUS_IO);
        io_sentence("cannot write: File too large");
        io_sentence(io_path);
        is_old_file();
    }
    signal(SIGXFSZ, handler);
}

static void places_that_cannot_be_written(void **state) {
    (void)state;
    assert_int_equal(lli_safetensors_write("/nonexistent/out", &large, 1, NULL, 0), LL_STATUS_IO);
    io_sentence("/nonexistent/out: cannot write: No such file or directory");
    assert_int_equal(lli_safetensors_write("", &large, 1, NULL, 0), LL_STATUS_IO);
    assert_int_equal(lli_safetensors_write(io_directory, &large, 1, NULL, 0), LL_STATUS_IO);
    io_sentence("not a regular file");
    assert_int_equal(lli_safetensors_write("/dev/full", &large, 1, NULL, 0), LL_STATUS_IO);
    io_sentence("not a regular file"); /* rename would have replaced the device */
    struct stat info;
    assert_int_equal(stat("/dev/full", &info), 0);
    assert_true(S_ISCHR(info.st_mode));
    char name[400];
    snprintf(name, sizeof name, "%s/%0300d", io_directory,
             0); /* fails in rename, after everything is written */
    unlink(io_path);
    assert_int_equal(lli_safetensors_write(name, &large, 1, NULL, 0), LL_STATUS_IO);
    assert_int_equal(files_in_directory(), 0);
}

static void on_alarm(int number) {
    (void)number;
}

/* Signals without SA_RESTART while writing: no error, no lost byte. */
static void interruptions_do_no_harm(void **state) {
    (void)state;
    struct sigaction action = {.sa_handler = on_alarm}, before;
    sigemptyset(&action.sa_mask);
    assert_int_equal(sigaction(SIGALRM, &action, &before), 0);
    const struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &often, NULL);
    ll_status status = LL_STATUS_OK;
    for (int i = 0; i < 50 && status == LL_STATUS_OK; i++)
        status = lli_safetensors_write(io_path, &large, 1, NULL, 0);
    setitimer(ITIMER_REAL, &never, NULL);
    sigaction(SIGALRM, &before, NULL);
    if (status != LL_STATUS_OK) fail_msg("%s", ll_last_error());
    lli_tensor_file_close(io_open());
}

static void a_mapped_file_can_be_replaced(void **state) {
    (void)state;
    written(&large, 1, NULL, 0);
    lli_tensor_file *file = io_open();
    lli_tensor tensor;
    assert_int_equal(lli_tensor_file_find(file, "large", &tensor), LL_STATUS_OK);
    tensor.name = "again";
    written(&tensor, 1, NULL, 0);
    assert_memory_equal(tensor.data, zeros, sizeof zeros);
    lli_tensor_file_close(file);
    file = io_open();
    assert_string_equal(lli_tensor_file_at(file, 0).name, "again");
    lli_tensor_file_close(file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip_with_every_type_aligned),
        cmocka_unit_test(nothing_is_a_file_too),
        cmocka_unit_test(header_ends_on_8_for_every_name_length),
        cmocka_unit_test(bad_arguments_write_nothing),
        cmocka_unit_test(out_of_space_keeps_the_old_file),
        cmocka_unit_test(places_that_cannot_be_written),
        cmocka_unit_test(interruptions_do_no_harm),
        cmocka_unit_test(a_mapped_file_can_be_replaced),
    };
    return cmocka_run_group_tests(tests, io_setup, io_teardown);
}

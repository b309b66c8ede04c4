/* .npy files: what NumPy writes is read, everything else is refused with a sentence. */
#define _DEFAULT_SOURCE /* mkdtemp */
#include "io_test.h"

/* A file of version major.0 with this dict, padded to 64 bytes as NumPy does, and n_data bytes 0, 1, 2, ...
 */
static void make(int major, const char *dict, size_t n_data) {
    static unsigned char bytes[8192];
    size_t prefix = major == 1 ? 10 : 12, end = (prefix + strlen(dict) + 1 + 63) / 64 * 64,
           length = end - prefix;
    memcpy(bytes, "\x93NUMPY", 6);
    bytes[6] = (unsigned char)major;
    bytes[7] = 0;
    for (size_t i = 0; i < prefix - 8; i++) bytes[8 + i] = (unsigned char)(length >> (8 * i));
    memset(bytes + prefix, ' ', length);
    memcpy(bytes + prefix, dict, strlen(dict));
    bytes[end - 1] = '\n';
    for (size_t i = 0; i < n_data; i++) bytes[end + i] = (unsigned char)i;
    io_write(bytes, end + n_data);
}

#define DICT(descr, fortran, shape) "{'descr': " descr ", 'fortran_order': " fortran ", 'shape': " shape ", }"

static void refused(const char *dict, size_t n_data, const char *part) {
    make(1, dict, n_data);
    io_refused(part);
}

static lli_tensor opened(lli_tensor_file **file) {
    lli_tensor tensor;
    *file = io_open();
    assert_int_equal(lli_tensor_file_count(*file), 1);
    assert_int_equal(lli_tensor_file_find(*file, NULL, &tensor), LL_STATUS_OK);
    return tensor;
}

static void reads_all_versions_and_types(void **state) {
    (void)state;
    static const struct {
        const char *dict;
        ll_dtype dtype;
        size_t element;
    } cases[] = {
        {DICT("'<f4'", "False", "(2, 3)"), LL_DTYPE_F32, 4},
        {DICT("'=f4'", "False", "(2, 3)"), LL_DTYPE_F32, 4},
        {DICT("'<f2'", "False", "(2, 3)"), LL_DTYPE_F16, 2},
        {DICT("'<i4'", "False", "(2, 3)"), LL_DTYPE_I32, 4},
        {DICT("'<i8'", "False", "(2, 3)"), LL_DTYPE_I64, 8},
    };
    for (int major = 1; major <= 3; major++) {
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            make(major, cases[i].dict, 6 * cases[i].element);
            lli_tensor_file *file;
            lli_tensor tensor = opened(&file);
            assert_int_equal(tensor.dtype, cases[i].dtype);
            assert_string_equal(tensor.name, "");
            assert_int_equal(tensor.n_dims, 2);
            assert_int_equal(tensor.dims[0], 2);
            assert_int_equal(tensor.dims[1], 3);
            for (size_t b = 0; b < 6 * cases[i].element; b++)
                assert_int_equal(((const unsigned char *)tensor.data)[b], b);
            lli_tensor_file_close(file);
        }
    }
}

static void key_order_and_quotes_are_free(void **state) {
    (void)state;
    make(1, "{\"shape\":(3,),'fortran_order' : False , \"descr\": '<f4'}", 12);
    lli_tensor_file *file;
    lli_tensor tensor = opened(&file);
    assert_int_equal(tensor.n_dims, 1);
    assert_int_equal(tensor.dims[0], 3);
    lli_tensor_file_close(file);
}

static void scalars_and_empty_arrays_are_tensors(void **state) {
    (void)state;
    lli_tensor_file *file;
    make(1, DICT("'<f4'", "False", "()"), 4);
    assert_int_equal(opened(&file).n_dims, 0);
    lli_tensor_file_close(file);
    make(1, DICT("'<f4'", "False", "(0, 7)"), 0);
    lli_tensor tensor = opened(&file);
    assert_int_equal(tensor.dims[1], 7);
    assert_non_null(tensor.data);
    lli_tensor_file_close(file);
    make(1, DICT("'<f4'", "False", "(1, 1, 1, 1, 1, 1, 1, 2)"), 8);
    assert_int_equal(opened(&file).n_dims, 8);
    lli_tensor_file_close(file);
}

static void column_major_only_where_it_is_also_row_major(void **state) {
    (void)state;
    lli_tensor_file *file;
    refused(DICT("'<f4'", "True", "(2, 3)"), 24, "ascontiguousarray");
    make(1, DICT("'<f4'", "True", "(1, 3, 1)"), 12);
    opened(&file);
    lli_tensor_file_close(file);
    make(1, DICT("'<f4'", "True", "(5, 0, 3)"), 0);
    opened(&file);
    lli_tensor_file_close(file);
}

static void other_types_are_refused_by_name(void **state) {
    (void)state;
    refused(DICT("'<f8'", "False", "(1,)"), 8,
            "'<f8', wanted '<f4', '<f2', '<i4' or '<i8'; convert it with .astype('<f4')");
    refused(DICT("'|V2'", "False", "(1,)"), 2, "no bf16: save it as .safetensors");
    refused(DICT("'<V2'", "False", "(1,)"), 2, "no bf16: save it as .safetensors");
    refused(DICT("'bfloat16'", "False", "(1,)"), 2, "no bf16: save it as .safetensors");
    refused(DICT("'>f4'", "False", "(1,)"), 4, "little-endian");
    refused(DICT("'|O'", "False", "(1,)"), 8, "pickles");
    refused(DICT("'<u2'", "False", "(1,)"), 2, "'<u2'");
    refused(DICT("'|f4'", "False", "(1,)"), 4, "'|f4'");
    refused(DICT("'|b1'", "False", "(1,)"), 1, "'|b1'");
    refused(DICT("[('a', '<f4')]", "False", "(1,)"), 4, "plain element type");
    refused(DICT("'<f4\\x27'", "False", "(1,)"), 4, "plain element type");
    refused(DICT("'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'", "False", "(1,)"), 4,
            "plain element type");
}

static void length_of_data_must_match(void **state) {
    (void)state;
    refused(DICT("'<f4'", "False", "(2, 3)"), 23,
            "23 bytes of data, but the .npy header's shape and type take 24");
    refused(DICT("'<f4'", "False", "(2, 3)"), 25, "25 bytes of data");
    refused(DICT("'<f4'", "False", "(2, 3)"), 0, "0 bytes of data");
}

static void products_do_not_wrap(void **state) {
    (void)state;
    refused(DICT("'<f4'", "False", "(4294967296, 4294967296)"), 0, "2^63");
    refused(DICT("'<f4'", "False", "(4611686018427387904,)"), 0, "2^63"); /* x 4 bytes = 2^64 */
    refused(DICT("'<f4'", "False", "(0, 9223372036854775807, 9223372036854775807)"), 0, "2^63");
    refused(DICT("'<f4'", "False", "(9223372036854775808,)"), 0, "below 2^63");
    refused(DICT("'<f4'", "False", "(99999999999999999999999999999999999,)"), 0, "below 2^63");
}

static void shapes_that_are_no_shape(void **state) {
    (void)state;
    static const char *const shapes[] = {
        DICT("'<f4'", "False", "(-1,)"),  DICT("'<f4'", "False", "(3)"),
        DICT("'<f4'", "False", "3"),      DICT("'<f4'", "False", "[3]"),
        DICT("'<f4'", "False", "(3,,)"),  DICT("'<f4'", "False", "(,)"),
        DICT("'<f4'", "False", "(3, 4"),  DICT("'<f4'", "False", "(3.0,)"),
        DICT("'<f4'", "False", "(0x3,)"), DICT("'<f4'", "False", "(3L,)"),
        DICT("'<f4'", "False", "(1_0,)"), DICT("'<f4'", "False", "(03,)"),
        DICT("'<f4'", "False", "(3 4)"),  DICT("'<f4'", "False", "(True,)"),
        DICT("'<f4'", "False", "(1+2,)"), DICT("'<f4'", "False", "((3,),)"),
        DICT("'<f4'", "False", "('3',)"), DICT("'<f4'", "False", "(1, 1, 1, 1, 1, 1, 1, 1, 1)"),
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) refused(shapes[i], 12, ".npy header byte");
}

static void dicts_that_are_no_header(void **state) {
    (void)state;
    static const struct {
        const char *dict, *part;
    } cases[] = {
        {"", "'{' wanted"},
        {"[]", "'{' wanted"},
        {"{}", "no descr"},
        {"{'descr': '<f4', 'shape': (3,)}", "no fortran_order"},
        {"{'descr': '<f4', 'fortran_order': False}", "no shape"},
        {"{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", "one each of"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'extra': 1}", "one each of"},
        {"{'descr': '<f4', 'fortran_order': false, 'shape': (3,)}", "True or False"},
        {"{'descr': '<f4', 'fortran_order': 0, 'shape': (3,)}", "True or False"},
        {"{'descr': '<f4', 'fortran_order': Falsehood, 'shape': (3,)}", "',' or '}'"},
        {"{'descr': '<f4' 'fortran_order': False, 'shape': (3,)}", "',' or '}'"},
        {"{'descr' '<f4', 'fortran_order': False, 'shape': (3,)}", "':'"},
        {"{descr: '<f4', 'fortran_order': False, 'shape': (3,)}", "one each of"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3,)", "',' or '}'"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}; import os", "only blanks"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}{}", "only blanks"},
        {"{,'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", "one each of"},
        {"{'descr': '<f4\n', 'fortran_order': False, 'shape': (3,)}", "plain element type"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape", "one each of"},
        {"{'descr': __import__('os'), 'fortran_order': False, 'shape': (3,)}", "plain element type"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) refused(cases[i].dict, 12, cases[i].part);
}

static void cut_anywhere_is_refused(void **state) {
    (void)state;
    unsigned char bytes[256];
    make(1, DICT("'<f4'", "False", "(2, 3)"), 24);
    FILE *in = fopen(io_path, "rb");
    assert_non_null(in);
    size_t n_bytes = fread(bytes, 1, sizeof bytes, in);
    fclose(in);
    for (size_t n = 0; n < n_bytes; n++) {
        io_write(bytes, n);
        io_refused(n == 0 ? "empty file" : "");
    }
}

static void header_length_beyond_the_file(void **state) {
    (void)state;
    unsigned char v1[] = "\x93NUMPY\1\0\xff\xff{'descr'", v2[] = "\x93NUMPY\2\0\xff\xff\xff\xff{'descr'";
    io_write(v1, sizeof v1 - 1);
    io_refused("header of 65535 bytes");
    io_write(v2, sizeof v2 - 1);
    io_refused("header of 4294967295 bytes");
}

static void unknown_versions_are_refused(void **state) {
    (void)state;
    io_write("\x93NUMPY\4\0\0\0\0\0", 12);
    io_refused("version 4.0");
    io_write("\x93NUMPY\0\0\0\0\0\0", 12);
    io_refused("version 0.0");
    io_write("\x93NUMPY\1\1\0\0\0\0", 12);
    io_refused("version 1.1");
}

static void misaligned_data_are_refused_by_name(void **state) {
    (void)state;
    static const char dict[] = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}";
    unsigned char bytes[128] = "\x93NUMPY\1";
    size_t length = sizeof dict - 1;
    while ((10 + length) % 4 != 1) length++;
    bytes[8] = (unsigned char)length;
    memset(bytes + 10, ' ', length);
    memcpy(bytes + 10, dict, sizeof dict - 1);
    io_write(bytes, 10 + length + 4);
    io_refused("not a multiple of the 4-byte element");
}

static void names_do_not_exist_in_npy(void **state) {
    (void)state;
    lli_tensor_file *file;
    lli_tensor tensor;
    make(1, DICT("'<f4'", "False", "(3,)"), 12);
    file = io_open();
    assert_int_equal(lli_tensor_file_find(file, "w", &tensor), LL_STATUS_INVALID_ARG);
    io_sentence("no tensor 'w'; the file has one tensor, without a name (.npy)");
    lli_tensor_file_close(file);
}

static void things_that_are_no_file(void **state) {
    (void)state;
    lli_tensor_file *file;
    assert_int_equal(lli_tensor_file_open("/nonexistent/x.npy", &file), LL_STATUS_IO);
    io_sentence("/nonexistent/x.npy: cannot open: No such file or directory");
    assert_int_equal(lli_tensor_file_open(io_directory, &file), LL_STATUS_INVALID_ARG);
    io_sentence("a directory");
    unlink(io_path);
    assert_int_equal(mkfifo(io_path, 0600), 0);
    io_refused("not a regular file"); /* and does not wait for a writer */
    unlink(io_path);
    io_write("PK\3\4 and so on", 14);
    io_refused("zip archive");
    lli_tensor_file_close(NULL);
}

static void dropped_pages_can_be_read_again(void **state) {
    (void)state;
    make(1, DICT("'<f4'", "False", "(1024,)"), 4096);
    lli_tensor_file *file;
    lli_tensor tensor = opened(&file);
    const unsigned char *data = tensor.data;
    lli_tensor_file_drop(file, data, 4096);
    lli_tensor_file_drop(file, data + 5, 100);
    lli_tensor_file_drop(file, data, SIZE_MAX); /* not inside the mapping: nothing happens */
    lli_tensor_file_drop(file, state, 1);
    for (size_t i = 0; i < 4096; i++) assert_int_equal(data[i], i & 0xff);
    lli_tensor_file_close(file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_all_versions_and_types),
        cmocka_unit_test(key_order_and_quotes_are_free),
        cmocka_unit_test(scalars_and_empty_arrays_are_tensors),
        cmocka_unit_test(column_major_only_where_it_is_also_row_major),
        cmocka_unit_test(other_types_are_refused_by_name),
        cmocka_unit_test(length_of_data_must_match),
        cmocka_unit_test(products_do_not_wrap),
        cmocka_unit_test(shapes_that_are_no_shape),
        cmocka_unit_test(dicts_that_are_no_header),
        cmocka_unit_test(cut_anywhere_is_refused),
        cmocka_unit_test(header_length_beyond_the_file),
        cmocka_unit_test(unknown_versions_are_refused),
        cmocka_unit_test(misaligned_data_are_refused_by_name),
        cmocka_unit_test(names_do_not_exist_in_npy),
        cmocka_unit_test(things_that_are_no_file),
        cmocka_unit_test(dropped_pages_can_be_read_again),
    };
    return cmocka_run_group_tests(tests, io_setup, io_teardown);
}

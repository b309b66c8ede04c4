/* Reading .safetensors files: one named test per attack on the header, and what sound files give. */
#define _DEFAULT_SOURCE /* mkdtemp */
#include "io_test.h"

#include <time.h>

/* A file of this header length, header and n_data bytes 0, 1, 2, ... */
static void make_raw(uint64_t header_bytes, const char *header, size_t n_header, size_t n_data) {
    unsigned char *bytes = malloc(8 + n_header + n_data);
    assert_non_null(bytes);
    memcpy(bytes, &header_bytes, 8);
    memcpy(bytes + 8, header, n_header);
    for (size_t i = 0; i < n_data; i++) bytes[8 + n_header + i] = (unsigned char)i;
    io_write(bytes, 8 + n_header + n_data);
    free(bytes);
}

/* The header is padded to a multiple of 8, as writers do. */
static void make(const char *header, size_t n_data) {
    char padded[8192];
    size_t n = strlen(header), wide = (n + 7) / 8 * 8;
    assert_true(wide <= sizeof padded);
    memset(padded, ' ', wide);
    memcpy(padded, header, n);
    make_raw(wide, padded, wide, n_data);
}

static void refused(const char *header, size_t n_data, const char *part) {
    make(header, n_data);
    io_refused(part);
}

#define ENTRY(name, dtype, shape, offsets)                                                                   \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define ONE(dtype, shape, offsets) "{" ENTRY("w", dtype, shape, offsets) "}"

static lli_tensor find(const lli_tensor_file *file, const char *name) {
    lli_tensor tensor;
    if (lli_tensor_file_find(file, name, &tensor) != LL_STATUS_OK) fail_msg("%s", ll_last_error());
    return tensor;
}

static void find_refused(const lli_tensor_file *file, const char *name, const char *part) {
    lli_tensor tensor;
    assert_int_equal(lli_tensor_file_find(file, name, &tensor), LL_STATUS_INVALID_ARG);
    io_sentence(part);
    io_sentence(io_path);
}

static void reads_every_usable_type(void **state) {
    (void)state;
    make("{\"__metadata__\":{\"format\":\"pt\"}," ENTRY("b", "F32", "[2,3]", "[8,32]") "," //
         ENTRY("a", "I64", "[1]", "[0,8]") "," ENTRY("c", "I32", "[]", "[32,36]") ","      //
         ENTRY("d", "BF16", "[1,1]", "[36,38]") "," ENTRY("e", "F16", "[1]", "[38,40]") "}",
         40);
    lli_tensor_file *file = io_open();
    assert_int_equal(lli_tensor_file_count(file), 5);
    static const char *const names[] = {"a", "b", "c", "d", "e"};
    static const ll_dtype dtypes[] = {LL_DTYPE_I64, LL_DTYPE_F32, LL_DTYPE_I32, LL_DTYPE_BF16, LL_DTYPE_F16};
    static const unsigned char first[] = {0, 8, 32, 36, 38};
    for (int i = 0; i < 5; i++) {
        lli_tensor tensor = lli_tensor_file_at(file, i);
        assert_string_equal(tensor.name, names[i]);
        assert_int_equal(tensor.dtype, dtypes[i]);
        assert_int_equal(*(const unsigned char *)tensor.data, first[i]);
        assert_ptr_equal(find(file, names[i]).data, tensor.data);
    }
    assert_int_equal(find(file, "b").n_dims, 2);
    assert_int_equal(find(file, "b").dims[1], 3);
    assert_int_equal(find(file, "c").n_dims, 0);
    lli_tensor_file_close(file);
}

static void blanks_and_escapes_are_json(void **state) {
    (void)state;
    make(" {}", 0);
    io_refused("a JSON object, {...} wanted"); /* the format: the first byte is '{' */
    make("{ \"a\\\"\\u00e9\\\\\" :\n{ \"data_offsets\" : [ 0 , 4 ] , \"shape\" : [ 1 ] ,\t\"dtype\" : "
         "\"F32\" } \r\n } ",
         4);
    lli_tensor_file *file = io_open();
    assert_string_equal(find(file, NULL).name, "a\"\xc3\xa9\\");
    find(file, "a\"\xc3\xa9\\");
    lli_tensor_file_close(file);
}

static void empty_files_and_tensors_are_sound(void **state) {
    (void)state;
    make("{}", 0);
    lli_tensor_file *file = io_open();
    assert_int_equal(lli_tensor_file_count(file), 0);
    find_refused(file, NULL, "no tensor");
    find_refused(file, "w", "no tensor 'w'");
    lli_tensor_file_close(file);
    make("{" ENTRY("full", "F32", "[1]", "[0,4]") "," ENTRY("none", "F32", "[0,5]", "[0,0]") "," //
         ENTRY("last", "F16", "[3,0]", "[4,4]") "}",
         4);
    file = io_open();
    assert_int_equal(find(file, "none").dims[1], 5);
    assert_non_null(find(file, "none").data);
    assert_non_null(find(file, "last").data);
    lli_tensor_file_close(file);
}

static void lookups_list_what_exists(void **state) {
    (void)state;
    char header[4096];
    size_t used = 0;
    for (int i = 0; i < 12; i++) {
        used += (size_t)snprintf(header + used, sizeof header - used,
                                 "%s\"t%d\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
                                 i ? "," : "{", i, 4 * i, 4 * i + 4);
    }
    snprintf(header + used, sizeof header - used, "}");
    make(header, 48);
    lli_tensor_file *file = io_open();
    find_refused(file, "t12",
                 "no tensor 't12'; the file has 't0', 't1', 't2', 't3', 't4', 't5', 't6', 't7' and 4 more");
    find_refused(file, NULL, "a tensor must be named, wanted one of 't0', 't1'");
    find_refused(file, "\x1b[31m\n", "no tensor '?[31m?'");
    lli_tensor_file_close(file);
}

static void other_types_are_refused_only_when_asked_for(void **state) {
    (void)state;
    make("{" ENTRY("d", "F64", "[1]", "[0,8]") "," ENTRY("f", "F32", "[1]", "[8,12]") "," //
         ENTRY("u", "U8", "[3]", "[12,15]") "," ENTRY("q", "F4", "[2]", "[15,16]") ","    //
         ENTRY("e", "F8_E4M3", "[1]", "[16,17]") "," ENTRY("b", "BOOL", "[1]", "[17,18]") "}",
         18);
    lli_tensor_file *file = io_open();
    assert_int_equal(find(file, "f").dtype, LL_DTYPE_F32);
    find_refused(file, "d", "tensor 'd' is F64, wanted F32, BF16, F16, I32 or I64 (convert it to F32)");
    find_refused(file, "u", "tensor 'u' is U8");
    find_refused(file, "q", "tensor 'q' is F4");
    find_refused(file, "e", "tensor 'e' is F8_E4M3");
    find_refused(file, "b", "tensor 'b' is BOOL");
    assert_null(lli_tensor_file_at(file, 0).data);
    assert_int_equal(lli_tensor_file_at(file, 0).dtype, LL_DTYPE_NONE);
    lli_tensor_file_close(file);
    refused(ONE("F4", "[3]", "[0,1]"), 1, "and a fraction");
    refused(ONE("F33", "[1]", "[0,4]"), 4, "'F33' is not one of the format");
    refused(ONE("f32", "[1]", "[0,4]"), 4, "'f32' is not one of the format");
}

static void misaligned_tensors_are_refused_by_name(void **state) {
    (void)state;
    make("{" ENTRY("u", "U8", "[3]", "[0,3]") "," ENTRY("f", "F32", "[1]", "[3,7]") "}", 7);
    lli_tensor_file *file = io_open();
    find_refused(file, "f", "tensor 'f' start at byte 123 of the file, not a multiple of its F32 element");
    lli_tensor_file_close(file);
    static const char header[] = "{" ENTRY("w", "F32", "[1]", "[0,4]") "}"; /* not padded */
    assert_int_not_equal((sizeof header - 1) % 4, 0);
    make_raw(sizeof header - 1, header, sizeof header - 1, 4);
    file = io_open();
    find_refused(file, "w", "not a multiple of its F32 element");
    assert_null(lli_tensor_file_at(file, 0).data);
    lli_tensor_file_close(file);
}

static void b96_header_lengths_that_lie(void **state) {
    (void)state;
    static const char header[] = ONE("F32", "[1]", "[0,4]");
    static const uint64_t lengths[] = {0,
                                       (uint64_t)1 << 63,
                                       UINT64_MAX - 3, /* 2^64 - 4: plus 8 wraps to 4 */
                                       UINT64_MAX - 7,
                                       UINT64_MAX,
                                       (uint64_t)1 << 32,
                                       sizeof header - 1 + 5}; /* one more than the file */
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        make_raw(lengths[i], header, sizeof header - 1, 4);
        io_refused("header length");
    }
    make_raw(sizeof header - 2, header, sizeof header - 1, 4);
    io_refused("ends inside its JSON object");
    make_raw(sizeof header, header, sizeof header - 1, 4);
    io_refused("'?' found"); /* the header takes the first data byte, 0, in */
    for (size_t n = 1; n < 8; n++) {
        io_write("\1\0\0\0\0\0\0", n);
        io_refused("too short for .safetensors");
    }
}

static void b96_offsets_that_lie(void **state) {
    (void)state;
    refused(ONE("F32", "[1]", "[8,4]"), 8, "data_offsets [8, 4], wanted begin <= end");
    refused(ONE("F32", "[1]", "[4]"), 4, "data_offsets has 1 numbers, wanted 2");
    refused(ONE("F32", "[1]", "[]"), 4, "data_offsets has 0 numbers, wanted 2");
    refused(ONE("F32", "[1]", "[0,4,8]"), 8, "data_offsets[2] is 8, wanted two integers");
    refused(ONE("F32", "[1]", "[-4,0]"), 4, "data_offsets[0] is -4");
    refused(ONE("F32", "[1]", "[0,4.0]"), 4, "'.0]}}");
    refused(ONE("F32", "[1]", "[0,4e0]"), 4, "'e0]}}");
    refused(ONE("F32", "[1]", "[0,\"4\"]"), 4, "data_offsets[1]");
    refused(ONE("F32", "[1]", "[[0,4]]"), 4, "at most 3 levels");
    refused(ONE("F32", "[1]", "{\"0\":0,\"1\":4}"), 4, "data_offsets is not an array");
    refused(ONE("F32", "[1]", "4"), 4, "data_offsets is not an array");
    refused(ONE("F32", "[1]", "[0,8]"), 4, "the 4 bytes of data");
    refused(ONE("F32", "[1]", "[0,9007199254740992]"), 4, "below 2^53");
    refused(ONE("F32", "[1]", "[0,18446744073709551620]"), 4, "below 2^53"); /* 2^64 + 4 */
    refused(ONE("F32", "[1]", "[18446744073709551612,0]"), 4, "below 2^53");
    refused(
        ONE("F32", "[1]", "[0,99999999999999999999999999999999999999999999999999999999999999999999999999]"),
        4, "w");
    refused("{\"w\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "tensor 'w' has no data_offsets");
}

static void b96_span_must_be_shape_times_type(void **state) {
    (void)state;
    refused(ONE("F32", "[2,2]", "[0,8]"), 8, "data_offsets span 8 bytes, but its shape of F32 takes 16");
    refused(ONE("F32", "[2]", "[0,7]"), 7, "span 7 bytes");
    refused(ONE("F32", "[0]", "[0,4]"), 4, "takes 0");
    refused(ONE("F32", "[]", "[0,0]"), 0, "takes 4");
}

static void b96_file_cut_or_longer(void **state) {
    (void)state;
    refused(ONE("F32", "[2]", "[0,8]"), 7, "the 7 bytes of data");
    refused(ONE("F32", "[2]", "[0,8]"), 9, "9 bytes of data, but the header's tensors end at 8");
    refused("{}", 1, "1 bytes of data, but the header's tensors end at 0");
}

static void shapes_that_lie(void **state) {
    (void)state;
    refused(ONE("F32", "[4294967296,4294967296]", "[0,0]"), 0, "beyond 2^63");
    refused(ONE("F32", "[4611686018427387904,1]", "[0,0]"), 0, "below 2^53");
    refused(ONE("F32", "[0,4503599627370496,4503599627370496]", "[0,0]"), 0, "beyond 2^63");
    refused(ONE("F32", "[-1]", "[0,4]"), 4, "shape[0] is -1");
    refused(ONE("F32", "[1,-1,-1]", "[0,4]"), 4, "shape[1] is -1");
    refused(ONE("F32", "[1.5]", "[0,4]"), 4, "'.5]");
    refused(ONE("F32", "[01]", "[0,4]"), 4, "leading zeros");
    refused(ONE("F32", "[--1]", "[0,4]"), 4, "not a JSON object");
    refused(ONE("F32", "[1 1]", "[0,4]"), 4, "not a JSON object");
    refused(ONE("F32", "[1,]", "[0,4]"), 4, "not a JSON object");
    refused(ONE("F32", "null", "[0,4]"), 4, "'null");
    refused(ONE("F32", "1", "[0,4]"), 4, "shape is not an array");
    refused(ONE("F32", "[\"1\"]", "[0,4]"), 4, "shape[0]");
    refused(ONE("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "tensor 'w' has more than 8 dimensions");
}

static void overlaps_and_holes(void **state) {
    (void)state;
    refused("{" ENTRY("a", "F32", "[2]", "[0,8]") "," ENTRY("b", "F32", "[2]", "[4,12]") "}", 12,
            "tensor 'b' begins at data byte 4, but the tensors before it end at 8 (overlap)");
    refused("{" ENTRY("a", "F32", "[2]", "[0,8]") "," ENTRY("b", "F32", "[2]", "[0,8]") "}", 8, "(overlap)");
    refused("{" ENTRY("a", "F32", "[1]", "[0,4]") "," ENTRY("b", "F32", "[1]", "[8,12]") "}", 12, "(hole)");
    refused(ONE("F32", "[1]", "[4,8]"), 8, "(hole)");
    refused("{" ENTRY("a", "F32", "[2]", "[0,8]") "," ENTRY("b", "F32", "[0]", "[4,4]") "}", 8, "(overlap)");
}

static void names_twice(void **state) {
    (void)state;
    refused("{" ENTRY("a", "F32", "[1]", "[0,4]") "," ENTRY("a", "F32", "[1]", "[4,8]") "}", 8,
            "tensor 'a' occurs twice");
    refused("{" ENTRY("a", "F32", "[1]", "[0,4]") "," ENTRY("\\u0061", "F32", "[1]", "[4,8]") "}", 8,
            "tensor 'a' occurs twice");
    refused("{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
            "key 'shape'");
    refused("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "__metadata__ occurs twice");
    refused("{\"__metadata__\":{},\"\\u005f_metadata__\":{}}", 0, "__metadata__ occurs twice");
}

static void nul_in_names(void **state) {
    (void)state;
    refused("{" ENTRY("a\\u0000b", "F32", "[1]", "[0,4]") "}", 4, "escape other than \\u0000");
    static const char header[] = "{\"a\0b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
    make_raw(sizeof header - 1, header, sizeof header - 1, 4);
    io_refused("UTF-8 text without NUL");
}

static void text_that_is_no_text(void **state) {
    (void)state;
    static const char *const names[] = {
        "\xff",         "\xc3",         "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80",
        "\xe0\x80\x80", "\xf8\x80\x80", "\x80",     "a\nb",         "\x1b"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char header[256];
        snprintf(header, sizeof header, "{\"%s\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
                 names[i]);
        refused(header, 4, "UTF-8 text");
    }
    refused("{" ENTRY("\\x41", "F32", "[1]", "[0,4]") "}", 4, "JSON escape");
    refused("{" ENTRY("\\u12g4", "F32", "[1]", "[0,4]") "}", 4, "JSON escape");
    refused("{" ENTRY("\\ud800", "F32", "[1]", "[0,4]") "}", 4, "not sound JSON");
    refused("{" ENTRY("\\udc00\\ud800", "F32", "[1]", "[0,4]") "}", 4, "not sound JSON");
}

static void headers_that_are_no_object(void **state) {
    (void)state;
    static const char *const headers[] = {
        "[]",
        "\"w\"",
        "null",
        "1",
        "{",
        "{]",
        "{}{}",
        "{},",
        "{\"w\"}",
        "{\"w\":}",
        "{\"w\":1}",
        "{\"w\":[]}",
        "{\"w\":\"x\"}",
        "{\"w\":{}}",
        "{\"w\" {}}",
        "{1:{}}",
        "{:}",
        "{,}",
        "{\"w\":{},}",
        "{\"\":{}",
        "{\"w",
        "{\"w\":{\"dtype\"}}",
        "{\"w\":{\"dtype\":\"F32\",}}",
        "{\"w\":{}\"v\":{}}",
        "{\"w\":{}{}}",
        "{\"w\":{}:1}",
        "{\"w\":{\"dtype\":1,\"shape\":[],\"data_offsets\":[0,0]}}",
        "{//\n}",
        "{\"w\":{\"a\":[}]}",
        "{\"w\":true}",
        "{\"w\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0],\"more\":1}}",
        "{\"w\":{\"shape\":[]}}",
        "\xef\xbb\xbf{}",
        "{\"a\":{},\"b\":{}:{}}",
        "{\"a\\",
        "{\"a\\u00",
        "{{}}",
        "{}\"\"",
        "{\"__metadata__\":{} {}}",
    };
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) refused(headers[i], 0, "");
}

static void metadata_is_an_object_of_strings(void **state) {
    (void)state;
    static const char *const bad[] = {
        "{\"__metadata__\":\"x\"}",
        "{\"__metadata__\":[]}",
        "{\"__metadata__\":{\"a\":1}}",
        "{\"__metadata__\":{\"a\":{}}}",
        "{\"__metadata__\":{\"a\":\"b\" \"c\"}}",
        "{\"__metadata__\":{\"a\":\"b\",}}",
        "{\"__metadata__\":{\"a\"}}",
        "{\"__metadata__\":{}{}}",
        "{\"__metadata__\":{\"a\":}}",
        "{\"__metadata__\":}",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) refused(bad[i], 0, "__metadata__ of the header");
    make("{\"__metadata__\" : { } }", 0);
    lli_tensor_file_close(io_open());
    make("{" ENTRY("w", "F32", "[1]", "[0,4]") ",\"__metadata__\":{\"a\":\"}{\\\"\" , \"b\":\"\"}}", 4);
    lli_tensor_file_close(io_open());
}

static void deep_nesting(void **state) {
    (void)state;
    size_t n = (size_t)1 << 20;
    char *header = malloc(n);
    assert_non_null(header);
    memset(header, '[', n);
    memcpy(header, "{\"w\":", 5);
    make_raw(n, header, n, 0);
    io_refused("at most 3 levels");
    free(header);
}

static void entries_that_only_cost_memory(void **state) {
    (void)state;
    size_t n = (size_t)1 << 20;
    char *header = malloc(n);
    assert_non_null(header);
    for (size_t i = 0; i < n; i++) header[i] = i % 2 ? ',' : '1';
    memcpy(header, "{\"w\":{\"shape\":[ ", 16);
    memcpy(header + n - 4, "1]}}", 4);
    make_raw(n, header, n, 0);
    io_refused("its header entry has 1048570 bytes, wanted at most 4096");
    free(header);
}

/* B97: 132 MB of header, 400000 tensors of one element with names of some 250 characters, in an order
 * that is neither that of the names nor that of the data. */
static void b97_header_of_132_mb(void **state) {
    (void)state;
    enum { kCount = 400000 };
    const size_t n_header = 132000000;
    char *header = malloc(n_header + 1024);
    assert_non_null(header);
    size_t used = 1;
    header[0] = '{';
    for (int i = 0; i < kCount; i++) {
        long long place = (long long)i * 7919 % kCount; /* 7919 is prime to the count: a permutation */
        used += (size_t)snprintf(header + used, 1024,
                                 "%s\"model.layers.%0240d.weight\":{\"dtype\":\"F32\",\"shape\":[1],"
                                 "\"data_offsets\":[%lld,%lld]}",
                                 i ? "," : "", i, 4 * place, 4 * place + 4);
    }
    header[used++] = '}';
    assert_true(used < n_header);
    memset(header + used, ' ', n_header - used);
    make_raw(n_header, header, n_header, 4 * (size_t)kCount);
    free(header);
    clock_t start = clock();
    lli_tensor_file *file = io_open();
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    print_message("132 MB header, %d tensors: %.2f s\n", kCount, seconds);
    assert_int_equal(lli_tensor_file_count(file), kCount);
    char name[300];
    for (int i = 0; i < kCount; i += 997) {
        snprintf(name, sizeof name, "model.layers.%0240d.weight", i);
        const unsigned char *data = find(file, name).data;
        assert_int_equal(*data, (4 * ((long long)i * 7919 % kCount)) & 0xff);
    }
    find_refused(file, "x", "and 399996 more");
    lli_tensor_file_close(file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_every_usable_type),
        cmocka_unit_test(blanks_and_escapes_are_json),
        cmocka_unit_test(empty_files_and_tensors_are_sound),
        cmocka_unit_test(lookups_list_what_exists),
        cmocka_unit_test(other_types_are_refused_only_when_asked_for),
        cmocka_unit_test(misaligned_tensors_are_refused_by_name),
        cmocka_unit_test(b96_header_lengths_that_lie),
        cmocka_unit_test(b96_offsets_that_lie),
        cmocka_unit_test(b96_span_must_be_shape_times_type),
        cmocka_unit_test(b96_file_cut_or_longer),
        cmocka_unit_test(shapes_that_lie),
        cmocka_unit_test(overlaps_and_holes),
        cmocka_unit_test(names_twice),
        cmocka_unit_test(nul_in_names),
        cmocka_unit_test(text_that_is_no_text),
        cmocka_unit_test(headers_that_are_no_object),
        cmocka_unit_test(metadata_is_an_object_of_strings),
        cmocka_unit_test(deep_nesting),
        cmocka_unit_test(entries_that_only_cost_memory),
        cmocka_unit_test(b97_header_of_132_mb),
    };
    return cmocka_run_group_tests(tests, io_setup, io_teardown);
}

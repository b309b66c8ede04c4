/* make_npy FILE DTYPE FILL DIM...: writes a small .npy file for the tests of the program, so that they need
 * no Python. DTYPE f4 or i8 or i4; FILL a number, `normal` (about unit variance) or `mod:V` (0 .. V-1 mixed).
 * Trusts its arguments. Little-endian machines only, like the files. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state = 0x9e3779b97f4a7c15u;

static uint64_t next(void) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1du;
}

static double uniform(void) {
    return (double)(next() >> 11) * 0x1p-53;
}

static double element(const char *fill) {
    if (strcmp(fill, "normal") == 0) return 2 * (uniform() + uniform() + uniform() - 1.5);
    if (strncmp(fill, "mod:", 4) == 0) return (double)(next() % strtoull(fill + 4, NULL, 10));
    return strtod(fill, NULL);
}

static void write_header(FILE *file, const char *dtype, int n_dims, char **dims) {
    char text[128] = "";
    size_t used =
        (size_t)snprintf(text, sizeof text, "{'descr': '<%s', 'fortran_order': False, 'shape': (", dtype);
    for (int i = 0; i < n_dims; i++) {
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", dims[i],
                                 n_dims == 1 || i + 1 < n_dims ? "," : "");
    }
    snprintf(text + used, sizeof text - used, "), }");
    /* Magic, version, length and dictionary fill a multiple of 64 bytes: 128 here. */
    fwrite("\x93NUMPY\x01\x00\x76\x00", 1, 10, file);
    fprintf(file, "%-117s\n", text);
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    const char *dtype = argv[2];
    FILE *file = fopen(argv[1], "wb");
    if (!file) return 3;
    write_header(file, dtype, argc - 4, argv + 4);
    long long count = 1;
    for (int i = 4; i < argc; i++) count *= atoll(argv[i]);
    for (long long i = 0; i < count; i++) {
        double value = element(argv[3]);
        float f = (float)value;
        int64_t wide = (int64_t)value;
        int32_t narrow = (int32_t)wide;
        if (dtype[0] == 'f') {
            fwrite(&f, sizeof f, 1, file);
        } else if (dtype[1] == '8') {
            fwrite(&wide, sizeof wide, 1, file);
        } else {
            fwrite(&narrow, sizeof narrow, 1, file);
        }
    }
    return fclose(file) == 0 ? 0 : 3;
}

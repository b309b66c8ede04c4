/* libFuzzer on the .npy reader: any bytes, parsed as if mapped from a file. */
#include "fuzz_tensor_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes) {
    fuzz_parse(bytes, n_bytes, lli_npy_parse);
    return 0;
}

/* libFuzzer on the .safetensors reader. The input is a header of its own and a data size: the length bytes
 * and the data are added here, else nearly every mutation would fail at the file's first 8 bytes.
 *
 *   | mode | data bytes | header ... |     mode 0: the rest is the whole file as it is */
#include "fuzz_tensor_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes) {
    if (n_bytes < 2) return 0;
    uint64_t header_bytes = n_bytes - 2, data_bytes = bytes[1];
    if (bytes[0] == 0) {
        fuzz_parse(bytes + 2, header_bytes, lli_safetensors_parse);
        return 0;
    }
    uint8_t *file = calloc(1, 8 + header_bytes + data_bytes);
    if (!file) return 0;
    memcpy(file, &header_bytes, 8);
    memcpy(file + 8, bytes + 2, header_bytes);
    fuzz_parse(file, 8 + header_bytes + data_bytes, lli_safetensors_parse);
    free(file);
    return 0;
}

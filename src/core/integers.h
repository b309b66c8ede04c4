/* Integers of sizes and positions. */
#ifndef LLI_CORE_INTEGERS_H
#define LLI_CORE_INTEGERS_H

#include <stdint.h>

static inline int64_t lli_round_up(int64_t n, int64_t unit) {
    return (n + unit - 1) / unit * unit;
}
static inline int64_t lli_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static inline int64_t lli_max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

#endif

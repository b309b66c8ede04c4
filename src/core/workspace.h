/* Carving the caller's workspace. One carve function per kernel serves both the size query (base NULL)
 * and the run:
 *
 *   base                                              base + used
 *   | piece 0 | gap | piece 1 | gap | ... | piece n |
 *   each piece starts on 64 bytes; under AddressSanitizer the gaps are poisoned red zones */
#ifndef LLI_CORE_WORKSPACE_H
#define LLI_CORE_WORKSPACE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LLI_ASAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define LLI_ASAN 1
#endif
#ifdef LLI_ASAN
#include <sanitizer/asan_interface.h>
enum { kWorkspaceGapBytes = 64 };
#else
enum { kWorkspaceGapBytes = 0 };
#endif

enum { kWorkspaceAlign = 64 };

typedef struct lli_arena {
    char *base; /* NULL: only count */
    size_t used;
} lli_arena;

/* Room for `count` elements (count < 0 counts as 0); NULL while counting. */
static inline void *lli_take(lli_arena *arena, int64_t count, size_t element_bytes) {
    size_t bytes = count > 0 ? (size_t)count * element_bytes : 0;
    size_t rounded = (bytes + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
    char *piece = arena->base ? arena->base + arena->used : NULL;
    arena->used += rounded + kWorkspaceGapBytes;
#ifdef LLI_ASAN
    if (piece) {
        __asan_unpoison_memory_region(piece, rounded);
        __asan_poison_memory_region(piece + bytes, rounded - bytes + kWorkspaceGapBytes);
    }
#endif
    return piece;
}

/* After a call: the caller's memory is the caller's again. */
static inline void lli_arena_release(const lli_arena *arena) {
#ifdef LLI_ASAN
    if (arena->base) __asan_unpoison_memory_region(arena->base, arena->used);
#else
    (void)arena;
#endif
}

#endif

/* How rows of given logits lie on a GPU: blocks a multiprocessor, tile warps a block, slots a warp
 * (ce_rows.cu). Measured on an H200 (docs/cuda-ce.md, section 4): a row's time falls with the warps that work
 * on it, up to some 18 a multiprocessor, and with the part of it that stays in shared memory; several blocks
 * hide each other's finish warp, as long as the L2 cache holds what their rows have beyond shared memory. */
#include "core/integers.h"
#include "cuda/ce.h"

int lli_cuda_ce_chip_read(lli_cuda_ce_chip *chip) {
    int device = 0, status = (int)cudaGetDevice(&device);
    const struct {
        int *to;
        enum cudaDeviceAttr from;
    } attributes[] = {{&chip->multiprocessors, cudaDevAttrMultiProcessorCount},
                      {&chip->l2_bytes, cudaDevAttrL2CacheSize},
                      {&chip->shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
                      {&chip->reserved_bytes, cudaDevAttrReservedSharedMemoryPerBlock},
                      {&chip->most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin}};
    for (int a = 0; a < 5 && !status; a++) {
        status = (int)cudaDeviceGetAttribute(attributes[a].to, attributes[a].from, device);
    }
    return status;
}

/* Steps of a row that a block with so many tile warps keeps, where `fit` have room; and a warp's slots. */
static int64_t slots_of(int64_t fit, int64_t steps, int64_t warps) {
    return lli_min(lli_min(fit / warps, kCeMostSlots), (steps + warps - 1) / warps);
}

static int64_t kept_by(int64_t fit, int64_t steps, int64_t warps) {
    return lli_min(warps * slots_of(fit, steps, warps), steps);
}

/* With `each` blocks a multiprocessor: the most tile warps that keep four fifths of the steps that any number
 * of them can. No warps: there is no room. */
static lli_cuda_ce_shape with_blocks(const lli_cuda_ce_chip *chip, int64_t steps, int32_t each) {
    enum { kWorkingWarps = 19 }; /* of a multiprocessor: no more gained */
    const int64_t part = chip->shared_bytes / each - chip->reserved_bytes - chip->own_bytes;
    const int64_t fit = lli_max(0, lli_min(part, chip->most_bytes - chip->own_bytes)) / kCeStepBytes;
    int64_t warps = lli_min(lli_min(fit, kWorkingWarps / each), steps), most = 0;
    for (int64_t w = 1; w <= warps; w++) most = lli_max(most, kept_by(fit, steps, w));
    while (warps > 0 && kept_by(fit, steps, warps) * 5 < most * 4) warps--;
    return (lli_cuda_ce_shape){.warps = (int32_t)warps,
                               .slots = warps > 0 ? (int32_t)slots_of(fit, steps, warps) : 0};
}

/* The most blocks a multiprocessor, with enough tile warps in all, for which what shared memory does not hold
 * of the rows at work takes a quarter of the L2 cache, which what comes and goes uses too; or one. */
lli_cuda_ce_shape lli_cuda_ce_shape_for(const lli_cuda_ce_chip *chip, int64_t row_bytes) {
    enum { kMostEach = 12, kMostWarps = kCeMostTileWarps + 1, kFewestTileWarps = 15 };
    const int64_t steps = (row_bytes + kCeStepBytes - 1) / kCeStepBytes;
    for (int32_t each = kMostEach; each > 1; each--) {
        const lli_cuda_ce_shape shape = with_blocks(chip, steps, each);
        const int64_t kept = (int64_t)shape.warps * shape.slots * kCeStepBytes;
        const int64_t beyond = lli_max(0, row_bytes - kept) * each * chip->multiprocessors;
        const bool busy = each * shape.warps >= kFewestTileWarps || shape.warps == steps;
        if (shape.warps > 0 && each * (shape.warps + 1) <= kMostWarps && busy && beyond <= chip->l2_bytes / 4)
            return shape;
    }
    return with_blocks(chip, steps, 1);
}

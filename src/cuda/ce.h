/* What the kernels of ce over given logits are told, and the shape in which rows lie on the chip. */
#ifndef LLI_CUDA_CE_H
#define LLI_CUDA_CE_H

#include "cuda/work.h"

#include <stdbool.h>

typedef struct lli_cuda_ce {
    lli_cuda_finish row; /* of a chunk of rows: targets, transform, row results, gradient coefficients */
    ll_view logits;      /* all rows of the call; data as the caller gave it */
    ll_view grad;        /* likewise; data NULL in a forward pass */
    int64_t v;           /* real columns; those up to logits.cols are padding */
    int32_t want_argmax, reserved;
} lli_cuda_ce;

enum {
    kCeStepBytes = 4096, /* of a row: what a tile warp works on at a time */
    kCeMostSlots = 6,    /* steps that a tile warp has in shared memory */
    kCeMostTileWarps =
        23 /* of a block, and with one finish warp of a multiprocessor: 80 registers a thread */
};

/* How rows lie on the chip (ce_rows.cu). */
typedef struct lli_cuda_ce_shape {
    int32_t warps;  /* of a block, that make statistics and gradients */
    int32_t slots;  /* of 4096 bytes, a warp's */
    int32_t blocks; /* that run at once on the device */
} lli_cuda_ce_shape;

/* ce_rows.cu: the rows' statistics into row.rows, and the gradient too where grad.data is set, but for the
 * targets' entries, with each logit read once. Logits and gradient have their rows on 16 bytes; no label
 * smoothing. */
LLI_C int lli_cuda_ce_rows_launch(const lli_cuda_ce *args, const lli_cuda_ce_shape *shape,
                                  cudaStream_t stream);
/* The shape for rows of v columns on the current device, with its kernels loaded and their limits set. */
LLI_C int lli_cuda_ce_rows_open(int32_t dtype, int64_t v, lli_cuda_ce_shape *shape);

/* ce_shape.c: what decides a shape. */
typedef struct lli_cuda_ce_chip {
    int multiprocessors, l2_bytes;
    int shared_bytes, reserved_bytes; /* of a multiprocessor; what each block of it takes beside its own */
    int most_bytes;                   /* of a block */
    int own_bytes;                    /* that the kernel's blocks have whatever the shape */
} lli_cuda_ce_chip;
/* All but own_bytes, of the current device. */
LLI_C int lli_cuda_ce_chip_read(lli_cuda_ce_chip *chip);
/* All but .blocks. */
LLI_C lli_cuda_ce_shape lli_cuda_ce_shape_for(const lli_cuda_ce_chip *chip, int64_t row_bytes);

/* ce_stats.cu: statistics of any rows into row.rows, to be finished by finish.cu. */
LLI_C int lli_cuda_ce_stats_launch(const lli_cuda_ce *args, cudaStream_t stream);
/* ce_dz.cu: the gradient of any rows from row.grads. */
LLI_C int lli_cuda_ce_dz_launch(const lli_cuda_ce *args, cudaStream_t stream);
/* The targets' entries alone, from row.grads. */
LLI_C int lli_cuda_ce_targets_launch(const lli_cuda_ce *args, cudaStream_t stream);

/* True if every row starts on 16 bytes. */
static inline bool lli_cuda_on_16_bytes(const ll_view *view) {
    const int64_t bytes = view->dtype == LL_DTYPE_F32 ? 4 : 2;
    return (uintptr_t)view->data % 16 == 0 && view->row_stride * bytes % 16 == 0;
}

/* ce_ids.cu: logits of ids and of the top and the ids' ranks, before a gradient may be written over them ...
 */
typedef struct lli_cuda_ce_ids {
    ll_view logits, ids;
    lli_cuda_targets targets;
    lli_cuda_transform transform;
    int64_t v, n_tokens;
    int32_t n_top, reserved;
    float *id_logp, *top_logp;
    int64_t *id_rank, *top_ids;
    const double *row_lse;
    int64_t *bad_targets;
} lli_cuda_ce_ids;
LLI_C int lli_cuda_ce_ids_launch(const lli_cuda_ce_ids *args, cudaStream_t stream);
/* ... and their log-probabilities, once rows have their lse. */
LLI_C int lli_cuda_ce_logp_launch(const lli_cuda_ce_ids *args, cudaStream_t stream);

LLI_C int lli_cuda_load_ce_stats(void);
LLI_C int lli_cuda_load_ce_dz(void);
LLI_C int lli_cuda_load_ce_ids(void);

#endif

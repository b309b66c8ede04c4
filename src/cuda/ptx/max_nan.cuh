/* One instruction a function, named after it. */
#ifndef LLI_CUDA_PTX_MAX_NAN_CUH
#define LLI_CUDA_PTX_MAX_NAN_CUH

/* The larger; NaN if either is (fmaxf gives the other). sm_80 and later. */
static __device__ inline float ptx_max_nan_f32(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

#endif

/* One instruction a function, named after it. */
#ifndef LLI_CUDA_PTX_LG2_APPROX_CUH
#define LLI_CUDA_PTX_LG2_APPROX_CUH

/* log2 x, absolute error at most 2^-22 for x in (1/2, 2), relative error at most 2^-22 elsewhere; -inf for 0.
 */
static __device__ inline float ptx_lg2_approx_f32(float x) {
    float r;
    asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

#endif

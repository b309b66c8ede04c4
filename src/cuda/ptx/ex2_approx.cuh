/* One instruction a function, named after it. */
#ifndef LLI_CUDA_PTX_EX2_APPROX_CUH
#define LLI_CUDA_PTX_EX2_APPROX_CUH

/* 2^x, relative error at most 2^-22; results below 2^-126 are 0; 2^0 is 1. sm_80 and later. */
static __device__ inline float ptx_ex2_approx_ftz_f32(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

#endif

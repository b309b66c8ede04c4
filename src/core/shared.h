/* Core code that runs on a GPU too. A CUDA file includes softmax.c, exact_sum.c, loss.c and exchange.c as
 * text, so that a row's integers and results come from the same lines on every backend; these words then make
 * device functions of them. Such files keep to C that is C++20 as well, index small arrays by constants where
 * they are hot (a run-time index moves an array out of registers), and are compiled without contraction. */
#ifndef LLI_CORE_SHARED_H
#define LLI_CORE_SHARED_H

#ifdef LLI_CALLS
/* Of a kernel that would outgrow the instruction cache with these functions in line wherever they are used.
 */
#define LLI_SHARED static __device__ __noinline__
#define LLI_WAITED static __device__ inline /* but for these: others wait for them */
#define LLI_LOCAL  static __device__
#define LLI_MATH   static __device__ __noinline__
#elif defined(__CUDACC__)
#define LLI_SHARED static __device__ /* with a prototype in the header */
#define LLI_WAITED LLI_SHARED
#define LLI_LOCAL  static __device__ /* of one file */
#define LLI_MATH   static __device__ inline
#else
#define LLI_SHARED
#define LLI_WAITED
#define LLI_LOCAL static
#define LLI_MATH  static inline
#endif

#endif

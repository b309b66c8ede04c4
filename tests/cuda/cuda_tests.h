/* The parts of cuda_tests: each is the main of a file, ours or one that other backends are tested with. */
#ifndef LL_TESTS_CUDA_TESTS_H
#define LL_TESTS_CUDA_TESTS_H

int cuda_fused_main(void);
int cuda_bits_main(void);
int cuda_calls_main(void);
int cuda_large_main(void);
int cuda_ranks_main(void);
int cuda_rank_calls_main(void);
int cuda_nccl_main(void);
int cuda_given_main(void); /* ce */

/* Of ce, over given logits. */
int given_kernels_main(void);
int given_ranks_main(void);
int given_faults_main(void);
int given_sizes_main(void);
int given_numerics_main(void);
/* Of linear_ce. */
int kernels_main(void);
int kernel_bits_main(void);
int sizes_main(int argc, char **argv);
int targets_main(int argc, char **argv);
int options_main(int argc, char **argv);
int numerics_main(int argc, char **argv);
int gradients_main(int argc, char **argv);
int invariance_main(int argc, char **argv);
int ranks_main(int argc, char **argv);
int group_main(int argc, char **argv);

#endif

/* What the processor and the operating system let a program use. */
#ifndef LLI_CPU_DETECT_H
#define LLI_CPU_DETECT_H

#include <stdbool.h>
#include <stddef.h>

/* lli_kernel.machine_ok of each instruction set: false and a sentence where something is missing. */
bool lli_cpu_has_plain(char *why, size_t why_bytes);
bool lli_cpu_has_avx2(char *why, size_t why_bytes);
bool lli_cpu_has_avx512(char *why, size_t why_bytes);

#endif

# What every file of the project is compiled with, and which instruction sets the compiler takes.
include(CheckCCompilerFlag)

set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, RelWithDebInfo or Debug" FORCE)
endif()

# -ffp-contract=off: GCC fuses a * b + c by default where the ISA has FMA, so the same line would round
# differently in the plain, AVX2 and AVX-512 builds of a kernel and the bits would no longer agree.
# CUDA files have words of their own for these (src/cuda/CMakeLists.txt).
set(not_cuda "$<NOT:$<COMPILE_LANGUAGE:CUDA>>")
add_compile_options("$<${not_cuda}:-Wall;-Wextra;-ffp-contract=off>")
if(LL_WERROR)
    add_compile_options("$<${not_cuda}:-Werror>")
endif()

if(LL_SANITIZE)
    list(JOIN LL_SANITIZE "," sanitizers)
    # no-sanitize-recover: UBSan would otherwise print, go on, and let the test pass.
    add_compile_options(-fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
    add_link_options(-fsanitize=${sanitizers})
endif()
if(LL_FUZZ)
    if(NOT CMAKE_C_COMPILER_ID MATCHES "Clang")
        message(FATAL_ERROR "LL_FUZZ needs clang (libFuzzer), the compiler is ${CMAKE_C_COMPILER_ID}: "
                            "configure with -DCMAKE_C_COMPILER=clang")
    endif()
    add_compile_options(-fsanitize=fuzzer-no-link)
endif()

set(LL_AVX2_FLAGS -mavx2 -mfma -mf16c)
set(LL_AVX512_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c)
set(LL_HAVE_AVX2 OFF)
set(LL_HAVE_AVX512 OFF)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND CMAKE_SIZEOF_VOID_P EQUAL 8)
    list(JOIN LL_AVX2_FLAGS " " avx2_flags)
    list(JOIN LL_AVX512_FLAGS " " avx512_flags)
    check_c_compiler_flag("${avx2_flags}" LL_COMPILER_TAKES_AVX2)
    check_c_compiler_flag("${avx512_flags}" LL_COMPILER_TAKES_AVX512)
    set(LL_HAVE_AVX2 ${LL_COMPILER_TAKES_AVX2})
    set(LL_HAVE_AVX512 ${LL_COMPILER_TAKES_AVX512})
endif()

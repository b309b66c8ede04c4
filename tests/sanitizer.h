/* Whether this is the thread sanitizer's build: twenty times as slow, and it ends a forked child that starts
 * a thread. */
#ifndef LL_TESTS_SANITIZER_H
#define LL_TESTS_SANITIZER_H

#if defined(__SANITIZE_THREAD__)
#define WITH_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define WITH_TSAN 1
#endif
#endif
#ifndef WITH_TSAN
#define WITH_TSAN 0
#endif

#endif

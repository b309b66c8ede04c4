/* Which sanitizer this build has. With one, programs run two (address) to twenty (thread) times as long; the
 * thread sanitizer ends a forked child that starts a thread. */
#ifndef LL_TESTS_SANITIZER_H
#define LL_TESTS_SANITIZER_H

#if defined(__has_feature)
#define HAS_FEATURE(name) __has_feature(name)
#else
#define HAS_FEATURE(name) 0
#endif

#if defined(__SANITIZE_THREAD__) || HAS_FEATURE(thread_sanitizer)
#define WITH_TSAN 1
#else
#define WITH_TSAN 0
#endif

/* One of the two. */
#if WITH_TSAN || defined(__SANITIZE_ADDRESS__) || HAS_FEATURE(address_sanitizer)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

#endif

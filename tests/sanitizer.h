/* Which sanitizer this build has. With one, programs run two (address) to twenty (thread) times as long; the
 * thread sanitizer ends a forked child that starts a thread. */
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

/* One of the two. */
#if WITH_TSAN || defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

#endif

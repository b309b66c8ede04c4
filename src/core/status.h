/* Failing with a sentence: sets the thread's ll_last_error and returns the status. */
#ifndef LLI_CORE_STATUS_H
#define LLI_CORE_STATUS_H

#include <logitless/logitless.h>

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
ll_status
lli_fail(ll_status status, const char *format, ...);

/* The function at fault leaves with `status` and the sentence unless `condition` holds. The sentence
 * starts with the public function or argument and names the value found and the value wanted. */
#define LLI_REQUIRE(condition, status, ...)                                                                  \
    do {                                                                                                     \
        if (!(condition)) return lli_fail((status), __VA_ARGS__);                                            \
    } while (0)

#define LLI_TRY(call)                                                                                        \
    do {                                                                                                     \
        ll_status lli_try_status = (call);                                                                   \
        if (lli_try_status != LL_STATUS_OK) return lli_try_status;                                           \
    } while (0)

#endif

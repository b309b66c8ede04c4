/* Why a communicator's library could not make an end: a sentence for its caller. Of the libraries that are
 * loaded when asked for, which share no code with liblogitless. */
#ifndef LLI_COMM_REFUSE_H
#define LLI_COMM_REFUSE_H

#include <logitless/comm.h>

#include <stdarg.h>
#include <stdio.h>

/* Where the sentence goes; nowhere: NULL or 0 bytes. */
typedef struct reason {
    char *text;
    size_t bytes;
} reason;

/* status, with its sentence. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static inline ll_status
refuse(reason why, ll_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (why.text && why.bytes) vsnprintf(why.text, why.bytes, format, args);
    va_end(args);
    return status;
}

#endif

/* Runs one thread a rank. cmocka's asserts may only be used on the thread of the test, so a rank notes what
 * it found, and the test asserts afterwards. */
#ifndef TESTS_COMM_RANKS_H
#define TESTS_COMM_RANKS_H

#include <logitless/comm.h>

enum { kRanksMax = 16 };

typedef struct rank_run {
    ll_comm *comm;
    int32_t rank;
    void *context;
    ll_status status; /* what the rank noted */
    char sentence[512];
    double seconds;    /* that it took */
    int32_t bad_line;  /* of the first CHECK that failed; 0: none */
    char bad_text[80]; /* its condition */
} rank_run;

typedef void rank_fn(rank_run *run);

/* fn for each of comms[0..size) at the same time, one thread each. runs: [size]. */
void run_ranks(ll_comm *comms, int32_t size, rank_fn *fn, void *context, rank_run *runs);

/* Same, and fails the test if a CHECK of a rank did. */
void run_checked(ll_comm *comms, int32_t size, rank_fn *fn, void *context);

void note_bad(rank_run *run, int32_t line, const char *text);
#define CHECK(run, condition)                                                                                \
    do {                                                                                                     \
        if (!(condition)) note_bad(run, __LINE__, #condition);                                               \
    } while (0)

/* Keeps the outcome of an operation and its sentence. */
void note_status(rank_run *run, ll_status status);

void make_world(int32_t size, int32_t timeout_ms, ll_comm *comms);
void destroy_all(ll_comm *comms, int32_t size);

double seconds_now(void);
void sleep_ms(int64_t ms);

/* Of a rank: full range, half range, and finite without a regular sum. */
int32_t value_i32(int32_t rank, int64_t i);
int64_t value_i64(int32_t rank, int64_t i);
float value_f32(int32_t rank, int64_t i);

#endif

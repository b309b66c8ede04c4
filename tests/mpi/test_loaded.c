/* test_loaded: the library as ll_comm_open loads it, in a program that is not linked with MPI. */
#include <logitless/comm.h>

#include <stdio.h>

/* The sum over a group of 1 for each rank. */
static int check_sum(const ll_comm *comm) {
    int64_t sum = 1;
    const ll_status status = comm->sum_i64(comm->self, &sum, 1, NULL);
    if (status == LL_STATUS_OK && sum == comm->size) return 0;
    fprintf(stderr, "FAIL rank %d of %d: status %d, sum %lld: %s\n", comm->rank, comm->size, status,
            (long long)sum, comm->error(comm->self));
    return 1;
}

int main(void) {
    ll_comm world, group;
    if (ll_comm_open("mpi", 0, &world) != LL_STATUS_OK) {
        fprintf(stderr, "FAIL: %s\n", ll_last_error());
        return 1;
    }
    int failures = check_sum(&world);
    int32_t ranks[64];
    for (int32_t i = 0; i < world.size && i < 64; i++) ranks[i] = world.size - 1 - i;
    if (ll_comm_group(&world, ranks, world.size, &group) != LL_STATUS_OK) {
        fprintf(stderr, "FAIL rank %d: %s\n", world.rank, ll_last_error());
        return 1;
    }
    failures += check_sum(&group);
    ll_comm_destroy(&group);
    ll_comm_destroy(&world);
    return failures != 0;
}

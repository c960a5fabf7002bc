/* Ranks as threads on real segments. All threads use one mapping of each segment, so that the
 * thread sanitizer sees every access. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ringreduce.h"

#include "check.h"

enum { SIZE_MAX_HERE = 5, STAGING = 8192, HEAP = 1 << 20, ROUNDS = 3 };

static const uint64_t COUNTS[] = {0, 1, 2, 3, 4, 5, 6, 4096, 4097, 5003, 20011};
static const rr_wait_limits LIMITS = {50, 20, 10};

static struct {
    uint32_t size;
    int descriptors[SIZE_MAX_HERE];
    void *segments[SIZE_MAX_HERE];
    uint64_t bytes[SIZE_MAX_HERE];
} host;

static void open_host(uint32_t size)
{
    host.size = size;
    for (uint32_t rank = 0; rank < size; rank++) {
        CHECK(rr_segment_create(STAGING, HEAP, &host.descriptors[rank]) == RR_DONE);
        CHECK(rr_segment_map(host.descriptors[rank], &host.segments[rank], &host.bytes[rank]) ==
              RR_DONE);
    }
}

static void close_host(void)
{
    for (uint32_t rank = 0; rank < host.size; rank++) {
        CHECK(rr_segment_unmap(host.segments[rank], host.bytes[rank]) == RR_DONE);
        close(host.descriptors[rank]);
    }
}

static void run_on_all(void *(*work)(void *))
{
    pthread_t threads[SIZE_MAX_HERE];
    for (uintptr_t rank = 0; rank < host.size; rank++)
        CHECK(pthread_create(&threads[rank], NULL, work, (void *)rank) == 0);
    for (uint32_t rank = 0; rank < host.size; rank++)
        CHECK(pthread_join(threads[rank], NULL) == 0);
}

static int run(rr_shm *group, const rr_call *call, void *data)
{
    int status;
    do {
        status = rr_shm_run(group, call, data, &LIMITS);
    } while (status == RR_WAITING);
    return status;
}

static void cut(uint64_t *bounds, uint64_t count)
{
    for (uint32_t rank = 0; rank <= host.size; rank++)
        bounds[rank] = count * rank / host.size;
}

static int32_t number(uint32_t rank, uint64_t i)
{
    return (int32_t)(i % 1000) * 3 + (int32_t)rank;
}

static int32_t total(uint64_t i)
{
    int32_t sum = 0;
    for (uint32_t rank = 0; rank < host.size; rank++)
        sum += number(rank, i);
    return sum;
}

/* One call of each kind for one length, on `data`. */
static void one_of_each(rr_shm *group, uint32_t rank, int32_t *data, uint64_t count)
{
    uint64_t bounds[SIZE_MAX_HERE + 1];
    cut(bounds, count);
    for (uint32_t action = RR_ALL_REDUCE; action <= RR_ALL_GATHER; action++) {
        rr_call call = {.action = action,
                        .dtype = RR_INT32,
                        .op = RR_SUM,
                        .divisor = host.size,
                        .bounds = bounds};
        call.header[0] = action;
        call.header[2] = (uint64_t)rank << 32;
        call.header[4] = count;
        for (uint64_t i = 0; i < count; i++)
            data[i] = number(rank, i);
        CHECK(run(group, &call, data) == RR_DONE);
        for (uint32_t owner = 0; owner < host.size; owner++)
            for (uint64_t i = bounds[owner]; i < bounds[owner + 1]; i++) {
                const int32_t alone = action == RR_ALL_GATHER ? number(owner, i) : number(rank, i);
                const int is_reduced =
                    action == RR_ALL_REDUCE || (action == RR_REDUCE_SCATTER && owner == rank);
                CHECK(data[i] == (is_reduced ? total(i) : alone));
            }
    }
}

static void *all_calls(void *argument)
{
    const uint32_t rank = (uint32_t)(uintptr_t)argument;
    rr_shm *group;
    CHECK(rr_shm_new(&group, rank, host.size, host.segments) == RR_DONE);
    uint64_t heap_bytes;
    const uint64_t heap = rr_segment_heap(host.segments[rank], &heap_bytes);
    CHECK(heap_bytes == HEAP);
    const uint64_t offset = 64 * (rank + 1); /* different on every rank */
    CHECK(rr_segment_reserve(host.descriptors[rank], host.segments[rank], 0, HEAP / 2) == RR_DONE);
    int32_t *registered = (int32_t *)((uint8_t *)host.segments[rank] + heap + offset);
    int32_t *private = malloc(COUNTS[sizeof COUNTS / sizeof COUNTS[0] - 1] * sizeof *private);
    CHECK(private != NULL);
    for (int round = 0; round < ROUNDS; round++)
        for (size_t c = 0; c < sizeof COUNTS / sizeof COUNTS[0]; c++) {
            one_of_each(group, rank, private, COUNTS[c]);
            one_of_each(group, rank, registered, COUNTS[c]);
            one_of_each(group, rank, rank % 2 ? private : registered, COUNTS[c]);
        }
    rr_shm_facts facts;
    rr_shm_look(group, &facts);
    CHECK(facts.sequence == 9 * ROUNDS * sizeof COUNTS / sizeof COUNTS[0]);
    CHECK(host.size == 1 || facts.bytes_received > 0);
    free(private);
    rr_shm_free(group);
    return NULL;
}

/* Elements that `sender` sends to `receiver` in the matrix of this number: none, equal parts of
 * several sizes, a gather, a scatter, all different. */
static uint64_t part(int matrix, uint32_t sender, uint32_t receiver)
{
    const uint32_t last = host.size - 1;
    switch (matrix) {
    case 0: return 0;
    case 1: return 1;
    case 2: return 1009;
    case 3: return 5003;
    case 4: return receiver == last ? 3001 + 1000 * sender : 0;
    case 5: return sender == last ? 2048 * receiver : 0;
    default: return (sender * 7 + receiver * 3) % 5 * 1201;
    }
}

static int32_t sent(uint32_t sender, uint32_t receiver, uint64_t i)
{
    return (int32_t)(sender * 10 + receiver) * 100000 + (int32_t)i;
}

/* An all-to-all from `source` with the counts of `matrix`. */
static void exchange(rr_shm *group, uint32_t rank, int matrix, int32_t *source, int32_t *target)
{
    uint64_t counts[SIZE_MAX_HERE * SIZE_MAX_HERE], at = 0;
    for (uint32_t i = 0; i < host.size * host.size; i++)
        counts[i] = part(matrix, i / host.size, i % host.size);
    rr_call call = {.action = RR_ALL_TO_ALL, .dtype = RR_INT32, .bounds = counts};
    call.header[4] = (uint64_t)matrix;
    for (uint32_t other = 0; other < host.size; other++)
        for (uint64_t i = 0; i < part(matrix, rank, other); i++)
            source[at++] = sent(rank, other, i);
    int status;
    do {
        status = rr_shm_exchange(group, &call, source, target, &LIMITS);
    } while (status == RR_WAITING);
    CHECK(status == RR_DONE);
    /* It may be written again at once. */
    memset(source, 0xFF, at * sizeof *source);
    at = 0;
    for (uint32_t other = 0; other < host.size; other++)
        for (uint64_t i = 0; i < part(matrix, other, rank); i++)
            CHECK(target[at++] == sent(other, rank, i));
}

static void *exchanges(void *argument)
{
    enum { ELEMENTS = 6 * 5003 };
    const uint32_t rank = (uint32_t)(uintptr_t)argument;
    rr_shm *group;
    CHECK(rr_shm_new(&group, rank, host.size, host.segments) == RR_DONE);
    uint64_t heap_bytes;
    const uint64_t heap = rr_segment_heap(host.segments[rank], &heap_bytes);
    CHECK(rr_segment_reserve(host.descriptors[rank], host.segments[rank], 0, HEAP / 2) == RR_DONE);
    int32_t *registered = (int32_t *)((uint8_t *)host.segments[rank] + heap + 64 * (rank + 1));
    int32_t *private = malloc(ELEMENTS * sizeof *private);
    int32_t *target = malloc(ELEMENTS * sizeof *target);
    CHECK(private != NULL && target != NULL);
    for (int round = 0; round < ROUNDS; round++)
        for (int matrix = 0; matrix <= 6; matrix++) {
            exchange(group, rank, matrix, private, target);
            exchange(group, rank, matrix, registered, target);
            exchange(group, rank, matrix, rank % 2 ? private : registered, target);
        }
    free(private);
    free(target);
    rr_shm_free(group);
    return NULL;
}

static void *disagreeing(void *argument)
{
    const uint32_t rank = (uint32_t)(uintptr_t)argument;
    uint64_t bounds[SIZE_MAX_HERE + 1];
    cut(bounds, rank == 2 ? 7 : 6);
    rr_call call = {.action = RR_ALL_REDUCE, .dtype = RR_INT32, .op = RR_SUM, .bounds = bounds};
    call.header[4] = rank == 2 ? 7 : 6;
    int32_t data[7] = {0};
    rr_shm *group;
    CHECK(rr_shm_new(&group, rank, host.size, host.segments) == RR_DONE);
    CHECK(run(group, &call, data) == RR_MISMATCH);
    rr_shm_facts facts;
    rr_shm_look(group, &facts);
    CHECK(facts.peer == (rank == 2 ? 0 : 2));
    CHECK(facts.theirs[4] == (rank == 2 ? 6 : 7));
    rr_shm_free(group);
    return NULL;
}

static void *giving_up(void *argument)
{
    const uint32_t rank = (uint32_t)(uintptr_t)argument;
    uint64_t bounds[SIZE_MAX_HERE + 1] = {0};
    const rr_call call = {.action = RR_ALL_GATHER, .dtype = RR_UINT8, .bounds = bounds};
    rr_shm *group;
    CHECK(rr_shm_new(&group, rank, host.size, host.segments) == RR_DONE);
    if (rank == 1) {
        rr_shm_abort(group);
    } else {
        CHECK(run(group, &call, NULL) == RR_ABORTED);
        rr_shm_facts facts;
        rr_shm_look(group, &facts);
        CHECK(facts.peer == 1);
        CHECK(!rr_shm_has_arrived(group, 1));
    }
    rr_shm_free(group);
    return NULL;
}

/* File descriptors that are no valid segment. */
static void test_foreign_segments(void)
{
    void *address;
    uint64_t bytes;
    int good;
    CHECK(rr_segment_create(STAGING, HEAP, &good) == RR_DONE);
    uint8_t head[4096];
    CHECK(pread(good, head, sizeof head, 0) == (ssize_t)sizeof head);
    CHECK(ftruncate(good, 4096) == -1 && errno == EPERM); /* sealed */

    const int bare = memfd_create("bare", MFD_ALLOW_SEALING);
    CHECK(rr_segment_map(bare, &address, &bytes) == -EPROTO); /* not sealed */
    CHECK(pwrite(bare, head, sizeof head, 0) == (ssize_t)sizeof head);
    CHECK(fcntl(bare, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    CHECK(rr_segment_map(bare, &address, &bytes) == -EPROTO); /* shorter than its head says */

    int of_other_abi;
    CHECK(rr_segment_create(STAGING, HEAP, &of_other_abi) == RR_DONE);
    head[8] ^= 1;
    CHECK(pwrite(of_other_abi, head, sizeof head, 0) == (ssize_t)sizeof head);
    CHECK(rr_segment_map(of_other_abi, &address, &bytes) == -EPROTO);

    int pipes[2];
    CHECK(pipe(pipes) == 0);
    CHECK(rr_segment_map(pipes[0], &address, &bytes) == -EPROTO); /* no memory at all */
    int too_large;
    CHECK(rr_segment_create(UINT64_MAX / 4, 0, &too_large) == -EFBIG);
    close(pipes[0]);
    close(pipes[1]);
    close(of_other_abi);
    close(bare);
    close(good);
}

static void test_heap_has_an_end(void)
{
    void *address;
    uint64_t bytes;
    int made;
    CHECK(rr_segment_create(STAGING, HEAP, &made) == RR_DONE);
    CHECK(rr_segment_map(made, &address, &bytes) == RR_DONE);
    CHECK(rr_segment_reserve(made, address, 0, HEAP) == RR_DONE);
    CHECK(rr_segment_reserve(made, address, 4096, HEAP) == -EINVAL);
    CHECK(rr_segment_reserve(made, address, UINT64_MAX, 2) == -EINVAL);
    CHECK(rr_segment_release(made, address, 0, HEAP) == RR_DONE);
    CHECK(rr_segment_unmap(address, bytes) == RR_DONE);
    close(made);
}

/* Count in the block until `stop`; return the last number. */
static struct {
    uint64_t *counter;
    int is_over;
} busy;

static void *count_up(void *unused)
{
    (void)unused;
    uint64_t count = 0;
    while (!__atomic_load_n(&busy.is_over, __ATOMIC_RELAXED)) {
        CHECK(__atomic_load_n(busy.counter, __ATOMIC_RELAXED) == count);
        __atomic_store_n(busy.counter, ++count, __ATOMIC_RELAXED);
    }
    return (void *)(uintptr_t)count;
}

/* `theirs` is another process's mapping of our segment. */
static void test_detached_block_is_out_of_reach(void)
{
    enum { BLOCK = 1 << 18, AT = 1 << 16 };
    void *ours, *theirs;
    uint64_t bytes, heap_bytes;
    int made;
    CHECK(rr_segment_create(STAGING, HEAP, &made) == RR_DONE);
    CHECK(rr_segment_map(made, &ours, &bytes) == RR_DONE);
    CHECK(rr_segment_map(made, &theirs, &bytes) == RR_DONE);
    CHECK(rr_segment_reserve(made, ours, AT, BLOCK) == RR_DONE);
    const uint64_t heap = rr_segment_heap(ours, &heap_bytes);
    uint8_t *own = (uint8_t *)ours + heap + AT, *other = (uint8_t *)theirs + heap + AT;
    memset(own, 1, BLOCK);
    CHECK(other[BLOCK / 2] == 1);

    /* A thread of this process goes on writing meanwhile: no write is lost. */
    pthread_t thread;
    void *count;
    busy.counter = (uint64_t *)(own + BLOCK - 8);
    *busy.counter = 0;
    CHECK(pthread_create(&thread, NULL, count_up, NULL) == 0);
    while (__atomic_load_n(busy.counter, __ATOMIC_RELAXED) < 1000)
        ;
    CHECK(rr_segment_detach(made, ours, AT, BLOCK) == RR_DONE);
    const uint64_t since = __atomic_load_n(busy.counter, __ATOMIC_RELAXED);
    while (__atomic_load_n(busy.counter, __ATOMIC_RELAXED) < since + 1000)
        ;
    __atomic_store_n(&busy.is_over, 1, __ATOMIC_RELAXED);
    CHECK(pthread_join(thread, &count) == 0);
    CHECK(*busy.counter == (uintptr_t)count);

    for (uint64_t i = 0; i < BLOCK - 8; i++)
        CHECK(own[i] == 1);
    memset(other, 2, BLOCK); /* a late rank's write */
    own[0] = 3;
    for (uint64_t i = 1; i < BLOCK - 8; i++)
        CHECK(own[i] == 1);
    CHECK(other[0] == 2);
    own[-1] = 4; /* memory around it is still shared */
    own[BLOCK] = 4;
    CHECK(other[-1] == 4 && other[BLOCK] == 4);

    CHECK(rr_segment_drop(ours, AT, BLOCK) == RR_DONE);
    CHECK(own[0] == 2); /* the copy is gone */
    CHECK(rr_segment_detach(made, ours, AT + 1, 4096) == -EINVAL);
    CHECK(rr_segment_detach(made, ours, 0, 100) == -EINVAL);
    CHECK(rr_segment_detach(made, ours, 4096, HEAP) == -EINVAL);
    CHECK(rr_segment_detach(made, ours, 0, 0) == -EINVAL);
    CHECK(rr_segment_drop(ours, 4096, HEAP) == -EINVAL);
    CHECK(rr_segment_unmap(ours, bytes) == RR_DONE);
    CHECK(rr_segment_unmap(theirs, bytes) == RR_DONE);
    close(made);
}

int main(void)
{
    for (uint32_t size = 1; size <= SIZE_MAX_HERE; size++) {
        open_host(size);
        run_on_all(all_calls);
        close_host();
        open_host(size);
        run_on_all(exchanges);
        close_host();
    }
    open_host(4);
    run_on_all(disagreeing);
    close_host();
    open_host(3);
    run_on_all(giving_up);
    close_host();
    test_foreign_segments();
    test_heap_has_an_end();
    test_detached_block_is_out_of_reach();
    return 0;
}

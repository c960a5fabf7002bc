/* The C part of ringreduce; README.md beside this folder says what it is for.
 *
 * Rules that hold for all of it: C99 in this header; nothing here aborts or prints; whatever
 * can fail returns one of the codes below; no function keeps a pointer that it was handed
 * unless it says so. Nothing links TensorFlow or libzmq.
 */
#ifndef RINGREDUCE_H
#define RINGREDUCE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RR_EXPORT __attribute__((visibility("default")))

/* Counted up with every change of this header; ringreduce/effects/native.py names the one it needs.
 */
#define RR_ABI 5

/* What functions return. Errors of the system come as -errno. */
enum {
    RR_DONE = 0,
    RR_WAITING = 1,  /* another rank is late; call again */
    RR_MISMATCH = 2, /* another rank is in another call */
    RR_ABORTED = 3,  /* another rank has given up; it has left news */
    RR_BROKEN = 4,   /* another rank's segment says what cannot be */
};

/* The ABI that this library was built with. */
RR_EXPORT uint32_t rr_abi(void);

/* ------------------------------------------------------------------------------------------
 * Shared memory of the ranks of one host
 *
 * Each rank owns a segment, a sealed memfd that every rank of the host maps. It has no name,
 * so nothing is left when the last process is gone, however it went.
 *
 *   offset
 *        0  head       magic, ABI and sizes; written before the segment is passed on
 *     4096  board      what the owner tells the others; a cache line for each word that is
 *                      waited for:
 *                        step      steps this rank has finished, counted over all calls
 *                        sleepers  ranks that sleep until `step` grows (written by them)
 *                        calls[2]  the call the rank is in, even and odd numbers in turn
 *                        news      why it gave up, for people; length 0: it has not
 *    65536  inbox[2]    whole small messages, of even and odd calls
 *    98304  staging    two halves: segments of even and odd number on their way
 *           heap       registered arrays (`rr_segment_reserve`), reduced where they lie
 *
 * Ranks advance in steps. A step is some copying or adding, then `step` is counted up, then
 * the rank waits until all others have done the same. So each word of a segment has one
 * writer in each step, and what was written in one step is read in a later one. Two halves
 * are enough, since nobody is more than one step ahead of anybody.
 *
 * all-reduce of a large array: chunk r belongs to rank r; segment s is the s-th piece of every
 * chunk. In step s each rank
 *   copies segment s of the others' chunks from its array into its staging,
 *   adds up segment s - 1 of its own chunk, from all stagings, into its array and its staging,
 *   copies segment s - 2 of the others' chunks out of their stagings into its array.
 * When all ranks' arrays are registered, each adds up its own chunk and writes it into all
 * arrays: two steps whatever the size. A small message is put into the inbox whole and every
 * rank adds them all up: one step.
 *
 * Whatever is added is added in the order of the ranks, so results are the same bits
 * everywhere and every time.
 * ------------------------------------------------------------------------------------------ */

enum {
    RR_INBOX_BYTES = 16384, /* largest message that goes through the inbox */
    RR_NEWS_BYTES = 16384,  /* longest news */
    RR_SHM_SIZE_MAX = 1024, /* ranks on one host */
};

/* Element types: their codes in frame headers (ringreduce/vocabulary/types.py). */
enum {
    RR_FLOAT16 = 1,
    RR_BFLOAT16,
    RR_FLOAT32,
    RR_FLOAT64,
    RR_INT8,
    RR_INT16,
    RR_INT32,
    RR_INT64,
    RR_UINT8,
};

/* Operators, likewise. RR_MEAN divides by the number of ranks. */
enum { RR_SUM = 1, RR_MEAN, RR_MIN, RR_MAX, RR_PRODUCT };

/* Make a segment with `staging_bytes` for each half and room for `heap_bytes` of registered
 * arrays; memory for all but the heap is taken now, so that using it cannot fail later.
 * -ENOSPC, -ENOMEM, -EFBIG: there is no room; -errno of memfd_create and fcntl otherwise. */
RR_EXPORT int rr_segment_create(uint64_t staging_bytes, uint64_t heap_bytes, int *descriptor);

/* Map a segment that this process or another one made. -EPROTO: it is not a sealed segment of
 * this ABI, or shorter than it says. */
RR_EXPORT int rr_segment_map(int descriptor, void **address, uint64_t *bytes);
RR_EXPORT int rr_segment_unmap(void *address, uint64_t bytes);

/* Where the heap of a mapped segment begins and how long it is. */
RR_EXPORT uint64_t rr_segment_heap(const void *address, uint64_t *bytes);

/* Take memory for bytes [offset, offset + bytes) of the heap, or give it back. -ENOSPC,
 * -ENOMEM: there is none. */
RR_EXPORT int rr_segment_reserve(int descriptor, const void *address, uint64_t offset,
                                 uint64_t bytes);
RR_EXPORT int rr_segment_release(int descriptor, const void *address, uint64_t offset,
                                 uint64_t bytes);

/* Make bytes [offset, offset + bytes) of the heap, whole pages, this process's own: address and
 * contents stay, but whoever still writes there in another process does it unseen. No write of
 * this process's threads is lost meanwhile. What the others reach stays as it is now until the
 * segment goes, so that who is late still reads what was there. -ENOMEM: not done. */
RR_EXPORT int rr_segment_detach(int descriptor, void *address, uint64_t offset, uint64_t bytes);

/* Give back the memory of a detached part that is not used any more. */
RR_EXPORT int rr_segment_drop(void *address, uint64_t offset, uint64_t bytes);

/* One rank's view of all segments of its host. One thread at a time. */
typedef struct rr_shm rr_shm;

/* `segments` are mapped, in rank order, and must stay so until rr_shm_free. */
RR_EXPORT int rr_shm_new(rr_shm **group, uint32_t index, uint32_t size, void *const *segments);
RR_EXPORT void rr_shm_free(rr_shm *group);

/* What a rank does in a call. */
enum {
    RR_ALL_REDUCE = 1, /* every chunk reduced, everywhere */
    RR_REDUCE_SCATTER, /* the own chunk reduced; the rest of the array unchanged */
    RR_ALL_GATHER,     /* the others' chunks copied from them */
};

typedef struct {
    uint64_t header[8]; /* as in a frame (ringreduce/pure/wire.py); equal on all ranks but for
                           the rank in word 2; word 3, the sequence, is filled in */
    uint32_t action;    /* RR_ALL_REDUCE, ... */
    uint32_t dtype;
    uint32_t op;
    uint32_t divisor;       /* of RR_MEAN */
    const uint64_t *bounds; /* size + 1 elements: chunk r is [bounds[r], bounds[r + 1]) */
} rr_call;

/* How long to wait in each way before the next; then sleep. */
typedef struct {
    uint32_t spins;    /* look again at once */
    uint32_t yields;   /* let another thread run, look again */
    uint32_t sleep_ms; /* sleep at most this long, then return RR_WAITING */
} rr_wait_limits;

/* Run `call` on `data`, the array's first byte. RR_WAITING: somebody is late; call again with
 * the same arguments to go on. After any other code but RR_DONE the group is of no more use. */
RR_EXPORT int rr_shm_run(rr_shm *group, const rr_call *call, void *data,
                         const rr_wait_limits *limits);

/* Lay down why this rank gives up (at most RR_NEWS_BYTES) and wake whoever waits for it. */
RR_EXPORT void rr_shm_abort(rr_shm *group, const void *news, uint32_t bytes);

/* What is known besides the code that rr_shm_run returned. */
typedef struct {
    uint64_t sequence;    /* number of the call */
    uint32_t peer;        /* index of the rank that is late, disagrees or has given up */
    uint32_t step, steps; /* where in the call */
    uint64_t theirs[8];   /* RR_MISMATCH: the peer's header */
    uint64_t progress;    /* grows while anybody gets on */
    uint64_t bytes_sent, bytes_received; /* what crossed between ranks so far */
} rr_shm_facts;
RR_EXPORT void rr_shm_look(const rr_shm *group, rr_shm_facts *facts);

/* The news of rank `peer`, copied to `news` (RR_NEWS_BYTES); returns the length, 0 for none. */
RR_EXPORT uint32_t rr_shm_news(const rr_shm *group, uint32_t peer, void *news);

/* Whether rank `peer` has finished all steps that this rank waits for. */
RR_EXPORT int rr_shm_has_arrived(const rr_shm *group, uint32_t peer);

/* Reduce `count` elements of `sources` arrays, in their order, and write the result to all
 * `targets`; a target may be a source. `divisor` counts for RR_MEAN. */
RR_EXPORT void rr_reduce(uint32_t dtype, uint32_t op, uint32_t divisor, uint64_t count,
                         uint32_t sources, const void *const *source, uint32_t targets,
                         void *const *target);

/* ======================================================================================
 * Handoff: buckets of gradients go from a framework's threads to the engine and back.
 *
 * The engine is one thread of Python's that reduces. A framework's threads pack gradients into
 * buckets and later take the means out; they never run Python. A plan is a fixed list of
 * buckets in memory that the caller of rr_handoff_register owns and leaves alone until the
 * plan has been unregistered or its handoff closed. One round of a plan takes each of its
 * buckets once through these states:
 *
 *      any thread          any thread               engine               engine
 *         start            packed, and so              take               finish
 *              .           are all before it
 *   EMPTY ---> PACKING ---> PACKED ---> (in queue) ---> REDUCING ---> REDUCED
 *     ^                                                                   |  wait,
 *     |            when all of the plan are SPENT                         v  any thread
 *     +------------------------- SPENT <--------------------------- UNPACKING
 *
 * The queue holds what can run at once, first in, first out: buckets (in plan order within a
 * round, whatever the order in which they were started) and the engine's other work, its jobs.
 *
 * All functions may be called from any thread. A handoff is never freed, only closed, so
 * that a thread that comes late meets a text and not freed memory; it is about 2 KiB.
 * ==================================================================================== */

enum {
    RR_HANDOFF_CLOSED = 100,  /* rr_handoff_close was called */
    RR_HANDOFF_FAILED = 101,  /* rr_handoff_fail was called */
    RR_HANDOFF_MISUSED = 102, /* no such plan or bucket, other sizes, or out of turn */
    RR_HANDOFF_BUSY = 103,    /* a round is in flight */
    RR_HANDOFF_LATER = 104,   /* who asked will be told */
    RR_HANDOFF_REFUSED = 105, /* this round of the bucket failed, and nothing else with it */
};

/* What rr_handoff_take gives. */
enum {
    RR_ITEM_JOB = 1,
    RR_ITEM_BUCKET = 2,
    RR_ITEM_COMPLAINT = 3, /* a bucket was started out of turn: call rr_handoff_fail */
};

/* Room for the longest text that comes with an error, its terminating zero included. */
#define RR_WHY_BYTES 2048

typedef struct rr_handoff rr_handoff;

/* A gradient's place in its bucket, in bytes. */
typedef struct {
    uint64_t start;
    uint64_t nbytes;
} rr_slot;

/* `memory` holds `nbytes`, or is NULL: then there is one slot, of that size, and the bucket is the
 * memory of the part that is started, from then on until it is waited for. The slots lie in it one
 * after the other. Bytes between them are padding, which start fills with zeros. What wait reads
 * lies where the slots do, or where `results` say, in the same way, if that is not NULL. */
typedef struct {
    void *memory;
    uint64_t nbytes;
    const rr_slot *slots;
    const rr_slot *results;
    uint32_t slot_count;
    uint32_t result_count;
} rr_bucket;

/* A gradient outside of the bucket: read by start, written by wait. */
typedef struct {
    void *data;
    uint64_t nbytes;
} rr_part;

typedef struct {
    int kind;        /* RR_ITEM_ */
    int64_t job;     /* of a job: the number that was posted */
    int64_t plan;    /* of a bucket: its plan's number */
    void *memory;    /* of a bucket: where it lies */
    uint32_t bucket; /* of a bucket: its place in the plan */
} rr_item;

/* A new handoff in `opened`; -ENOMEM. */
RR_EXPORT int rr_handoff_open(rr_handoff **opened);

/* A number for this plan, never used again in this process; -ENOMEM, -EINVAL (slots that do not
 * lie in their bucket one after the other), RR_HANDOFF_CLOSED. Copies the layout. */
RR_EXPORT int rr_handoff_register(rr_handoff *handoff, const rr_bucket *buckets,
                                  uint32_t bucket_count, int64_t *plan);

/* Forget a plan; RR_HANDOFF_BUSY while a round of it is in flight or a thread waits for one of
 * its buckets, and it stays. After a failure rounds are in flight no more. */
RR_EXPORT int rr_handoff_unregister(int64_t plan);

/* Put a job at the end of the queue; -ENOMEM, RR_HANDOFF_CLOSED. */
RR_EXPORT int rr_handoff_post(rr_handoff *handoff, int64_t job);

/* Wait for the next item, which is then the engine's until rr_handoff_finish;
 * RR_HANDOFF_CLOSED. For the engine's thread alone. With `why` the bucket is given out as
 * RR_HANDOFF_REFUSED in this round; NULL: it is reduced. */
RR_EXPORT int rr_handoff_take(rr_handoff *handoff, rr_item *item);
RR_EXPORT void rr_handoff_finish(rr_handoff *handoff, const char *why);

/* Wait until the queue is empty and nothing is taken, for at most `timeout_ms`.
 * 1 when it is so, or the handoff closed; 0 when the time is over. */
RR_EXPORT int rr_handoff_wait_idle(rr_handoff *handoff, uint32_t timeout_ms);

/* Every start and wait, also those that wait now, returns RR_HANDOFF_FAILED and `why`. */
RR_EXPORT void rr_handoff_fail(rr_handoff *handoff, const char *why);

/* As fail, with RR_HANDOFF_CLOSED, and for the engine too. Returns when no thread of the
 * framework's is inside any more and all who waited have been told; then the memory of all plans
 * may go. */
RR_EXPORT void rr_handoff_close(rr_handoff *handoff, const char *why);

/* How long threads have been blocked in rr_handoff_wait, all added up, and the time in which
 * anybody waited to be told. */
RR_EXPORT uint64_t rr_handoff_waited_ns(rr_handoff *handoff);

/* Pack a bucket and hand it over. One part for each of its slots, of that slot's size; none is
 * used after the return, unless it is the bucket. On an error `why`, of RR_WHY_BYTES, says more. A
 * bucket that is started a second time within a round means that this rank is out of step for good:
 * the engine gets a complaint, and the call waits for its verdict, which it returns. */
RR_EXPORT int rr_handoff_start(int64_t plan, uint32_t bucket, const rr_part *parts,
                               uint32_t part_count, char *why);

/* Wait until a started bucket is reduced, and unpack it. As for start, with a part for each of its
 * results; also what rr_handoff_finish was given. */
RR_EXPORT int rr_handoff_wait(int64_t plan, uint32_t bucket, const rr_part *parts,
                              uint32_t part_count, char *why);

/* The same without waiting. RR_HANDOFF_LATER: `tell` will be called with `data`, once, by a thread
 * of the handoff's own, with what rr_handoff_wait would have returned; until then the parts'
 * memory must stay. It may go on with whatever follows, also call start and this function, but
 * must not wait for the handoff. Any other code is the result; -ENOMEM, -EAGAIN: there is no
 * memory, no thread. */
typedef void rr_delivered(void *data, int code, const char *why);
RR_EXPORT int rr_handoff_wait_async(int64_t plan, uint32_t bucket, const rr_part *parts,
                                    uint32_t part_count, rr_delivered *tell, void *data, char *why);

/* ------------------------------------------------------------------------------------------
 * TensorFlow kernels on top of the handoff (tf_ops.c)
 * ------------------------------------------------------------------------------------------ */

/* Register the ops RingreduceStart and RingreduceWait and their kernels with the TensorFlow whose
 * libtensorflow_framework is at `path` and loaded already. On an error `why`, of RR_WHY_BYTES,
 * says more: -ENOENT (no such library is loaded), -ENOSYS (it lacks a symbol), -EINVAL (TensorFlow
 * refused). Once per process. */
RR_EXPORT int rr_tensorflow_register(const char *path, char *why);

/* ------------------------------------------------------------------------------------------
 * XLA custom calls on top of the handoff (xla_calls.c)
 * ------------------------------------------------------------------------------------------ */

/* Register the custom calls ringreduce_start and ringreduce_wait for XLA's platform Host, with the
 * XLA in the library at `path`, TensorFlow's libtensorflow_framework or libtensorflow_cc, which is
 * loaded already. `futures_at` is the place of XLA_FFI_Future_Create among the functions of
 * XLA_FFI_Api, in the header that came with this XLA. As rr_tensorflow_register; -ENOSYS also:
 * XLA's interface is none of those that are known. */
RR_EXPORT int rr_xla_register(const char *path, int futures_at, char *why);

#ifdef __cplusplus
}
#endif
#endif

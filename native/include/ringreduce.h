/* The C part of ringreduce; native/README.md says what it is for.
 *
 * Rules for all of it: this header is C99; nothing aborts or prints; a function that can fail
 * returns one of the codes below; no function keeps a pointer argument unless it says so.
 * Nothing links TensorFlow or libzmq.
 */
#ifndef RINGREDUCE_H
#define RINGREDUCE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RR_EXPORT __attribute__((visibility("default")))

/* Increased with every change of this header; ringreduce/effects/native.py requires this value. */
#define RR_ABI 18

/* Return codes. System errors are returned as -errno. */
enum {
    RR_DONE = 0,
    RR_WAITING = 1,  /* another rank is late; call again */
    RR_MISMATCH = 2, /* another rank is in another call */
    RR_ABORTED = 3,  /* another rank has aborted */
    RR_BROKEN = 4,   /* another rank's segment holds impossible values */
};

/* The ABI that this library was built with. */
RR_EXPORT uint32_t rr_abi(void);

/* ------------------------------------------------------------------------------------------
 * Shared memory of the ranks of one host
 *
 * Each rank owns a segment, a sealed memfd that every rank of the host maps. It has no name,
 * so nothing is left when the last process has ended, for whatever reason.
 *
 *   offset
 *        0  head       magic, ABI and sizes; written before the segment is passed on
 *     4096  board      the owner's state; a cache line for each word that others wait for:
 *                        step      steps that this rank has finished, over all calls
 *                        sleepers  ranks that sleep until `step` grows (written by them)
 *                        calls[2]  the rank's current call; even and odd calls alternate
 *                        aborted   whether it has given up
 *                        channels  where its heap has its channels to other ranks
 *    65536  inbox[2]   whole small messages, of even and odd calls
 *    98304  staging    two halves: data in flight of even and odd segments
 *           heap       registered arrays (`rr_segment_reserve`), reduced in place; channels
 *
 * Ranks advance in steps. In a step a rank copies or adds, then increments `step`, then waits
 * until all others have done the same. So each word of a segment has one writer in each step,
 * and is read in a later step. Two halves are enough, since no rank is more than one step
 * ahead of another.
 *
 * all-reduce of a large array: chunk r belongs to rank r; segment s is the s-th piece of every
 * chunk. In step s each rank
 *   copies segment s - 2 of the others' chunks out of its staging into its array,
 *   copies segment s of the others' chunks from its array into its staging,
 *   adds up segment s - 1 of its own chunk, from all stagings, into its array and the same place
 *   in the others' stagings.
 * When all ranks' arrays are registered, each rank adds up its own chunk and writes it into
 * all arrays, or in an all-gather copies the others' chunks: two steps for any size. For a small
 * message each rank copies its whole array into its inbox, and every rank adds up all inboxes: one
 * step.
 *
 * all-to-all: in step s each rank copies segment s of what it sends into its staging, and the parts
 * that segment s - 1 of the others has for it out of theirs. Parts in registered arrays are copied
 * from there: two steps.
 *
 * Additions are in the order of the ranks, so results have the same bits on every rank and in
 * every run.
 * ------------------------------------------------------------------------------------------ */

enum {
    RR_INBOX_BYTES = 16384, /* largest message that goes through the inbox */
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

/* Operators: also their codes in frame headers. RR_MEAN divides by the number of ranks. */
enum { RR_SUM = 1, RR_MEAN, RR_MIN, RR_MAX, RR_PRODUCT };

/* Make a segment with `staging_bytes` for each half and up to `heap_bytes` of registered arrays.
 * Memory for all but the heap is allocated now, so that using it cannot fail later.
 * -ENOSPC, -ENOMEM, -EFBIG: not enough memory; else -errno of memfd_create or fcntl. */
RR_EXPORT int rr_segment_create(uint64_t staging_bytes, uint64_t heap_bytes, int *descriptor);

/* Map a segment that this process or another one made. -EPROTO: it is not a sealed segment of
 * this ABI, or its length is not the one in its head. */
RR_EXPORT int rr_segment_map(int descriptor, void **address, uint64_t *bytes);
RR_EXPORT int rr_segment_unmap(void *address, uint64_t bytes);

/* Offset of a mapped segment's heap; its length in `bytes`. */
RR_EXPORT uint64_t rr_segment_heap(const void *address, uint64_t *bytes);

/* Allocate or free the memory of bytes [offset, offset + bytes) of the heap. -ENOSPC, -ENOMEM:
 * not enough memory. */
RR_EXPORT int rr_segment_reserve(int descriptor, const void *address, uint64_t offset,
                                 uint64_t bytes);
RR_EXPORT int rr_segment_release(int descriptor, const void *address, uint64_t offset,
                                 uint64_t bytes);

/* Remap bytes [offset, offset + bytes) of the heap, whole pages, as private memory. Address and
 * contents stay, and this process does not see later writes by other processes. Writes by its
 * own threads meanwhile are kept. Late ranks still read the shared pages, which keep their
 * contents. -ENOMEM: not done. */
RR_EXPORT int rr_segment_detach(int descriptor, void *address, uint64_t offset, uint64_t bytes);

/* Free the memory of a detached part that is no longer used. */
RR_EXPORT int rr_segment_drop(void *address, uint64_t offset, uint64_t bytes);

/* One rank's view of all segments of its host. Not thread-safe. */
typedef struct rr_shm rr_shm;

/* `segments` are mapped, in rank order, and must stay mapped until rr_shm_free. */
RR_EXPORT int rr_shm_new(rr_shm **group, uint32_t index, uint32_t size, void *const *segments);
RR_EXPORT void rr_shm_free(rr_shm *group);

/* The collective that a call makes. */
enum {
    RR_ALL_REDUCE = 1, /* every chunk reduced, on all ranks */
    RR_REDUCE_SCATTER, /* the own chunk reduced; the rest of the array unchanged */
    RR_ALL_GATHER,     /* the others' chunks copied from them */
    RR_ALL_TO_ALL,     /* a part of every rank's array copied from it */
};

typedef struct {
    uint64_t header[8]; /* as in a frame (ringreduce/pure/wire.py); equal on all ranks but for
                           the rank in word 2; word 3, the sequence, is filled in */
    uint32_t action;    /* RR_ALL_REDUCE, ... */
    uint32_t dtype;
    uint32_t op;
    uint32_t divisor;       /* of RR_MEAN */
    const uint64_t *bounds; /* size + 1 elements: chunk r is [bounds[r], bounds[r + 1]);
                               RR_ALL_TO_ALL: size * size elements, in row i what rank i sends to
                               each, equal on all ranks */
} rr_call;

/* How to wait: spin, then yield, then sleep. */
typedef struct {
    uint32_t spins;    /* checks without a pause */
    uint32_t yields;   /* checks after sched_yield */
    uint32_t sleep_ms; /* sleep at most this long, then return RR_WAITING */
} rr_wait_limits;

/* Run `call` on `data`, the array's first byte. RR_WAITING: another rank is late; call again with
 * the same arguments to continue. After any code but RR_DONE and RR_WAITING the group is unusable.
 */
RR_EXPORT int rr_shm_run(rr_shm *group, const rr_call *call, void *data,
                         const rr_wait_limits *limits);

/* The same for RR_ALL_TO_ALL: `source` is this rank's array, `target` has the parts of all ranks
 * for this one, end to end, and does not overlap it. */
RR_EXPORT int rr_shm_exchange(rr_shm *group, const rr_call *call, const void *source, void *target,
                              const rr_wait_limits *limits);

/* Publish that this rank gives up, and wake the ranks that wait for it. */
RR_EXPORT void rr_shm_abort(rr_shm *group);

/* Details of the code that rr_shm_run returned. */
typedef struct {
    uint64_t sequence;    /* number of the call */
    uint32_t peer;        /* index of the rank that is late, disagrees or has aborted */
    uint32_t step, steps; /* where in the call */
    uint64_t theirs[8];   /* RR_MISMATCH: the peer's header */
    uint64_t progress;    /* grows while any rank advances */
    uint64_t bytes_sent, bytes_received; /* between ranks so far */
} rr_shm_facts;
RR_EXPORT void rr_shm_look(const rr_shm *group, rr_shm_facts *facts);

/* Whether rank `peer` has finished all steps that this rank waits for. */
RR_EXPORT int rr_shm_has_arrived(const rr_shm *group, uint32_t peer);

/* ------------------------------------------------------------------------------------------
 * Messages from one rank of a host to another
 *
 * A channel is memory in the sender's heap. It carries one direction of a pair:
 *
 *   filled   slots that the sender has filled so far
 *   emptied  slots that the receiver has emptied so far
 *   slots[]  in turn: header of the message that begins here, or nothing; data
 *
 * Messages of a channel match in sending order. Nothing of the collectives is used, so that other
 * threads may run those, other pairs and the other direction meanwhile.
 * ------------------------------------------------------------------------------------------ */

/* One end of a channel. Not thread-safe. */
typedef struct rr_pair rr_pair;

/* The end of rank `sender` or of rank `receiver`. `segments` as for rr_shm_new. */
RR_EXPORT int rr_pair_new(rr_pair **pair, uint32_t size, void *const *segments, uint32_t sender,
                          uint32_t receiver);
RR_EXPORT void rr_pair_free(rr_pair *pair);

/* Only for the sender: the channel lies at `offset` of its heap, a multiple of 64, in
 * rr_pair_channel_bytes() zeros that stay allocated as long as the segment. Once per pair and
 * segment, and by one thread at a time of a sender. */
RR_EXPORT uint64_t rr_pair_channel_bytes(void);
RR_EXPORT void rr_pair_open(rr_pair *pair, uint64_t offset);

/* Send `bytes` at `data`; returns when they may be changed. `header` as in rr_call: word 3, the
 * number of the message, and word 6, its bytes, are filled in; both ends pass the sender's rank.
 * RR_WAITING: the receiver is late; call again with the same arguments to continue. */
RR_EXPORT int rr_pair_send(rr_pair *pair, const uint64_t *header, const void *data, uint64_t bytes,
                           const rr_wait_limits *limits);

/* Receive a message of this `header` and length into `data`. RR_WAITING: the sender is late.
 * RR_MISMATCH: the next message is another one. */
RR_EXPORT int rr_pair_receive(rr_pair *pair, const uint64_t *header, void *data, uint64_t bytes,
                              const rr_wait_limits *limits);

/* Details of the code that send or receive returned. */
typedef struct {
    uint64_t sequence;  /* number of the message */
    uint64_t theirs[8]; /* RR_MISMATCH: the sender's header */
    uint64_t progress;  /* grows while either end advances */
    uint32_t aborted;   /* RR_ABORTED: the rank */
    uint32_t unused;
} rr_pair_facts;
RR_EXPORT void rr_pair_look(const rr_pair *pair, rr_pair_facts *facts);

/* Reduce `count` elements of `sources` arrays, in their order, and write the result to all
 * `targets`; a target may be a source. `divisor` is used by RR_MEAN. */
RR_EXPORT void rr_reduce(uint32_t dtype, uint32_t op, uint32_t divisor, uint64_t count,
                         uint32_t sources, const void *const *source, uint32_t targets,
                         void *const *target);

/* ------------------------------------------------------------------------------------------
 * Events: what happened in a communicator, and when (ringreduce/pure/spans.py)
 *
 * Python owns the memory. Calls are written by the thread that makes them, which holds the GIL.
 * What they consist of, their parts, is in two rings, since each has one writer at a time: threads
 * that hold the GIL, or the lock of the handoff. Times are seconds on CLOCK_MONOTONIC; a thread is
 * pthread_self().
 * ------------------------------------------------------------------------------------------ */

enum {
    RR_CALLS_KEPT = 256,  /* powers of two */
    RR_PARTS_KEPT = 1024, /* in each of the rings */
};

/* Kinds of spans. */
enum {
    RR_SPAN_CALL = 1, /* a collective, as the user called it */
    RR_SPAN_QUEUE,    /* a bucket or other work was ready, and the engine busy with other work */
    RR_SPAN_PACK,     /* gradients were copied into a bucket; other: its index */
    RR_SPAN_REDUCE,   /* a bucket was reduced */
    RR_SPAN_BLOCKED,  /* a training step had to wait for a bucket */
    RR_SPAN_UNPACK,   /* a bucket was copied into gradients */
    RR_SPAN_KINDS = 16,
};

typedef struct {
    uint64_t stamp;     /* spans before it in its ring, plus 1; 0: there is none here */
    uint16_t kind;      /* RR_SPAN_ */
    uint16_t operation; /* its code in frame headers */
    int32_t other;      /* a rank or bucket, by the kind */
    uint64_t number;    /* of the call that it belongs to */
    uint64_t nbytes;
    uint64_t thread;
    double began, ended;
    uint64_t unused;
} rr_span;

/* A call that begins sets the last four words; one that has completed sets all, and its span. */
typedef struct {
    uint64_t number;    /* of the present or next call */
    uint64_t calls;     /* that have completed */
    double seconds;     /* in those */
    double elapsed;     /* of the last of those */
    uint64_t operation; /* of the call that runs: its code; 0: none runs */
    uint64_t nbytes;    /* of that; 0: none runs */
    uint64_t thread;    /* of that; 0: none runs */
    double since;       /* when it began; while none runs, when the last one ended */
} rr_current_call;

typedef struct {
    uint64_t count; /* of all spans so far; the last is in spans[(count - 1) % RR_PARTS_KEPT] */
    uint64_t unused[7];
    double seconds[RR_SPAN_KINDS]; /* of all spans so far, by kind */
    rr_span spans[RR_PARTS_KEPT];
} rr_parts;

typedef struct {
    rr_current_call current;
    rr_span calls[RR_CALLS_KEPT]; /* call n in calls[n % RR_CALLS_KEPT] */
    rr_parts ours;                /* by threads that hold the GIL */
    rr_parts queued;              /* by threads that hold the handoff's lock */
} rr_events;

/* Record that a call of `nbytes` begins; that it has completed. */
RR_EXPORT void rr_events_begin(rr_events *events, uint64_t operation, uint64_t nbytes);
RR_EXPORT void rr_events_end(rr_events *events);

/* Functions of Python's, and its None. */
typedef struct {
    unsigned long long (*as_number)(void *object); /* PyLong_AsUnsignedLongLong */
    void (*hold)(void *object);                    /* Py_IncRef */
    void *none;
} rr_python;

/* The same as functions of Python's (METH_FASTCALL), once rr_events_use was called: `self` is the
 * address of rr_events as a number; on_begin takes the operation and nbytes. */
RR_EXPORT void rr_events_use(const rr_python *functions);
RR_EXPORT void *rr_events_on_begin(void *self, void *const *arguments, intptr_t number);
RR_EXPORT void *rr_events_on_end(void *self, void *const *arguments, intptr_t number);

/* ------------------------------------------------------------------------------------------
 * Small calls: a call on one array as a C function of Python's
 *
 * A call of few bytes takes a microsecond in C and several in Python. So Python runs each call
 * once, then teaches it; from then on rr_small_run does all of it, from the arguments on.
 * ------------------------------------------------------------------------------------------ */

enum { RR_SMALL_COLLECTIVE = 1, RR_SMALL_SEND, RR_SMALL_RECEIVE };

/* A call that was taught: found again by the addresses of two Python objects, which must live. */
typedef struct {
    const void *dtype;  /* of the array */
    const void *option; /* the second argument */
    uint64_t count, nbytes;
    const void *call; /* rr_call, or the header of a message; NULL: none is known */
} rr_small_call;

enum { RR_SMALL_CALLS = 64 };

/* What a function knows. All functions are Python's, and all objects borrowed. */
typedef struct {
    uint32_t kind;      /* RR_SMALL_COLLECTIVE, ... */
    uint32_t operation; /* its code in events */
    rr_events *events;  /* where calls are recorded; NULL: nowhere */
    void *end;          /* rr_shm or rr_pair; NULL: no call may begin */
    const rr_wait_limits *limits;
    const void *array_type;       /* numpy.ndarray */
    void *done, *late, *unknown;  /* what to return: True, False, None */
    void *(*release_gil)(void);   /* PyEval_SaveThread */
    void (*take_gil)(void *);     /* PyEval_RestoreThread */
    void (*hold)(void *object);   /* Py_IncRef */
    void (*drop)(void *object);   /* Py_DecRef */
    void *(*call)(void *object);  /* PyObject_CallNoArgs */
    void *lock, *unlock;          /* a lock's, without waiting; NULL: callers exclude each other */
    uint64_t *caller;             /* with a lock: the thread that is in a call, in C or not; 0 */
    uint64_t thread;              /* the only one that may begin a call; 0: any may */
    const rr_small_call *running; /* NULL: none */
    uint64_t bytes;               /* of all calls */
    rr_small_call known[RR_SMALL_CALLS];
} rr_small_calls;

/* Remember a call, in place of another one if need be; the slot that it takes. Not while one runs.
 */
RR_EXPORT uint32_t rr_small_learn(rr_small_calls *calls, const rr_small_call *call);

/* As METH_FASTCALL: `self` is an array whose data is rr_small_calls; the arguments are an array and
 * the option. Returns `unknown` when nothing was begun, as when the lock is taken; `late` when the
 * call is to be continued by rr_shm_run, rr_pair_send or rr_pair_receive, with the same arguments.
 * The GIL is held when it is called, and released while it waits. */
RR_EXPORT void *rr_small_run(void *self, void *const *arguments, intptr_t number);

/* The same, without arguments, with a lock: ends a call of this thread that was late, which has had
 * the lock until now. Else it does nothing. Returns `unknown`. */
RR_EXPORT void *rr_small_end(void *self, void *const *arguments, intptr_t number);

/* ======================================================================================
 * Handoff: buckets of gradients go from a framework's threads to the engine and back.
 *
 * The engine is one Python thread that reduces. A framework's threads pack gradients into
 * buckets and later unpack the means; they never run Python. A plan is a fixed list of buckets.
 * One round of it takes each of them once through these states:
 *
 *      any thread          any thread               engine               engine
 *         start            packed, as are              take               finish
 *              .           all before it
 *   EMPTY ---> PACKING ---> PACKED ---> (in queue) ---> REDUCING ---> REDUCED
 *     ^                                                                   |  wait,
 *     |            when all of the plan are SPENT                         v  any thread
 *     +------------------------- SPENT <--------------------------- UNPACKING
 *
 * The queue is first in, first out. It holds buckets that are ready (in plan order within a
 * round, in whatever order they were started) and the engine's other work, its jobs.
 *
 * All functions may be called from any thread. A handoff (about 2 KiB) is closed but never
 * freed, so that a late thread gets an error and does not touch freed memory.
 * ==================================================================================== */

enum {
    RR_HANDOFF_CLOSED = 100,  /* rr_handoff_close was called */
    RR_HANDOFF_FAILED = 101,  /* rr_handoff_fail was called */
    RR_HANDOFF_MISUSED = 102, /* no such plan or bucket, wrong sizes, or wrong order */
    RR_HANDOFF_BUSY = 103,    /* a round is in flight */
    RR_HANDOFF_LATER = 104,   /* the caller will be notified */
    RR_HANDOFF_REFUSED = 105, /* only this round of the bucket failed */
};

/* What rr_handoff_take gives. */
enum {
    RR_ITEM_JOB = 1,
    RR_ITEM_BUCKET = 2,
    RR_ITEM_COMPLAINT = 3, /* a bucket was started twice: call rr_handoff_fail */
};

/* Size of a buffer for error texts, including the terminating zero. */
#define RR_WHY_BYTES 2048

typedef struct rr_handoff rr_handoff;

/* A gradient's range in its bucket, in bytes. */
typedef struct {
    uint64_t start;
    uint64_t nbytes;
} rr_slot;

/* Memory for rounds of a bucket. Results may be lent: they stay where they are, and the area takes
 * no other round until all are given back. */
typedef struct rr_area rr_area;

/* A new area of `memory`, which the caller owns; NULL: there is no memory for it. The area must
 * not be freed, nor its memory, while a plan, a round or a result uses it.
 *
 * The ranks of a host may share the memory of a bucket whose results are equal on all of them. Each
 * calls this with its own number and the same `marks`, RR_MARK_BYTES for each of `ranks`, whose
 * second words the first rank has set to 1 and the rest to 0. The first rank's memory stays in use
 * until the others have freed their areas. */
enum { RR_MARK_BYTES = 64 };
RR_EXPORT rr_area *rr_area_new(void *memory, void *marks, uint32_t ranks, uint32_t rank);
RR_EXPORT int rr_area_is_used(const rr_area *area);
RR_EXPORT void rr_area_free(rr_area *area);

/* Give back one result that a wait has lent; from any thread. */
RR_EXPORT void rr_area_give_back(rr_area *area);

/* Each of `areas` has `nbytes`: a round takes the first that is free, or spare memory. Slots are in
 * ascending order and do not overlap. Wait reads `results`; if that is NULL, the slots, between
 * which start fills the bytes with zeros. Without areas the bucket is reduced in place: it has one
 * slot of `nbytes`, and uses the memory of the part passed to start until the wait. */
typedef struct {
    rr_area *const *areas;
    uint64_t nbytes;
    const rr_slot *slots;
    const rr_slot *results;
    uint32_t area_count;
    uint32_t slot_count;
    uint32_t result_count;
} rr_bucket;

/* A gradient outside the bucket: read by start, written by wait. */
typedef struct {
    void *data;
    uint64_t nbytes;
} rr_part;

typedef struct {
    int kind;        /* RR_ITEM_ */
    int64_t job;     /* of a job: the number that was posted */
    int64_t plan;    /* of a bucket: its plan's number */
    void *memory;    /* of a bucket */
    uint32_t bucket; /* of a bucket: its index in the plan */
} rr_item;

/* Store a new handoff in `opened`; -ENOMEM. What happens to its buckets is recorded in `events`, if
 * that is not NULL, until it is closed. */
RR_EXPORT int rr_handoff_open(rr_handoff **opened, rr_events *events);

/* Copy the layout and store a number for this plan, unique in this process; -ENOMEM, -EINVAL
 * (slots overlap, are not in order or exceed their bucket), RR_HANDOFF_CLOSED. */
RR_EXPORT int rr_handoff_register(rr_handoff *handoff, const rr_bucket *buckets,
                                  uint32_t bucket_count, int64_t *plan);

/* Delete a plan. RR_HANDOFF_BUSY: not done, since a round of it is in flight or a thread waits for
 * one of its buckets. After a failure no round is in flight. */
RR_EXPORT int rr_handoff_unregister(int64_t plan);

/* Append a job to the queue; -ENOMEM, RR_HANDOFF_CLOSED. */
RR_EXPORT int rr_handoff_post(rr_handoff *handoff, int64_t job);

/* Only for the engine's thread. Take waits for the next item, which the engine owns until finish;
 * RR_HANDOFF_CLOSED. If `why` is NULL the bucket is reduced; else waiting for it returns
 * RR_HANDOFF_REFUSED and that text in this round. */
RR_EXPORT int rr_handoff_take(rr_handoff *handoff, rr_item *item);
RR_EXPORT void rr_handoff_finish(rr_handoff *handoff, const char *why);

/* Wait at most `timeout_ms` until the queue is empty and no item is taken. 1: it is so, or the
 * handoff is closed; 0: the time is over. */
RR_EXPORT int rr_handoff_wait_idle(rr_handoff *handoff, uint32_t timeout_ms);

/* From now on every start and wait, running ones included, returns RR_HANDOFF_FAILED and `why`. */
RR_EXPORT void rr_handoff_fail(rr_handoff *handoff, const char *why);

/* After fail: start and wait work again, every plan from its first bucket on. Waits until no
 * framework thread is inside and the engine has done its jobs, so not for the engine's thread.
 * Does nothing before fail. RR_HANDOFF_CLOSED. */
RR_EXPORT int rr_handoff_reopen(rr_handoff *handoff);

/* As fail, with RR_HANDOFF_CLOSED, and for the engine too. Returns when no framework thread is
 * inside and all waiters have been notified; then no plan uses any area. */
RR_EXPORT void rr_handoff_close(rr_handoff *handoff, const char *why);

/* Pack a bucket and queue it. Takes one part for each slot, of the slot's size; none is used after
 * the return, unless the bucket is reduced in place. On an error `why`, of RR_WHY_BYTES, says more.
 * Starting a bucket twice in a round means that this rank is out of step for good: the engine gets
 * a complaint, and the call returns when the engine has failed the handoff. */
RR_EXPORT int rr_handoff_start(int64_t plan, uint32_t bucket, const rr_part *parts,
                               uint32_t part_count, char *why);

/* Wait until a started bucket is reduced, and unpack it. As start, with one part for each result.
 * A result whose part has no `data`, and some bytes, is lent: `data` becomes its address in the
 * bucket's area, and `lender` that area. Give back each of them by rr_area_give_back, also after an
 * error. `lender` may be NULL if all parts have data. Also returns RR_HANDOFF_REFUSED with the text
 * given to rr_handoff_finish. */
RR_EXPORT int rr_handoff_wait(int64_t plan, uint32_t bucket, rr_part *parts, uint32_t part_count,
                              rr_area **lender, char *why);

/* The same without blocking and without lending. RR_HANDOFF_LATER: the handoff's delivery thread
 * will call `notify` once, with `data` and what rr_handoff_wait would have returned; until then the
 * parts' memory must stay. `notify` may run further work, and call start and this function, but
 * must not block on the handoff. Any other code is the result; -ENOMEM, -EAGAIN: no memory, no
 * thread. */
typedef void rr_delivered(void *data, int code, const char *why);
RR_EXPORT int rr_handoff_wait_async(int64_t plan, uint32_t bucket, rr_part *parts,
                                    uint32_t part_count, rr_delivered *notify, void *data,
                                    char *why);

/* ------------------------------------------------------------------------------------------
 * TensorFlow kernels on top of the handoff (tf_ops.c)
 * ------------------------------------------------------------------------------------------ */

/* Register the ops RingreduceStart and RingreduceWait and their kernels with TensorFlow, whose
 * libtensorflow_framework, at `path`, is loaded already. On an error `why`, of RR_WHY_BYTES,
 * says more: -ENOENT (no such library is loaded), -ENOSYS (it lacks a symbol), -EINVAL (TensorFlow
 * refused). Once per process. */
RR_EXPORT int rr_tensorflow_register(const char *path, char *why);

/* ------------------------------------------------------------------------------------------
 * XLA custom calls on top of the handoff (xla_calls.c)
 * ------------------------------------------------------------------------------------------ */

/* Register the custom calls ringreduce_start and ringreduce_wait for XLA's platform Host. The
 * library at `path`, TensorFlow's libtensorflow_framework or libtensorflow_cc, contains XLA and is
 * loaded already. `futures_at` is the index of XLA_FFI_Future_Create among the functions of
 * XLA_FFI_Api, in the header that came with this XLA. As rr_tensorflow_register; -ENOSYS also:
 * XLA's interface is not a known one. */
RR_EXPORT int rr_xla_register(const char *path, int futures_at, char *why);

#ifdef __cplusplus
}
#endif
#endif

/* Memory that several processes share: made, sealed, mapped, checked.
 *
 * A memfd has no name in any file system. Its size is sealed before it is passed on, so no
 * process can shrink it while another one uses it (which would be SIGBUS). Memory for all fixed
 * parts is allocated when it is made, so running out of memory is an error here and not a signal
 * later.
 */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "segment.h"

#define RR_MAGIC UINT64_C(0x314d48532d525252) /* "RRR-SHM1" in memory */

static const int SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

static uint64_t page(void)
{
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

static uint64_t whole_pages(uint64_t bytes)
{
    return (bytes + page() - 1) / page() * page();
}

/* fallocate, repeated when a signal interrupts it. */
static int allocate(int descriptor, int mode, uint64_t offset, uint64_t bytes)
{
    int failed;
    do {
        failed = fallocate(descriptor, mode, (off_t)offset, (off_t)bytes);
    } while (failed && errno == EINTR);
    return failed ? -errno : RR_DONE;
}

int rr_segment_create(uint64_t staging_bytes, uint64_t heap_bytes, int *descriptor)
{
    struct rr_head head = {
        .magic = RR_MAGIC,
        .abi = RR_ABI,
        .staging = RR_STAGING_OFFSET,
        .staging_bytes = whole_pages(staging_bytes),
        .heap_bytes = whole_pages(heap_bytes),
    };
    head.heap = head.staging + 2 * head.staging_bytes;
    head.bytes = head.heap + head.heap_bytes;
    if (head.bytes > INT64_MAX || head.staging_bytes < staging_bytes ||
        head.heap_bytes < heap_bytes)
        return -EFBIG;

    const int made = memfd_create("ringreduce", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made < 0)
        return -errno;
    int status = RR_DONE;
    if (ftruncate(made, (off_t)head.bytes) != 0)
        status = -errno;
    if (status == RR_DONE)
        status = allocate(made, 0, 0, head.heap);
    if (status == RR_DONE && pwrite(made, &head, sizeof head, 0) != (ssize_t)sizeof head)
        status = -errno;
    if (status == RR_DONE && fcntl(made, F_ADD_SEALS, SEALS) != 0)
        status = -errno;
    if (status != RR_DONE) {
        close(made);
        return status;
    }
    *descriptor = made;
    return RR_DONE;
}

/* Whether `head` describes a segment of `bytes` as rr_segment_create makes them. */
static int is_sound(const struct rr_head *head, uint64_t bytes)
{
    return head->magic == RR_MAGIC && head->abi == RR_ABI && head->bytes == bytes &&
           head->staging == RR_STAGING_OFFSET && head->staging_bytes <= bytes / 2 &&
           head->staging_bytes % page() == 0 &&
           head->heap == head->staging + 2 * head->staging_bytes && head->heap <= bytes &&
           head->heap_bytes == bytes - head->heap;
}

int rr_segment_map(int descriptor, void **address, uint64_t *bytes)
{
    struct stat about;
    struct rr_head head;
    const int seals = fcntl(descriptor, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS || fstat(descriptor, &about) != 0)
        return -EPROTO;
    if (pread(descriptor, &head, sizeof head, 0) != (ssize_t)sizeof head ||
        about.st_size < RR_STAGING_OFFSET || !is_sound(&head, (uint64_t)about.st_size))
        return -EPROTO;
    void *mapped =
        mmap(NULL, head.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    if (mapped == MAP_FAILED)
        return -errno;
#ifdef MADV_POPULATE_READ
    /* Page faults now, not in the first calls; those of reads map 16 pages each, for writing too.
     * Kernels before 5.14 do not support it. */
    (void)madvise(mapped, head.heap, MADV_POPULATE_READ);
#endif
    *address = mapped;
    *bytes = head.bytes;
    return RR_DONE;
}

int rr_segment_unmap(void *address, uint64_t bytes)
{
    return munmap(address, bytes) == 0 ? RR_DONE : -errno;
}

uint64_t rr_segment_heap(const void *address, uint64_t *bytes)
{
    const struct rr_head *head = address;
    *bytes = head->heap_bytes;
    return head->heap;
}

/* Offset in the file of a part of the heap; 0 if the part exceeds the heap. */
static uint64_t in_heap(const struct rr_head *head, uint64_t offset, uint64_t bytes)
{
    if (offset > head->heap_bytes || bytes > head->heap_bytes - offset)
        return 0;
    return head->heap + offset;
}

int rr_segment_reserve(int descriptor, const void *address, uint64_t offset, uint64_t bytes)
{
    const uint64_t at = in_heap(address, offset, bytes);
    return at == 0 || bytes == 0 ? -EINVAL : allocate(descriptor, 0, at, bytes);
}

int rr_segment_release(int descriptor, const void *address, uint64_t offset, uint64_t bytes)
{
    const uint64_t at = in_heap(address, offset, bytes);
    if (at == 0 || bytes == 0)
        return -EINVAL;
    return allocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, bytes);
}

/* Make the kernel copy every page now, with its present contents. */
static void copy_on_write(uint8_t *start, uint64_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    if (madvise(start, bytes, MADV_POPULATE_WRITE) == 0)
        return;
#endif
    /* Kernels before 5.14: a write that changes nothing, atomic because other threads write too. */
    for (uint64_t at = 0; at < bytes; at += page())
        (void)__atomic_fetch_or(start + at, 0, __ATOMIC_RELAXED);
}

int rr_segment_detach(int descriptor, void *address, uint64_t offset, uint64_t bytes)
{
    const uint64_t at = in_heap(address, offset, bytes);
    if (at == 0 || bytes == 0 || offset % page() != 0 || bytes % page() != 0)
        return -EINVAL;
    /* A private mapping of the same pages, each copied when it is first written. It is made at
     * another address and moved over the shared one, so that a failure leaves the shared one
     * intact and other threads never see a gap. Copying the bytes before the move would lose what
     * they write in between. */
    void *own = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, descriptor, (off_t)at);
    if (own == MAP_FAILED)
        return -errno;
    uint8_t *target = (uint8_t *)address + at;
    if (mremap(own, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target) == MAP_FAILED) {
        const int status = -errno;
        munmap(own, bytes);
        return status;
    }
    copy_on_write(target, bytes);
    return RR_DONE;
}

int rr_segment_drop(void *address, uint64_t offset, uint64_t bytes)
{
    const uint64_t at = in_heap(address, offset, bytes);
    if (at == 0 || bytes == 0)
        return -EINVAL;
    return madvise((uint8_t *)address + at, bytes, MADV_DONTNEED) == 0 ? RR_DONE : -errno;
}

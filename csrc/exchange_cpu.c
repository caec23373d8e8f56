/* The exchange between processes of one machine: strided rows copied into the peers' shared memory, and counters.
 *
 * Every rank owns one counter per peer, in memory that the peers map too. A sender copies its rows into the receiver's
 * buffer and then stores the number of the exchange in its counter there (release); the receiver loads it (acquire)
 * and may read the rows. Who waits sleeps on the counter itself with a futex, so it costs no CPU time.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MAX_THREADS 64
#define LINE 64 /* bytes of a cache line on x86, the unit in which streaming stores leave the core */
#define RECENT 8 /* exchanges whose calls can still be compared; a power of two, as numbers wrap */

enum how { PLAIN, STREAMING, STREAMING_AVX512 };

/* Plain atomics work between processes only where they need no lock. */
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "atomics must be lock-free");

/* Rows that one rank sends to another: row (b, t) lies first + b * batch_stride + t * token_stride bytes into the
 * sender's tensor and, in the same way, into the receiver's result. */
typedef struct {
    uint64_t batch, tokens, row_bytes;
    uint64_t source_first, source_batch_stride, source_token_stride;
    uint64_t target_first, target_batch_stride, target_token_stride;
} Block;

/* One sender's counter in a receiver's memory, alone in its cache lines (some cores fetch them in pairs). */
typedef struct {
    _Atomic uint32_t posted;        /* number of the sender's last exchange that is complete here */
    _Atomic uint32_t waiting;       /* 1 while the receiver sleeps on `posted` or is about to */
    _Atomic uint64_t calls[RECENT]; /* by number modulo RECENT: a hash of the sender's calls up to that exchange */
    char unused[56];
} Slot;

_Static_assert(sizeof(Slot) == 128, "Python lays the counters out in steps of 128 bytes");

typedef struct {
    const Block *blocks;
    const char *source;
    char *const *targets;
    uint32_t num_blocks, thread, num_threads;
    enum how how;
} Share;

static void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Streaming stores write whole cache lines past the caches: a line need not be read before it is overwritten, which
 * saves a third of the memory traffic of a big copy. Both functions take whole lines at aligned targets. */
#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void stream_row_avx512(char *target, const char *source, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes; i += LINE)
        _mm512_stream_si512((void *)(target + i), _mm512_loadu_si512(source + i));
}

static void stream_row(char *target, const char *source, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes; i += LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)(source + i));
        __m128i b = _mm_loadu_si128((const __m128i *)(source + i + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + i + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(source + i + 48));
        _mm_stream_si128((__m128i *)(target + i), a);
        _mm_stream_si128((__m128i *)(target + i + 16), b);
        _mm_stream_si128((__m128i *)(target + i + 32), c);
        _mm_stream_si128((__m128i *)(target + i + 48), d);
    }
}
#endif

static void copy_row(char *target, const char *source, uint64_t bytes, enum how how) {
#if defined(__x86_64__)
    if (how != PLAIN && ((uintptr_t)target | bytes) % LINE == 0) {
        if (how == STREAMING_AVX512)
            stream_row_avx512(target, source, bytes);
        else
            stream_row(target, source, bytes);
        return;
    }
#endif
    (void)how;
    memcpy(target, source, bytes);
}

static enum how best(int streaming) {
#if defined(__x86_64__)
    if (streaming)
        return __builtin_cpu_supports("avx512f") ? STREAMING_AVX512 : STREAMING;
#endif
    (void)streaming;
    return PLAIN;
}

/* Makes streaming stores visible before anything this thread stores later; release alone does not order them. */
static void finish_streaming(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* Copies rows [begin, end) of a block, counted over batch and tokens. */
static void copy_rows(const Block *block, const char *source, char *target, uint64_t begin, uint64_t end,
                      enum how how) {
    while (begin < end) {
        uint64_t b = begin / block->tokens, t = begin % block->tokens;
        uint64_t count = block->tokens - t < end - begin ? block->tokens - t : end - begin;
        const char *from = source + block->source_first;
        char *to = target + block->target_first + b * block->target_batch_stride + t * block->target_token_stride;
        from += b * block->source_batch_stride + t * block->source_token_stride;
        if (block->source_token_stride == block->row_bytes && block->target_token_stride == block->row_bytes) {
            copy_row(to, from, count * block->row_bytes, how);
        } else {
            for (uint64_t i = 0; i < count; i++)
                copy_row(to + i * block->target_token_stride, from + i * block->source_token_stride, block->row_bytes,
                         how);
        }
        begin += count;
    }
}

static void copy_share(const Share *share, uint32_t i) {
    const Block *block = &share->blocks[i];
    uint64_t rows = block->row_bytes ? block->batch * block->tokens : 0;
    copy_rows(block, share->source, share->targets[i], rows * share->thread / share->num_threads,
              rows * (share->thread + 1) / share->num_threads, share->how);
}

static void *copy_shares(void *argument) {
    const Share *share = argument;
    for (uint32_t i = 0; i < share->num_blocks; i++)
        copy_share(share, i);
    finish_streaming();
    return NULL;
}

static void post(Slot *slot, uint32_t number, uint64_t calls) {
    /* Release: who sees this entry sees the earlier numbers in `posted`, and so that it took over an older one. */
    atomic_store_explicit(&slot->calls[number % RECENT], calls, memory_order_release);
    /* Sequentially consistent, as is the sleeper's store to `waiting`: one of the two sees the other. */
    atomic_store(&slot->posted, number);
    if (atomic_load(&slot->waiting))
        syscall(SYS_futex, &slot->posted, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Copies blocks[i] into targets[i] and then posts `number`, and the hash `calls`, in slots[i], one receiver after the
 * other. */
void exchange_send(const Block *blocks, const char *source, char *const *targets, Slot *const *slots, uint32_t count,
                   uint32_t number, uint64_t calls, uint32_t num_threads, int streaming) {
    Share shares[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    uint32_t started = 1;
    if (num_threads > MAX_THREADS)
        num_threads = MAX_THREADS;
    for (uint32_t i = 0; i < num_threads; i++)
        shares[i] = (Share){blocks, source, targets, count, i, num_threads, best(streaming)};
    while (started < num_threads && pthread_create(&threads[started], NULL, copy_shares, &shares[started]) == 0)
        started++;
    for (uint32_t i = started; i < num_threads; i++) /* threads that the system refused */
        copy_shares(&shares[i]);
    if (started == 1) {
        for (uint32_t i = 0; i < count; i++) {
            copy_share(&shares[0], i);
            finish_streaming();
            post(slots[i], number, calls); /* at once, so that this peer need not wait for the others' rows */
        }
        return;
    }
    copy_shares(&shares[0]);
    for (uint32_t i = 1; i < started; i++)
        pthread_join(threads[i], NULL); /* joining orders the helpers' stores before the posts */
    for (uint32_t i = 0; i < count; i++)
        post(slots[i], number, calls);
}

/* Copies one block from a result in shared memory, or within a process. */
void exchange_copy(const Block *block, const char *source, char *target, int streaming) {
    copy_rows(block, source, target, 0, block->row_bytes ? block->batch * block->tokens : 0, best(streaming));
    finish_streaming();
}

static int arrived(Slot *slot, uint32_t number) {
    return (int32_t)(atomic_load_explicit(&slot->posted, memory_order_acquire) - number) >= 0; /* numbers wrap */
}

/* Tells whether a sender that has posted `number` made other calls up to there than `calls`. Once it may have begun to
 * post RECENT numbers more nobody can tell, but every later hash tells of the same calls. */
static int strayed(Slot *slot, uint32_t number, uint64_t calls) {
    uint64_t theirs = atomic_load_explicit(&slot->calls[number % RECENT], memory_order_acquire);
    uint32_t ahead = atomic_load_explicit(&slot->posted, memory_order_acquire) - number;
    return ahead < RECENT - 1 && theirs != calls;
}

static void sleep_on(Slot *slot, uint32_t number, int64_t nanoseconds) {
    struct timespec time = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    atomic_store(&slot->waiting, 1);
    uint32_t seen = atomic_load(&slot->posted);
    if ((int32_t)(seen - number) < 0)
        syscall(SYS_futex, &slot->posted, FUTEX_WAIT, seen, &time, NULL, 0);
    atomic_store(&slot->waiting, 0);
}

/* Waits until every rank has posted `number` or a later one in this rank's slots, spinning for at most `spin`
 * nanoseconds before it sleeps. Returns a bit for each rank that had not after `timeout` nanoseconds. May return
 * early with such bits, after a signal. Sets in `*strays` a bit for each rank that had, but whose calls up to there
 * have another hash than `calls`: it may have written its rows anywhere. */
uint64_t exchange_wait(Slot *slots, uint32_t world_size, uint32_t number, uint64_t calls, uint64_t *strays,
                       int64_t timeout, int64_t spin) {
    int64_t begin = now();
    uint64_t missing = 0;
    *strays = 0;
    for (uint32_t i = 0; i < world_size; i++) {
        while (!arrived(&slots[i], number)) {
            int64_t waited = now() - begin;
            if (waited >= timeout)
                break;
            if (waited < spin) {
                for (int k = 0; k < 16 && !arrived(&slots[i], number); k++)
                    relax();
            } else {
                sleep_on(&slots[i], number, timeout - waited);
            }
        }
        if (!arrived(&slots[i], number))
            missing |= (uint64_t)1 << i;
        else if (strayed(&slots[i], number, calls))
            *strays |= (uint64_t)1 << i;
    }
    return missing;
}

/* Makes the pages of a range present and writable, and says so when memory is short instead of killing the process
 * at first use. Returns 0, or errno; EINVAL means that the kernel (before 5.14) cannot. */
int exchange_populate(void *start, uint64_t bytes) {
    while (madvise(start, bytes, 23 /* MADV_POPULATE_WRITE */) != 0)
        if (errno != EINTR && errno != EAGAIN)
            return errno;
    return 0;
}

/* Asks for large pages for memory that was allocated just now: a big tensor's first use is mostly page faults. */
void exchange_prefer_large_pages(void *start, uint64_t bytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = ((uintptr_t)start + page - 1) / page * page, end = ((uintptr_t)start + bytes) / page * page;
    if (begin < end)
        madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* only a wish: nothing depends on it */
}

// The kernels of the exchange between GPUs, and what they share with the host; compiled by exchange_cuda.cu alone.
#pragma once
#include "exchange_rows.h"

namespace exchange {

constexpr int kCounterStride = 16;  // words between counters: 128 bytes, a cache line
constexpr unsigned kLook = 64;      // polls between looks at the clock and at host memory

// In host memory, read and written by both sides without synchronisation. Python knows the layout.
struct Page {
    uint64_t timeout_ns;  // a wait lasts at least so long: may be raised while kernels wait
    uint64_t stop;        // not 0: waits end at once, as after a timeout
    uint64_t failed;      // 1 once a wait ran into its timeout; the words below are written before
    uint64_t number;      // of the exchange waited for
    uint64_t missing;     // a bit for every rank that did not arrive
    uint64_t waited_ns;
};

struct Control {
    uint64_t posted[kMaxRanks * kCounterStride];  // word r * kCounterStride: last exchange that rank r completed here
    unsigned done[kMaxRanks];                     // blocks of the running push that are through, by target
    unsigned poisoned;                            // not 0 after a timeout: kernels that follow return at once
};

struct Target {
    Rows rows;
    char *result;
    uint64_t *counter;
    int width;
};

struct Push {
    const char *source;
    Control *control;  // of this rank
    uint64_t number;
    int world;
    Target targets[kMaxRanks];
};
static_assert(sizeof(Push) <= 4096, "kernel arguments hold 4096 bytes before CUDA 12.1");

struct PlainStore {
    template <class Word>
    __device__ void operator()(Word *to, const Word &word) const {
        *to = word;
    }
};

__device__ uint64_t load_acquire(const uint64_t *word) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ void store_release(uint64_t *word, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ uint64_t nanoseconds() {
    uint64_t value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value)::"memory");
    return value;
}

// Called by a block's first thread after all its threads' stores. Between the threads' stores and the peer's reads lie:
// each thread's fence, the block's barrier, the fences around the count (so that the block which counts last stands
// behind the stores of all), and the release at system scope, which the peer acquires.
__device__ void complete(const Push &push, int target, int count) {
    __threadfence_system();
    const unsigned before = atomicAdd(&push.control->done[target], 1u);
    __threadfence_system();
    if (before + 1 == static_cast<unsigned>(count)) {
        push.control->done[target] = 0;  // for the next push, which starts after this kernel
        store_release(push.targets[target].counter, push.number);
    }
}

__global__ void __launch_bounds__(kThreads) push_kernel(const __grid_constant__ Push push) {
    const bool poisoned = threadIdx.x == 0 && *static_cast<volatile unsigned *>(&push.control->poisoned) != 0;
    if (__syncthreads_or(poisoned)) return;  // the whole block or none of it
    const int block = static_cast<int>(blockIdx.x), num_blocks = static_cast<int>(gridDim.x);
    for (int target = first_target(block, push.world); target < push.world; target += num_blocks) {
        const Share share = share_of(block, num_blocks, target, push.world);
        const Target &to = push.targets[target];
        copy_rows(to.rows, to.width, push.source, to.result, share, static_cast<int>(threadIdx.x),
                  static_cast<int>(blockDim.x), PlainStore{});
        __threadfence_system();
        __syncthreads();
        if (threadIdx.x == 0) complete(push, target, share.count);
    }
}

// Tells whether a wait must end before its time; if so, later kernels return at once, and the host can read why.
__device__ bool give_up(Control *control, volatile Page *page, unsigned missing, uint64_t number, uint64_t began,
                        uint64_t timeout_ns) {
    const uint64_t now = nanoseconds(), least = page->timeout_ns;
    const uint64_t waited = now > began ? now - began : 0;  // a clock that steps back is no timeout
    if (page->stop == 0) {
        if (waited <= (least > timeout_ns ? least : timeout_ns)) return false;
        page->number = number;
        page->missing = missing;
        page->waited_ns = waited;
        __threadfence_system();
        page->failed = 1;
    }
    control->poisoned = 1;
    return true;
}

// One warp; lane r watches rank r. It ends after the timeout at the latest, without a trap: a GPU's context would be
// lost to the whole process. Sleeping between polls leaves the memory system to those who copy.
__global__ void __launch_bounds__(32) wait_kernel(Control *control, Page *page, int world, uint64_t number,
                                                  uint64_t timeout_ns) {
    const int lane = static_cast<int>(threadIdx.x);
    if (*static_cast<volatile unsigned *>(&control->poisoned) != 0) return;
    const uint64_t began = nanoseconds();
    bool arrived = lane >= world;
    for (unsigned polls = 1;; ++polls) {
        if (!arrived) arrived = load_acquire(&control->posted[lane * kCounterStride]) >= number;
        const unsigned missing = __ballot_sync(~0u, !arrived);
        if (missing == 0) break;
        bool over = false;
        if (lane == 0 && polls % kLook == 0) over = give_up(control, page, missing, number, began, timeout_ns);
        if (__ballot_sync(~0u, over) != 0) break;
        __nanosleep(100);
    }
    __threadfence_system();  // what the next kernel reads was written before the counters
}

}  // namespace exchange

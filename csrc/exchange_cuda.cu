// The exchange between GPUs of one machine: kernels that write rows straight into the peers' memory, opened through
// CUDA IPC, and counters there that say so. Loaded by mgpu_runtime/exchange/peer_buffers.py through ctypes.
//
// Every rank owns a control block, small and never moved, and two banks for results, which grow. A push kernel writes
// the rows for each rank into that rank's bank; the last block that serves a rank then stores the exchange's number in
// the word that this rank owns in the peer's control block. A wait kernel watches the words in its own control block.
// Peers are only stored to, never read or hit with atomics, which PCIe does not carry everywhere.
//
// A pointer to text is returned where something failed, null where not; the text lives until the thread's next call.
// The calling thread's current device and context are left as they were: each call pushes the device's primary context,
// the one torch uses, and pops it. The CUDA runtime linked in here follows the context, so it needs no cudaSetDevice.
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <string.h>

#include <cstdio>

#include "exchange_kernels.h"

#define EXCHANGE_API extern "C" __attribute__((visibility("default")))

using namespace exchange;

namespace {

constexpr size_t kGranule = size_t{2} << 20;  // CUDA shares memory in pieces of 2 MiB; whole ones keep others' data out

const char *told(const char *what, const char *why) {
    thread_local char text[256];
    snprintf(text, sizeof text, "%.*s: %s", static_cast<int>(strcspn(what, "(")), what, why);
    return text;
}

const char *told(const char *what, cudaError_t error) {
    cudaGetLastError();  // else the next launch would report it again
    return told(what, cudaGetErrorString(error));
}

#define TRY(call)                                                                              \
    do {                                                                                       \
        if (const cudaError_t error = (call); error != cudaSuccess) return told(#call, error); \
    } while (0)

// The few functions of the driver that the runtime has no word for. The library is opened, not linked, so that this
// file builds and loads where no driver is.
struct Driver {
    CUresult (*init)(unsigned);
    CUresult (*get)(CUdevice *, int);
    CUresult (*retain)(CUcontext *, CUdevice);
    CUresult (*release)(CUdevice);
    CUresult (*push)(CUcontext);
    CUresult (*pop)(CUcontext *);
    bool ready;
};

template <class Function>
bool find(void *library, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
}

const Driver &driver() {
    static const Driver only = [] {
        Driver made{};
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        made.ready = library != nullptr && find(library, "cuInit", made.init) &&
                     find(library, "cuDeviceGet", made.get) &&
                     find(library, "cuDevicePrimaryCtxRetain", made.retain) &&
                     find(library, "cuDevicePrimaryCtxRelease_v2", made.release) &&
                     find(library, "cuCtxPushCurrent_v2", made.push) &&
                     find(library, "cuCtxPopCurrent_v2", made.pop) && made.init(0) == CUDA_SUCCESS;
        return made;
    }();
    return only;
}

struct Memory {
    char *of[kMaxRanks];  // own memory at this rank's place, else the peer's as mapped here
    size_t bytes;         // of each
};

}  // namespace

struct Exchange {
    CUcontext context;
    CUdevice device;
    int rank, world, most_blocks;
    Page *page, *page_on_device;
    Memory controls, banks, next;  // `next` are larger banks that are being handed round
};

namespace {

class Current {
   public:
    explicit Current(const Exchange *exchange) { driver().push(exchange->context); }
    ~Current() {
        CUcontext popped;
        driver().pop(&popped);
    }
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;
};

size_t whole_granules(size_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

const char *allocate(const Exchange *exchange, Memory &memory, size_t bytes, unsigned char *handle) {
    void *made = nullptr;
    TRY(cudaMalloc(&made, bytes));  // not cudaMallocAsync: memory of its pools cannot be shared this way
    memory.of[exchange->rank] = static_cast<char *>(made);
    memory.bytes = bytes;
    cudaIpcMemHandle_t shared;
    TRY(cudaIpcGetMemHandle(&shared, made));
    static_assert(sizeof shared == 64, "Python hands 64 bytes round");
    memcpy(handle, &shared, sizeof shared);
    return nullptr;
}

const char *open_peers(const Exchange *exchange, Memory &memory, const unsigned char *handles) {
    for (int rank = 0; rank < exchange->world; ++rank) {
        if (rank == exchange->rank) continue;
        cudaIpcMemHandle_t shared;
        memcpy(&shared, handles + rank * sizeof shared, sizeof shared);
        void *opened = nullptr;
        TRY(cudaIpcOpenMemHandle(&opened, shared, cudaIpcMemLazyEnablePeerAccess));
        memory.of[rank] = static_cast<char *>(opened);
    }
    return nullptr;
}

void close_peers(const Exchange *exchange, Memory &memory) {
    for (int rank = 0; rank < exchange->world; ++rank) {
        if (rank == exchange->rank || memory.of[rank] == nullptr) continue;
        cudaIpcCloseMemHandle(memory.of[rank]);
        memory.of[rank] = nullptr;
    }
}

void free_own(const Exchange *exchange, Memory &memory) {
    if (memory.of[exchange->rank] != nullptr) cudaFree(memory.of[exchange->rank]);
    memory = Memory{};
}

Control *control_of(const Exchange *exchange, int rank) {
    return reinterpret_cast<Control *>(exchange->controls.of[rank]);
}

const char *set_up(Exchange *exchange, int device, unsigned char *handle) {
    int multiprocessors = 0;
    TRY(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    // Half of them hold far more words in flight than a link between GPUs needs. On all of them, with the priority that
    // pushes have, there would be no room for the arithmetic that is to run meanwhile.
    exchange->most_blocks = multiprocessors > 1 ? multiprocessors / 2 : 1;
    // A kernel's first use loads it, which may wait for the device while a wait kernel stands there: load them now.
    cudaFuncAttributes attributes;
    TRY(cudaFuncGetAttributes(&attributes, push_kernel));
    TRY(cudaFuncGetAttributes(&attributes, wait_kernel));
    void *page = nullptr;
    TRY(cudaHostAlloc(&page, sizeof(Page), cudaHostAllocMapped | cudaHostAllocPortable));
    memset(page, 0, sizeof(Page));
    exchange->page = static_cast<Page *>(page);
    void *on_device = nullptr;
    TRY(cudaHostGetDevicePointer(&on_device, page, 0));
    exchange->page_on_device = static_cast<Page *>(on_device);
    static_assert(sizeof(Control) <= kGranule, "");
    if (const char *failed = allocate(exchange, exchange->controls, kGranule, handle)) return failed;
    TRY(cudaMemset(control_of(exchange, exchange->rank), 0, sizeof(Control)));
    TRY(cudaDeviceSynchronize());
    return nullptr;
}

}  // namespace

// Lets go of the peers' memory after this device's kernels have ended: from then on this rank writes to nobody.
EXCHANGE_API void exchange_leave(Exchange *exchange) {
    const Current current(exchange);
    cudaDeviceSynchronize();
    for (Memory *memory : {&exchange->next, &exchange->banks, &exchange->controls}) close_peers(exchange, *memory);
    cudaGetLastError();
}

// Gives back everything, after this device's kernels have ended; the other ranks must have left before, as CUDA leaves
// open what becomes of memory that is freed while another process has it open.
EXCHANGE_API void exchange_free(Exchange *exchange) {
    exchange_leave(exchange);
    {
        const Current current(exchange);
        for (Memory *memory : {&exchange->next, &exchange->banks, &exchange->controls}) free_own(exchange, *memory);
        if (exchange->page != nullptr) cudaFreeHost(exchange->page);
        cudaGetLastError();
    }
    driver().release(exchange->device);
    delete exchange;
}

// Makes one rank's part on a device (torch's number of it), without banks. `handle` gets 64 bytes for the peers, `bus`
// at least 32 bytes of text.
EXCHANGE_API const char *exchange_make(int device, int rank, int world, Exchange **made, unsigned char *handle,
                                       char *bus) {
    if (world > kMaxRanks) return told("exchange", "more ranks than the kernels know (32)");
    if (!driver().ready) return told("libcuda.so.1", "no NVIDIA driver");
    auto *exchange = new Exchange{};
    exchange->rank = rank;
    exchange->world = world;
    if (driver().get(&exchange->device, device) != CUDA_SUCCESS ||
        driver().retain(&exchange->context, exchange->device) != CUDA_SUCCESS) {
        delete exchange;
        return told("cuDevicePrimaryCtxRetain", "the device's context cannot be had");
    }
    const char *failed = nullptr;
    {
        const Current current(exchange);
        failed = set_up(exchange, device, handle);
        if (failed == nullptr) {
            const cudaError_t error = cudaDeviceGetPCIBusId(bus, 32, device);
            if (error != cudaSuccess) failed = told("cudaDeviceGetPCIBusId", error);
        }
    }
    if (failed != nullptr) {
        exchange_free(exchange);  // the text is the thread's and outlives it
        return failed;
    }
    *made = exchange;
    return nullptr;
}

// Tells whether this device can write to the memory of the device at a PCI address. A device that this process is not
// shown cannot be asked about; opening its memory tells.
EXCHANGE_API const char *exchange_reaches(const Exchange *exchange, int device, const char *bus) {
    const Current current(exchange);
    int peer = 0, can = 0;
    if (cudaDeviceGetByPCIBusId(&peer, bus) != cudaSuccess) {
        cudaGetLastError();
        return nullptr;
    }
    if (peer == device) return nullptr;
    TRY(cudaDeviceCanAccessPeer(&can, device, peer));
    return can ? nullptr : told("cudaDeviceCanAccessPeer", "this GPU cannot write to another's memory");
}

EXCHANGE_API const char *exchange_open_controls(Exchange *exchange, const unsigned char *handles) {
    const Current current(exchange);
    return open_peers(exchange, exchange->controls, handles);
}

// Growth, the first banks included, takes three steps on every rank, each after all have done the one before:
// make the larger banks; open the peers' and take the old contents along; give the old ones back. No kernel of the
// exchange may be under way on any rank.
EXCHANGE_API const char *exchange_grow(Exchange *exchange, int64_t bank_bytes, unsigned char *handle) {
    const Current current(exchange);
    const size_t each = whole_granules(static_cast<size_t>(bank_bytes));
    free_own(exchange, exchange->next);  // of a try that failed half way
    return allocate(exchange, exchange->next, 2 * each, handle);
}

// Gives up growth after the first step.
EXCHANGE_API void exchange_abandon(Exchange *exchange) {
    const Current current(exchange);
    free_own(exchange, exchange->next);
}

EXCHANGE_API const char *exchange_open_grown(Exchange *exchange, const unsigned char *handles) {
    const Current current(exchange);
    if (const char *failed = open_peers(exchange, exchange->next, handles)) return failed;
    const size_t before = exchange->banks.bytes / 2, after = exchange->next.bytes / 2;
    const char *from = exchange->banks.of[exchange->rank];
    char *to = exchange->next.of[exchange->rank];
    for (int bank = 0; before != 0 && bank < 2; ++bank) {
        TRY(cudaMemcpy(to + bank * after, from + bank * before, before, cudaMemcpyDeviceToDevice));
    }
    TRY(cudaDeviceSynchronize());  // a copy inside a device does not wait for its end
    close_peers(exchange, exchange->banks);
    return nullptr;
}

EXCHANGE_API void exchange_drop_old(Exchange *exchange) {
    const Current current(exchange);
    free_own(exchange, exchange->banks);
    exchange->banks = exchange->next;
    exchange->next = Memory{};
}

EXCHANGE_API Page *exchange_page(const Exchange *exchange) { return exchange->page; }

EXCHANGE_API char *exchange_bank(const Exchange *exchange, int bank) {
    return exchange->banks.of[exchange->rank] + static_cast<size_t>(bank) * (exchange->banks.bytes / 2);
}

EXCHANGE_API int64_t exchange_bank_bytes(const Exchange *exchange) {
    return static_cast<int64_t>(exchange->banks.bytes / 2);
}

// Starts exchange `number` on a stream: rows[r] go from `source` to offsets[r] of rank r's bank.
EXCHANGE_API const char *exchange_push(const Exchange *exchange, const Rows *rows, const char *source, int bank,
                                       const int64_t *offsets, uint64_t number, cudaStream_t stream) {
    const Current current(exchange);
    Push push{};
    push.source = source;
    push.control = control_of(exchange, exchange->rank);
    push.number = number;
    push.world = exchange->world;
    const size_t bank_bytes = exchange->banks.bytes / 2;
    int64_t largest = 0;
    int widest = 1;
    for (int rank = 0; rank < exchange->world; ++rank) {
        Target &target = push.targets[rank];
        target.rows = rows[rank];
        const int64_t end = target_end(target.rows);
        if (offsets[rank] < 0 || end < 0 || offsets[rank] + end > static_cast<int64_t>(bank_bytes)) {
            return told("exchange_push", "rows reach beyond a rank's bank");
        }
        target.result = exchange->banks.of[rank] + static_cast<size_t>(bank) * bank_bytes + offsets[rank];
        target.counter = &control_of(exchange, rank)->posted[exchange->rank * kCounterStride];
        target.width = word_width(target.rows, source, target.result);
        const int64_t bytes = end == 0 ? 0 : target.rows.batch * target.rows.tokens * target.rows.row_bytes;
        if (bytes > largest) {
            largest = bytes;
            widest = target.width;
        }
    }
    const int blocks = blocks_for(largest, widest, exchange->world, exchange->most_blocks);
    push_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(push);
    TRY(cudaGetLastError());
    return nullptr;
}

// Holds a stream until every rank has completed exchange `number` and those before it in this rank's bank, or for
// `timeout_ns` or Page::timeout_ns, whichever is more.
EXCHANGE_API const char *exchange_wait(const Exchange *exchange, uint64_t number, uint64_t timeout_ns,
                                       cudaStream_t stream) {
    const Current current(exchange);
    wait_kernel<<<1, 32, 0, stream>>>(control_of(exchange, exchange->rank), exchange->page_on_device, exchange->world,
                                      number, timeout_ns);
    TRY(cudaGetLastError());
    return nullptr;
}

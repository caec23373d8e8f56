// Which thread copies which bytes of an exchange. The kernels (exchange_cuda.cu) and the host shim, which runs them as
// loops over ordinary memory (host_shim.cpp), compile the same lines.
//
// One rank sends rows of contiguous bytes to every rank: row (b, t) lies first + b * batch_stride + t * token_stride
// bytes into the source and, likewise, into the target. A row is cut into words, as wide as all addresses allow, and
// the words of all rows for one target are dealt to the threads of that target's blocks, so that neighbouring threads
// hold neighbouring words.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define EXCHANGE_FN __host__ __device__ __forceinline__
#else
#define EXCHANGE_FN inline
#endif
#ifdef __CUDA_ARCH__
#define EXCHANGE_UNROLL _Pragma("unroll")
#else
#define EXCHANGE_UNROLL
#endif

namespace exchange {

constexpr int kMaxRanks = 32;      // one warp waits for all of them, and a kernel's arguments hold them
constexpr int kThreads = 512;      // of one block
constexpr int kWordsInFlight = 4;  // a thread loads so many words before it stores the first
constexpr int kWidest = 16;        // bytes of a word

// The layout is known to Python (peer_buffers.py). All in bytes but batch and tokens.
struct Rows {
    int64_t batch, tokens, row_bytes;
    int64_t source_first, source_batch_stride, source_token_stride;
    int64_t target_first, target_batch_stride, target_token_stride;
};

struct alignas(16) Word16 {
    uint32_t x, y, z, w;
};

// The part of one target's rows that one block copies: the index-th of count equal parts.
struct Share {
    int index, count;
};

// Blocks are dealt to targets in turn: block i serves i mod world. With fewer blocks than targets a block serves
// several. Use: for (target = first_target(...); target < world; target += num_blocks).
EXCHANGE_FN int first_target(int block, int world) { return block % world; }

EXCHANGE_FN Share share_of(int block, int num_blocks, int target, int world) {
    if (num_blocks <= world) return {0, 1};
    return {block / world, (num_blocks - target + world - 1) / world};
}

// Bytes from the first to behind the last that the target's side of some rows touches; 0 without rows.
EXCHANGE_FN int64_t target_end(const Rows &rows) {
    if (rows.batch <= 0 || rows.tokens <= 0 || rows.row_bytes <= 0) return 0;
    return rows.target_first + (rows.batch - 1) * rows.target_batch_stride +
           (rows.tokens - 1) * rows.target_token_stride + rows.row_bytes;
}

// The widest word, in bytes, that divides every address and length of the rows.
inline int word_width(const Rows &rows, const void *source, const void *target) {
    uint64_t bits = static_cast<uint64_t>(rows.row_bytes);
    bits |= reinterpret_cast<uint64_t>(source) + static_cast<uint64_t>(rows.source_first);
    bits |= reinterpret_cast<uint64_t>(target) + static_cast<uint64_t>(rows.target_first);
    if (rows.tokens > 1) bits |= static_cast<uint64_t>(rows.source_token_stride | rows.target_token_stride);
    if (rows.batch > 1) bits |= static_cast<uint64_t>(rows.source_batch_stride | rows.target_batch_stride);
    int width = kWidest;
    while (bits % static_cast<uint64_t>(width) != 0) width /= 2;
    return width;
}

// How many blocks are worth starting where the largest target takes `bytes`: at least one for each target as far as
// `most` allows, and no more than have words to copy.
inline int blocks_for(int64_t bytes, int width, int world, int most) {
    const int64_t per_block = static_cast<int64_t>(kThreads) * kWordsInFlight * width;
    const int64_t wanted = bytes <= per_block ? 1 : (bytes + per_block - 1) / per_block;
    return wanted > most / world ? most : static_cast<int>(wanted) * world;
}

// A word's place, in three digits. Stepping digit by digit saves the divisions of every word but a thread's first, and
// holds for any number of words.
struct Place {
    int64_t batch, token, word;
};

EXCHANGE_FN Place place_of(int64_t number, int64_t tokens, int64_t words) {
    const int64_t row = number / words;
    return {row / tokens, row % tokens, number % words};
}

EXCHANGE_FN void advance(Place &place, const Place &step, int64_t tokens, int64_t words) {
    place.word += step.word;
    place.token += step.token;
    place.batch += step.batch;
    if (place.word >= words) {
        place.word -= words;
        place.token += 1;
    }
    if (place.token >= tokens) {  // at most tokens - 1 + tokens - 1 + 1: once is enough
        place.token -= tokens;
        place.batch += 1;
    }
}

template <class Word, class Store>
EXCHANGE_FN void copy_words(const Rows &rows, const char *source, char *target, Share share, int thread,
                            int num_threads, Store store) {
    const int64_t words = rows.row_bytes / static_cast<int64_t>(sizeof(Word));
    if (words <= 0 || rows.tokens <= 0 || rows.batch <= 0) return;
    const int64_t first = static_cast<int64_t>(share.index) * num_threads + thread;
    Place place = place_of(first, rows.tokens, words);
    const Place step = place_of(static_cast<int64_t>(share.count) * num_threads, rows.tokens, words);
    source += rows.source_first;
    target += rows.target_first;
    while (place.batch < rows.batch) {
        Word held[kWordsInFlight] = {};
        char *to[kWordsInFlight] = {};
        EXCHANGE_UNROLL
        for (int i = 0; i < kWordsInFlight; ++i) {
            if (place.batch < rows.batch) {
                const int64_t column = place.word * static_cast<int64_t>(sizeof(Word));
                const char *from = source + place.batch * rows.source_batch_stride +
                                   place.token * rows.source_token_stride + column;
                to[i] = target + place.batch * rows.target_batch_stride + place.token * rows.target_token_stride +
                        column;
                held[i] = *reinterpret_cast<const Word *>(from);
                advance(place, step, rows.tokens, words);
            }
        }
        EXCHANGE_UNROLL
        for (int i = 0; i < kWordsInFlight; ++i) {
            if (to[i] != nullptr) store(reinterpret_cast<Word *>(to[i]), held[i]);
        }
    }
}

// What one thread of one block copies; `width` is that of word_width.
template <class Store>
EXCHANGE_FN void copy_rows(const Rows &rows, int width, const char *source, char *target, Share share, int thread,
                           int num_threads, Store store) {
    switch (width) {
        case 16: return copy_words<Word16>(rows, source, target, share, thread, num_threads, store);
        case 8: return copy_words<uint64_t>(rows, source, target, share, thread, num_threads, store);
        case 4: return copy_words<uint32_t>(rows, source, target, share, thread, num_threads, store);
        case 2: return copy_words<uint16_t>(rows, source, target, share, thread, num_threads, store);
        default: return copy_words<uint8_t>(rows, source, target, share, thread, num_threads, store);
    }
}

}  // namespace exchange

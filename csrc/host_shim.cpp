// The push kernel as loops over ordinary memory, for tests on machines without a GPU: blocks and threads run one after
// the other and every byte counts how often it was written. Built by tests/test_exchange_kernels.py alone.
#include "exchange_rows.h"

using namespace exchange;

namespace {

// Stores as the kernel does, and counts writes per byte of a buffer that mirrors the targets' memory.
struct CountingStore {
    char *memory;
    uint8_t *counts;

    template <class Word>
    void operator()(Word *to, const Word &word) const {
        *to = word;
        uint8_t *count = counts + (reinterpret_cast<char *>(to) - memory);
        for (unsigned i = 0; i < sizeof(Word); ++i) {
            if (count[i] < 255) ++count[i];
        }
    }
};

}  // namespace

// Copies one rank's rows to all `world` targets; results[r] and counts[r] are the result of rank r and its write
// counts. widths[r] gets the width used, shares[r] the number of blocks that served rank r. Returns 0, or 1 where a
// block's share of a target is not what its place among that target's blocks says.
extern "C" int shim_push(const Rows *rows, const char *source, char *const *results, uint8_t *const *counts, int world,
                         int num_blocks, int num_threads, int *widths, int *shares) {
    for (int target = 0; target < world; ++target) {
        widths[target] = word_width(rows[target], source, results[target]);
        shares[target] = 0;
    }
    for (int block = 0; block < num_blocks; ++block) {
        for (int target = first_target(block, world); target < world; target += num_blocks) {
            const Share share = share_of(block, num_blocks, target, world);
            if (share.index != shares[target]++) return 1;
            const CountingStore store{results[target], counts[target]};
            for (int thread = 0; thread < num_threads; ++thread) {
                copy_rows(rows[target], widths[target], source, results[target], share, thread, num_threads, store);
            }
        }
    }
    for (int target = 0; target < world; ++target) {
        if (share_of(target, num_blocks, target, world).count != shares[target]) return 1;
    }
    return 0;
}

// Runs one target's rows from number `first_word` on as if `count` blocks shared them, and returns where the thread's
// next words lie in the source: the arithmetic alone, for sizes that no memory holds.
extern "C" void shim_places(const Rows *rows, int width, int64_t first_word, int64_t step_words, int num,
                            int64_t *offsets) {
    const int64_t words = rows->row_bytes / width;
    Place place = place_of(first_word, rows->tokens, words);
    const Place step = place_of(step_words, rows->tokens, words);
    for (int i = 0; i < num; ++i) {
        offsets[i] = rows->source_first + place.batch * rows->source_batch_stride +
                     place.token * rows->source_token_stride + place.word * width;
        advance(place, step, rows->tokens, words);
    }
}

extern "C" int shim_blocks_for(int64_t bytes, int width, int world, int most) {
    return blocks_for(bytes, width, world, most);
}

extern "C" int64_t shim_target_end(const Rows *rows) { return target_end(*rows); }

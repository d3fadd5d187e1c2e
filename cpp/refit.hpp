// The codec of the weight refit (docs/refit-format.md): the table of one instruction set. Definitions of the streams are in
// halfbyte/refit/codec/reference.py; every function here gives the same bytes.
#pragma once

#include <cstdint>

#include "dispatch.hpp"

namespace halfbyte {

// Streams of a block's changes. On the way in, pointers to what was read; on the way out, to buffers with kSlack spare bytes.
struct RefitStreams {
    uint8_t* where;   // gaps or mask
    uint8_t* values;  // 4 bits a change (while encoding: room for a byte a change)
    uint8_t* wide;    // zigzags that need more
    int64_t where_size, changed, wide_count;
};

// Quotients of gaps within classes, the classes and the low bits.
struct RefitClasses {
    uint8_t* quotients;
    uint8_t* low;
    int64_t quotients_size, low_size;
};

constexpr int64_t kRefitSlack = 64;
constexpr int64_t kRefitHashed = 241;  // bytes from which on blocks are hashed here (xxh3.hpp)
constexpr int64_t kRefitMostPlaces = int64_t{1} << 32;
constexpr int kRefitClasses = 256, kRefitRecord = 6, kRefitMostLow = 20;  // a record: class, low bits, changes (4 bytes)
constexpr int64_t kRefitClassHead = 2 + kRefitClasses * kRefitRecord;

// `kind`: bits of an element, negative where the pattern is sign and magnitude.
struct RefitTable {
    // False as soon as more than `most` changes are found. `hash`: of the target, where that has kRefitHashed bytes or more.
    bool (*sparse)(int kind, const uint8_t* base, const uint8_t* target, int64_t n, int64_t most, RefitStreams& out, uint64_t& hash);
    void (*bitmask)(int kind, const uint8_t* base, const uint8_t* target, int64_t n, RefitStreams& out);
    bool (*is_fill)(int kind, const uint8_t* target, int64_t n);
    void (*transpose_xor)(int size, const uint8_t* base, const uint8_t* target, int64_t n, uint8_t* planes);
    void (*apply_xor)(int size, uint8_t* data, const uint8_t* planes, int64_t n);
    bool (*check_sparse)(int kind, const RefitStreams& in, int64_t n);
    bool (*check_bitmask)(int kind, const RefitStreams& in, int64_t n);
    void (*apply_sparse)(int kind, uint8_t* data, const RefitStreams& in, uint8_t* old);
    void (*apply_bitmask)(int kind, uint8_t* data, const RefitStreams& in, uint8_t* old);
    void (*revert_sparse)(int kind, uint8_t* data, const uint8_t* gaps, int64_t changed, const uint8_t* old);
    void (*revert_bitmask)(int kind, uint8_t* data, const uint8_t* mask, int64_t mask_size, int64_t changed, const uint8_t* old);
    // `plain` in position order -> `out` in class order.
    void (*to_classes)(int kind, int shift, int width, const uint8_t* base, int64_t n, const RefitStreams& plain,
                       RefitStreams& out, RefitClasses& classes);
    // The other way; false where the streams do not fit each other or the base.
    bool (*from_classes)(int kind, int shift, int width, const uint8_t* base, int64_t n, const RefitStreams& in,
                         const RefitClasses& classes, RefitStreams& plain);
    // Absolute patches (refit_patch.hpp). `size`: bytes of a unit.
    int64_t (*count_differing)(int size, const uint8_t* before, const uint8_t* after, int64_t n);
    void (*find_differing)(int size, const uint8_t* before, const uint8_t* after, int64_t n, uint32_t* places, uint8_t* old, uint8_t* now);
    int64_t (*put)(int size, uint8_t* data, int64_t n, const uint32_t* places, const uint8_t* values, const uint8_t* expect, int64_t count);
    void (*patch_sparse)(int kind, uint8_t* data, const RefitStreams& in, uint32_t* places, uint8_t* old, uint8_t* now);
    void (*patch_bitmask)(int kind, uint8_t* data, const RefitStreams& in, uint32_t* places, uint8_t* old, uint8_t* now);
};

extern const RefitTable refit_generic;
#ifdef HALFBYTE_X86
extern const RefitTable refit_avx2;
extern const RefitTable refit_avx512;
#endif

const RefitTable& refit_table(Isa isa);

}  // namespace halfbyte

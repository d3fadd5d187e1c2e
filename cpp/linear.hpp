// Matrix products over packed panels: the table of one instruction set, and the threaded driver.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "dispatch.hpp"
#include "panels.hpp"
#include "quantise.hpp"

namespace halfbyte {

// Quantised rows in the form the w4a4 product of one instruction set reads: per block, the doubled codes (int8), then a start for
// the integer sum (weight codes enter with 12 added, so that they are unsigned) and the block scale, as that set likes them.
struct ActivationRows {
    const uint8_t* data;
    int64_t stride;       // bytes from row to row
    const float* global;  // multiplier of each row
};

constexpr int64_t activation_block_bytes(int64_t block) { return block + 16; }

// A cache line more than the row: strides of a power of two would put all rows into the same few sets of the cache.
constexpr int64_t activation_stride(int64_t block, int64_t k) { return k / block * activation_block_bytes(block) + 64; }

// Which input rows a product reads and where its output rows go: entries [first, first + count) of two lists; a null list is
// 0, 1, 2, ...
struct RowMap {
    int64_t count;
    const int32_t* in;
    const int32_t* out;
    int64_t first = 0;
    HALFBYTE_INLINE int64_t input(int64_t i) const { return in ? in[first + i] : first + i; }
    HALFBYTE_INLINE int64_t output(int64_t i) const { return out ? out[first + i] : first + i; }
};

struct LinearTable {
    // out[row][16 p ...] for panels [first, last); `out` has `stride` floats a row.
    void (*w4a4)(const Panels&, int64_t first, int64_t last, const ActivationRows&, const RowMap&, float* out, int64_t stride);
    // The other kinds: x has w.k floats a row, already rounded to BF16 where the kind says so.
    void (*dense)(const Panels&, int64_t first, int64_t last, const float* x, const RowMap&, float* out, int64_t stride);
    // Expands one quantised row into the form above.
    void (*expand)(Format, const uint8_t* codes, const uint8_t* scales, int64_t k, uint8_t* out);
    // Rounds to BF16 (to nearest even) and back.
    void (*round_bf16)(const float* x, int64_t count, float* out);
};

extern const LinearTable linear_generic;
#ifdef HALFBYTE_X86
extern const LinearTable linear_avx2;
extern const LinearTable linear_avx512;
#endif

const LinearTable& linear_table(Isa isa);

// Uninitialised, 64-byte aligned memory of one call.
class Scratch {
   public:
    explicit Scratch(int64_t bytes) : memory_(static_cast<uint8_t*>(::operator new(size_t(bytes) + 64, kAlign))) {}
    template <class T>
    T* as(int64_t byte_offset = 0) const {
        return reinterpret_cast<T*>(memory_.get() + byte_offset);
    }

   private:
    static constexpr std::align_val_t kAlign{64};
    struct Free {
        void operator()(uint8_t* p) const { ::operator delete(p, kAlign); }
    };
    std::unique_ptr<uint8_t, Free> memory_;
};

// Inputs of a product, quantised or rounded once for all panels.
class PreparedRows {
   public:
    // Quantises (w4a4) or rounds (bf16, w4a16) x [rows, k]; fp32 reads x itself. `bad_row()` is the first row that holds NaN or
    // infinity where the kind quantises, else -1. With `record`, what is quantised is also written there.
    PreparedRows(Isa isa, Kind kind, const Rule* rule, const float* x, int64_t rows, int64_t k, const CodeRows* record = nullptr);
    // Takes rows that are quantised already; `global` are multipliers.
    PreparedRows(Isa isa, Format format, const uint8_t* codes, const uint8_t* scales, const float* global, int64_t rows, int64_t k);
    int64_t bad_row() const { return bad_row_; }

    // The product of some rows with some panels; safe from several threads.
    void multiply(const Panels& w, int64_t first, int64_t last, const RowMap& map, float* out, int64_t stride) const;

   private:
    const LinearTable& table_;
    std::vector<Scratch> scratch_;
    ActivationRows rows_{};
    const float* x_ = nullptr;
    int64_t bad_row_ = -1;
};

// Work is split over groups of four panels, which the kernels compute side by side.
constexpr int64_t kPanelGroup = 4;
inline int64_t panel_groups(const Panels& w) { return (w.panels() + kPanelGroup - 1) / kPanelGroup; }

// Panel groups worth giving to one thread at once, for about 20 microseconds of work.
int64_t group_grain(const Panels& w, int64_t rows);

}  // namespace halfbyte

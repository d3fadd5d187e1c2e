// From the joint projection of queries, keys and values to the attention's output in one call: head norms, rotation, writing to the
// pages, attention. Every step is the one of its own file, so the result is theirs bit for bit.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>

#include "attention.hpp"
#include "linear.hpp"
#include "norm.hpp"
#include "registers.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace halfbyte {
namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

struct Rotation {
    const int64_t* positions;
    int64_t table_rows;
    const float *cos, *sin;
};

// Heads of one token: normed (if there is a weight), then rotated.
void prepare(const NormTable& table, const float* x, const float* norm, double eps, const int64_t* position, const Rotation& turn,
             int64_t heads, int64_t width, float* spare, float* out) {
    if (norm != nullptr) {
        table.rms_norm(x, norm, eps, heads, width, spare);
        x = spare;
    }
    table.rope(x, position, turn.cos, turn.sin, 1, heads, width, out);
}

bool attend(Isa isa, AttentionInput in, const float* qkv, const float* q_norm, const float* k_norm, double eps, const Rotation& turn,
            const int64_t* slots, const int32_t* query_start, const int32_t* context, int64_t rows, int64_t sequences) {
    for (int64_t r = 0; r < rows; ++r)
        if (turn.positions[r] < 0 || turn.positions[r] >= turn.table_rows) return false;
    if (!attention_fits(in, query_start, context, rows, sequences)) return false;
    const int64_t width = in.kv.width, q_row = in.heads * width, kv_row = in.kv.heads * width, row = q_row + 2 * kv_row;
    const Scratch memory(rows * row * 4);
    float *q = memory.as<float>(), *k = q + rows * q_row, *v = k + rows * kv_row;
    const NormTable& table = norm_table(isa);
    parallel_for(rows, std::max<int64_t>(1, (1 << 15) / row), [&](int64_t begin, int64_t end) {
        const Scratch own(std::max(q_row, kv_row) * 4);
        for (int64_t r = begin; r < end; ++r) {
            const float* x = qkv + r * row;
            prepare(table, x, q_norm, eps, turn.positions + r, turn, in.heads, width, own.as<float>(), q + r * q_row);
            prepare(table, x + q_row, k_norm, eps, turn.positions + r, turn, in.kv.heads, width, own.as<float>(), k + r * kv_row);
            std::memcpy(v + r * kv_row, x + q_row + kv_row, size_t(kv_row) * 4);
        }
    });
    if (!store_rows(isa, in.kv, k, v, slots, rows)) return false;
    in.q = q;
    return attention(isa, in, query_start, context, rows, sequences);
}

}  // namespace

// Addresses of contiguous buffers; the Python wrapper checks shapes and dtypes. False when a value cannot be used; then nothing was
// written.
void register_attend(nb::module_& m) {
    m.def("attend", [](int isa, const KvPages& kv, uintptr_t qkv, int64_t rows, int64_t heads, uintptr_t q_norm, uintptr_t k_norm, double eps,
                       uintptr_t positions, int64_t table_rows, uintptr_t cos, uintptr_t sin, uintptr_t slots, uintptr_t page_table,
                       int64_t sequences, int64_t pages_per_sequence, uintptr_t query_start, uintptr_t context, float scale, uintptr_t out) {
        nb::gil_scoped_release free;
        const AttentionInput in{nullptr, at<float>(out), heads, kv, at<const int32_t>(page_table), pages_per_sequence, scale};
        const Rotation turn{at<const int64_t>(positions), table_rows, at<const float>(cos), at<const float>(sin)};
        return attend(usable_isa(isa), in, at<const float>(qkv), at<const float>(q_norm), at<const float>(k_norm), eps, turn,
                      at<const int64_t>(slots), at<const int32_t>(query_start), at<const int32_t>(context), rows, sequences);
    });
}

}  // namespace halfbyte

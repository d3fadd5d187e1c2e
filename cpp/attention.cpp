#include "attention.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "registers.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace halfbyte {
namespace {

constexpr int64_t kRows = 64;  // (query, head) rows that share a pass over the keys

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

bool attention_fits(const AttentionInput& in, const int32_t* query_start, const int32_t* context, int64_t queries, int64_t sequences) {
    if (query_start[0] != 0 || query_start[sequences] != queries) return false;
    for (int64_t s = 0; s < sequences; ++s) {
        const int64_t count = int64_t(query_start[s + 1]) - query_start[s];
        if (count < 0 || context[s] < count || context[s] > in.pages_per_sequence * in.kv.page_size) return false;
        const int32_t* pages = in.page_table + s * in.pages_per_sequence;
        const int64_t used = (context[s] + in.kv.page_size - 1) / in.kv.page_size;
        for (int64_t p = 0; p < used; ++p)
            if (pages[p] < 0 || pages[p] >= in.kv.pages) return false;
    }
    return true;
}

bool attention(Isa isa, const AttentionInput& in, const int32_t* query_start, const int32_t* context, int64_t queries,
               int64_t sequences) {
    if (!attention_fits(in, query_start, context, queries, sequences)) return false;
    const int64_t chunk = std::max<int64_t>(1, kRows / (in.heads / in.kv.heads));
    std::vector<AttentionItem> items;
    int64_t keys = 0;
    for (int64_t s = 0; s < sequences; ++s) {
        const int64_t count = query_start[s + 1] - query_start[s];
        for (int64_t i = 0; i < count; i += chunk)
            for (int64_t h = 0; h < in.kv.heads; ++h) {
                const int64_t visible = context[s] - count + i + 1;
                items.push_back({int32_t(s), int32_t(h), query_start[s] + i, std::min(chunk, count - i), visible});
                keys += visible * std::min(chunk, count - i);
            }
    }
    if (items.empty()) return true;
    const AttentionTable& table = attention_table(isa);
    const int64_t work = std::max<int64_t>(1, keys * in.kv.width * (in.heads / in.kv.heads) / int64_t(items.size()));
    const int64_t grain = std::max<int64_t>(1, (1 << 18) / work);
    parallel_for(int64_t(items.size()), grain, [&](int64_t begin, int64_t end) {
        int64_t rows = kRows;
        for (int64_t i = begin; i < end; ++i) rows = std::max(rows, items[size_t(i)].count * (in.heads / in.kv.heads));
        std::vector<float> scratch(size_t(scratch_floats(rows, in.kv.width)));
        table.attend(in, items.data() + begin, end - begin, scratch.data(), rows);
    });
    return true;
}

const AttentionTable& attention_table(Isa isa) {
#ifdef HALFBYTE_X86
    if (isa == Isa::avx512) return attention_avx512;
    if (isa == Isa::avx2) return attention_avx2;
#endif
    (void)isa;
    return attention_generic;
}

// Addresses of contiguous buffers; the Python wrappers check shapes and dtypes. False when an argument's values cannot be used
// (then the wrapper finds out which, for the message).
void register_attention(nb::module_& m) {
    nb::class_<KvPages>(m, "KvPages", "Addresses and sizes of the page arrays of one layer.")
        .def("__init__",
             [](KvPages* self, int kind, int64_t pages, int64_t page_size, int64_t heads, int64_t width, uintptr_t k, uintptr_t v,
                uintptr_t k_scales, uintptr_t v_scales, float global) {
                 new (self) KvPages{static_cast<KvKind>(kind), pages,           page_size,  heads, width, at<void>(k), at<void>(v),
                                    at<uint8_t>(k_scales),     at<uint8_t>(v_scales), global};
             });
    m.def("store_kv", [](int isa, const KvPages& kv, uintptr_t k, uintptr_t v, uintptr_t slots, int64_t count) {
        nb::gil_scoped_release free;
        return store_rows(usable_isa(isa), kv, at<const float>(k), at<const float>(v), at<const int64_t>(slots), count);
    });
    m.def("attention",
          [](int isa, const KvPages& kv, uintptr_t q, int64_t queries, int64_t heads, uintptr_t page_table, int64_t sequences,
             int64_t pages_per_sequence, uintptr_t query_start, uintptr_t context, float scale, uintptr_t out) {
              nb::gil_scoped_release free;
              const AttentionInput in{at<const float>(q), at<float>(out), heads, kv, at<const int32_t>(page_table), pages_per_sequence,
                                      scale};
              return attention(usable_isa(isa), in, at<const int32_t>(query_start), at<const int32_t>(context), queries, sequences);
          });
}

}  // namespace halfbyte

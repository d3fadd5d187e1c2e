// Guided rounding of rows, and payloads of codes that exist already.
#include "guide.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "quantise.hpp"
#include "registers.hpp"
#include "scalar.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace halfbyte {
namespace {

constexpr int64_t kGrain = 1 << 16;  // elements worth a thread

struct Rows {
    const void* x;
    bool bf16;
    int64_t rows, k;
    const uint8_t *payload, *scales;
    const float* global;  // one, or one a row
    int64_t global_count;
    const uint8_t* guided;  // 0 for rows without guidance; null: all have it
    void* out;
};

// One row on its own scale, to nearest.
bool own_row(const QuantiseTable& table, const Rule& rule, const void* x, bool bf16, int64_t k, uint8_t* codes, uint8_t* scales, void* out) {
    const uint32_t amax = table.amax_bits(x, bf16, k);
    if (amax >= 0x7F800000u) return false;
    const float g = rule.mode == 1 ? usual_global(scalar::from_bits(amax)) : rule.constant;
    table.row(x, bf16, k, g, codes, scales);
    table.dequantise_row(rule.format, codes, scales, g, k, out, bf16);
    return true;
}

// Returns the first row holding NaN or infinity, or -1. `rule` is that of rows without guidance.
int64_t guided_round(Isa isa, const Rule* rule, const Guide& guide, const Rows& a) {
    const GuideTable& table = guide_table(isa);
    const QuantiseTable& own = quantise_table(isa);
    const int64_t k = a.k, block = guide.block(), size = a.bf16 ? 2 : 4;
    std::atomic<int64_t> bad{a.rows};
    parallel_for(a.rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, k)), [&](int64_t begin, int64_t end) {
        std::vector<uint8_t> codes, scales;
        if (a.guided != nullptr) {
            codes.resize(static_cast<size_t>(k / 2));
            scales.resize(static_cast<size_t>(k / block));
        }
        for (int64_t r = begin; r < end; ++r) {
            const void* x = static_cast<const char*>(a.x) + r * k * size;
            void* out = static_cast<char*>(a.out) + r * k * size;
            bool good;
            if (a.guided != nullptr && a.guided[r] == 0) {
                good = own_row(own, *rule, x, a.bf16, k, codes.data(), scales.data(), out);
            } else {
                const GuideRow row{a.payload + r * (k / 8 * guide.bits), a.scales + r * (k / block),
                                   a.global[a.global_count == 1 ? 0 : r]};
                good = table.round(guide, row, x, a.bf16, k, out);
            }
            if (!good) {
                int64_t seen = bad.load();
                while (r < seen && !bad.compare_exchange_weak(seen, r)) {
                }
                return;
            }
        }
    });
    return bad < a.rows ? bad.load() : -1;
}

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

const GuideTable& guide_table(Isa isa) {
#ifdef HALFBYTE_X86
    if (isa == Isa::avx512) return guide_avx512;
    if (isa == Isa::avx2) return guide_avx2;
#endif
    (void)isa;
    return guide_generic;
}

void register_guide(nb::module_& m) {
    m.def("guided_round",
          [](int isa, const Rule* rule, int format, int bits, float reach, uintptr_t x, bool bf16, int64_t rows, int64_t k,
             uintptr_t payload, uintptr_t scales, uintptr_t global, int64_t global_count, uintptr_t guided, uintptr_t out) {
              nb::gil_scoped_release free;
              return guided_round(usable_isa(isa), rule, Guide{static_cast<Format>(format), bits, reach},
                                  Rows{at<const void>(x), bf16, rows, k, at<const uint8_t>(payload), at<const uint8_t>(scales),
                                       at<const float>(global), global_count, at<const uint8_t>(guided), at<void>(out)});
          },
          nb::arg("isa"), nb::arg("rule").none(), nb::arg("format"), nb::arg("bits"), nb::arg("reach"), nb::arg("x"), nb::arg("bf16"),
          nb::arg("rows"), nb::arg("k"), nb::arg("payload"), nb::arg("scales"), nb::arg("global_scale"), nb::arg("global_count"),
          nb::arg("guided"), nb::arg("out"));
    m.def("narrow", [](int isa, uintptr_t codes, int64_t count, int bits, uintptr_t out) {
        nb::gil_scoped_release free;
        const GuideTable& table = guide_table(usable_isa(isa));
        parallel_for(count / 16, kGrain / 16, [&](int64_t begin, int64_t end) {
            table.narrow(at<const uint8_t>(codes) + begin * 8, (end - begin) * 16, bits, at<uint8_t>(out) + begin * 2 * bits);
        });
    });
}

}  // namespace halfbyte

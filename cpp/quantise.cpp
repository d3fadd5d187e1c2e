#include "quantise.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "guide.hpp"
#include "registers.hpp"
#include "scalar.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace halfbyte {
namespace {

constexpr uint32_t kInfinity = 0x7F800000u;
constexpr int64_t kGrain = 1 << 16;  // elements worth a thread

int64_t row_grain(int64_t k) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, k)); }

const void* row_at(const void* x, bool bf16, int64_t row, int64_t k) {
    return static_cast<const char*>(x) + row * k * (bf16 ? 2 : 4);
}

void lower(std::atomic<int64_t>& value, int64_t candidate) {
    int64_t seen = value.load();
    while (candidate < seen && !value.compare_exchange_weak(seen, candidate)) {
    }
}

// The global scale of a whole tensor, or the first bad row.
int64_t tensor_global(const QuantiseTable& table, const void* x, bool bf16, int64_t rows, int64_t k, float* global) {
    std::atomic<int64_t> bad{rows};
    std::atomic<uint32_t> top{0};
    parallel_for(rows, row_grain(k), [&](int64_t begin, int64_t end) {
        uint32_t most = 0;
        for (int64_t r = begin; r < end; ++r) {
            const uint32_t amax = table.amax_bits(row_at(x, bf16, r, k), bf16, k);
            if (amax >= kInfinity) return lower(bad, r);
            most = std::max(most, amax);
        }
        uint32_t seen = top.load();
        while (most > seen && !top.compare_exchange_weak(seen, most)) {
        }
    });
    if (bad < rows) return bad;
    *global = usual_global(scalar::from_bits(top));
    return -1;
}

int64_t fake_quantise(Isa isa, const Rule& rule, const void* x, bool bf16, int64_t rows, int64_t k, void* out) {
    const QuantiseTable& table = quantise_table(isa);
    float whole = rule.constant;
    if (rule.mode == 0) {
        const int64_t bad = tensor_global(table, x, bf16, rows, k, &whole);
        if (bad >= 0) return bad;
    }
    std::atomic<int64_t> bad{rows};
    parallel_for(rows, row_grain(k), [&](int64_t begin, int64_t end) {
        std::vector<uint8_t> codes(static_cast<size_t>(k / 2)), scales(static_cast<size_t>(k / rule.block()));
        for (int64_t r = begin; r < end; ++r) {
            const void* row = row_at(x, bf16, r, k);
            float g = whole;
            if (rule.mode != 0) {
                const uint32_t amax = table.amax_bits(row, bf16, k);
                if (amax >= kInfinity) return lower(bad, r);
                if (rule.mode == 1) g = usual_global(scalar::from_bits(amax));
            }
            table.row(row, bf16, k, g, codes.data(), scales.data());
            void* to = static_cast<char*>(out) + r * k * (bf16 ? 2 : 4);
            table.dequantise_row(rule.format, codes.data(), scales.data(), g, k, to, bf16);
        }
    });
    return bad < rows ? bad.load() : -1;
}

void dequantise_rows(Isa isa, Format format, const uint8_t* codes, const uint8_t* scales, const float* global, int64_t count,
                     int64_t rows, int64_t k, void* out, bool bf16) {
    const QuantiseTable& table = quantise_table(isa);
    const int64_t block = format == Format::nvfp4 ? 16 : 32;
    parallel_for(rows, row_grain(k), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            table.dequantise_row(format, codes + r * (k / 2), scales + r * (k / block), global[count == 1 ? 0 : r], k,
                                 static_cast<char*>(out) + r * k * (bf16 ? 2 : 4), bf16);
    });
}

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

const QuantiseTable& quantise_table(Isa isa) {
#ifdef HALFBYTE_X86
    if (isa == Isa::avx512) return quantise_avx512;
    if (isa == Isa::avx2) return quantise_avx2;
#endif
    (void)isa;
    return quantise_generic;
}

float usual_global(float amax) {
    if (!(amax > 0.0f)) return 1.0f;
    const uint32_t b = scalar::float_bits(amax / 2688.0f);
    const uint32_t exponent = (b >> 23) + ((b & 0x7FFFFFu) != 0 ? 1u : 0u);
    return scalar::from_bits(std::clamp<uint32_t>(exponent, 1, 254) << 23);
}

int64_t quantise_rows(Isa isa, const Rule& rule, const void* x, bool bf16, int64_t rows, int64_t k, const float* given,
                      int64_t given_count, const CodeRows& to) {
    const QuantiseTable& table = quantise_table(isa);
    const GuideTable& guide = guide_table(isa);
    const int64_t block = rule.block();
    const bool per_row = given == nullptr ? rule.mode == 1 : given_count != 1;
    float whole = given != nullptr ? given[0] : rule.mode == 3 ? 1.0f : rule.constant;
    if (given == nullptr && rule.mode == 0) {
        const int64_t bad = tensor_global(table, x, bf16, rows, k, &whole);
        if (bad >= 0) return bad;
    }
    if (!per_row && given == nullptr) to.global[0] = whole;
    std::atomic<int64_t> bad{rows};
    parallel_for(rows, row_grain(k), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const void* row = row_at(x, bf16, r, k);
            float g = given != nullptr && per_row ? given[r] : whole;
            if (given != nullptr || rule.mode != 0) {
                const uint32_t amax = table.amax_bits(row, bf16, k);
                if (amax >= kInfinity) return lower(bad, r);
                if (given == nullptr && rule.mode == 1) g = usual_global(scalar::from_bits(amax));
            }
            if (per_row && given == nullptr) to.global[r] = g;
            uint8_t* codes = to.codes + r * (k / 2);
            table.row(row, bf16, k, g, codes, to.scales + r * (k / block));
            if (to.bits != 0) guide.narrow(codes, k, to.bits, to.payload + r * (k / 8 * to.bits));
        }
    });
    return bad < rows ? bad.load() : -1;
}

void register_quantise(nb::module_& m) {
    nb::class_<Rule>(m, "Rule", "The part of a QuantSpec that native quantisation needs.")
        .def("__init__",
             [](Rule* self, int format, int mode, float constant) {
                 new (self) Rule{static_cast<Format>(format), mode, mode == 3 ? 1.0f : constant};
             },
             nb::arg("format"), nb::arg("mode"), nb::arg("constant"));

    nb::class_<CodeRows>(m, "CodeRows", "Addresses of codes, scales, global scale and payload that a kernel writes.")
        .def("__init__", [](CodeRows* self, uintptr_t codes, uintptr_t scales, uintptr_t global, int bits, uintptr_t payload) {
            new (self) CodeRows{at<uint8_t>(codes), at<uint8_t>(scales), at<float>(global), bits, at<uint8_t>(payload)};
        });

    // Addresses of contiguous buffers; the Python wrappers check shapes and dtypes. Return the first row with NaN or infinity, or -1.
    m.def("quantise", [](int isa, const Rule& rule, uintptr_t x, bool bf16, int64_t rows, int64_t k, uintptr_t given, int64_t given_count,
                         const CodeRows& to) {
        nb::gil_scoped_release free;
        return quantise_rows(usable_isa(isa), rule, at<const void>(x), bf16, rows, k, at<const float>(given), given_count, to);
    });
    m.def("fake_quantise", [](int isa, const Rule& rule, uintptr_t x, bool bf16, int64_t rows, int64_t k, uintptr_t out) {
        nb::gil_scoped_release free;
        return fake_quantise(usable_isa(isa), rule, at<const void>(x), bf16, rows, k, at<void>(out));
    });
    m.def("dequantise", [](int isa, int format, uintptr_t codes, uintptr_t scales, uintptr_t global, int64_t count, int64_t rows,
                           int64_t k, uintptr_t out, bool bf16) {
        nb::gil_scoped_release free;
        dequantise_rows(usable_isa(isa), static_cast<Format>(format), at<const uint8_t>(codes), at<const uint8_t>(scales),
                        at<const float>(global), count, rows, k, at<void>(out), bf16);
    });
}

}  // namespace halfbyte

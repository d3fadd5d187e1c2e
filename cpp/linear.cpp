#include "linear.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "guide.hpp"
#include "norm.hpp"
#include "registers.hpp"
#include "scalar.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace halfbyte {
namespace {

constexpr uint32_t kInfinity = 0x7F800000u;

int64_t row_grain(int64_t k) { return std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, k)); }

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

int64_t product(const Panels& w, const PreparedRows& x, int64_t rows, float* out) {
    if (x.bad_row() >= 0) return x.bad_row();
    const RowMap map{rows, nullptr, nullptr, 0};
    parallel_for(panel_groups(w), group_grain(w, rows), [&](int64_t first, int64_t last) {
        x.multiply(w, first * kPanelGroup, std::min(last * kPanelGroup, w.panels()), map, out, w.n);
    });
    return -1;
}

// What happens to the rows before and after the product; null pointers and false for nothing.
struct Around {
    const float* norm;
    double eps;
    bool gated;
    const float* residual;
};

int64_t linear(Isa isa, const Panels& w, const Rule* rule, const float* x, int64_t rows, float* out, const Around& around,
               const CodeRows* record) {
    const NormTable& table = norm_table(isa);
    std::vector<Scratch> spare;
    if (around.norm != nullptr) {
        float* normed = spare.emplace_back(rows * w.k * 4).as<float>();
        parallel_for(rows, row_grain(w.k), [&](int64_t begin, int64_t end) {
            table.rms_norm(x + begin * w.k, around.norm, around.eps, end - begin, w.k, normed + begin * w.k);
        });
        x = normed;
    }
    float* y = around.gated ? spare.emplace_back(rows * w.n * 4).as<float>() : out;
    const int64_t bad = product(w, PreparedRows(isa, w.kind, rule, x, rows, w.k, record), rows, y);
    if (bad >= 0 || (!around.gated && around.residual == nullptr)) return bad;
    const int64_t width = around.gated ? w.n / 2 : w.n;
    parallel_for(rows, row_grain((around.gated ? 8 : 1) * width), [&](int64_t begin, int64_t end) {
        if (around.gated) table.swiglu(y + begin * w.n, end - begin, width, out + begin * width);
        if (around.residual != nullptr)
            for (int64_t i = begin * width; i < end * width; ++i) out[i] = around.residual[i] + out[i];
    });
    return -1;
}

// Row-major codes [n, k/2] and scales [n, k/block] into panels, or back. Padding rows are zero.
void pack_codes(const uint8_t* codes, const uint8_t* scales, int64_t n, int64_t k, int64_t block, uint8_t* out_codes, uint8_t* out_scales) {
    const int64_t panels = (n + kPanel - 1) / kPanel, groups = k / 16, blocks = k / block;
    parallel_for(panels, std::max<int64_t>(1, (1 << 14) / k), [&](int64_t first, int64_t last) {
        for (int64_t p = first; p < last; ++p) {
            uint8_t* to = out_codes + p * groups * kGroupBytes;
            uint8_t* to_scale = out_scales + p * blocks * kPanel;
            for (int64_t r = 0; r < kPanel; ++r) {
                const int64_t row = p * kPanel + r;
                for (int64_t g = 0; g < groups; ++g) {
                    uint8_t code[16] = {};
                    if (row < n) {
                        const uint8_t* from = codes + row * (k / 2) + g * 8;
                        for (int i = 0; i < 8; ++i) {
                            code[2 * i] = from[i] & 15;
                            code[2 * i + 1] = from[i] >> 4;
                        }
                    }
                    for (int run = 0; run < 2; ++run)
                        for (int t = 0; t < 4; ++t)
                            to[g * kGroupBytes + run * 64 + r * 4 + t] =
                                static_cast<uint8_t>(code[run * 8 + t] | (code[run * 8 + 4 + t] << 4));
                }
                for (int64_t b = 0; b < blocks; ++b) to_scale[b * kPanel + r] = row < n ? scales[row * blocks + b] : 0;
            }
        }
    });
}

void unpack_codes(const uint8_t* codes, const uint8_t* scales, int64_t n, int64_t k, int64_t block, uint8_t* out_codes, uint8_t* out_scales) {
    const int64_t groups = k / 16, blocks = k / block;
    for (int64_t row = 0; row < n; ++row) {
        const int64_t p = row / kPanel, r = row % kPanel;
        for (int64_t g = 0; g < groups; ++g) {
            uint8_t code[16];
            for (int run = 0; run < 2; ++run) {
                for (int t = 0; t < 4; ++t) {
                    const uint8_t both = codes[(p * groups + g) * kGroupBytes + run * 64 + r * 4 + t];
                    code[run * 8 + t] = both & 15;
                    code[run * 8 + 4 + t] = both >> 4;
                }
            }
            uint8_t* to = out_codes + row * (k / 2) + g * 8;
            for (int i = 0; i < 8; ++i) to[i] = static_cast<uint8_t>(code[2 * i] | (code[2 * i + 1] << 4));
        }
        for (int64_t b = 0; b < blocks; ++b) out_scales[row * blocks + b] = scales[(p * blocks + b) * kPanel + r];
    }
}

}  // namespace

const LinearTable& linear_table(Isa isa) {
#ifdef HALFBYTE_X86
    if (isa == Isa::avx512) return linear_avx512;
    if (isa == Isa::avx2) return linear_avx2;
#endif
    (void)isa;
    return linear_generic;
}

int64_t group_grain(const Panels& w, int64_t rows) {
    // Rough cycles of one group: a pass over its weights, and the arithmetic of every row.
    const double row = w.kind == Kind::w4a4 ? 0.25 : w.kind == Kind::fp32 ? 4.0 : 1.0;
    const double cycles = static_cast<double>(kPanelGroup * w.k) * (0.5 + row * static_cast<double>(rows));
    return std::max<int64_t>(1, static_cast<int64_t>(60000.0 / std::max(1.0, cycles)));
}

PreparedRows::PreparedRows(Isa isa, Kind kind, const Rule* rule, const float* x, int64_t rows, int64_t k, const CodeRows* record)
    : table_(linear_table(isa)) {
    if (kind == Kind::fp32) {
        x_ = x;
        return;
    }
    if (kind != Kind::w4a4) {
        scratch_.emplace_back(rows * k * 4);
        float* rounded = scratch_.back().as<float>();
        parallel_for(rows, row_grain(k),
                     [&](int64_t begin, int64_t end) { table_.round_bf16(x + begin * k, (end - begin) * k, rounded + begin * k); });
        x_ = rounded;
        return;
    }
    const QuantiseTable& quantise = quantise_table(isa);
    const GuideTable& guide = guide_table(isa);
    const int64_t block = rule->block(), stride = activation_stride(block, k);
    scratch_.emplace_back(rows * stride);
    scratch_.emplace_back(rows * 4);
    uint8_t* data = scratch_[0].as<uint8_t>();
    float* global = scratch_[1].as<float>();
    std::atomic<int64_t> bad{rows};
    parallel_for(rows, row_grain(k), [&](int64_t begin, int64_t end) {
        const Scratch own_codes(k / 2), own_scales(k / block);
        for (int64_t r = begin; r < end; ++r) {
            const uint32_t amax = quantise.amax_bits(x + r * k, false, k);
            if (amax >= kInfinity) {
                int64_t seen = bad.load();
                while (r < seen && !bad.compare_exchange_weak(seen, r)) {
                }
                return;
            }
            global[r] = rule->mode == 1 ? usual_global(scalar::from_bits(amax)) : rule->constant;
            uint8_t* codes = record != nullptr ? record->codes + r * (k / 2) : own_codes.as<uint8_t>();
            uint8_t* scales = record != nullptr ? record->scales + r * (k / block) : own_scales.as<uint8_t>();
            quantise.row(x + r * k, false, k, global[r], codes, scales);
            table_.expand(rule->format, codes, scales, k, data + r * stride);
            if (record == nullptr) continue;
            if (rule->mode == 1) record->global[r] = global[r];
            if (record->bits != 0) guide.narrow(codes, k, record->bits, record->payload + r * (k / 8 * record->bits));
        }
    });
    if (record != nullptr && rule->mode != 1) record->global[0] = rule->constant;
    if (bad < rows) bad_row_ = bad;
    rows_ = {data, stride, global};
}

PreparedRows::PreparedRows(Isa isa, Format format, const uint8_t* codes, const uint8_t* scales, const float* global, int64_t rows, int64_t k)
    : table_(linear_table(isa)) {
    const int64_t block = format == Format::nvfp4 ? 16 : 32, stride = activation_stride(block, k);
    scratch_.emplace_back(rows * stride);
    uint8_t* data = scratch_[0].as<uint8_t>();
    for (int64_t r = 0; r < rows; ++r) table_.expand(format, codes + r * (k / 2), scales + r * (k / block), k, data + r * stride);
    rows_ = {data, stride, global};
}

void PreparedRows::multiply(const Panels& w, int64_t first, int64_t last, const RowMap& map, float* out, int64_t stride) const {
    if (w.kind == Kind::w4a4) {
        table_.w4a4(w, first, last, rows_, map, out, stride);
    } else {
        table_.dense(w, first, last, x_, map, out, stride);
    }
}

void register_linear(nb::module_& m) {
    nb::class_<Panels>(m, "Panels", "Addresses of one packed matrix or of a stack of them; the Python store keeps the memory alive.")
        .def("__init__", [](Panels* self, int kind, int format, int64_t n, int64_t k, uintptr_t codes, uintptr_t scales,
                            uintptr_t row_scale, uintptr_t dense, uintptr_t bias) {
            new (self) Panels{static_cast<Kind>(kind), static_cast<Format>(format), n, k, at<const uint8_t>(codes),
                              at<const uint8_t>(scales), at<const float>(row_scale), at<const void>(dense), at<const float>(bias)};
        })
        .def("expert", &Panels::expert, nb::arg("index"), "The view of one matrix of a stack.");
    m.def("linear", [](int isa, const Panels& w, const Rule* rule, uintptr_t x, int64_t rows, uintptr_t out, uintptr_t norm, double eps,
                       bool gated, uintptr_t residual, const CodeRows* record) {
        nb::gil_scoped_release free;
        const Around around{at<const float>(norm), eps, gated, at<const float>(residual)};
        return linear(usable_isa(isa), w, rule, at<const float>(x), rows, at<float>(out), around, record);
    }, nb::arg("isa"), nb::arg("w"), nb::arg("rule").none(), nb::arg("x"), nb::arg("rows"), nb::arg("out"), nb::arg("norm"),
       nb::arg("eps"), nb::arg("gated"), nb::arg("residual"), nb::arg("record").none());
    m.def("linear_codes",
          [](int isa, const Panels& w, uintptr_t codes, uintptr_t scales, uintptr_t global, int64_t rows, uintptr_t out) {
              nb::gil_scoped_release free;
              const Isa set = usable_isa(isa);
              const PreparedRows x(set, w.format, at<const uint8_t>(codes), at<const uint8_t>(scales), at<const float>(global), rows, w.k);
              return product(w, x, rows, at<float>(out));
          });
    m.def("pack_codes", [](uintptr_t codes, uintptr_t scales, int64_t n, int64_t k, int64_t block, uintptr_t out_codes, uintptr_t out_scales) {
        nb::gil_scoped_release free;
        pack_codes(at<const uint8_t>(codes), at<const uint8_t>(scales), n, k, block, at<uint8_t>(out_codes), at<uint8_t>(out_scales));
    });
    m.def("unpack_codes", [](uintptr_t codes, uintptr_t scales, int64_t n, int64_t k, int64_t block, uintptr_t out_codes, uintptr_t out_scales) {
        nb::gil_scoped_release free;
        unpack_codes(at<const uint8_t>(codes), at<const uint8_t>(scales), n, k, block, at<uint8_t>(out_codes), at<uint8_t>(out_scales));
    });
}

}  // namespace halfbyte

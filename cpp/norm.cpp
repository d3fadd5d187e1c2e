#include "norm.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>

#include "registers.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace halfbyte {
namespace {

constexpr int64_t kGrain = 1 << 15;  // elements worth a thread

int64_t row_grain(int64_t width) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)); }

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

const NormTable& norm_table(Isa isa) {
#ifdef HALFBYTE_X86
    if (isa == Isa::avx512) return norm_avx512;
    if (isa == Isa::avx2) return norm_avx2;
#endif
    (void)isa;
    return norm_generic;
}

// Addresses of contiguous buffers; the Python wrappers check shapes and dtypes.
void register_norm(nb::module_& m) {
    m.def("rms_norm",
          [](int isa, uintptr_t x, uintptr_t weight, double eps, int64_t rows, int64_t width, uintptr_t out) {
              nb::gil_scoped_release free;
              const NormTable& table = norm_table(usable_isa(isa));
              parallel_for(rows, row_grain(width), [&](int64_t begin, int64_t end) {
                  table.rms_norm(at<const float>(x) + begin * width, at<const float>(weight), eps, end - begin, width,
                                 at<float>(out) + begin * width);
              });
          });
    m.def("rope",
          [](int isa, uintptr_t x, uintptr_t positions, int64_t table_rows, uintptr_t cos, uintptr_t sin, int64_t rows,
             int64_t heads, int64_t width, uintptr_t out) {
              nb::gil_scoped_release free;
              const int64_t* position = at<const int64_t>(positions);
              for (int64_t r = 0; r < rows; ++r)
                  if (position[r] < 0 || position[r] >= table_rows) return false;
              const NormTable& table = norm_table(usable_isa(isa));
              const int64_t row = heads * width;
              parallel_for(rows, row_grain(row), [&](int64_t begin, int64_t end) {
                  table.rope(at<const float>(x) + begin * row, position + begin, at<const float>(cos), at<const float>(sin),
                             end - begin, heads, width, at<float>(out) + begin * row);
              });
              return true;
          },
          "False when a position lies outside the tables.");
    m.def("route",
          [](int isa, uintptr_t logits, int64_t rows, int64_t experts, int64_t chosen, bool normalise, uintptr_t ids, uintptr_t gates) {
              nb::gil_scoped_release free;
              const float* x = at<const float>(logits);
              for (int64_t i = 0; i < rows * experts; ++i)
                  if (!std::isfinite(x[i])) return false;
              const NormTable& table = norm_table(usable_isa(isa));
              parallel_for(rows, row_grain(experts * (chosen + 8)), [&](int64_t begin, int64_t end) {
                  table.route(x + begin * experts, end - begin, experts, chosen, normalise, at<int32_t>(ids) + begin * chosen,
                              at<float>(gates) + begin * chosen);
              });
              return true;
          },
          "False when a logit is not finite.");
    m.def("swiglu", [](int isa, uintptr_t gate_up, int64_t rows, int64_t width, uintptr_t out) {
        nb::gil_scoped_release free;
        const NormTable& table = norm_table(usable_isa(isa));
        parallel_for(rows, row_grain(8 * width), [&](int64_t begin, int64_t end) {
            table.swiglu(at<const float>(gate_up) + begin * 2 * width, end - begin, width, at<float>(out) + begin * width);
        });
    });
}

}  // namespace halfbyte

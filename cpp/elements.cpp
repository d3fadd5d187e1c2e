#include "elements.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>

#include "registers.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace halfbyte {
namespace {

const ElementsTable& elements_table(Isa isa) {
#ifdef HALFBYTE_X86
    if (isa == Isa::avx512) return elements_avx512;
    if (isa == Isa::avx2) return elements_avx2;
#endif
    (void)isa;
    return elements_generic;
}

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

const void* element(uintptr_t x, bool bf16, int64_t i) { return at<const char>(x) + i * (bf16 ? 2 : 4); }

constexpr int64_t kGrain = 1 << 16;  // elements worth a thread

}  // namespace

// Addresses of contiguous buffers; the Python wrappers check shapes and dtypes.
void register_elements(nb::module_& m) {
    m.def("block_amax", [](int isa, uintptr_t x, bool bf16, int64_t block, int64_t blocks, uintptr_t out) {
        nb::gil_scoped_release free;
        const ElementsTable& table = elements_table(usable_isa(isa));
        parallel_for(blocks, kGrain / block, [&](int64_t begin, int64_t end) {
            table.block_amax(element(x, bf16, begin * block), bf16, block, end - begin, at<float>(out) + begin);
        });
    });
    m.def("rule_codes", [](int isa, bool multiply, int ties, int zero_sign, bool wrap, uintptr_t x, bool bf16, uintptr_t scale,
                           int64_t block, int64_t blocks, uintptr_t out) {
        nb::gil_scoped_release free;
        const ElementsTable& table = elements_table(usable_isa(isa));
        const CodeRule rule{multiply, ties, zero_sign, wrap};
        parallel_for(blocks, kGrain / block, [&](int64_t begin, int64_t end) {
            table.codes(rule, element(x, bf16, begin * block), bf16, at<const float>(scale) + begin, block, end - begin,
                        at<uint8_t>(out) + begin * block / 2);
        });
    });
}

}  // namespace halfbyte

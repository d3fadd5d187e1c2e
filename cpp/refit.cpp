#include "refit.hpp"

#include <nanobind/nanobind.h>

#include "registers.hpp"

namespace nb = nanobind;

namespace halfbyte {
namespace {

template <class T = uint8_t>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

RefitStreams streams(uintptr_t where, int64_t where_size, uintptr_t values, uintptr_t wide, int64_t changed, int64_t wide_count) {
    return {at(where), at(values), at(wide), where_size, changed, wide_count};
}

}  // namespace

const RefitTable& refit_table(Isa isa) {
#ifdef HALFBYTE_X86
    if (isa == Isa::avx512) return refit_avx512;
    if (isa == Isa::avx2) return refit_avx2;
#endif
    (void)isa;
    return refit_generic;
}

// Addresses of contiguous buffers; the Python wrapper checks sizes and leaves room (kRefitSlack, docs/refit-format.md).
void register_refit(nb::module_& m) {
    // (bytes of where, changed, wide values); changed -1 where there are more than `most`.
    m.def("refit_sparse", [](int isa, int kind, uintptr_t base, uintptr_t target, int64_t n, int64_t most, uintptr_t where, uintptr_t values,
                             uintptr_t wide) {
        RefitStreams out = streams(where, 0, values, wide, 0, 0);
        bool few = false;
        {
            nb::gil_scoped_release free;
            few = refit_table(usable_isa(isa)).sparse(kind, at(base), at(target), n, most, out);
        }
        return nb::make_tuple(out.where_size, few ? out.changed : -1, out.wide_count);
    });
    m.def("refit_bitmask", [](int isa, int kind, uintptr_t base, uintptr_t target, int64_t n, uintptr_t where, uintptr_t values, uintptr_t wide) {
        RefitStreams out = streams(where, 0, values, wide, 0, 0);
        {
            nb::gil_scoped_release free;
            refit_table(usable_isa(isa)).bitmask(kind, at(base), at(target), n, out);
        }
        return nb::make_tuple(out.where_size, out.changed, out.wide_count);
    });
    m.def("refit_is_fill", [](int isa, int kind, uintptr_t target, int64_t n) {
        nb::gil_scoped_release free;
        return refit_table(usable_isa(isa)).is_fill(kind, at(target), n);
    });
    m.def("refit_xor", [](int isa, int size, uintptr_t base, uintptr_t target, int64_t n, uintptr_t planes) {
        nb::gil_scoped_release free;
        refit_table(usable_isa(isa)).transpose_xor(size, at(base), at(target), n, at(planes));
    });
    m.def("refit_apply_xor", [](int isa, int size, uintptr_t data, uintptr_t planes, int64_t n) {
        nb::gil_scoped_release free;
        refit_table(usable_isa(isa)).apply_xor(size, at(data), at(planes), n);
    });
    m.def("refit_check", [](int isa, int kind, bool mask, uintptr_t where, int64_t where_size, uintptr_t values, uintptr_t wide, int64_t changed,
                            int64_t wide_count, int64_t n) {
        nb::gil_scoped_release free;
        const RefitStreams in = streams(where, where_size, values, wide, changed, wide_count);
        const RefitTable& table = refit_table(usable_isa(isa));
        return mask ? table.check_bitmask(kind, in, n) : table.check_sparse(kind, in, n);
    });
    m.def("refit_apply", [](int isa, int kind, bool mask, uintptr_t data, uintptr_t where, int64_t where_size, uintptr_t values, uintptr_t wide,
                            int64_t changed, int64_t wide_count, uintptr_t old) {
        nb::gil_scoped_release free;
        const RefitStreams in = streams(where, where_size, values, wide, changed, wide_count);
        const RefitTable& table = refit_table(usable_isa(isa));
        mask ? table.apply_bitmask(kind, at(data), in, at(old)) : table.apply_sparse(kind, at(data), in, at(old));
    });
    m.def("refit_revert", [](int isa, int kind, bool mask, uintptr_t data, uintptr_t where, int64_t where_size, int64_t changed, uintptr_t old) {
        nb::gil_scoped_release free;
        const RefitTable& table = refit_table(usable_isa(isa));
        mask ? table.revert_bitmask(kind, at(data), at(where), where_size, at(old))
             : table.revert_sparse(kind, at(data), at(where), changed, at(old));
    });
    // (bytes of quotients, bytes of low)
    m.def("refit_to_classes", [](int isa, int kind, int shift, int width, uintptr_t base, int64_t n, uintptr_t where, uintptr_t values,
                                 uintptr_t wide, int64_t changed, uintptr_t out_values, uintptr_t out_wide, uintptr_t quotients, uintptr_t low) {
        RefitClasses classes{at(quotients), at(low), 0, 0};
        {
            nb::gil_scoped_release free;
            RefitStreams out = streams(0, 0, out_values, out_wide, 0, 0);
            refit_table(usable_isa(isa))
                .to_classes(kind, shift, width, at(base), n, streams(where, 0, values, wide, changed, 0), out, classes);
        }
        return nb::make_tuple(classes.quotients_size, classes.low_size);
    });
    // Bytes of the gap stream, or -1.
    m.def("refit_from_classes", [](int isa, int kind, int shift, int width, uintptr_t base, int64_t n, uintptr_t values, uintptr_t wide,
                                   int64_t changed, int64_t wide_count, uintptr_t quotients, int64_t quotients_size, uintptr_t low,
                                   int64_t low_size, uintptr_t out_where, uintptr_t out_values, uintptr_t out_wide) {
        nb::gil_scoped_release free;
        RefitStreams out = streams(out_where, 0, out_values, out_wide, 0, 0);
        const RefitClasses classes{at(quotients), at(low), quotients_size, low_size};
        const bool good = refit_table(usable_isa(isa))
                              .from_classes(kind, shift, width, at(base), n, streams(0, 0, values, wide, changed, wide_count), classes, out);
        return good ? out.where_size : int64_t{-1};
    });
}

}  // namespace halfbyte

#include "refit.hpp"

#include <nanobind/nanobind.h>

#include "registers.hpp"

namespace nb = nanobind;

namespace halfbyte {
namespace {

// Contiguous bytes of a Python object, held as long as this lives. Create and destroy it with the GIL.
class Buffer {
   public:
    explicit Buffer(nb::handle object, bool writable = false) {
        if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) nb::raise_python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    uint8_t* at() const { return static_cast<uint8_t*>(view_.buf); }
    int64_t size() const { return view_.len; }
    uint32_t* places() const { return static_cast<uint32_t*>(view_.buf); }

   private:
    Py_buffer view_;
};

int64_t bits(int kind) { return kind < 0 ? -kind : kind; }
int64_t element_size(int kind) { return bits(kind) < 8 ? 1 : bits(kind) / 8; }
int64_t elements(const Buffer& data, int kind) { return data.size() * 8 / bits(kind); }
void require(bool good) {
    if (!good) throw nb::value_error("a buffer of the wrong size");
}

// Room for `changed` changes and what the kernels write past them (halfbyte/refit/codec/native.py).
void require_room(int kind, const Buffer& where, int64_t where_size, const Buffer& values, const Buffer& wide, int64_t changed) {
    require(where.size() >= where_size + kRefitSlack && values.size() >= changed + kRefitSlack &&
            wide.size() >= changed * element_size(kind));
}

struct Marked {
    Marked(nb::handle where_, nb::handle values_, nb::handle wide_, int64_t changed_, int kind)
        : where(where_), values(values_), wide(wide_), changed(changed_), wide_count(wide.size() / element_size(kind)) {
        require(values.size() == (changed + 1) / 2 && wide.size() % element_size(kind) == 0);
    }
    RefitStreams streams() const { return {where.at(), values.at(), wide.at(), where.size(), changed, wide_count}; }
    Buffer where, values, wide;
    int64_t changed, wide_count;
};

}  // namespace

const RefitTable& refit_table(Isa isa) {
#ifdef HALFBYTE_X86
    if (isa == Isa::avx512) return refit_avx512;
    if (isa == Isa::avx2) return refit_avx2;
#endif
    (void)isa;
    return refit_generic;
}

// Buffers of bytes in, buffers of bytes out; sizes are checked here, contents by refit_check.
void register_refit(nb::module_& m) {
    // (bytes of where, changed, wide values, hash of the target); changed -1 where there are more than `most`.
    m.def("refit_sparse", [](int isa, int kind, nb::handle base, nb::handle target, int64_t most, nb::handle where, nb::handle values,
                             nb::handle wide) {
        const Buffer a(base), b(target), w(where, true), v(values, true), x(wide, true);
        const int64_t n = elements(a, kind);
        require(a.size() == b.size());
        require_room(kind, w, most + n / 255, v, x, most);
        RefitStreams out{w.at(), v.at(), x.at(), 0, 0, 0};
        uint64_t hash = 0;
        bool few = false;
        {
            nb::gil_scoped_release free;
            few = refit_table(usable_isa(isa)).sparse(kind, a.at(), b.at(), n, most, out, hash);
        }
        return nb::make_tuple(out.where_size, few ? out.changed : -1, out.wide_count, hash);
    });
    m.def("refit_bitmask", [](int isa, int kind, nb::handle base, nb::handle target, nb::handle where, nb::handle values, nb::handle wide) {
        const Buffer a(base), b(target), w(where, true), v(values, true), x(wide, true);
        const int64_t n = elements(a, kind);
        require(a.size() == b.size());
        require_room(kind, w, n / 8 + 1, v, x, n);
        RefitStreams out{w.at(), v.at(), x.at(), 0, 0, 0};
        {
            nb::gil_scoped_release free;
            refit_table(usable_isa(isa)).bitmask(kind, a.at(), b.at(), n, out);
        }
        return nb::make_tuple(out.where_size, out.changed, out.wide_count);
    });
    m.def("refit_is_fill", [](int isa, int kind, nb::handle target) {
        const Buffer t(target);
        require(elements(t, kind) > 0);
        nb::gil_scoped_release free;
        return refit_table(usable_isa(isa)).is_fill(kind, t.at(), elements(t, kind));
    });
    m.def("refit_xor", [](int isa, int size, nb::handle base, nb::handle target, nb::handle planes) {
        const Buffer a(base), b(target), p(planes, true);
        require(a.size() == b.size() && a.size() == p.size() && a.size() % size == 0);
        nb::gil_scoped_release free;
        refit_table(usable_isa(isa)).transpose_xor(size, a.at(), b.at(), a.size() / size, p.at());
    });
    m.def("refit_apply_xor", [](int isa, int size, nb::handle data, nb::handle planes) {
        const Buffer d(data, true), p(planes);
        require(d.size() == p.size() && d.size() % size == 0);
        nb::gil_scoped_release free;
        refit_table(usable_isa(isa)).apply_xor(size, d.at(), p.at(), d.size() / size);
    });
    m.def("refit_check", [](int isa, int kind, bool mask, nb::handle where, nb::handle values, nb::handle wide, int64_t changed, int64_t n) {
        const Marked in(where, values, wide, changed, kind);
        nb::gil_scoped_release free;
        const RefitTable& table = refit_table(usable_isa(isa));
        return mask ? table.check_bitmask(kind, in.streams(), n) : table.check_sparse(kind, in.streams(), n);
    });
    m.def("refit_apply", [](int isa, int kind, bool mask, nb::handle data, nb::handle where, nb::handle values, nb::handle wide,
                            int64_t changed, nb::handle old) {
        const Marked in(where, values, wide, changed, kind);
        const Buffer d(data, true), o(old, true);
        require(o.size() == changed * element_size(kind));
        nb::gil_scoped_release free;
        const RefitTable& table = refit_table(usable_isa(isa));
        mask ? table.apply_bitmask(kind, d.at(), in.streams(), o.at()) : table.apply_sparse(kind, d.at(), in.streams(), o.at());
    });
    m.def("refit_revert", [](int isa, int kind, bool mask, nb::handle data, nb::handle where, nb::handle old) {
        const Buffer d(data, true), w(where), o(old);
        const int64_t changed = o.size() / element_size(kind);
        nb::gil_scoped_release free;
        const RefitTable& table = refit_table(usable_isa(isa));
        mask ? table.revert_bitmask(kind, d.at(), w.at(), w.size(), changed, o.at())
             : table.revert_sparse(kind, d.at(), w.at(), changed, o.at());
    });
    m.def("refit_count_differing", [](int isa, int size, nb::handle before, nb::handle after) {
        const Buffer a(before), b(after);
        require(a.size() == b.size() && a.size() % size == 0 && a.size() / size <= kRefitMostPlaces);
        nb::gil_scoped_release free;
        return refit_table(usable_isa(isa)).count_differing(size, a.at(), b.at(), a.size() / size);
    });
    m.def("refit_find_differing", [](int isa, int size, nb::handle before, nb::handle after, nb::handle places, nb::handle old, nb::handle now) {
        const Buffer a(before), b(after), p(places, true), o(old, true), w(now, true);
        require(a.size() == b.size() && a.size() % size == 0 && a.size() / size <= kRefitMostPlaces);
        nb::gil_scoped_release free;
        const RefitTable& table = refit_table(usable_isa(isa));
        const int64_t count = table.count_differing(size, a.at(), b.at(), a.size() / size);
        require(p.size() == 4 * count && o.size() == size * count && w.size() == size * count);
        table.find_differing(size, a.at(), b.at(), a.size() / size, p.places(), o.at(), w.at());
    });
    // Units that do not hold what `expect` says (nothing was written then; an empty one says nothing); -1: a place beyond the end.
    m.def("refit_put", [](int isa, int size, nb::handle data, nb::handle places, nb::handle values, nb::handle expect) {
        const Buffer d(data, true), p(places), v(values), e(expect);
        const int64_t count = p.size() / 4;
        require(d.size() % size == 0 && v.size() == count * size && (e.size() == 0 || e.size() == v.size()));
        nb::gil_scoped_release free;
        return refit_table(usable_isa(isa)).put(size, d.at(), d.size() / size, p.places(), v.at(), e.size() > 0 ? e.at() : nullptr, count);
    });
    m.def("refit_patch", [](int isa, int kind, bool mask, nb::handle data, nb::handle where, nb::handle values, nb::handle wide,
                            int64_t changed, nb::handle places, nb::handle old, nb::handle now) {
        const Marked in(where, values, wide, changed, kind);
        const Buffer d(data, true), p(places, true), o(old, true), w(now, true);
        require(bits(kind) >= 8 && p.size() == 4 * changed && o.size() == changed * element_size(kind) && w.size() == o.size());
        nb::gil_scoped_release free;
        const RefitTable& table = refit_table(usable_isa(isa));
        (mask ? table.patch_bitmask : table.patch_sparse)(kind, d.at(), in.streams(), p.places(), o.at(), w.at());
    });
    // (bytes of quotients, bytes of low)
    m.def("refit_to_classes", [](int isa, int kind, int shift, int width, nb::handle base, nb::handle where, nb::handle values, nb::handle wide,
                                 int64_t changed, nb::handle out_values, nb::handle out_wide, nb::handle quotients, nb::handle low) {
        const Marked in(where, values, wide, changed, kind);
        const Buffer a(base), v(out_values, true), x(out_wide, true), q(quotients, true), l(low, true);
        const int64_t n = elements(a, kind);
        require(v.size() >= changed + kRefitSlack && x.size() == in.wide.size() && q.size() >= changed + n / 255 + kRefitSlack &&
                l.size() >= kRefitClassHead + changed * kRefitMostLow / 8 + kRefitSlack);
        RefitClasses classes{q.at(), l.at(), 0, 0};
        {
            nb::gil_scoped_release free;
            RefitStreams out{nullptr, v.at(), x.at(), 0, 0, 0};
            refit_table(usable_isa(isa)).to_classes(kind, shift, width, a.at(), n, in.streams(), out, classes);
        }
        return nb::make_tuple(classes.quotients_size, classes.low_size);
    });
    // Bytes of the gap stream, or -1 where the streams do not fit each other or the base.
    m.def("refit_from_classes", [](int isa, int kind, int shift, int width, nb::handle base, nb::handle quotients, nb::handle values,
                                   nb::handle wide, nb::handle low, int64_t changed, nb::handle out_where, nb::handle out_values,
                                   nb::handle out_wide) {
        const Marked in(quotients, values, wide, changed, kind);
        const Buffer a(base), l(low), w(out_where, true), v(out_values, true), x(out_wide, true);
        const int64_t n = elements(a, kind);
        require(w.size() >= changed + n / 255 + kRefitSlack && v.size() >= changed + kRefitSlack && x.size() >= in.wide.size());
        nb::gil_scoped_release free;
        RefitStreams out{w.at(), v.at(), x.at(), 0, 0, 0};
        const RefitClasses classes{in.where.at(), l.at(), in.where.size(), l.size()};
        const bool good = refit_table(usable_isa(isa)).from_classes(kind, shift, width, a.at(), n, in.streams(), classes, out);
        return good ? out.where_size : int64_t{-1};
    });
}

}  // namespace halfbyte

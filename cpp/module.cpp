// The extension module halfbyte.kernels._native: every kernel family registers its own functions.
#include <nanobind/nanobind.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "dispatch.hpp"
#include "registers.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace {

// Asks for pages of 2 MiB under [address, address + bytes) before it is touched: a fifth of the time to make them, and fewer misses
// of the address translation afterwards. Advice only; nothing happens where the system has none.
void use_huge_pages(uintptr_t address, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t page = 4096;
    const uintptr_t first = (address + page - 1) / page * page, last = (address + uintptr_t(bytes)) / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
    (void)address, (void)bytes;
#endif
}

}  // namespace

NB_MODULE(_native, m) {
    using namespace halfbyte;
    m.doc() = "Native kernels; use them through halfbyte.kernels.";
    m.def("best_isa", [] { return static_cast<int>(best_isa()); }, "0 generic, 1 AVX2, 2 AVX-512 VNNI.");
    m.def("thread_count", &thread_count, "Threads of the kernels' own pool.");
    m.def("set_thread_count", &set_thread_count, nb::arg("n"), "Sizes the pool; results do not depend on it.");
    m.def("use_huge_pages", &use_huge_pages, nb::arg("address"), nb::arg("bytes"), "Advice for memory that was not touched yet.");
    register_quantise(m);
    register_guide(m);
    register_elements(m);
    register_guidance_rows(m);
    register_linear(m);
    register_experts(m);
    register_norm(m);
    register_attention(m);
    register_attend(m);
    register_sampling(m);
    register_refit(m);
}

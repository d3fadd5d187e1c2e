// The extension module halfbyte.kernels._native: every kernel family registers its own functions.
#include <nanobind/nanobind.h>

#include "dispatch.hpp"
#include "registers.hpp"
#include "threads.hpp"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    using namespace halfbyte;
    m.doc() = "Native kernels; use them through halfbyte.kernels.";
    m.def("best_isa", [] { return static_cast<int>(best_isa()); }, "0 generic, 1 AVX2, 2 AVX-512 VNNI.");
    m.def("thread_count", &thread_count, "Threads of the kernels' own pool.");
    m.def("set_thread_count", &set_thread_count, nb::arg("n"), "Sizes the pool; results do not depend on it.");
    register_quantise(m);
    register_linear(m);
    register_experts(m);
    register_norm(m);
    register_attention(m);
    register_sampling(m);
    register_refit(m);
}

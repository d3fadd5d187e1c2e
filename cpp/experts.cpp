// Routed SwiGLU experts: rows sorted by expert, the two products over all (expert, panel group) pairs, slots added in order.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "linear.hpp"
#include "norm.hpp"
#include "registers.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace halfbyte {
namespace {

struct Routing {
    std::vector<int32_t> slots;   // (token, slot) pairs sorted by expert, stable
    std::vector<int32_t> tokens;  // the token of each
    std::vector<int64_t> start;   // first pair of each used expert, and the end
    std::vector<int64_t> expert;  // used experts

    Routing(const int32_t* ids, int64_t tokens_count, int64_t k, int64_t experts) {
        std::vector<int64_t> offset(static_cast<size_t>(experts) + 1);
        const int64_t pairs = tokens_count * k;
        for (int64_t i = 0; i < pairs; ++i) ++offset[static_cast<size_t>(ids[i]) + 1];
        for (int64_t e = 0; e < experts; ++e) {
            if (offset[static_cast<size_t>(e) + 1] != 0) {
                start.push_back(offset[static_cast<size_t>(e)]);
                expert.push_back(e);
            }
            offset[static_cast<size_t>(e) + 1] += offset[static_cast<size_t>(e)];
        }
        start.push_back(pairs);
        slots.resize(static_cast<size_t>(pairs));
        tokens.resize(static_cast<size_t>(pairs));
        for (int64_t i = 0; i < pairs; ++i) {
            const auto to = static_cast<size_t>(offset[static_cast<size_t>(ids[i])]++);
            slots[to] = static_cast<int32_t>(i);
            tokens[to] = static_cast<int32_t>(i / k);
        }
    }
};

// out[slot] = x[row of slot] times its expert's matrix, over all used experts.
void grouped(const Panels& w, const Routing& routes, const PreparedRows& x, bool by_token, float* out) {
    const auto used = static_cast<int64_t>(routes.expert.size());
    const int64_t groups = panel_groups(w), pairs = routes.start.back();
    const int64_t grain = group_grain(w, std::max<int64_t>(1, pairs / std::max<int64_t>(1, used)));
    parallel_for(used * groups, grain, [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t u = begin / groups, first = begin % groups;
            const int64_t last = std::min(groups, first + (end - begin));
            const int64_t from = routes.start[static_cast<size_t>(u)];
            const int32_t* slots = routes.slots.data() + from;
            const RowMap map{routes.start[static_cast<size_t>(u) + 1] - from, by_token ? routes.tokens.data() + from : slots, slots, 0};
            x.multiply(w.expert(routes.expert[static_cast<size_t>(u)]), first * kPanelGroup, std::min(last * kPanelGroup, w.panels()),
                       map, out, w.n);
            begin += last - first;
        }
    });
}

// Returns -1, or the first row whose quantiser met NaN or infinity: tokens first, then tokens + (token, slot) pairs.
int64_t run_experts(Isa isa, const Panels& gate_up, const Panels& down, const Rule* rule, int64_t experts, const float* x,
                    const int32_t* ids, const float* gates, int64_t tokens, int64_t k, float* out, const CodeRows* in_codes,
                    const CodeRows* middle_codes) {
    const int64_t pairs = tokens * k, hidden = down.n, width = down.k;
    std::fill(out, out + tokens * hidden, 0.0f);
    if (pairs == 0) return -1;
    const Routing routes(ids, tokens, k, experts);
    const PreparedRows input(isa, gate_up.kind, rule, x, tokens, hidden, in_codes);
    if (input.bad_row() >= 0) return input.bad_row();
    const Scratch both_memory(pairs * 2 * width * 4), middle_memory(pairs * width * 4), parts_memory(pairs * hidden * 4);
    float *both = both_memory.as<float>(), *middle = middle_memory.as<float>(), *parts = parts_memory.as<float>();
    grouped(gate_up, routes, input, true, both);
    const NormTable& norm = norm_table(isa);
    parallel_for(pairs, std::max<int64_t>(1, (1 << 14) / width), [&](int64_t begin, int64_t end) {
        norm.swiglu(both + begin * 2 * width, end - begin, width, middle + begin * width);
    });
    const PreparedRows inner(isa, down.kind, rule, middle, pairs, width, middle_codes);
    if (inner.bad_row() >= 0) return tokens + inner.bad_row();
    grouped(down, routes, inner, false, parts);
    parallel_for(tokens, std::max<int64_t>(1, (1 << 14) / (hidden * k)), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            float* y = out + t * hidden;
            for (int64_t j = 0; j < k; ++j) {
                const float gate = gates[t * k + j];
                const float* part = parts + (t * k + j) * hidden;
                for (int64_t i = 0; i < hidden; ++i) y[i] += gate * part[i];
            }
        }
    });
    return -1;
}

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

void register_experts(nb::module_& m) {
    m.def("experts",
          [](int isa, const Panels& gate_up, const Panels& down, const Rule* rule, int64_t experts, uintptr_t x, uintptr_t ids,
             uintptr_t gates, int64_t tokens, int64_t k, uintptr_t out, const CodeRows* inputs, const CodeRows* middle) {
              nb::gil_scoped_release free;
              return run_experts(usable_isa(isa), gate_up, down, rule, experts, at<const float>(x), at<const int32_t>(ids),
                                 at<const float>(gates), tokens, k, at<float>(out), inputs, middle);
          },
          nb::arg("isa"), nb::arg("gate_up"), nb::arg("down"), nb::arg("rule").none(), nb::arg("experts"), nb::arg("x"),
          nb::arg("ids"), nb::arg("gates"), nb::arg("tokens"), nb::arg("k"), nb::arg("out"), nb::arg("inputs").none(),
          nb::arg("middle").none());
}

}  // namespace halfbyte

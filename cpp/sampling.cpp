#include "sampling.hpp"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <vector>

#include "registers.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace halfbyte {
namespace {

constexpr int64_t kBlock = 1024;
constexpr int64_t kGrain = 1 << 13;  // logits worth a thread
constexpr float kLowest = -0x1.fffffep+127f;

int64_t row_grain(int64_t vocabulary) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, vocabulary)); }

void lower(std::atomic<int64_t>& value, int64_t candidate) {
    int64_t seen = value.load();
    while (candidate < seen && !value.compare_exchange_weak(seen, candidate)) {
    }
}

float usable(float temperature) { return temperature == 0.0f ? 1.0f : temperature; }

float log_probability(float z, float top, double log_total) {
    const float d = z - top;
    return static_cast<float>(static_cast<double>(d < kLowest ? kLowest : d) - log_total);
}

// One row's distribution, in buffers that are reused from row to row.
class Row {
   public:
    Row(const SamplingTable& table, int64_t vocabulary)
        : table_(table), v_(vocabulary), z_(size_t(vocabulary)), e_(size_t(vocabulary)), blocks_(size_t((vocabulary + kBlock - 1) / kBlock)) {}

    bool read(const float* logits, float temperature) {
        if (!(temperature >= 0.0f) || std::isinf(temperature)) return false;
        return table_.scale(logits, v_, usable(temperature), z_.data(), &top_);
    }

    void exponentiate() { table_.exponentials(z_.data(), v_, top_, e_.data()); }

    // Running sums of the blocks of e; returns the total.
    double sum() {
        table_.block_sums(e_.data(), v_, blocks_.data());
        for (size_t b = 1; b < blocks_.size(); ++b) blocks_[b] += blocks_[b - 1];
        return blocks_.back();
    }

    // These two need sum() first.
    void log_softmax(float* out) const { table_.log_probabilities(z_.data(), v_, top_, table_.logarithm(blocks_.back()), out); }
    float log_probability_of(int64_t id) const { return log_probability(z_[size_t(id)], top_, table_.logarithm(blocks_.back())); }

    // Keeps only the ids of a support (sorted here).
    void restrict_to(std::vector<int64_t>& support) {
        std::sort(support.begin(), support.end());
        support.erase(std::unique(support.begin(), support.end()), support.end());
        top_ = kLowest;
        for (const int64_t i : support) top_ = std::max(top_, z_[size_t(i)]);
        std::fill(e_.begin(), e_.end(), 0.0f);
        std::vector<float> some(support.size());
        for (size_t j = 0; j < support.size(); ++j) some[j] = z_[size_t(support[j])];
        table_.exponentials(some.data(), int64_t(some.size()), top_, some.data());
        for (size_t j = 0; j < support.size(); ++j) e_[size_t(support[j])] = some[j];
    }

    int64_t greedy() const { return std::max_element(z_.begin(), z_.end()) - z_.begin(); }

    // Drops tokens: their e becomes 0. Returns false where no filter acts.
    bool filter(int64_t top_k, float top_p, float min_p) {
        const bool some_k = top_k > 0 && top_k < v_;
        if (!some_k && !(top_p < 1.0f) && !(min_p > 0.0f)) return false;
        kept_.assign(size_t(v_), 1);
        if (some_k || top_p < 1.0f) keep_most_probable(some_k ? top_k : v_, top_p);
        for (size_t i = 0; i < kept_.size(); ++i) {
            if (min_p > 0.0f && e_[i] < min_p) kept_[i] = 0;
            if (kept_[i] == 0) e_[i] = 0.0f;
        }
        return true;
    }

    const std::vector<uint8_t>& kept() const { return kept_; }

    int64_t draw(double uniform) const {
        const double target = uniform * blocks_.back();
        int64_t block = 0;
        while (!(blocks_[size_t(block)] > target)) ++block;
        double cdf = block == 0 ? 0.0 : blocks_[size_t(block - 1)];
        const int64_t end = std::min(v_, (block + 1) * kBlock);
        int64_t last = block * kBlock;
        for (int64_t i = block * kBlock; i < end; ++i) {
            cdf += static_cast<double>(e_[size_t(i)]);
            if (cdf > target) return i;
            if (e_[size_t(i)] > 0.0f) last = i;
        }
        return last;
    }

   private:
    // top-k, then the smallest set of most probable tokens that reaches top_p of what top-k kept.
    void keep_most_probable(int64_t k, float top_p) {
        order_.resize(size_t(v_));
        std::iota(order_.begin(), order_.end(), 0);
        const auto before = [this](int32_t a, int32_t b) {
            const float x = z_[size_t(a)], y = z_[size_t(b)];
            return x > y || (x == y && a < b);
        };
        const auto begin = order_.begin();
        if (k < v_) {
            std::nth_element(begin, begin + k, order_.end(), before);
            std::fill(kept_.begin(), kept_.end(), uint8_t{0});
            std::for_each(begin, begin + k, [this](int32_t i) { kept_[size_t(i)] = 1; });
        }
        if (!(top_p < 1.0f)) return;
        for (size_t i = 0; i < kept_.size(); ++i)
            if (kept_[i] == 0) e_[i] = 0.0f;
        const double enough = static_cast<double>(top_p) * sum();
        std::fill(kept_.begin(), kept_.end(), uint8_t{0});
        double reached = 0.0;
        for (int64_t sorted = 0, end; sorted < k; sorted = end) {  // sort no more than is kept, in growing pieces
            end = std::min(k, std::max<int64_t>(64, 2 * sorted));
            if (end < k) std::nth_element(begin + sorted, begin + end, begin + k, before);
            std::sort(begin + sorted, begin + end, before);
            for (auto i = begin + sorted; i != begin + end; ++i) {
                if (!(reached < enough)) return;
                kept_[size_t(*i)] = 1;
                reached += static_cast<double>(e_[size_t(*i)]);
            }
        }
    }

    const SamplingTable& table_;
    int64_t v_;
    float top_ = 0.0f;
    std::vector<float> z_, e_;
    std::vector<double> blocks_;
    std::vector<int32_t> order_;
    std::vector<uint8_t> kept_;
};

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Runs body(row, r) for each row of logits; returns the first row it calls false for, or -1.
template <class Body>
int64_t for_rows(int isa, const float* logits, const float* temperature, int64_t rows, int64_t vocabulary, const Body& body) {
    const SamplingTable& table = sampling_table(usable_isa(isa));
    std::atomic<int64_t> bad{rows};
    parallel_for(rows, row_grain(vocabulary), [&](int64_t begin, int64_t end) {
        Row row(table, vocabulary);
        for (int64_t r = begin; r < end; ++r) {
            if (!row.read(logits + r * vocabulary, temperature[r])) return lower(bad, r);
            row.exponentiate();
            body(row, r);
        }
    });
    return bad < rows ? bad.load() : -1;
}

struct Parameters {
    const float* temperature;
    const int32_t* top_k;
    const float* top_p;
    const float* min_p;
    const double* uniform;

    bool good(int64_t rows) const {
        for (int64_t r = 0; r < rows; ++r)
            if (!(top_k[r] >= 0 && top_p[r] > 0.0f && top_p[r] <= 1.0f && min_p[r] >= 0.0f && min_p[r] <= 1.0f && uniform[r] >= 0.0 &&
                  uniform[r] < 1.0))
                return false;
        return true;
    }
};

constexpr int64_t kBadParameters = -2;

}  // namespace

const SamplingTable& sampling_table(Isa isa) {
#ifdef HALFBYTE_X86
    if (isa == Isa::avx512) return sampling_avx512;
    if (isa == Isa::avx2) return sampling_avx2;
#endif
    (void)isa;
    return sampling_generic;
}

// Addresses of contiguous buffers; the Python wrappers check shapes and dtypes. Each returns -1, the first row that cannot be
// used, or -2 for parameters out of range (then the wrapper finds out which, for the message).
void register_sampling(nb::module_& m) {
    m.def("log_softmax", [](int isa, uintptr_t logits, uintptr_t temperature, int64_t rows, int64_t vocabulary, uintptr_t out) {
        nb::gil_scoped_release free;
        return for_rows(isa, at<const float>(logits), at<const float>(temperature), rows, vocabulary,
                        [&](Row& row, int64_t r) {
                            row.sum();
                            row.log_softmax(at<float>(out) + r * vocabulary);
                        });
    });
    // Row r is sampled from support[start[r] .. start[r + 1]), or from everything where that is empty.
    m.def("token_logprobs", [](int isa, uintptr_t logits, uintptr_t temperature, int64_t rows, int64_t vocabulary, uintptr_t ids,
                               uintptr_t support, uintptr_t start, uintptr_t out) {
        nb::gil_scoped_release free;
        const int64_t* first = at<const int64_t>(start);
        return for_rows(isa, at<const float>(logits), at<const float>(temperature), rows, vocabulary, [&](Row& row, int64_t r) {
            if (first != nullptr && first[r] != first[r + 1]) {
                std::vector<int64_t> kept(at<const int64_t>(support) + first[r], at<const int64_t>(support) + first[r + 1]);
                row.restrict_to(kept);
            }
            row.sum();
            at<float>(out)[r] = row.log_probability_of(at<const int64_t>(ids)[r]);
        });
    });
    // `kept` [rows, vocabulary] (or null) receives 1 for a kept token and 0 for a dropped one where a filter acts.
    m.def("sample", [](int isa, uintptr_t logits, int64_t rows, int64_t vocabulary, uintptr_t temperature, uintptr_t top_k,
                       uintptr_t top_p, uintptr_t min_p, uintptr_t uniform, uintptr_t ids, uintptr_t logprobs, uintptr_t kept) {
        nb::gil_scoped_release free;
        const Parameters p{at<const float>(temperature), at<const int32_t>(top_k), at<const float>(top_p), at<const float>(min_p),
                           at<const double>(uniform)};
        if (!p.good(rows)) return kBadParameters;
        return for_rows(isa, at<const float>(logits), p.temperature, rows, vocabulary, [&](Row& row, int64_t r) {
            const bool greedy = p.temperature[r] == 0.0f;
            const bool filtered = !greedy && row.filter(p.top_k[r], p.top_p[r], p.min_p[r]);
            row.sum();
            const int64_t id = greedy ? row.greedy() : row.draw(p.uniform[r]);
            if (filtered && kept != 0) std::copy(row.kept().begin(), row.kept().end(), at<uint8_t>(kept) + r * vocabulary);
            at<int64_t>(ids)[r] = id;
            at<float>(logprobs)[r] = row.log_probability_of(id);
        });
    });
}

}  // namespace halfbyte

// Float64 sums in a defined order: the twin of halfbyte/kernels/reference/sums.py.
#pragma once

#include "lanes.hpp"

namespace halfbyte {
namespace HALFBYTE_ISA {

constexpr int64_t kSumBlock = 1024;

// Sixteen running sums; element i of a block goes to lane i % 16, and lanes are added in halves at the end.
struct LaneSums {
    double lane[16] = {};

    template <class Value>
    HALFBYTE_INLINE void add(int64_t count, const Value& value) {
        int64_t i = 0;
        for (; i + 16 <= count; i += 16)
            for (int l = 0; l < 16; ++l) lane[l] += value(i + l);
        for (int l = 0; i + l < count; ++l) lane[l] += value(i + l);
    }

    HALFBYTE_INLINE double total() const {
        double t[16];
        for (int l = 0; l < 16; ++l) t[l] = lane[l];
        for (int half = 8; half > 0; half /= 2)
            for (int l = 0; l < half; ++l) t[l] += t[l + half];
        return t[0];
    }
};

// The sum of value(0 .. count-1): blocks of 1024 in order.
template <class Value>
HALFBYTE_INLINE double lane_sum(int64_t count, const Value& value) {
    double sum = 0.0;
    for (int64_t first = 0; first < count; first += kSumBlock) {
        LaneSums lanes;
        const int64_t n = count - first < kSumBlock ? count - first : kSumBlock;
        lanes.add(n, [&](int64_t i) { return value(first + i); });
        const double block = lanes.total();
        sum = first == 0 ? block : sum + block;
    }
    return sum;
}

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte

// Absolute patches (halfbyte/refit/patch.py): places of a block with the values before and after, in units of whole bytes.
#pragma once

#include "refit_lanes.hpp"

namespace halfbyte::HALFBYTE_ISA {

template <class T>
int64_t count_differences(const uint8_t* before, const uint8_t* after, int64_t n) {
    using E = Element<8 * sizeof(T), false>;
    uint64_t masks[kChunk / 64];
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += kChunk) {
        const int64_t end = std::min(n, begin + kChunk);
        differ<E>(before, after, begin, end, masks);
        for (int64_t i = 0; i < (end - begin + 63) / 64; ++i) count += __builtin_popcountll(masks[i]);
    }
    return count;
}

// Places and both values of all units that differ; `count` is how many there are.
template <class T>
void find_differences(const uint8_t* before, const uint8_t* after, int64_t n, uint32_t* places, uint8_t* old, uint8_t* now) {
    using E = Element<8 * sizeof(T), false>;
    uint32_t found[kChunk + 64];
    uint64_t masks[kChunk / 64];
    for (int64_t begin = 0; begin < n; begin += kChunk) {
        const int64_t end = std::min(n, begin + kChunk);
        int64_t count = 0;
        differ<E>(before, after, begin, end, masks);
        for (int64_t i = begin; i < end; i += 64) count += bit_numbers(masks[(i - begin) / 64], uint32_t(i), found + count);
        for (int64_t i = 0; i < count; ++i) store<T>(old + i * int64_t(sizeof(T)), E::get(before, found[i]));
        for (int64_t i = 0; i < count; ++i) store<T>(now + i * int64_t(sizeof(T)), E::get(after, found[i]));
        std::memcpy(places, found, size_t(count) * sizeof(uint32_t));
        places += count;
        old += count * int64_t(sizeof(T));
        now += count * int64_t(sizeof(T));
    }
}

// As write_places, and keeps the places and the new values as well.
template <class E, class Places>
void patch_places(uint8_t* data, Places marks, const RefitStreams& in, uint32_t* places, uint8_t* old, uint8_t* now) {
    using T = typename E::T;
    uint32_t place[kStage + 64];
    T held[kStage], z[kStage];
    const uint8_t* wide = in.wide;
    for (int64_t i = 0; i < in.changed;) {
        const int64_t count = marks.next(place);
        for (int64_t j = 0; j < count; ++j) held[j] = E::get(data, place[j]);
        std::memcpy(old + i * E::kSize, held, size_t(count * E::kSize));
        read_zigzags<E>(in, i, count, wide, z);
        for (int64_t j = 0; j < count; ++j) held[j] = E::moved(held[j], z[j]);
        for (int64_t j = 0; j < count; ++j) E::put(data, place[j], held[j]);
        std::memcpy(now + i * E::kSize, held, size_t(count * E::kSize));
        std::memcpy(places + i, place, size_t(count) * sizeof(uint32_t));
        i += count;
    }
}

// Writes values at places; where `expect` is given, every unit must hold its value there. Units that do not are counted (all of
// them), and everything is as it was. -1: a place beyond the end; everything is as it was.
template <class T>
int64_t put_units(uint8_t* data, int64_t n, const uint32_t* places, const uint8_t* values, const uint8_t* expect, int64_t count) {
    constexpr int64_t kSize = sizeof(T);
    uint32_t last = 0;
    for (int64_t i = 0; i < count; ++i) last = std::max(last, places[i]);
    if (count > 0 && int64_t(last) >= n) return -1;
    for (int64_t begin = 0; begin < count; begin += kStage) {
        const int64_t end = std::min(count, begin + kStage);
        if (expect != nullptr) {
            T wrong = 0;
            for (int64_t i = begin; i < end; ++i) wrong |= T(load<T>(data + places[i] * kSize) ^ load<T>(expect + i * kSize));
            if (wrong != 0) {
                for (int64_t i = begin; i-- > 0;) store<T>(data + places[i] * kSize, load<T>(expect + i * kSize));
                int64_t all = 0;
                for (int64_t i = 0; i < count; ++i) all += load<T>(data + places[i] * kSize) != load<T>(expect + i * kSize);
                return all;
            }
        }
        for (int64_t i = begin; i < end; ++i) store<T>(data + places[i] * kSize, load<T>(values + i * kSize));
    }
    return 0;
}

// f(T{}) for units of so many bytes.
template <class F>
decltype(auto) with_unit(int size, const F& f) {
    switch (size) {
        case 1: return f(uint8_t{});
        case 2: return f(uint16_t{});
        case 4: return f(uint32_t{});
        default: return f(uint64_t{});
    }
}

inline int64_t count_differing(int size, const uint8_t* before, const uint8_t* after, int64_t n) {
    return with_unit(size, [&](auto t) { return count_differences<decltype(t)>(before, after, n); });
}
inline void find_differing(int size, const uint8_t* before, const uint8_t* after, int64_t n, uint32_t* places, uint8_t* old, uint8_t* now) {
    with_unit(size, [&](auto t) { find_differences<decltype(t)>(before, after, n, places, old, now); });
}
inline int64_t put(int size, uint8_t* data, int64_t n, const uint32_t* places, const uint8_t* values, const uint8_t* expect, int64_t count) {
    return with_unit(size, [&](auto t) { return put_units<decltype(t)>(data, n, places, values, expect, count); });
}
inline void patch_sparse(int kind, uint8_t* data, const RefitStreams& in, uint32_t* places, uint8_t* old, uint8_t* now) {
    with_element(kind, [&](auto e) { patch_places<decltype(e)>(data, GapPlaces(in.where, in.changed), in, places, old, now); });
}
inline void patch_bitmask(int kind, uint8_t* data, const RefitStreams& in, uint32_t* places, uint8_t* old, uint8_t* now) {
    with_element(kind, [&](auto e) { patch_places<decltype(e)>(data, MaskPlaces(in.where, in.where_size), in, places, old, now); });
}

}  // namespace halfbyte::HALFBYTE_ISA

// The codec's kernels, over differ64 of one instruction set.
#pragma once

#include <algorithm>
#include <type_traits>

#include "refit.hpp"
#include "refit_masks.hpp"
#include "xxh3.hpp"

namespace halfbyte::HALFBYTE_ISA {

constexpr int kEscape = 15;   // a value that is in the wide stream
constexpr int kSkip = 255;    // a gap byte without a mark
constexpr int64_t kStage = 256;    // changes applied at a time: their lines stay in the first cache
constexpr int64_t kBatch = 64;    // marks collected before they are written out: reading them at once would wait for the stores
constexpr int64_t kPad = 32;         // changes worked on at once while encoding
// Elements compared before the places of their marks are written out: both sides stay in the first cache, and the processor fetches
// the next ones meanwhile (4096 and asking for lines ahead were a quarter slower from memory).
constexpr int64_t kChunk = 1024;

// An element kind: unsigned type, access by number, rank and its inverse.
template <int Bits, bool Signed>
struct Element {
    using T = std::conditional_t<Bits == 64, uint64_t, std::conditional_t<Bits == 32, uint32_t, std::conditional_t<Bits == 16, uint16_t, uint8_t>>>;
    static constexpr int kBits = Bits, kSize = Bits / 8 ? Bits / 8 : 1;
    static constexpr T kOnes = T(~uint64_t{0} >> (64 - Bits)), kSign = T(uint64_t{1} << (Bits - 1));

    static T get(const uint8_t* data, int64_t i) {
        if constexpr (Bits == 4) return T(data[i >> 1] >> (4 * (i & 1)) & 15);
        else return load<T>(data + i * kSize);
    }
    static void put(uint8_t* data, int64_t i, T v) {
        if constexpr (Bits == 4) {
            const int shift = int(4 * (i & 1));
            data[i >> 1] = uint8_t((data[i >> 1] & (0xF0 >> shift)) | v << shift);
        } else {
            store<T>(data + i * kSize, v);
        }
    }
    static const uint8_t* at(const uint8_t* data, int64_t i) { return data + i * Bits / 8; }

    // All ones where the top bit is set: signs are random, so nothing here may become a branch.
    static T spread(T top) { return T(0 - (top >> (Bits - 1))) & kOnes; }
    static T rank(T bits) { return Signed ? T(bits ^ (spread(bits) | kSign)) : bits; }
    static T unrank(T r) { return Signed ? T(r ^ (T(~spread(r)) | kSign)) & kOnes : r; }
    static T zigzag(T old, T now) {
        const T d = T(rank(now) - rank(old)) & kOnes;
        return T((d << 1) ^ spread(d)) & kOnes;
    }
    static T moved(T old, T z) { return unrank(T(rank(old) + T((z >> 1) ^ T(0 - (z & 1)))) & kOnes); }
};

// Calls f(Element<...>{}) for a kind.
template <class F>
decltype(auto) with_element(int kind, const F& f) {
    switch (kind) {
        case 4: return f(Element<4, false>{});
        case -4: return f(Element<4, true>{});
        case 8: return f(Element<8, false>{});
        case -8: return f(Element<8, true>{});
        case 16: return f(Element<16, false>{});
        case -16: return f(Element<16, true>{});
        case 32: return f(Element<32, false>{});
        case -32: return f(Element<32, true>{});
        case 64: return f(Element<64, false>{});
        default: return f(Element<64, true>{});
    }
}

// Masks of up to kChunk elements from `begin` on. A pass of its own, without a branch on the data: a branch guessed wrong here would
// wait for memory.
template <class E>
inline void differ(const uint8_t* base, const uint8_t* target, int64_t begin, int64_t end, uint64_t* masks) {
    int64_t i = begin;
    for (; i + 64 <= end; i += 64) *masks++ = differ64<E::kBits>(E::at(base, i), E::at(target, i));
    if (i == end) return;
    *masks = 0;
    for (int64_t j = i; j < end; ++j) *masks |= uint64_t(E::get(base, j) != E::get(target, j)) << (j - i);
}

// Numbers of the set bits, `first` added. Writes up to 64 entries, always four: the usual words take no branch that depends on
// them.
inline int64_t bit_numbers(uint64_t mask, uint32_t first, uint32_t* out) {
    const int count = __builtin_popcountll(mask);
    const auto four = [&](int at) {
        for (int j = 0; j < 4; ++j) {
            out[at + j] = first + uint32_t(__builtin_ctzll(mask | uint64_t{1} << 63));
            mask &= mask - 1;
        }
    };
    four(0);
    for (int at = 4; at < count; at += 4) four(at);
    return count;
}

// Whether one of eight bytes is the given one, and nothing but that.
inline bool any_byte(uint64_t eight, uint8_t wanted) {
    const uint64_t zero = eight ^ 0x0101010101010101u * wanted;
    return ((zero - 0x0101010101010101u) & ~zero & 0x8080808080808080u) != 0;
}

// Values of the elements at `found`, codes one a byte. Whole vectors of kPad are worked on, without rests that go one by one:
// after the last place come kPad more that may be read, whose codes are written over.
template <class E>
inline void write_values(const uint8_t* base, const uint8_t* target, uint32_t* found, int64_t all, RefitStreams& out) {
    using T = typename E::T;
    if (all == 0) return;
    uint8_t* codes = out.values + out.changed;
    T before[kStage], z[kStage];
    std::fill(found + all, found + all + kPad, found[all - 1]);
    for (int64_t first = 0; first < all; first += kStage, codes += kStage) {
        const int64_t count = std::min(kStage, all - first), padded = (count + kPad - 1) / kPad * kPad;
        const uint32_t* place = found + first;
        T most = 0;
        for (int64_t j = 0; j < padded; ++j) before[j] = E::get(base, place[j]);
        for (int64_t j = 0; j < padded; ++j) z[j] = E::get(target, place[j]);
        for (int64_t i = 0; i < padded; i += kPad) {
            for (int64_t j = i; j < i + kPad; ++j) {
                z[j] = E::zigzag(before[j], z[j]);
                most = std::max(most, z[j]);
            }
            for (int64_t j = i; j < i + kPad; ++j) codes[j] = uint8_t(std::min<T>(z[j], kEscape + 1) - 1);
        }
        if (most <= kEscape) continue;
        uint32_t wide[2 * 64];
        std::memset(codes + count, 0, 64);
        for (int64_t j = 0; j < count; j += 64) {
            const int64_t escapes = bit_numbers(equal64(codes + j, kEscape), uint32_t(j), wide);
            for (int64_t i = 0; i < escapes; ++i) store<T>(out.wide + E::kSize * (out.wide_count + i), z[wide[i]]);
            out.wide_count += escapes;
        }
    }
    out.changed += all;
}

// Gaps before each mark; `found[-1]` is the mark before the first one, and 16 entries after the last may be written. Writes up to 16
// bytes past the gaps.
inline uint8_t* write_gaps(uint32_t* found, int64_t count, uint8_t* gap) {
    constexpr int64_t kGroup = 16;
    for (int64_t j = count; j < count + kGroup; ++j) found[j] = found[j - 1] + 1;  // whole groups, whose rest has gaps of 0
    for (int64_t i = 0; i < count; i += kGroup) {
        uint32_t skip[kGroup], most = 0;
        uint8_t bytes[kGroup];
        for (int j = 0; j < kGroup; ++j) skip[j] = found[i + j] - found[i + j - 1] - 1;
        for (int j = 0; j < kGroup; ++j) most |= skip[j] + 1;  // a bit from the ninth on: some gap is kSkip or more
        for (int j = 0; j < kGroup; ++j) bytes[j] = uint8_t(skip[j]);
        const int64_t left = std::min(kGroup, count - i);
        if (most <= kSkip) {
            std::memcpy(gap, bytes, kGroup);
            gap += left;
            continue;
        }
        for (int64_t j = 0; j < left; ++j) {  // no branch for up to four skips: where they are is random
            uint32_t here = skip[j];
            for (; here >= 4 * kSkip; here -= 4 * kSkip, gap += 4) store<uint32_t>(gap, ~uint32_t{0});
            const uint32_t skips = here / kSkip;
            store<uint32_t>(gap, ~uint32_t{0});
            gap += skips;
            *gap++ = uint8_t(here - kSkip * skips);
        }
    }
    return gap;
}

// Codes, one a byte, to two a byte, in place.
inline void join_values(uint8_t* values, int64_t changed) {
    std::fill(values + changed, values + changed + 8, uint8_t{0});
    for (int64_t i = 0; i < changed; i += 8) store<uint32_t>(values + i / 2, join_nibbles(load<uint64_t>(values + i)));
}

// Also hashes the target (blocks too short for that are left alone).
template <class E>
bool sparse_of(const uint8_t* base, const uint8_t* target, int64_t n, int64_t most, RefitStreams& out, uint64_t& hash) {
    const int64_t size = n * E::kBits / 8;
    Xxh3 hasher(size);
    uint32_t marks[1 + kBatch + kChunk + 64];
    uint32_t* const found = marks + 1;
    uint64_t masks[kChunk / 64];
    uint8_t* gap = out.where;
    marks[0] = ~uint32_t{0};  // the mark before element 0
    out.changed = out.wide_count = 0;
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += kChunk) {
        const int64_t end = std::min(n, begin + kChunk);
        differ<E>(base, target, begin, end, masks);
        for (int64_t i = begin; i < end; i += 64) count += bit_numbers(masks[(i - begin) / 64], uint32_t(i), found + count);
        hasher.advance(target, end * E::kBits / 8);
        if (count < kBatch && end < n) continue;
        if (out.changed + count > most) return false;
        gap = write_gaps(found, count, gap);
        if (count > 0) marks[0] = found[count - 1];
        write_values<E>(base, target, found, count, out);
        count = 0;
    }
    out.where_size = gap - out.where;
    join_values(out.values, out.changed);
    if (size >= kRefitHashed) hash = hasher.finish(target);
    return true;
}

template <class E>
void bitmask_of(const uint8_t* base, const uint8_t* target, int64_t n, RefitStreams& out) {
    uint32_t found[kChunk + 64];
    uint64_t masks[kChunk / 64];
    out.changed = out.wide_count = 0;
    out.where_size = (n + 7) / 8;
    for (int64_t begin = 0; begin < n; begin += kChunk) {
        const int64_t end = std::min(n, begin + kChunk);
        int64_t count = 0;
        differ<E>(base, target, begin, end, masks);
        for (int64_t i = begin; i < end; i += 64) {
            const uint64_t mask = masks[(i - begin) / 64];
            store<uint64_t>(out.where + i / 8, mask);  // the last one into the slack
            count += bit_numbers(mask, uint32_t(i), found + count);
        }
        write_values<E>(base, target, found, count, out);
    }
    join_values(out.values, out.changed);
}

template <class E>
bool fill_of(const uint8_t* target, int64_t n) {
    const auto first = E::get(target, 0);
    for (int64_t i = 1; i < n; ++i)
        if (E::get(target, i) != first) return false;
    return true;
}

// The code of change i, eight at a time from the packed stream.
class Codes {
   public:
    Codes(const uint8_t* values, int64_t changed) : values_(values), bytes_((changed + 1) / 2) {}
    unsigned next() {
        if (left_ == 0) {
            uint32_t packed = 0;
            std::memcpy(&packed, values_ + at_, size_t(std::min<int64_t>(4, bytes_ - at_)));
            codes_ = split_nibbles(packed);
            at_ += 4;
            left_ = 8;
        }
        const unsigned code = unsigned(codes_ & 15);
        codes_ >>= 8;
        --left_;
        return code;
    }

   private:
    const uint8_t* values_;
    int64_t bytes_, at_ = 0;
    uint64_t codes_ = 0;
    int left_ = 0;
};

template <class E>
bool values_agree(const RefitStreams& in) {
    using T = typename E::T;
    int64_t escapes = 0, i = 0;
    const int64_t pairs = in.changed / 2;
    const auto count = [](uint64_t x) {  // nibbles that are all ones
        return __builtin_popcountll(x & x >> 1 & x >> 2 & x >> 3 & 0x1111111111111111u);
    };
    for (; i + 8 <= pairs; i += 8) escapes += count(load<uint64_t>(in.values + i));
    for (; i < pairs; ++i) escapes += count(in.values[i]);
    if (in.changed & 1) {
        if (in.values[pairs] >> 4) return false;
        escapes += (in.values[pairs] & 15) == kEscape;
    }
    if (escapes != in.wide_count) return false;
    for (int64_t i = 0; i < in.wide_count; ++i) {
        const T z = load<T>(in.wide + i * E::kSize);
        if (z <= kEscape || z > E::kOnes) return false;
    }
    return true;
}

inline bool gaps_agree(const RefitStreams& in, int64_t n) {
    constexpr uint64_t kEven = 0x00FF00FF00FF00FFu;
    int64_t sum = 0, skips = 0, i = 0;
    while (i + 64 <= in.where_size) {
        uint64_t pairs = 0;  // four sums of at most 2 * 64 * 255
        for (const int64_t end = std::min(in.where_size - 63, i + 512); i < end; i += 64) {
            skips += __builtin_popcountll(equal64(in.where + i, kSkip));
            for (int w = 0; w < 64; w += 8) {
                const uint64_t x = load<uint64_t>(in.where + i + w);
                pairs += (x & kEven) + (x >> 8 & kEven);
            }
        }
        for (; pairs != 0; pairs >>= 16) sum += int64_t(pairs & 0xFFFF);
    }
    for (; i < in.where_size; ++i) {
        sum += in.where[i];
        skips += in.where[i] == kSkip;
    }
    const int64_t marks = in.where_size - skips;
    const bool ends_marked = in.where_size == 0 || in.where[in.where_size - 1] != kSkip;
    return sum + marks <= n && marks == in.changed && ends_marked;
}

inline bool mask_agrees(const RefitStreams& in, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < in.where_size; ++i) count += __builtin_popcount(in.where[i]);
    if (in.where_size * 8 < n) return false;
    for (int64_t i = n; i < in.where_size * 8; ++i)
        if (in.where[i / 8] >> (i % 8) & 1) return false;
    return count == in.changed;
}

// f(element number) for every mark of a gap stream.
template <class F>
inline void for_gaps(const uint8_t* gap, int64_t changed, const F& f) {
    int64_t position = 0;
    for (int64_t i = 0; i < changed; ++i) {
        unsigned skip = *gap++;
        while (__builtin_expect(skip == kSkip, 0)) {
            position += kSkip;
            skip = *gap++;
        }
        position += skip;
        f(position++);
    }
}

// Places of the next marks of a gap stream, at most kStage at a time.
class GapPlaces {
   public:
    GapPlaces(const uint8_t* gaps, int64_t changed) : gap_(gaps), left_(changed) {}
    int64_t next(uint32_t* places) {
        const int64_t count = std::min(left_, kStage);
        const uint8_t* gap = gap_;
        uint32_t at = at_;
        int64_t i = 0;
        // Eight at once while none of them is a skip. (The last eight one by one: nothing past the stream is read.)
        for (; i + 8 <= count; ) {
            if (any_byte(load<uint64_t>(gap), kSkip)) {
                one(gap, at, places[i++]);
                continue;
            }
            at += eight_places(gap, at, places + i);
            gap += 8;
            i += 8;
        }
        while (i < count) one(gap, at, places[i++]);
        gap_ = gap;
        at_ = at;
        left_ -= count;
        return count;
    }

   private:
    static void one(const uint8_t*& gap, uint32_t& at, uint32_t& place) {
        while (*gap == kSkip) at += *gap++;
        at += *gap++;
        place = at++;
    }
    const uint8_t* gap_;
    int64_t left_;
    uint32_t at_ = 0;
};

// Likewise of a mask.
class MaskPlaces {
   public:
    MaskPlaces(const uint8_t* mask, int64_t size) : mask_(mask), size_(size) {}
    int64_t next(uint32_t* places) {
        int64_t count = 0;
        for (; at_ < size_ && count + 64 <= kStage; at_ += 8) {
            uint64_t word = 0;
            std::memcpy(&word, mask_ + at_, size_t(std::min<int64_t>(8, size_ - at_)));
            count += bit_numbers(word, uint32_t(8 * at_), places + count);
        }
        return count;
    }

   private:
    const uint8_t* mask_;
    int64_t size_, at_ = 0;
};

// The zigzags of changes i .. i + count, from codes and wide values.
template <class E>
inline void read_zigzags(const RefitStreams& in, int64_t i, int64_t count, const uint8_t*& wide, typename E::T* z) {
    using T = typename E::T;
    const uint8_t* packed = in.values + i / 2;
    uint8_t room[kStage + 16];
    uint8_t* codes = room;
    const int64_t bytes = (i + count + 1) / 2 - i / 2;
    int64_t b = 0;
    for (; b + 4 <= bytes; b += 4) store<uint64_t>(codes + 2 * b, split_nibbles(load<uint32_t>(packed + b)));
    for (; b < bytes; ++b) {
        codes[2 * b] = packed[b] & 15;
        codes[2 * b + 1] = packed[b] >> 4;
    }
    codes += i & 1;  // a mask's stage may end after an odd number
    for (int64_t j = 0; j < count; ++j) z[j] = T(codes[j] + 1);
    for (int64_t j = 0; j < count; j += 8) {
        if (!any_byte(load<uint64_t>(codes + j), kEscape)) continue;
        for (int64_t k = j, end = std::min(count, j + 8); k < end; ++k) {
            if (codes[k] != kEscape) continue;
            z[k] = load<T>(wide);
            wide += E::kSize;
        }
    }
}

// Writes new values and keeps the old ones. In stages, so that loads, arithmetic and stores are loops of their own.
template <class E, class Places>
void write_places(uint8_t* data, Places places, const RefitStreams& in, uint8_t* old) {
    using T = typename E::T;
    uint32_t place[kStage + 64];
    T now[kStage], z[kStage];
    const uint8_t* wide = in.wide;
    for (int64_t i = 0; i < in.changed;) {
        const int64_t count = places.next(place);
        for (int64_t j = 0; j < count; ++j) now[j] = E::get(data, place[j]);
        std::memcpy(old + i * E::kSize, now, size_t(count * E::kSize));
        read_zigzags<E>(in, i, count, wide, z);
        for (int64_t j = 0; j < count; ++j) now[j] = E::moved(now[j], z[j]);
        for (int64_t j = 0; j < count; ++j) E::put(data, place[j], now[j]);
        i += count;
    }
}

template <class E, class Places>
void restore_places(uint8_t* data, Places places, int64_t changed, const uint8_t* old) {
    uint32_t place[kStage + 64];
    for (int64_t i = 0; i < changed;) {
        const int64_t count = places.next(place);
        for (int64_t j = 0; j < count; ++j) E::put(data, place[j], load<typename E::T>(old + (i + j) * E::kSize));
        i += count;
    }
}

template <int Size>
void planes_of(const uint8_t* base, const uint8_t* target, int64_t n, uint8_t* planes) {
    for (int64_t i = 0; i < n; ++i)
        for (int j = 0; j < Size; ++j) planes[j * n + i] = uint8_t(base[i * Size + j] ^ target[i * Size + j]);
}

template <int Size>
void xor_of(uint8_t* data, const uint8_t* planes, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
        for (int j = 0; j < Size; ++j) data[i * Size + j] ^= planes[j * n + i];
}

inline bool sparse(int kind, const uint8_t* base, const uint8_t* target, int64_t n, int64_t most, RefitStreams& out, uint64_t& hash) {
    return with_element(kind, [&](auto e) { return sparse_of<decltype(e)>(base, target, n, most, out, hash); });
}
inline void bitmask(int kind, const uint8_t* base, const uint8_t* target, int64_t n, RefitStreams& out) {
    with_element(kind, [&](auto e) { bitmask_of<decltype(e)>(base, target, n, out); });
}
inline bool is_fill(int kind, const uint8_t* target, int64_t n) {
    return with_element(kind, [&](auto e) { return fill_of<decltype(e)>(target, n); });
}
inline void transpose_xor(int size, const uint8_t* base, const uint8_t* target, int64_t n, uint8_t* planes) {
    if (size == 1) planes_of<1>(base, target, n, planes);
    if (size == 2) planes_of<2>(base, target, n, planes);
    if (size == 4) planes_of<4>(base, target, n, planes);
    if (size == 8) planes_of<8>(base, target, n, planes);
}
inline void apply_xor(int size, uint8_t* data, const uint8_t* planes, int64_t n) {
    if (size == 1) xor_of<1>(data, planes, n);
    if (size == 2) xor_of<2>(data, planes, n);
    if (size == 4) xor_of<4>(data, planes, n);
    if (size == 8) xor_of<8>(data, planes, n);
}
inline bool check_sparse(int kind, const RefitStreams& in, int64_t n) {
    return gaps_agree(in, n) && with_element(kind, [&](auto e) { return values_agree<decltype(e)>(in); });
}
inline bool check_bitmask(int kind, const RefitStreams& in, int64_t n) {
    return mask_agrees(in, n) && with_element(kind, [&](auto e) { return values_agree<decltype(e)>(in); });
}
inline void apply_sparse(int kind, uint8_t* data, const RefitStreams& in, uint8_t* old) {
    with_element(kind, [&](auto e) { write_places<decltype(e)>(data, GapPlaces(in.where, in.changed), in, old); });
}
inline void apply_bitmask(int kind, uint8_t* data, const RefitStreams& in, uint8_t* old) {
    with_element(kind, [&](auto e) { write_places<decltype(e)>(data, MaskPlaces(in.where, in.where_size), in, old); });
}
inline void revert_sparse(int kind, uint8_t* data, const uint8_t* gaps, int64_t changed, const uint8_t* old) {
    with_element(kind, [&](auto e) { restore_places<decltype(e)>(data, GapPlaces(gaps, changed), changed, old); });
}
inline void revert_bitmask(int kind, uint8_t* data, const uint8_t* mask, int64_t mask_size, int64_t changed, const uint8_t* old) {
    with_element(kind, [&](auto e) { restore_places<decltype(e)>(data, MaskPlaces(mask, mask_size), changed, old); });
}

}  // namespace halfbyte::HALFBYTE_ISA

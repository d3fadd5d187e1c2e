// Positions within classes of the base's exponent (the `max` profile): the chance of a change doubles from one exponent to the
// next below, so a gap counted in its own class takes fewer bits. A gap is split: low bits as they are, quotients as bytes.
#pragma once

#include <vector>

#include "refit_lanes.hpp"

namespace halfbyte::HALFBYTE_ISA {

constexpr int kClasses = kRefitClasses, kRecord = kRefitRecord, kMostLow = kRefitMostLow;

template <class E>
struct ClassOf {
    int shift, mask;
    int operator()(const uint8_t* base, int64_t i) const { return int(E::get(base, i) >> shift) & mask; }
};

// Low bits of the gaps of a class: the largest k with 2^k * 2.375 <= mean gap, in integers.
inline int low_bits(int64_t members, int64_t changed) {
    int k = 0;
    while (k < kMostLow && 19 * changed * (int64_t{2} << k) <= 8 * (members - changed)) ++k;
    return k;
}

// Classes of the base, a tile at a time, one byte an element. Bytes past the end are any class's.
constexpr int64_t kTile = 4096;
template <class E>
struct Tile {
    uint8_t ids[kTile];
    int64_t count = 0, words = 0;

    void read(ClassOf<E> class_of, const uint8_t* base, int64_t begin, int64_t n) {
        using T = typename E::T;
        count = std::min(kTile, n - begin);
        words = (count + 63) / 64;
        const int64_t here = count;
        if constexpr (E::kBits == 4) {
            for (int64_t i = 0; i < here; ++i) ids[i] = uint8_t(class_of(base, begin + i));
        } else {
            // Through arrays that nothing else can point into: else the loop would not become vectors.
            const int shift = class_of.shift;
            const T mask = T(class_of.mask);
            int64_t i = 0;
            for (; i + 64 <= here; i += 64) {
                T v[64];
                uint8_t low[64];
                std::memcpy(v, E::at(base, begin + i), sizeof v);
                for (int j = 0; j < 64; ++j) low[j] = uint8_t(T(v[j] >> shift) & mask);
                std::memcpy(ids + i, low, sizeof low);
            }
            for (; i < here; ++i) ids[i] = uint8_t(class_of(base, begin + i));
        }
    }
    uint64_t members(int64_t word, int id) const { return equal64(ids + 64 * word, uint8_t(id)); }
    int64_t beyond(int id) const {
        return count % 64 ? __builtin_popcountll(members(words - 1, id) & ~uint64_t{0} << count % 64) : 0;
    }
};

struct ClassPart {
    int id = 0, k = 0;
    int64_t changed = 0, first = 0, wide = 0;  // first change and first wide value in class order
};

class BitWriter {
   public:
    explicit BitWriter(uint8_t* out) : begin_(out), out_(out) {}
    void put(uint64_t bits, int count) {
        word_ |= bits << used_;
        used_ += count;
        while (used_ >= 8) {
            *out_++ = uint8_t(word_);
            word_ >>= 8;
            used_ -= 8;
        }
    }
    int64_t finish() {
        if (used_ > 0) *out_++ = uint8_t(word_);
        return out_ - begin_;
    }

   private:
    uint8_t *begin_, *out_;
    uint64_t word_ = 0;
    int used_ = 0;
};

template <class E>
void into_classes(ClassOf<E> class_of, const uint8_t* base, int64_t n, const RefitStreams& plain, RefitStreams& out, RefitClasses& classes) {
    using T = typename E::T;
    std::vector<uint64_t> marks(size_t((n + 63) / 64), 0);
    std::vector<uint32_t> first_of(marks.size());  // number of a word's first change
    std::vector<ClassPart> parts(kClasses);
    for_gaps(plain.where, plain.changed, [&](int64_t position) {
        marks[size_t(position / 64)] |= uint64_t{1} << position % 64;
        ++parts[size_t(class_of(base, position))].changed;
    });
    std::vector<int> used;
    int64_t first = 0;
    for (int id = kClasses - 1; id >= 0; --id) {
        ClassPart& part = parts[size_t(id)];
        part.first = first;
        first += part.changed;
        if (part.changed > 0) used.push_back(id);
    }
    const int count = int(used.size());
    uint32_t before = 0;
    for (size_t w = 0; w < marks.size(); ++w) {
        first_of[w] = before;
        before += uint32_t(__builtin_popcountll(marks[w]));
    }
    // Changes in class order: which one in plain order, and how many members come before it.
    std::vector<uint32_t> number_of(size_t(plain.changed)), rank_of(size_t(plain.changed));
    std::vector<int64_t> seen(kClasses, 0), cursor(kClasses);
    for (const int id : used) cursor[size_t(id)] = parts[size_t(id)].first;
    Tile<E> tile;
    for (int64_t begin = 0; begin < n; begin += kTile) {
        tile.read(class_of, base, begin, n);
        const uint64_t* marked = &marks[size_t(begin / 64)];
        const uint32_t* number = &first_of[size_t(begin / 64)];
        for (const int id : used) {
            int64_t members = seen[size_t(id)], at = cursor[size_t(id)];
            for (int64_t w = 0; w < tile.words; ++w) {
                const uint64_t mask = tile.members(w, id);
                for (uint64_t hits = mask & marked[w]; hits != 0; hits &= hits - 1) {
                    const uint64_t below = (hits & (0 - hits)) - 1;
                    number_of[size_t(at)] = number[w] + uint32_t(__builtin_popcountll(marked[w] & below));
                    rank_of[size_t(at++)] = uint32_t(members + __builtin_popcountll(mask & below));
                }
                members += __builtin_popcountll(mask);
            }
            seen[size_t(id)] = members - tile.beyond(id);
            cursor[size_t(id)] = at;
        }
    }
    for (const int id : used) parts[size_t(id)].k = low_bits(seen[size_t(id)], parts[size_t(id)].changed);
    std::vector<uint8_t> code_of(size_t(plain.changed));
    std::vector<T> wide_of(size_t(plain.changed));
    Codes codes(plain.values, plain.changed);
    const uint8_t* wide = plain.wide;
    for (size_t j = 0; j < code_of.size(); ++j) {
        code_of[j] = uint8_t(codes.next());
        if (code_of[j] != kEscape) continue;
        wide_of[j] = load<T>(wide);
        wide += E::kSize;
    }
    out.changed = plain.changed;
    out.wide_count = 0;
    for (int64_t at = 0; at < plain.changed; ++at) {
        const size_t j = number_of[size_t(at)];
        out.values[at] = code_of[j];
        if (code_of[j] == kEscape) store<T>(out.wide + E::kSize * out.wide_count++, wide_of[j]);
    }
    join_values(out.values, out.changed);

    uint8_t* quotient = classes.quotients;
    store<uint16_t>(classes.low, uint16_t(count));
    uint8_t* record = classes.low + 2;
    BitWriter low(record + count * kRecord);
    for (int id = kClasses - 1; id >= 0; --id) {
        const ClassPart& part = parts[size_t(id)];
        if (part.changed == 0) continue;
        record[0] = uint8_t(id);
        record[1] = uint8_t(part.k);
        store<uint32_t>(record + 2, uint32_t(part.changed));
        record += kRecord;
        int64_t next = 0;
        for (int64_t at = part.first; at < part.first + part.changed; ++at) {
            const int64_t gap = int64_t(rank_of[size_t(at)]) - next;
            next = int64_t(rank_of[size_t(at)]) + 1;
            int64_t q = gap >> part.k;
            for (; q >= kSkip; q -= kSkip) *quotient++ = kSkip;
            *quotient++ = uint8_t(q);
            low.put(uint64_t(gap & ((int64_t{1} << part.k) - 1)), part.k);
        }
    }
    classes.quotients_size = quotient - classes.quotients;
    classes.low_size = 2 + count * kRecord + low.finish();
}

// The member that comes after `until` others, counted from the beginning of a word: its word (`words`: behind the tile), bit, and
// how many are to come before it from that word on.
struct Hit {
    int64_t word, until;
    int bit;
};
inline Hit next_member(const uint8_t* ids, int64_t words, int id, int64_t word, int64_t until) {
    for (; word < words; ++word) {
        const uint64_t mask = equal64(ids + 64 * word, uint8_t(id));
        const int64_t members = __builtin_popcountll(mask);
        if (until < members) return {word, until, nth_bit(mask, until)};
        until -= members;
    }
    return {words, until, 0};
}

// Reads the gaps of one class; `bad` once the streams end too soon.
class GapReader {
   public:
    const uint8_t *quotient = nullptr, *quotient_end = nullptr, *low = nullptr, *low_end = nullptr;
    int64_t bit = 0;
    int k = 0;
    bool bad = false;

    int64_t next() {
        int64_t q = 0;
        for (;;) {
            if (quotient == quotient_end) return fail();
            const unsigned byte = *quotient++;
            q += byte;
            if (byte != kSkip) break;
        }
        uint64_t word = 0;
        const uint8_t* from = low + (bit >> 3);
        const int64_t left = low_end - from;
        if (left < 0 || (bit & 7) + k > 8 * left) return fail();
        std::memcpy(&word, from, size_t(std::min<int64_t>(8, left)));
        word = (word >> (bit & 7)) & ((uint64_t{1} << k) - 1);
        bit += k;
        return (q << k) + int64_t(word);
    }

   private:
    int64_t fail() {
        bad = true;
        return 0;
    }
};

template <class E>
bool out_of_classes(ClassOf<E> class_of, const uint8_t* base, int64_t n, const RefitStreams& in, const RefitClasses& classes, RefitStreams& plain) {
    using T = typename E::T;
    if (classes.low_size < 2) return false;
    const int count = load<uint16_t>(classes.low);
    const int64_t head = 2 + int64_t(count) * kRecord;
    if (count > kClasses || classes.low_size < head) return false;
    std::vector<ClassPart> parts(kClasses);
    std::vector<int> order;
    int64_t first = 0, bits = 0;
    for (int j = 0, above = kClasses; j < count; ++j) {
        const uint8_t* record = classes.low + 2 + j * kRecord;
        const ClassPart part{record[0], record[1], load<uint32_t>(record + 2), first, 0};
        if (part.id >= above || part.k > kMostLow || part.changed == 0) return false;
        above = part.id;
        first += part.changed;
        bits += part.changed * part.k;
        if (first > in.changed) return false;
        parts[size_t(part.id)] = part;
        order.push_back(part.id);
    }
    const int64_t tail = bits & 7;
    if (first != in.changed || classes.low_size != head + (bits + 7) / 8) return false;
    if (tail != 0 && classes.low[classes.low_size - 1] >> tail) return false;

    // One reader a class: where its quotients and low bits begin is known only after those before it.
    std::vector<GapReader> readers(kClasses);
    const uint8_t *quotient = classes.quotients, *quotient_end = classes.quotients + classes.quotients_size;
    int64_t bit = 0;
    Codes codes(in.values, in.changed);
    std::vector<uint8_t> code_of(size_t(in.changed));
    for (int64_t j = 0; j < in.changed; ++j) code_of[size_t(j)] = uint8_t(codes.next());
    int64_t wide = 0, at = 0;
    for (const int id : order) {
        ClassPart& part = parts[size_t(id)];
        GapReader& reader = readers[size_t(id)];
        reader.quotient = quotient;
        reader.quotient_end = quotient_end;
        reader.low = classes.low + head;
        reader.low_end = classes.low + classes.low_size;
        reader.bit = bit;
        reader.k = part.k;
        part.wide = wide;
        for (int64_t end = at + part.changed; at < end; ++at) {
            while (quotient != quotient_end && *quotient == kSkip) ++quotient;
            if (quotient == quotient_end) return false;
            ++quotient;
            wide += code_of[size_t(at)] == kEscape;
        }
        bit += part.changed * part.k;
    }
    if (quotient != quotient_end || wide != in.wide_count || !values_agree<E>(in)) return false;

    // Each class counts its members down to its next mark; a word's marks of all classes come out in order of position.
    std::vector<int64_t> left(kClasses, 0), open(kClasses, 0);
    for (const int id : order) {
        left[size_t(id)] = readers[size_t(id)].next();
        open[size_t(id)] = parts[size_t(id)].changed;
        if (readers[size_t(id)].bad) return false;
    }
    uint8_t* gap = plain.where;
    int64_t next = 0, marks = 0;
    plain.wide_count = 0;
    Tile<E> tile;
    uint64_t marked[kTile / 64];
    std::vector<uint32_t> change_at(kTile);  // in class order
    std::vector<T> wide_at(kTile);
    for (int64_t begin = 0; begin < n; begin += kTile) {
        tile.read(class_of, base, begin, n);
        std::fill(marked, marked + tile.words, uint64_t{0});
        for (const int id : order) {
            if (open[size_t(id)] == 0) continue;
            GapReader& reader = readers[size_t(id)];
            ClassPart& part = parts[size_t(id)];
            for (int64_t w = 0, until = left[size_t(id)];;) {
                const Hit hit = next_member(tile.ids, tile.words, id, w, until);
                if (hit.word == tile.words) {
                    left[size_t(id)] = hit.until;
                    break;
                }
                w = hit.word;
                const size_t at = size_t(64 * w + hit.bit);
                if (int64_t(at) >= tile.count) return false;
                marked[w] |= uint64_t{1} << hit.bit;
                const uint32_t change = uint32_t(part.first++);
                change_at[at] = change;
                if (code_of[change] == kEscape) wide_at[at] = load<T>(in.wide + E::kSize * part.wide++);
                if (--open[size_t(id)] == 0) break;
                until = hit.until + 1 + reader.next();  // counted from the word's first member
                if (reader.bad) return false;
            }
        }
        for (int64_t w = 0; w < tile.words; ++w) {
            for (uint64_t hits = marked[w]; hits != 0; hits &= hits - 1) {
                const int64_t at = 64 * w + __builtin_ctzll(hits), i = begin + at;
                int64_t skip = i - next;
                next = i + 1;
                for (; skip >= kSkip; skip -= kSkip) *gap++ = kSkip;
                *gap++ = uint8_t(skip);
                const uint8_t code = code_of[change_at[size_t(at)]];
                plain.values[marks++] = code;
                if (code == kEscape) store<T>(plain.wide + E::kSize * plain.wide_count++, wide_at[size_t(at)]);
            }
        }
    }
    if (marks != in.changed) return false;
    plain.changed = marks;
    plain.where_size = gap - plain.where;
    join_values(plain.values, marks);
    return true;
}

inline void to_classes(int kind, int shift, int width, const uint8_t* base, int64_t n, const RefitStreams& plain, RefitStreams& out, RefitClasses& classes) {
    with_element(kind, [&](auto e) {
        into_classes(ClassOf<decltype(e)>{shift, (1 << width) - 1}, base, n, plain, out, classes);
    });
}
inline bool from_classes(int kind, int shift, int width, const uint8_t* base, int64_t n, const RefitStreams& in, const RefitClasses& classes, RefitStreams& plain) {
    return with_element(kind, [&](auto e) {
        return out_of_classes(ClassOf<decltype(e)>{shift, (1 << width) - 1}, base, n, in, classes, plain);
    });
}

}  // namespace halfbyte::HALFBYTE_ISA

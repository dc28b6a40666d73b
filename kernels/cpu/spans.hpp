// Spans: the inner loops, over dense pieces of memory that are contiguous and small enough to stay in cache.
//
// Each dispatch level compiles its own set (`spans_*.cpp`); a kernel fetches the set in use once per call. The bodies
// here are plain loops, always inlined, so that a level's functions compile them for its instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cast.hpp"

namespace dcr {

// What `compare` may write past the elements that it reports: output buffers hold this many more.
constexpr size_t SLACK = 64;

struct Key {
    uint64_t index, bits;
};

struct Sums {
    uint64_t x = 0, y = 0;
};

struct Pair {
    Sums old, now;
};

template <class W>
struct Span {
    // Writes the numbers (first + i), new and old bits of all i in [0, n) with now[i] != base[i]; returns how many.
    size_t (*compare)(const W* now, const W* base, size_t n, uint32_t first, uint32_t* positions, W* bits, W* old);
    // Adds up the digest lanes of n elements: canonical indices index + i * step, or index + positions[i] * step.
    Sums (*digest)(const W* bits, size_t n, uint64_t index, uint64_t step, Key key);
    Sums (*digest_at)(const W* bits, size_t n, const uint32_t* positions, uint64_t index, uint64_t step, Key key);
    // The same of old and new bits, which share their indices: those of positions, or indices[i].
    Pair (*digest_both_at)(const W* old, const W* now, size_t n, const uint32_t* positions, uint64_t index, uint64_t step,
                           Key key);
    Pair (*digest_both)(const W* old, const W* now, size_t n, const uint64_t* indices, Key key);
};

struct Spans {
    Span<uint8_t> w1;
    Span<uint16_t> w2;
    Span<uint32_t> w4;
    Span<uint64_t> w8;
    // Casts n elements by a Kind (not NONE).
    void (*cast)(const uint32_t* bits, size_t n, int kind, uint16_t* out);

    template <class W>
    const Span<W>& of() const {
        if constexpr (sizeof(W) == 1) return w1;
        else if constexpr (sizeof(W) == 2) return w2;
        else if constexpr (sizeof(W) == 4) return w4;
        else return w8;
    }
};

// One set per level; `level.hpp` says which are usable here.
extern const Spans PORTABLE;
#if defined(__x86_64__)
extern const Spans AVX2, AVX512;
#endif

#define DCR_INLINE __attribute__((always_inline)) inline

// Odd multipliers; the same as in dcr/kernels/reference.py.
constexpr uint64_t M1 = 0x9E3779B97F4A7C15, M2 = 0xD6E8FEB86659FD93;
constexpr uint64_t M3 = 0xBF58476D1CE4E5B9, M4 = 0x94D049BB133111EB;

// The part of an element's lanes that depends on where it is, and the rest, added to sums.
DCR_INLINE uint64_t mix_index(uint64_t index, Key key) {
    const uint64_t u = (index ^ key.index) * M1;
    return u ^ u >> 32;
}

DCR_INLINE void mix_bits(uint64_t u, uint64_t bits, Key key, uint64_t& x_sum, uint64_t& y_sum) {
    uint64_t x = u + (bits ^ key.bits) * M2;
    x ^= x >> 32;
    x *= M3;
    x ^= x >> 29;
    uint64_t y = x * M4;
    y ^= y >> 32;
    x_sum += x;
    y_sum += y;
}

template <class W>
DCR_INLINE Sums digest_body(const W* bits, size_t n, uint64_t index, uint64_t step, Key key) {
    uint64_t x = 0, y = 0;
    for (size_t i = 0; i < n; ++i, index += step) mix_bits(mix_index(index, key), bits[i], key, x, y);
    return {x, y};
}

template <class W>
DCR_INLINE Sums digest_at_body(const W* bits, size_t n, const uint32_t* positions, uint64_t index, uint64_t step, Key key) {
    uint64_t x = 0, y = 0;
    if (step == 1)
        for (size_t i = 0; i < n; ++i) mix_bits(mix_index(index + positions[i], key), bits[i], key, x, y);
    else
        for (size_t i = 0; i < n; ++i) mix_bits(mix_index(index + positions[i] * step, key), bits[i], key, x, y);
    return {x, y};
}

template <class W>
DCR_INLINE Pair digest_both_at_body(const W* old, const W* now, size_t n, const uint32_t* positions, uint64_t index,
                                    uint64_t step, Key key) {
    uint64_t x = 0, y = 0, z = 0, w = 0;
    const auto add = [&](uint64_t u, size_t i) __attribute__((always_inline)) {
        mix_bits(u, old[i], key, x, y);
        mix_bits(u, now[i], key, z, w);
    };
    if (step == 1)
        for (size_t i = 0; i < n; ++i) add(mix_index(index + positions[i], key), i);
    else
        for (size_t i = 0; i < n; ++i) add(mix_index(index + positions[i] * step, key), i);
    return {{x, y}, {z, w}};
}

template <class W>
DCR_INLINE Pair digest_both_body(const W* old, const W* now, size_t n, const uint64_t* indices, Key key) {
    uint64_t x = 0, y = 0, z = 0, w = 0;
    for (size_t i = 0; i < n; ++i) {
        const uint64_t u = mix_index(indices[i], key);
        mix_bits(u, old[i], key, x, y);
        mix_bits(u, now[i], key, z, w);
    }
    return {{x, y}, {z, w}};
}

DCR_INLINE void cast_body(const uint32_t* bits, size_t n, int kind, uint16_t* out) {
    if (kind == F32_BF16)
        for (size_t i = 0; i < n; ++i) out[i] = bf16_of(bits[i]);
    else
        for (size_t i = 0; i < n; ++i) out[i] = f16_of(bits[i]);
}

// Appends the lanes of a 64-byte block whose bits are set in `mask`; lane 0 is now[0], was base[0] and has `number`.
//
// The first few are stored whether they are there or not, and the end of the output moves on past those that are:
// how many of them there are is what no branch predictor can know.
template <class W>
DCR_INLINE size_t append_lanes(uint64_t mask, const W* now, const W* base, uint32_t number, size_t k,
                               uint32_t* positions, W* bits, W* old) {
    constexpr uint64_t LAST = uint64_t(1) << (64 / sizeof(W) - 1);
    for (int i = 0; i < 2; ++i, mask &= mask - 1) {
        const int lane = __builtin_ctzll(mask | LAST);
        positions[k] = number + uint32_t(lane);
        bits[k] = now[lane];
        old[k] = base[lane];
        k += mask != 0;
    }
    for (; mask; mask &= mask - 1, ++k) {
        const int lane = __builtin_ctzll(mask);
        positions[k] = number + uint32_t(lane);
        bits[k] = now[lane];
        old[k] = base[lane];
    }
    return k;
}

DCR_INLINE uint64_t word_at(const void* at) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

// Works word by word: first a list of the words that differ, then, for each of them, all its lanes; both lists grow
// past an entry only if it counts, so nothing but the test of a whole block is left to branch prediction.
template <class W>
DCR_INLINE size_t compare_body(const W* now, const W* base, size_t n, uint32_t first, uint32_t* positions, W* bits,
                               W* old) {
    constexpr size_t WORD = 8 / sizeof(W), BLOCK = 8 * WORD, LIST = 64 * BLOCK;  // elements
    uint64_t differ[LIST / WORD];
    uint16_t starts[LIST / WORD];
    size_t k = 0, i = 0;
    for (const size_t whole = n - n % BLOCK; i < whole;) {
        const size_t list = i, end = whole - i < LIST ? whole : i + LIST;
        size_t words = 0;
        for (; i < end; i += BLOCK) {
            W any = 0;
            for (size_t j = 0; j < BLOCK; ++j) any |= W(now[i + j] ^ base[i + j]);
            if (any == 0) continue;
            for (size_t j = i; j < i + BLOCK; j += WORD) {
                differ[words] = word_at(now + j) ^ word_at(base + j);
                starts[words] = uint16_t(j - list);
                words += differ[words] != 0;
            }
        }
        for (size_t word = 0; word < words; ++word) {
            for (size_t lane = 0; lane < WORD; ++lane) {
                const size_t element = list + starts[word] + lane;
                positions[k] = first + uint32_t(element);
                bits[k] = now[element];
                old[k] = base[element];
                k += W(differ[word] >> (8 * sizeof(W) * lane)) != 0;
            }
        }
    }
    for (; i < n; ++i) {
        positions[k] = first + uint32_t(i);
        bits[k] = now[i];
        old[k] = base[i];
        k += now[i] != base[i];
    }
    return k;
}

}  // namespace dcr

// Classes: which of four an element belongs to by its old bits, and its number among those of its class. Each dispatch
// level compiles its own set from the loops here (`classes_*.cpp`); `classes.cpp` checks what it is given.
//
//     N  elements of a frame      K  changed elements
//
// The grade of an element is what its 8 bits under the sign say (7 in a single byte): the exponent of a bfloat16.
// Class c holds the grades from cuts[c - 1] on and below cuts[c].
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifndef DCR_INLINE
#define DCR_INLINE __attribute__((always_inline)) inline
#endif

#ifndef DCR_TARGET  // a level's file says for which instructions its loops are compiled
#define DCR_TARGET
#endif

namespace dcr {

constexpr size_t CLASSES = 4;
constexpr size_t CUTS = CLASSES - 1;
constexpr size_t BLOCK_ELEMS = 64;  // one bit each in a word

template <class W>
struct Classer {
    // Of positions [K], ascending and below N: the class [K], and the number among its class [K].  Moves N b + 9 K.
    void (*rank)(const W* base, size_t N, const W* lowest, const uint32_t* positions, size_t K, uint32_t* ranks,
                 uint8_t* classes);
    // The inverse. ranks [K] and values [K] lie class by class, ends [CLASSES] says where each ends. Positions [K] and
    // values [K] in order; returns how many there are: fewer than K if ranks do not ascend within a class, or leave it.
    //                                                                                             Moves N b + 2 K (4 + b).
    size_t (*merge)(const W* base, size_t N, const W* lowest, const size_t* ends, const uint32_t* ranks,
                    const W* values, uint32_t* positions, W* merged);
};

struct Classers {
    Classer<uint8_t> w1;
    Classer<uint16_t> w2;
    Classer<uint32_t> w4;
    Classer<uint64_t> w8;

    template <class W>
    const Classer<W>& of() const {
        if constexpr (sizeof(W) == 1) return w1;
        else if constexpr (sizeof(W) == 2) return w2;
        else if constexpr (sizeof(W) == 4) return w4;
        else return w8;
    }
};

extern const Classers PORTABLE_CLASSERS;
#if defined(__x86_64__)
extern const Classers AVX2_CLASSERS, AVX512_CLASSERS;
#endif

template <class W>
constexpr W MAGNITUDE = W(~W(0)) >> 1;  // all bits but the sign

// The lowest magnitude of a grade.
template <class W>
constexpr W lowest_of(uint8_t grade) {
    if constexpr (sizeof(W) == 1) return W((grade + 1) >> 1);
    else return W(W(grade) << (8 * sizeof(W) - 9));
}

// Which of 64 elements are in each class. `Marks` is a level's: at_least(base, lowest) says in a word which of 64
// elements have at least that magnitude, nth(word, n) is the n-th set bit of a word, alone.
struct Members {
    uint64_t of[CLASSES];
};

template <class Marks, class W>
DCR_TARGET DCR_INLINE Members members_of(const W* base, size_t n, const W* lowest) {
    W padded[BLOCK_ELEMS];
    uint64_t valid = ~uint64_t(0);
    if (n < BLOCK_ELEMS) {
        std::memset(padded, 0, sizeof padded);
        std::memcpy(padded, base, n * sizeof(W));
        base = padded;
        valid = (uint64_t(1) << n) - 1;
    }
    uint64_t above[CUTS];
    Marks::at_least(base, lowest, above);
    Members members;
    members.of[0] = valid & ~above[0];
    members.of[1] = valid & above[0] & ~above[1];
    members.of[2] = valid & above[1] & ~above[2];
    members.of[3] = valid & above[2];
    return members;
}

// Blocks are looked at a window at a time, so that the changes of a window are one loop: where the next block begins
// among them is hard to predict.
constexpr size_t WINDOW_BLOCKS = 64;
constexpr size_t WINDOW_ELEMS = WINDOW_BLOCKS * BLOCK_ELEMS;

// The members of each block of a window, and how many elements of each class lie ahead of it in the frame.
struct Window {
    uint64_t members[CLASSES][WINDOW_BLOCKS];
    uint32_t before[CLASSES][WINDOW_BLOCKS];

    // The class of an element.
    DCR_TARGET DCR_INLINE size_t class_of(size_t block, unsigned bit) const {
        return (members[1][block] >> bit & 1) + 2 * (members[2][block] >> bit & 1) + 3 * (members[3][block] >> bit & 1);
    }
};

// Fills a window of `size` elements; `seen` counts on. Blocks behind its end are as if all of the frame lay before them.
template <class Marks, class W>
DCR_TARGET DCR_INLINE void fill_window(const W* base, size_t size, const W* lowest, uint32_t* seen, Window& window) {
    size_t block = 0;
    for (size_t at = 0; at < size; at += BLOCK_ELEMS, ++block) {
        const size_t n = size - at < BLOCK_ELEMS ? size - at : BLOCK_ELEMS;
        const Members found = members_of<Marks>(base + at, n, lowest);
        for (size_t c = 0; c < CLASSES; ++c) {
            window.members[c][block] = found.of[c];
            window.before[c][block] = seen[c];
            seen[c] += uint32_t(__builtin_popcountll(found.of[c]));
        }
    }
    for (; block < WINDOW_BLOCKS; ++block)
        for (size_t c = 0; c < CLASSES; ++c) {
            window.members[c][block] = 0;
            window.before[c][block] = UINT32_MAX;
        }
}

template <class Marks, class W>
DCR_TARGET DCR_INLINE void rank_body(const W* base, size_t N, const W* lowest, const uint32_t* positions, size_t K,
                                     uint32_t* ranks, uint8_t* classes) {
    Window window;
    uint32_t seen[CLASSES] = {};
    size_t k = 0;
    for (size_t first = 0; first < N && k < K; first += WINDOW_ELEMS) {
        const size_t size = N - first < WINDOW_ELEMS ? N - first : WINDOW_ELEMS;
        fill_window<Marks>(base + first, size, lowest, seen, window);
        for (; k < K && positions[k] - first < size; ++k) {
            const size_t block = (positions[k] - first) / BLOCK_ELEMS;
            const unsigned bit = unsigned(positions[k] % BLOCK_ELEMS);
            const size_t at = window.class_of(block, bit);
            const uint64_t below = window.members[at][block] & ((uint64_t(1) << bit) - 1);
            classes[k] = uint8_t(at);
            ranks[k] = window.before[at][block] + uint32_t(__builtin_popcountll(below));
        }
    }
}

// The last block that starts at or before element `rank` of a class: a search without a branch to mispredict.
DCR_TARGET DCR_INLINE size_t block_of(const uint32_t* before, uint32_t rank) {
    size_t block = 0;
    for (size_t step = WINDOW_BLOCKS / 2; step > 0; step /= 2) block += step & (0 - size_t(before[block + step] <= rank));
    return block;
}

template <class Marks, class W>
DCR_TARGET DCR_INLINE size_t merge_body(const W* base, size_t N, const W* lowest, const size_t* ends,
                                        const uint32_t* ranks, const W* values, uint32_t* positions, W* merged) {
    const size_t K = ends[CLASSES - 1];
    Window window;
    uint32_t seen[CLASSES] = {};
    size_t read[CLASSES] = {0, ends[0], ends[1], ends[2]}, taken[CLASSES] = {0, ends[0], ends[1], ends[2]};
    size_t written = 0;
    for (size_t first = 0; first < N && written < K; first += WINDOW_ELEMS) {
        const size_t size = N - first < WINDOW_ELEMS ? N - first : WINDOW_ELEMS;
        fill_window<Marks>(base + first, size, lowest, seen, window);
        uint64_t found[WINDOW_BLOCKS] = {};
        for (size_t c = 0; c < CLASSES; ++c)
            for (; read[c] < ends[c] && ranks[read[c]] < seen[c]; ++read[c]) {
                const size_t block = block_of(window.before[c], ranks[read[c]]);
                found[block] |= Marks::nth(window.members[c][block], ranks[read[c]] - window.before[c][block]);
            }
        for (size_t block = 0; block < WINDOW_BLOCKS; ++block)
            for (uint64_t left = found[block]; left; left &= left - 1, ++written) {
                const unsigned bit = unsigned(__builtin_ctzll(left));
                positions[written] = uint32_t(first + block * BLOCK_ELEMS + bit);
                merged[written] = values[taken[window.class_of(block, bit)]++];
            }
    }
    return written;
}

// ------------------------------------------------------------------ what callers use

// Groups a change by class: ranks [K] and values [K], class by class, and how many there are of each. cuts [CUTS]
// ascend. Throws std::invalid_argument unless positions ascend strictly and lie below N.
void split(const void* base, size_t N, size_t width, const uint8_t* cuts, const uint32_t* positions,
           const void* values, size_t K, uint32_t* ranks, void* grouped, size_t* counts);

// The inverse. Throws std::invalid_argument where base has no such elements, or ranks do not ascend within a class.
void merge(const void* base, size_t N, size_t width, const uint8_t* cuts, const size_t* counts, const uint32_t* ranks,
           const void* values, uint32_t* positions, void* merged);

}  // namespace dcr

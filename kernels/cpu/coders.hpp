// Coders: the codec's inner loops. As with the spans, each dispatch level compiles its own set (`coders_*.cpp`) from the
// plain loops here; `streams.cpp` and `huffman.cpp` check what they are given and say what the bytes mean.
//
//     K  changed elements      G  bytes of their gap stream
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dcr {

constexpr uint8_t ESCAPE = 255;
constexpr size_t GAP_SLACK = 64;   // bytes that `gaps` may write past the end of the stream
constexpr size_t LANES = 4;        // interleaved bit streams of a Huffman-coded one
constexpr unsigned LONGEST = 12;   // bits of the longest code

struct Reached {
    size_t read, written;
    uint64_t elements;  // passed so far: the last position and 1 more
};

template <class W>
struct SymbolCoder {
    // symbols [n] of values [n]; returns how many are escaped.
    size_t (*encode)(const W* values, size_t n, uint8_t* symbols);
    // values [n] of symbols [n], but for those that are escaped; returns how many are.
    size_t (*decode)(const uint8_t* symbols, size_t n, W* values);
};

struct Coders {
    // Whether positions [K] ascend strictly.
    bool (*ascend)(const uint32_t* positions, size_t K);
    // The gap stream of ascending positions [K]; returns G. `out` holds K + last / 255 + GAP_SLACK bytes.
    size_t (*gaps)(const uint32_t* positions, size_t K, uint8_t* out);
    // Positions [K] of gaps [G]; stops at either end, and early where it is clear that `numel` is left behind.
    Reached (*positions)(const uint8_t* gaps, size_t G, size_t K, uint64_t numel, uint32_t* out);
    SymbolCoder<uint8_t> w1;
    SymbolCoder<uint16_t> w2;
    SymbolCoder<uint32_t> w4;
    SymbolCoder<uint64_t> w8;
    // data [n] into bit streams that start at starts [LANES]; codes [256] hold the bits and, from bit 16, the length.
    void (*write_bits)(const uint8_t* data, size_t n, const uint32_t* codes, uint8_t* const* starts);
    // out [n] from bit streams; at [LANES] are the bits read so far, counted from `packed`, ends [LANES] the bytes where
    // the streams end; table [2^LONGEST] holds the length and, from bit 8, the byte. Reads nothing from `ends` on.
    void (*read_bits)(const uint8_t* packed, const uint16_t* table, uint64_t* at, const size_t* ends, size_t n,
                      uint8_t* out);

    template <class W>
    const SymbolCoder<W>& of() const {
        if constexpr (sizeof(W) == 1) return w1;
        else if constexpr (sizeof(W) == 2) return w2;
        else if constexpr (sizeof(W) == 4) return w4;
        else return w8;
    }
};

// One set per level; `level.hpp` says which are usable here.
extern const Coders PORTABLE_CODERS;
#if defined(__x86_64__)
extern const Coders AVX2_CODERS, AVX512_CODERS;
#endif

#ifndef DCR_INLINE
#define DCR_INLINE __attribute__((always_inline)) inline
#endif

DCR_INLINE bool ascend_body(const uint32_t* positions, size_t K) {
    uint32_t disorder = 0;  // of the width of what is compared: gcc vectorises nothing else
    for (size_t i = 1; i < K; ++i) disorder |= uint32_t(positions[i] > positions[i - 1] ? 0 : 1);
    return disorder == 0;
}

// Appends one gap: eight escapes are stored whether they are needed or not, since how many are is hard to predict.
DCR_INLINE uint8_t* put_gap(uint8_t* out, uint32_t gap) {
    const uint32_t escapes = gap / ESCAPE;
    std::memset(out, ESCAPE, 8);
    for (uint32_t done = 8; done < escapes; done += 8) std::memset(out + done, ESCAPE, 8);
    out += escapes;
    *out = uint8_t(gap - escapes * ESCAPE);
    return out + 1;
}

// The gaps from positions[from] on; `from` is 0 only for the first element of all.
DCR_INLINE uint8_t* put_gaps(const uint32_t* positions, size_t from, size_t to, uint8_t* out) {
    if (from == 0 && to > 0) out = put_gap(out, positions[from++]);
    for (size_t i = from; i < to; ++i) out = put_gap(out, positions[i] - positions[i - 1] - 1);
    return out;
}

DCR_INLINE size_t gaps_body(const uint32_t* positions, size_t K, uint8_t* out) {
    return size_t(put_gaps(positions, 0, K, out) - out);
}

// Every byte writes a position, and the end of the output moves on past it only if a gap ends there.
DCR_INLINE Reached positions_body(const uint8_t* gaps, size_t G, size_t K, Reached so_far, uint32_t* out) {
    auto [i, k, elements] = so_far;
    for (; i < G && k < K; ++i) {
        const bool last = gaps[i] != ESCAPE;
        elements += gaps[i] + uint64_t(last);
        out[k] = uint32_t(elements - 1);
        k += last;
    }
    return {i, k, elements};
}

// How many of n symbols are escapes, counted in bytes for as long as those can't overflow.
DCR_INLINE size_t count_escapes(const uint8_t* symbols, size_t n) {
    constexpr size_t PART = 128;
    size_t escaped = 0;
    for (size_t i = 0; i < n; i += PART) {
        const size_t end = i + PART < n ? i + PART : n;
        uint8_t found = 0;
        for (size_t j = i; j < end; ++j) found = uint8_t(found + (symbols[j] == ESCAPE));
        escaped += found;
    }
    return escaped;
}

// A value read as a signed step: 1, -1, 2, -2, ... are 1, 0, 3, 2, ...; a zero wraps round to the top and is escaped.
template <class W>
DCR_INLINE size_t encode_symbols_body(const W* values, size_t n, uint8_t* symbols) {
    for (size_t i = 0; i < n; ++i) {
        const W sign = W(W(0) - W(values[i] >> (8 * sizeof(W) - 1)));
        const W zigzag = W(W(W(values[i] << 1) ^ sign) - 1);
        symbols[i] = uint8_t(zigzag < ESCAPE ? zigzag : W(ESCAPE));
    }
    return count_escapes(symbols, n);
}

template <class W>
DCR_INLINE size_t decode_symbols_body(const uint8_t* symbols, size_t n, W* values) {
    for (size_t i = 0; i < n; ++i) {
        const W zigzag = W(W(symbols[i]) + 1);
        values[i] = W(W(zigzag >> 1) ^ W(W(0) - W(zigzag & 1)));
    }
    return count_escapes(symbols, n);
}

DCR_INLINE uint64_t little_word(const uint8_t* at) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

// A bit stream that is being written; `word` holds the bits that do not fill a byte yet, `held` says how many.
struct BitLane {
    uint8_t* out;
    uint64_t word = 0;
    unsigned held = 0;

    static constexpr unsigned MOST = 56;  // behind the 7 that may be held, and then the word is not yet full

    // Appends up to MOST bits. Stores a whole word: 8 bytes from `out` on have to be the lane's.
    DCR_INLINE void put(uint64_t bits, unsigned count) {
        const uint64_t all = word | bits << held;
        const unsigned reached = held + count;
        std::memcpy(out, &all, sizeof all);
        out += reached / 8;
        word = all >> (reached & ~7u);
        held = reached & 7;
    }
};

// Codes of a lane that are still to come, of one bit at least, for whole words to be stored into it.
constexpr size_t CODES_AHEAD = 64;

// The rest of data [n], from i on, byte by byte.
DCR_INLINE void finish_bits(BitLane* lanes, const uint8_t* data, size_t i, size_t n, const uint32_t* codes) {
    for (; i < n; ++i) {
        BitLane& lane = lanes[i % LANES];
        const uint32_t code = codes[data[i]];
        lane.word |= uint64_t(code & 0xFFFF) << lane.held;
        for (lane.held += code >> 16; lane.held >= 8; lane.held -= 8, lane.word >>= 8) *lane.out++ = uint8_t(lane.word);
    }
    for (size_t lane = 0; lane < LANES; ++lane)
        if (lanes[lane].held) *lanes[lane].out = uint8_t(lanes[lane].word);
}

// Byte i goes to lane i % LANES. Four codes, 48 bits at most, are put at once.
DCR_INLINE void write_bits_body(const uint8_t* data, size_t n, const uint32_t* codes, uint8_t* const* starts) {
    constexpr size_t STEP = 4 * LANES;
    BitLane lane0{starts[0]}, lane1{starts[1]}, lane2{starts[2]}, lane3{starts[3]};
    const auto four = [&](BitLane& lane, const uint8_t* from) __attribute__((always_inline)) {
        uint64_t word = 0;
        unsigned bits = 0;
        for (size_t j = 0; j < 4; ++j) {
            const uint32_t code = codes[from[LANES * j]];
            word |= uint64_t(code & 0xFFFF) << bits;
            bits += code >> 16;
        }
        lane.put(word, bits);
    };
    size_t i = 0;
    for (; i + STEP + CODES_AHEAD * LANES <= n; i += STEP) {
        four(lane0, data + i);
        four(lane1, data + i + 1);
        four(lane2, data + i + 2);
        four(lane3, data + i + 3);
    }
    BitLane lanes[LANES] = {lane0, lane1, lane2, lane3};
    finish_bits(lanes, data, i, n, codes);
}

// The bits from `at` on, at least LONGEST of them; zeros follow the end.
DCR_INLINE uint64_t peek(const uint8_t* packed, uint64_t at, size_t end) {
    uint64_t word = 0;
    for (unsigned byte = 0; byte < 3; ++byte)
        if (at / 8 + byte < end) word |= uint64_t(packed[at / 8 + byte]) << (8 * byte);
    return word >> (at & 7);
}

DCR_INLINE void read_bits_body(const uint8_t* packed, const uint16_t* table, uint64_t* at, const size_t* ends, size_t n,
                               uint8_t* out) {
    constexpr size_t STEP = 4 * LANES;
    constexpr uint64_t MASK = (1u << LONGEST) - 1;
    uint64_t at0 = at[0], at1 = at[1], at2 = at[2], at3 = at[3];
    const auto four = [&](uint64_t& here, uint8_t* to) __attribute__((always_inline)) {
        uint64_t word = little_word(packed + here / 8) >> (here & 7);  // 57 bits at least, 48 are needed
        unsigned passed = 0;
        for (size_t j = 0; j < 4; ++j) {
            const unsigned entry = table[word & MASK];
            to[LANES * j] = uint8_t(entry >> 8);
            word >>= entry & 63;
            passed += entry;
        }
        here += passed & 0xFF;  // four lengths do not reach the bytes above them
    };
    size_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        if (at0 / 8 + 8 > ends[0] || at1 / 8 + 8 > ends[1] || at2 / 8 + 8 > ends[2] || at3 / 8 + 8 > ends[3]) break;
        four(at0, out + i);
        four(at1, out + i + 1);
        four(at2, out + i + 2);
        four(at3, out + i + 3);
    }
    at[0] = at0, at[1] = at1, at[2] = at2, at[3] = at3;
    for (; i < n; ++i) {
        const size_t lane = i % LANES;
        const unsigned entry = table[peek(packed, at[lane], ends[lane]) & MASK];
        out[i] = uint8_t(entry >> 8);
        at[lane] += entry & 63;
    }
}

}  // namespace dcr

// AVX-512 with VBMI and VBMI2: sixteen gaps at a time in both directions, 64 bytes to code at a time.
#include "coders.hpp"

#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc's own header, GCC bug 105593
#pragma GCC diagnostic ignored "-Wuninitialized"        // the same, where little is inlined
#endif
#include <immintrin.h>

#if defined(__clang__)
#define DCR_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,bmi,bmi2,popcnt")))
#else  // gcc keeps plain loops to 32 bytes unless it is told
#define DCR_TARGET \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,bmi,bmi2,popcnt,prefer-vector-width=512")))
#endif

namespace dcr {
namespace {

DCR_TARGET bool ascend(const uint32_t* positions, size_t K) { return ascend_body(positions, K); }

// Sixteen gaps below 4 * 255, each as three escapes and its last byte in a lane; what is not needed is packed away.
DCR_TARGET DCR_INLINE uint8_t* put_short_gaps(__m512i gap, __mmask16 escaped, uint8_t* out) {
    const __m512i escape = _mm512_set1_epi32(ESCAPE);
    const __mmask16 twice = _mm512_mask_cmpge_epu32_mask(escaped, gap, _mm512_set1_epi32(2 * ESCAPE));
    const __mmask16 thrice = _mm512_mask_cmpge_epu32_mask(twice, gap, _mm512_set1_epi32(3 * ESCAPE));
    __m512i last = _mm512_mask_sub_epi32(gap, escaped, gap, escape);
    last = _mm512_mask_sub_epi32(last, twice, last, escape);
    last = _mm512_mask_sub_epi32(last, thrice, last, escape);
    const __m512i bytes = _mm512_or_si512(_mm512_slli_epi32(last, 24), _mm512_set1_epi32(0xFFFFFF));
    const uint64_t kept = 0x8888888888888888 | _pdep_u64(escaped, 0x4444444444444444) |
                          _pdep_u64(twice, 0x2222222222222222) | _pdep_u64(thrice, 0x1111111111111111);
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi8(kept, bytes));
    return out + __builtin_popcountll(kept);
}

DCR_TARGET size_t gaps(const uint32_t* positions, size_t K, uint8_t* out) {
    const __m512i one = _mm512_set1_epi32(1), escape = _mm512_set1_epi32(ESCAPE);
    uint8_t* at = put_gaps(positions, 0, K ? 1 : 0, out);
    size_t i = 1;
    for (; i + 16 <= K; i += 16) {
        const __m512i step = _mm512_sub_epi32(_mm512_loadu_si512(positions + i), _mm512_loadu_si512(positions + i - 1));
        const __m512i gap = _mm512_sub_epi32(step, one);
        const __mmask16 escaped = _mm512_cmpge_epu32_mask(gap, escape);
        if (!escaped) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(gap));
            at += 16;
        } else if (!_mm512_cmpge_epu32_mask(gap, _mm512_set1_epi32(4 * ESCAPE))) {
            at = put_short_gaps(gap, escaped, at);
        } else {
            at = put_gaps(positions, i, i + 16, at);
        }
    }
    return size_t(put_gaps(positions, i, K, at) - out);
}

// lane i becomes the sum of lanes 0 to i
DCR_TARGET DCR_INLINE __m512i prefix_sums(__m512i x) {
    const __m512i zero = _mm512_setzero_si512();
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 15));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 14));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 12));
    return _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 8));
}

DCR_TARGET Reached positions(const uint8_t* gaps, size_t G, size_t K, uint64_t numel, uint32_t* out) {
    const __m512i one = _mm512_set1_epi32(1);
    size_t i = 0, k = 0;
    uint64_t elements = 0;
    for (; i + 16 <= G && k + 16 <= K && elements <= numel; i += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(gaps + i));
        const __mmask16 last = _mm_cmpneq_epi8_mask(bytes, _mm_set1_epi8(char(ESCAPE)));
        const __m512i wide = _mm512_cvtepu8_epi32(bytes);
        const __m512i sums = prefix_sums(_mm512_mask_add_epi32(wide, last, wide, one));
        const __m512i base = _mm512_set1_epi32(int(uint32_t(elements - 1)));
        _mm512_storeu_si512(out + k, _mm512_maskz_compress_epi32(last, _mm512_add_epi32(sums, base)));
        k += size_t(__builtin_popcount(last));
        elements += uint32_t(_mm_extract_epi32(_mm512_extracti32x4_epi32(sums, 3), 3));
    }
    return positions_body(gaps, G, K, {i, k, elements}, out);
}

template <class W>
DCR_TARGET size_t encode(const W* values, size_t n, uint8_t* symbols) {
    return encode_symbols_body(values, n, symbols);
}

template <class W>
DCR_TARGET size_t decode(const uint8_t* symbols, size_t n, W* values) {
    return decode_symbols_body(symbols, n, values);
}

// A table of 256 bytes in registers.
struct ByteTable {
    __m512i parts[4];

    DCR_TARGET DCR_INLINE explicit ByteTable(const uint8_t* bytes) {
        for (int part = 0; part < 4; ++part) parts[part] = _mm512_loadu_si512(bytes + 64 * part);
    }
    DCR_TARGET DCR_INLINE __m512i operator[](__m512i indices) const {
        return _mm512_mask_blend_epi8(_mm512_movepi8_mask(indices),
                                      _mm512_permutex2var_epi8(parts[0], indices, parts[1]),
                                      _mm512_permutex2var_epi8(parts[2], indices, parts[3]));
    }
};

// Strings of bits, each in 64, and their lengths.
struct Strings {
    __m512i bits, lengths;
};

// Eight times four codes, each in 16 bits with its length in the upper four, as eight strings of 48 bits at most.
DCR_TARGET DCR_INLINE Strings strung(__m512i codes) {
    const __m512i code = _mm512_set1_epi32(0xFFF), length = _mm512_set1_epi32(0xF);
    const __m512i first_length = _mm512_and_si512(_mm512_srli_epi32(codes, 12), length);
    const __m512i second = _mm512_and_si512(_mm512_srli_epi32(codes, 16), code);
    const __m512i pairs = _mm512_or_si512(_mm512_and_si512(codes, code), _mm512_sllv_epi32(second, first_length));
    const __m512i lengths = _mm512_add_epi32(first_length, _mm512_srli_epi32(codes, 28));
    const __m512i low = _mm512_set1_epi64(0xFFFFFFFF), low_length = _mm512_and_si512(lengths, low);
    return {_mm512_or_si512(_mm512_and_si512(pairs, low), _mm512_sllv_epi64(_mm512_srli_epi64(pairs, 32), low_length)),
            _mm512_add_epi64(low_length, _mm512_srli_epi64(lengths, 32))};
}

// Strings 0, 1, 4 and 5, each with the one two places on behind it.
constexpr __mmask8 DOUBLED = 0x33;
DCR_TARGET DCR_INLINE Strings doubled(Strings strings) {
    const __m512i bits = _mm512_permutex_epi64(strings.bits, 0xEE);
    return {_mm512_or_si512(strings.bits, _mm512_sllv_epi64(bits, strings.lengths)),
            _mm512_add_epi64(strings.lengths, _mm512_permutex_epi64(strings.lengths, 0xEE))};
}

// The codes of 64 bytes of data, in memory: strings 0, STEP, ... of `even` go to lane 0, the next ones to lane 1, those of
// `odd` to lanes 2 and 3. Usually eight codes fit one string.
struct Block {
    struct alignas(64) Stored {
        uint64_t bits[8], lengths[8];
    } even, odd;
    bool is_doubled;

    DCR_TARGET DCR_INLINE void store(Strings evens, Strings odds) {
        const __m512i most = _mm512_set1_epi64(BitLane::MOST);
        const Strings evens2 = doubled(evens), odds2 = doubled(odds);
        const __mmask8 wide = _mm512_mask_cmpgt_epu64_mask(DOUBLED, evens2.lengths, most) |
                              _mm512_mask_cmpgt_epu64_mask(DOUBLED, odds2.lengths, most);
        is_doubled = wide == 0;
        store(is_doubled ? evens2 : evens, even);
        store(is_doubled ? odds2 : odds, odd);
    }
    template <size_t STEP>
    DCR_INLINE void put(BitLane& lane0, BitLane& lane1, BitLane& lane2, BitLane& lane3) const {
        for (size_t at = 0; at < 8; at += STEP) {
            lane0.put(even.bits[at], unsigned(even.lengths[at]));
            lane1.put(even.bits[at + 1], unsigned(even.lengths[at + 1]));
            lane2.put(odd.bits[at], unsigned(odd.lengths[at]));
            lane3.put(odd.bits[at + 1], unsigned(odd.lengths[at + 1]));
        }
    }

  private:
    DCR_TARGET DCR_INLINE static void store(Strings strings, Stored& to) {
        _mm512_store_si512(to.bits, strings.bits);
        _mm512_store_si512(to.lengths, strings.lengths);
    }
};

// 64 bytes at a time; within 16 of them each lane has four. A block is put while the next one is being looked up: what has
// just been stored as a vector can't be read back in parts at once.
DCR_TARGET void write_bits(const uint8_t* data, size_t n, const uint32_t* codes, uint8_t* const* starts) {
    static_assert(LANES == 4 && LONGEST == 12);
    uint8_t low[256], high[256];  // of a code with its length above it
    for (size_t byte = 0; byte < 256; ++byte) {
        low[byte] = uint8_t(codes[byte]);
        high[byte] = uint8_t((codes[byte] >> 8 & 0xF) | codes[byte] >> 16 << 4);
    }
    const ByteTable lows(low), highs(high);
    const __m512i by_lane = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    BitLane lane0{starts[0]}, lane1{starts[1]}, lane2{starts[2]}, lane3{starts[3]};
    Block blocks[2];
    const auto put = [&](const Block& block) __attribute__((always_inline)) {
        block.is_doubled ? block.put<4>(lane0, lane1, lane2, lane3) : block.put<2>(lane0, lane1, lane2, lane3);
    };
    size_t i = 0;
    for (; i + 64 + CODES_AHEAD * LANES <= n; i += 64) {
        const __m512i bytes = _mm512_shuffle_epi8(_mm512_loadu_si512(data + i), by_lane);
        const __m512i lower = lows[bytes], upper = highs[bytes];
        blocks[i / 64 % 2].store(strung(_mm512_unpacklo_epi8(lower, upper)), strung(_mm512_unpackhi_epi8(lower, upper)));
        if (i) put(blocks[(i / 64 + 1) % 2]);
    }
    if (i) put(blocks[(i / 64 + 1) % 2]);
    BitLane lanes[LANES] = {lane0, lane1, lane2, lane3};
    finish_bits(lanes, data, i, n, codes);
}

DCR_TARGET void read_bits(const uint8_t* packed, const uint16_t* table, uint64_t* at, const size_t* ends, size_t n,
                          uint8_t* out) {
    read_bits_body(packed, table, at, ends, n, out);
}

template <class W>
constexpr SymbolCoder<W> coder{encode<W>, decode<W>};

}  // namespace

constinit const Coders AVX512_CODERS{
    ascend, gaps, positions, coder<uint8_t>, coder<uint16_t>, coder<uint32_t>, coder<uint64_t>, write_bits, read_bits,
};

}  // namespace dcr

#endif

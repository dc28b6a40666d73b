// AVX-512 with VBMI2: sixteen gaps at a time in both directions.
#include "coders.hpp"

#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc's own header, GCC bug 105593
#endif
#include <immintrin.h>

#if defined(__clang__)
#define DCR_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,bmi,bmi2,popcnt")))
#else  // gcc keeps plain loops to 32 bytes unless it is told
#define DCR_TARGET \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,bmi,bmi2,popcnt,prefer-vector-width=512")))
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

DCR_TARGET void write_bits(const uint8_t* data, size_t n, const uint32_t* codes, uint8_t* const* starts) {
    write_bits_body(data, n, codes, starts);
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

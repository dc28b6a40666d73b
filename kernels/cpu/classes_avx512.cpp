// AVX-512: compares that give bits.
#if defined(__x86_64__)

#define DCR_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,bmi,bmi2,popcnt")))
#include "classes.hpp"
#include "mask.hpp"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc's own header, GCC bug 105593
#endif
#include <immintrin.h>

namespace dcr {
namespace {

DCR_TARGET DCR_INLINE uint64_t above_of(const uint8_t* base, uint8_t lowest) {
    const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(base), _mm512_set1_epi8(0x7F));
    return _mm512_cmpge_epu8_mask(magnitude, _mm512_set1_epi8(char(lowest)));
}
DCR_TARGET DCR_INLINE uint64_t above_of(const uint16_t* base, uint16_t lowest) {
    const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(base), _mm512_set1_epi16(0x7FFF));
    return widened(_mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(short(lowest))));
}
DCR_TARGET DCR_INLINE uint64_t above_of(const uint32_t* base, uint32_t lowest) {
    const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(base), _mm512_set1_epi32(0x7FFFFFFF));
    return widened(_mm512_cmpge_epu32_mask(magnitude, _mm512_set1_epi32(int(lowest))));
}
DCR_TARGET DCR_INLINE uint64_t above_of(const uint64_t* base, uint64_t lowest) {
    const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(base), _mm512_set1_epi64(INT64_MAX));
    return widened(_mm512_cmpge_epu64_mask(magnitude, _mm512_set1_epi64(int64_t(lowest))));
}

struct Avx512 {
    template <class W>
    DCR_TARGET DCR_INLINE static void at_least(const W* base, const W* lowest, uint64_t* above) {
        constexpr size_t AT_ONCE = 64 / sizeof(W);
        for (size_t c = 0; c < CUTS; ++c) {
            uint64_t word = 0;
            for (size_t i = 0; i < BLOCK_ELEMS; i += AT_ONCE) word |= above_of(base + i, lowest[c]) << i;
            above[c] = word;
        }
    }
    DCR_TARGET DCR_INLINE static uint64_t nth(uint64_t word, uint32_t n) { return _pdep_u64(uint64_t(1) << n, word); }
};

template <class W>
DCR_TARGET void rank(const W* base, size_t N, const W* lowest, const uint32_t* positions, size_t K, uint32_t* ranks,
                     uint8_t* classes) {
    rank_body<Avx512>(base, N, lowest, positions, K, ranks, classes);
}

template <class W>
DCR_TARGET size_t merge(const W* base, size_t N, const W* lowest, const size_t* ends, const uint32_t* ranks,
                        const W* values, uint32_t* positions, W* merged) {
    return merge_body<Avx512>(base, N, lowest, ends, ranks, values, positions, merged);
}

template <class W>
constexpr Classer<W> classer{rank<W>, merge<W>};

}  // namespace

constinit const Classers AVX512_CLASSERS{classer<uint8_t>, classer<uint16_t>, classer<uint32_t>, classer<uint64_t>};

}  // namespace dcr

#endif

// AVX-512 with VBMI2 (Ice Lake, Zen 4 and later): 64-byte vectors, and compress, which packs the changed lanes.
#include "spans.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#if defined(__clang__)
#define DCR_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,popcnt")))
#else  // gcc keeps plain loops to 32 bytes unless it is told
#define DCR_TARGET \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,popcnt,prefer-vector-width=512")))
#endif

namespace dcr {
namespace {

// The two operations whose names depend on the lane's width: a mask of unequal lanes, and packing lanes to the front.
DCR_TARGET DCR_INLINE uint64_t unequal(__m512i a, __m512i b, uint8_t) { return _mm512_cmpneq_epi8_mask(a, b); }
DCR_TARGET DCR_INLINE uint64_t unequal(__m512i a, __m512i b, uint16_t) { return _mm512_cmpneq_epi16_mask(a, b); }
DCR_TARGET DCR_INLINE uint64_t unequal(__m512i a, __m512i b, uint32_t) { return _mm512_cmpneq_epi32_mask(a, b); }
DCR_TARGET DCR_INLINE uint64_t unequal(__m512i a, __m512i b, uint64_t) { return _mm512_cmpneq_epi64_mask(a, b); }

DCR_TARGET DCR_INLINE __m512i pack(uint64_t mask, __m512i v, uint8_t) { return _mm512_maskz_compress_epi8(mask, v); }
DCR_TARGET DCR_INLINE __m512i pack(uint64_t mask, __m512i v, uint16_t) {
    return _mm512_maskz_compress_epi16(__mmask32(mask), v);
}
DCR_TARGET DCR_INLINE __m512i pack(uint64_t mask, __m512i v, uint32_t) {
    return _mm512_maskz_compress_epi32(__mmask16(mask), v);
}
DCR_TARGET DCR_INLINE __m512i pack(uint64_t mask, __m512i v, uint64_t) {
    return _mm512_maskz_compress_epi64(__mmask8(mask), v);
}

// Appends the masked lanes of `now`, whose first lane has `number`. Whole vectors are stored, hence SLACK; storing
// packed lanes straight to memory (compressstore) is much slower on Zen 4.
template <class W>
DCR_TARGET DCR_INLINE size_t append(uint64_t mask, __m512i now, uint32_t number, size_t k, uint32_t* positions,
                                    W* bits) {
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_storeu_si512(bits + k, pack(mask, now, W{}));
    for (size_t lane = 0; lane < 64 / sizeof(W); lane += 16) {
        const __mmask16 part = __mmask16(mask >> lane);
        const __m512i numbers = _mm512_add_epi32(iota, _mm512_set1_epi32(int(number + uint32_t(lane))));
        _mm512_storeu_si512(positions + k, _mm512_maskz_compress_epi32(part, numbers));
        k += size_t(__builtin_popcount(part));
    }
    return k;
}


template <class W>
DCR_TARGET size_t compare(const W* now, const W* base, size_t n, uint32_t first, uint32_t* positions, W* bits) {
    constexpr size_t LANES = 64 / sizeof(W);
    size_t k = 0, i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        const __m512i now0 = _mm512_loadu_si512(now + i), now1 = _mm512_loadu_si512(now + i + LANES);
        const uint64_t mask0 = unequal(now0, _mm512_loadu_si512(base + i), W{});
        const uint64_t mask1 = unequal(now1, _mm512_loadu_si512(base + i + LANES), W{});
        if ((mask0 | mask1) == 0) continue;
        k = append(mask0, now0, first + uint32_t(i), k, positions, bits);
        k = append(mask1, now1, first + uint32_t(i + LANES), k, positions, bits);
    }
    return k + compare_body(now + i, base + i, n - i, first + uint32_t(i), positions + k, bits + k);
}

template <class W>
DCR_TARGET Sums digest(const W* bits, size_t n, uint64_t index, uint64_t step, Key key) {
    return digest_body(bits, n, index, step, key);
}

template <class W>
DCR_TARGET Sums digest_at(const W* bits, size_t n, const uint64_t* indices, Key key) {
    return digest_at_body(bits, n, indices, key);
}

template <class W>
DCR_TARGET Pair digest_both(const W* old, const W* now, size_t n, const uint64_t* indices, Key key) {
    return digest_both_body(old, now, n, indices, key);
}

DCR_TARGET void cast(const uint32_t* bits, size_t n, int kind, uint16_t* out) { cast_body(bits, n, kind, out); }

template <class W>
constexpr Span<W> span{compare<W>, digest<W>, digest_at<W>, digest_both<W>};

}  // namespace

constinit const Spans AVX512{span<uint8_t>, span<uint16_t>, span<uint32_t>, span<uint64_t>, cast};

}  // namespace dcr

#endif

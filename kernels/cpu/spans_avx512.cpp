// AVX-512 with VBMI2 (Ice Lake, Zen 4 and later): 64-byte vectors, and compress, which packs the changed lanes.
#include "mask.hpp"
#include "spans.hpp"

#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc's own header, GCC bug 105593
#endif
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
DCR_TARGET DCR_INLINE uint64_t unequal(__m512i a, __m512i b, uint16_t) {
    return widened(_mm512_cmpneq_epi16_mask(a, b));
}
DCR_TARGET DCR_INLINE uint64_t unequal(__m512i a, __m512i b, uint32_t) {
    return widened(_mm512_cmpneq_epi32_mask(a, b));
}
DCR_TARGET DCR_INLINE uint64_t unequal(__m512i a, __m512i b, uint64_t) {
    return widened(_mm512_cmpneq_epi64_mask(a, b));
}

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

// The first n lanes, or all; zeros in the others.
template <class W>
DCR_TARGET DCR_INLINE __m512i load_some(const W* at, size_t n) {
    constexpr size_t LANES = 64 / sizeof(W);
    const uint64_t mask = n < LANES ? (uint64_t(1) << n) - 1 : ~uint64_t(0);
    if constexpr (sizeof(W) == 1) return _mm512_maskz_loadu_epi8(mask, at);
    else if constexpr (sizeof(W) == 2) return _mm512_maskz_loadu_epi16(__mmask32(mask), at);
    else if constexpr (sizeof(W) == 4) return _mm512_maskz_loadu_epi32(__mmask16(mask), at);
    else return _mm512_maskz_loadu_epi64(__mmask8(mask), at);
}

// The numbers 0, 1, 2, ... in lanes of W, and the first eight lanes as numbers of 32 bits.
template <class W>
struct Iota {
    alignas(64) W lanes[64 / sizeof(W)];
    constexpr Iota() : lanes{} {
        for (size_t i = 0; i < 64 / sizeof(W); ++i) lanes[i] = W(i);
    }
};
DCR_TARGET DCR_INLINE __m256i eight_numbers(__m512i v, uint8_t) {
    return _mm256_cvtepu8_epi32(_mm512_castsi512_si128(v));
}
DCR_TARGET DCR_INLINE __m256i eight_numbers(__m512i v, uint16_t) {
    return _mm256_cvtepu16_epi32(_mm512_castsi512_si128(v));
}
DCR_TARGET DCR_INLINE __m256i eight_numbers(__m512i v, uint32_t) { return _mm512_castsi512_si256(v); }
DCR_TARGET DCR_INLINE __m256i eight_numbers(__m512i v, uint64_t) { return _mm512_cvtepi64_epi32(v); }

// Stores eight lanes at least.
template <class W>
DCR_TARGET DCR_INLINE void store_eight(W* out, __m512i v) {
    if constexpr (sizeof(W) <= 2)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_castsi512_si128(v));
    else if constexpr (sizeof(W) == 4)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(v));
    else
        _mm512_storeu_si512(out, v);
}

// Appends more than eight masked lanes of a vector.
template <class W>
DCR_TARGET __attribute__((noinline, cold)) void append_many(uint64_t mask, __m512i now, __m512i base, uint32_t number,
                                                            uint32_t* positions, W* bits, W* old) {
    _mm512_storeu_si512(bits, pack(mask, now, W{}));
    _mm512_storeu_si512(old, pack(mask, base, W{}));
    const __m512i sixteen = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (size_t lane = 0; lane < 64 / sizeof(W); lane += 16) {
        const __mmask16 part = __mmask16(mask >> lane);
        const __m512i numbers = _mm512_add_epi32(sixteen, _mm512_set1_epi32(int(number + uint32_t(lane))));
        _mm512_storeu_si512(positions, _mm512_maskz_compress_epi32(part, numbers));
        positions += __builtin_popcount(part);
    }
}

// Appends the masked lanes of one vector, whose first lane has `number`; returns the new end of the output. The first
// eight lanes are stored whether they are there or not: no branch predictor knows, narrow stores cost less than reading
// what is compared, and more than eight are rare. Stores go past the end, hence SLACK. (To store packed lanes straight to
// memory, by compressstore, is much slower on Zen 4.)
template <class W>
DCR_TARGET DCR_INLINE size_t append(uint64_t mask, __m512i now, __m512i base, uint32_t number, size_t k,
                                    uint32_t* positions, W* bits, W* old) {
    static constexpr Iota<W> iota;
    const unsigned count = unsigned(__builtin_popcountll(mask));
    __m512i after = pack(mask, now, W{}), before = pack(mask, base, W{});
    __m512i numbers = pack(mask, _mm512_load_si512(iota.lanes), W{});
    // Three registers, not one after another the same one: a third faster on Zen 4, whose compress waits for what its
    // target held before.
    asm("" : "+v"(after), "+v"(before), "+v"(numbers));
    store_eight(bits + k, after);
    store_eight(old + k, before);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions + k),
                        _mm256_add_epi32(eight_numbers(numbers, W{}), _mm256_set1_epi32(int(number))));
    if (__builtin_expect(count > 8, 0)) append_many(mask, now, base, number, positions + k, bits + k, old + k);
    return k + count;
}

template <class W>
DCR_TARGET size_t compare(const W* now, const W* base, size_t n, uint32_t first, uint32_t* positions, W* bits,
                          W* old) {
    constexpr size_t LANES = 64 / sizeof(W);
    size_t k = 0, i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        const __m512i now0 = _mm512_loadu_si512(now + i), now1 = _mm512_loadu_si512(now + i + LANES);
        const __m512i base0 = _mm512_loadu_si512(base + i), base1 = _mm512_loadu_si512(base + i + LANES);
        const uint64_t mask0 = unequal(now0, base0, W{}), mask1 = unequal(now1, base1, W{});
        const uint32_t number = first + uint32_t(i);
        k = append(mask0, now0, base0, number, k, positions, bits, old);
        k = append(mask1, now1, base1, number + uint32_t(LANES), k, positions, bits, old);
    }
    for (; i < n; i += LANES) {
        const __m512i after = load_some(now + i, n - i), before = load_some(base + i, n - i);
        k = append(unequal(after, before, W{}), after, before, first + uint32_t(i), k, positions, bits, old);
    }
    return k;
}

template <class W>
DCR_TARGET Sums digest(const W* bits, size_t n, uint64_t index, uint64_t step, Key key) {
    return digest_body(bits, n, index, step, key);
}

template <class W>
DCR_TARGET Sums digest_at(const W* bits, size_t n, const uint32_t* positions, uint64_t index, uint64_t step, Key key) {
    return digest_at_body(bits, n, positions, index, step, key);
}

template <class W>
DCR_TARGET Pair digest_both_at(const W* old, const W* now, size_t n, const uint32_t* positions, uint64_t index, uint64_t step,
                               Key key) {
    return digest_both_at_body(old, now, n, positions, index, step, key);
}

template <class W>
DCR_TARGET Pair digest_both(const W* old, const W* now, size_t n, const uint64_t* indices, Key key) {
    return digest_both_body(old, now, n, indices, key);
}

DCR_TARGET void cast(const uint32_t* bits, size_t n, int kind, uint16_t* out) { cast_body(bits, n, kind, out); }

template <class W>
constexpr Span<W> span{compare<W>, digest<W>, digest_at<W>, digest_both_at<W>, digest_both<W>};

}  // namespace

constinit const Spans AVX512{span<uint8_t>, span<uint16_t>, span<uint32_t>, span<uint64_t>, cast};

}  // namespace dcr

#endif

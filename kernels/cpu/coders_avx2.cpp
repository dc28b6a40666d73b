// AVX2 and BMI2: the same loops; wider symbols, and shifts by a register that leave the flags alone.
#include "coders.hpp"

#if defined(__x86_64__)

#define DCR_TARGET __attribute__((target("avx2,bmi,bmi2")))

namespace dcr {
namespace {

DCR_TARGET bool ascend(const uint32_t* positions, size_t K) { return ascend_body(positions, K); }

DCR_TARGET size_t gaps(const uint32_t* positions, size_t K, uint8_t* out) { return gaps_body(positions, K, out); }

DCR_TARGET Reached positions(const uint8_t* gaps, size_t G, size_t K, uint64_t, uint32_t* out) {
    return positions_body(gaps, G, K, {}, out);
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

constinit const Coders AVX2_CODERS{
    ascend, gaps, positions, coder<uint8_t>, coder<uint16_t>, coder<uint32_t>, coder<uint64_t>, write_bits, read_bits,
};

}  // namespace dcr

#endif

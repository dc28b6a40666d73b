// The level that every machine has: what the compiler makes of plain loops.
#include "coders.hpp"

namespace dcr {
namespace {

bool ascend(const uint32_t* positions, size_t K) { return ascend_body(positions, K); }

size_t gaps(const uint32_t* positions, size_t K, uint8_t* out) { return gaps_body(positions, K, out); }

Reached positions(const uint8_t* gaps, size_t G, size_t K, uint64_t, uint32_t* out) {
    return positions_body(gaps, G, K, {}, out);
}

template <class W>
size_t encode(const W* values, size_t n, uint8_t* symbols) {
    return encode_symbols_body(values, n, symbols);
}

template <class W>
size_t decode(const uint8_t* symbols, size_t n, W* values) {
    return decode_symbols_body(symbols, n, values);
}

void write_bits(const uint8_t* data, size_t n, const uint32_t* codes, uint8_t* const* starts) {
    write_bits_body(data, n, codes, starts);
}

void read_bits(const uint8_t* packed, const uint16_t* table, uint64_t* at, const size_t* ends, size_t n, uint8_t* out) {
    read_bits_body(packed, table, at, ends, n, out);
}

template <class W>
constexpr SymbolCoder<W> coder{encode<W>, decode<W>};

}  // namespace

constinit const Coders PORTABLE_CODERS{
    ascend, gaps, positions, coder<uint8_t>, coder<uint16_t>, coder<uint32_t>, coder<uint64_t>, write_bits, read_bits,
};

}  // namespace dcr

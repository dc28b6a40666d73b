// A Huffman coder for streams of bytes: order 0, canonical codes of at most 12 bits, four interleaved bit streams.
// docs/format.md has the layout, dcr/kernels/streams.py defines every byte. Nothing here trusts what it reads: a packed stream
// without a complete code, or whose bit streams do not end with their last symbol, throws std::invalid_argument.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "coders.hpp"

namespace dcr {

using Lengths = std::array<uint8_t, 256>;  // bits of each byte's code; 0 where the byte does not occur

// What packing a stream will give: known from counts alone, before anything is written.
struct Packing {
    Lengths lengths;
    std::vector<uint8_t> table;         // the lengths, as they are written
    std::array<size_t, LANES> sizes{};  // bytes of the bit streams
    size_t size = 0;                    // of everything; 0 where packing saves less than a fiftieth
};

// Reads data [n] once.                                                                           Moves n.
Packing plan_packing(const uint8_t* data, size_t n);

// data [n], the same that was planned -> out [packing.size].                                     Moves n + size.
void pack(const Packing& packing, const uint8_t* data, size_t n, uint8_t* out);

// A packed stream's parts, found and checked.
struct Packed {
    const uint8_t* bytes;
    size_t n;  // bytes of data
    Lengths lengths;
    std::array<size_t, LANES> starts, ends;  // of the bit streams, in `bytes`
};

// bytes [size] should hold data [n]; nothing is allocated.
Packed open_packed(const uint8_t* bytes, size_t size, size_t n);

// out [packed.n].                                                                                Moves size + n.
void unpack(const Packed& packed, uint8_t* out);

}  // namespace dcr

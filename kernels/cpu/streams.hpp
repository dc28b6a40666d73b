// The streams of a sparse change: gaps, symbols, exceptions. dcr/kernels/streams.py defines what each function computes. Each
// checks the sizes of what it reads and writes; a stream that does not fit throws std::invalid_argument.
//
//     K  changed elements      G  bytes of their gap stream      E  exceptions
#pragma once

#include <cstddef>
#include <cstdint>

namespace dcr {

// Bytes that `gaps_of` needs for positions that have been checked: no less than G and its slack.
size_t gaps_room(const uint32_t* positions, size_t K);

// positions [K], ascending (see check_positions) -> out; returns G.                              Moves 4 K + G.
size_t gaps_of(const uint32_t* positions, size_t K, uint8_t* out);

// gaps [G] -> out [K], ascending and below numel.                                                Moves G + 4 K.
void positions_of(const uint8_t* gaps, size_t G, size_t K, uint64_t numel, uint32_t* out);

// values [K] of `width` bytes -> symbols [K]; returns E.                                         Moves K (width + 1).
size_t symbols_of(const void* values, size_t width, size_t K, uint8_t* symbols);

// The values [E] whose symbols are escapes -> exceptions.                                        Moves K + E 2 width.
void exceptions_of(const void* values, size_t width, const uint8_t* symbols, size_t K, void* exceptions);

// symbols [K] and exceptions, `bytes` of them and not necessarily aligned -> out [K].            Moves K (1 + width).
void values_of(const uint8_t* symbols, size_t K, const uint8_t* exceptions, size_t bytes, size_t width, void* out);

// The bytes of elements [n] by significance, lowest first: planes [width * n].                       Moves 2 n width.
void planes_of(const void* values, size_t width, size_t n, uint8_t* planes);
// The inverse; planes [width] of n bytes each.                                                       Moves 2 n width.
void of_planes(const uint8_t* const* planes, size_t width, size_t n, void* values);

}  // namespace dcr

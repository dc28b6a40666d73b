// BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020): what a chunk's body is bound by. A hash of a tree, so many
// pieces of 1024 bytes are compressed at once, one in each 32-bit lane of a vector.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dcr {

constexpr size_t BLAKE3_BYTES = 32, PIECE_BYTES = 1024;
constexpr size_t VALUE_WORDS = 8;  // of a chaining value: what a piece, or two values together, become

// One set per level; `level.hpp` says which are usable here.
struct Hashers {
    // data: so many whole pieces, the first of all data in front -> values [pieces, 8].
    void (*pieces)(const uint8_t* data, size_t pieces, uint32_t* values);
    // children [2 * parents, 8] -> values [parents, 8], which may be the same memory.
    void (*parents)(const uint32_t* children, size_t parents, uint32_t* values);
};

extern const Hashers PORTABLE_HASHERS;
#if defined(__x86_64__)
extern const Hashers AVX2_HASHERS, AVX512_HASHERS;
#endif

// out [32]: the hash of data [n].                                                                 Moves n.
void blake3(const uint8_t* data, size_t n, uint8_t* out);

}  // namespace dcr

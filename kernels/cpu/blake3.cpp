#include "blake3.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "level.hpp"

#define DCR_TARGET

namespace dcr {
namespace {

#include "blake3_lanes.hpp"

// A piece of 0 to 1024 bytes, the last of all, or all there is.
void hash_last(const uint8_t* data, size_t n, uint64_t counter, uint32_t last_flags, uint32_t* value) {
    begin(value, uint32_t(0));
    for (size_t at = 0;; at += BLOCK_BYTES) {
        const size_t length = std::min(BLOCK_BYTES, n - at);
        const bool is_last = at + length == n;
        uint32_t block[BLOCK_WORDS] = {};
        if (length) std::memcpy(block, data + at, length);
        compress(value, block, uint32_t(counter), uint32_t(counter >> 32), uint32_t(length),
                 (at == 0 ? PIECE_START : 0) | (is_last ? PIECE_END | last_flags : 0));
        if (is_last) return;
    }
}

// Level by level two values become one, and what is left over goes up as it is, until two are left.
void hash_root(const Hashers& hashers, uint32_t* values, size_t left, uint32_t* value) {
    for (size_t parents; left > 2; left = parents + left % 2) {
        parents = left / 2;
        hashers.parents(values, parents, values);
        if (left % 2) std::memmove(values + VALUE_WORDS * parents, values + VALUE_WORDS * (left - 1), BLAKE3_BYTES);
    }
    begin(value, uint32_t(0));
    compress(value, values, uint32_t(0), uint32_t(0), uint32_t(BLOCK_BYTES), PARENT | ROOT);
}

}  // namespace

void blake3(const uint8_t* data, size_t n, uint8_t* out) {
    uint32_t value[VALUE_WORDS];
    if (n <= PIECE_BYTES) {
        hash_last(data, n, 0, ROOT, value);
    } else {
        const Hashers& hashers = *level().hashers;
        const size_t whole = n / PIECE_BYTES, rest = n % PIECE_BYTES;
        std::vector<uint32_t> values(VALUE_WORDS * (whole + (rest != 0)));
        hashers.pieces(data, whole, values.data());
        if (rest) hash_last(data + n - rest, rest, whole, 0, values.data() + VALUE_WORDS * whole);
        hash_root(hashers, values.data(), whole + (rest != 0), value);
    }
    std::memcpy(out, value, BLAKE3_BYTES);
}

}  // namespace dcr

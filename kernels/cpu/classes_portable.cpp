// The level that every machine has: what the compiler makes of plain loops.
#include "classes.hpp"

namespace dcr {
namespace {

struct Plain {
    template <class W>
    DCR_INLINE static void at_least(const W* base, const W* lowest, uint64_t* above) {
        for (size_t c = 0; c < CUTS; ++c) {
            uint8_t flags[BLOCK_ELEMS];
            for (size_t i = 0; i < BLOCK_ELEMS; ++i) flags[i] = (base[i] & MAGNITUDE<W>) >= lowest[c];
            uint64_t word = 0;
            for (size_t i = 0; i < BLOCK_ELEMS; i += 8) {
                uint64_t eight;  // flags, one per byte; the product has them next to each other in its highest byte
                std::memcpy(&eight, flags + i, sizeof eight);
                word |= (eight * 0x0102040810204080) >> 56 << i;
            }
            above[c] = word;
        }
    }
    DCR_INLINE static uint64_t nth(uint64_t word, uint32_t n) {
        for (; n > 0; --n) word &= word - 1;
        return word & (~word + 1);
    }
};

template <class W>
constexpr Classer<W> classer{rank_body<Plain, W>, merge_body<Plain, W>};

}  // namespace

constinit const Classers PORTABLE_CLASSERS{classer<uint8_t>, classer<uint16_t>, classer<uint32_t>, classer<uint64_t>};

}  // namespace dcr

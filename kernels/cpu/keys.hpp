// Keys and sums [T, 2] of a table's tensors, one region at a time.
#pragma once

#include "spans.hpp"
#include "table.hpp"

namespace dcr {

inline Key key_of(const Region& region, const uint64_t* keys) {
    return {keys[2 * region.tensor], keys[2 * region.tensor + 1]};
}

inline void add(const Region& region, Sums part, uint64_t* sums) {
    sums[2 * region.tensor] += part.x;
    sums[2 * region.tensor + 1] += part.y;
}

}  // namespace dcr

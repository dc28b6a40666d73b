// The level that every machine has: vectors of four lanes, which SSE2 and NEON know.
#include <algorithm>
#include <cstring>
#include <utility>

#include "blake3.hpp"

#define DCR_TARGET

namespace dcr {
namespace {

#include "blake3_lanes.hpp"

}  // namespace

constinit const Hashers PORTABLE_HASHERS{hash_pieces<4>, hash_parents<4>};

}  // namespace dcr

// AVX2: eight lanes.
#include <algorithm>
#include <cstring>
#include <utility>

#include "blake3.hpp"

#if defined(__x86_64__)
#define DCR_TARGET __attribute__((target("avx2,bmi,bmi2")))

namespace dcr {
namespace {

#include "blake3_lanes.hpp"

}  // namespace

constinit const Hashers AVX2_HASHERS{hash_pieces<8>, hash_parents<8>};

}  // namespace dcr

#endif

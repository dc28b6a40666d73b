// AVX-512: sixteen lanes.
#include <algorithm>
#include <cstring>
#include <utility>

#include "blake3.hpp"

#if defined(__x86_64__)
#define DCR_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))

namespace dcr {
namespace {

#include "blake3_lanes.hpp"

}  // namespace

constinit const Hashers AVX512_HASHERS{hash_pieces<16>, hash_parents<16>};

}  // namespace dcr

#endif

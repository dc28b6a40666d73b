#include "level.hpp"

#include <atomic>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace dcr {
namespace {

#if defined(__x86_64__)
// Older compilers' __builtin_cpu_supports does not know this one.
bool has_f16c() {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

std::vector<Level> detect() {
    std::vector<Level> found{{"portable", &PORTABLE, &PORTABLE_CODERS, &PORTABLE_CLASSERS, &PORTABLE_HASHERS}};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2") ||
        !has_f16c())
        return found;
    found.push_back({"avx2", &AVX2, &AVX2_CODERS, &AVX2_CLASSERS, &AVX2_HASHERS});
    // VBMI looks bytes up in tables, VBMI2 compresses 8- and 16-bit lanes: Ice Lake, Zen 4 and later.
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi") &&
        __builtin_cpu_supports("avx512vbmi2"))
        found.push_back({"avx512", &AVX512, &AVX512_CODERS, &AVX512_CLASSERS, &AVX512_HASHERS});
#endif
    return found;
}

std::atomic<const Level*>& current() {
    static std::atomic<const Level*> chosen{&levels().back()};
    return chosen;
}

}  // namespace

const std::vector<Level>& levels() {
    static const std::vector<Level> found = detect();
    return found;
}

const Level& level() { return *current().load(std::memory_order_relaxed); }

const Level& use_level(const std::string& name) {
    std::string known;
    for (const Level& candidate : levels()) {
        if (candidate.name == name) {
            current().store(&candidate, std::memory_order_relaxed);
            return candidate;
        }
        known += std::string(" ") + candidate.name;
    }
    throw std::invalid_argument("no level \"" + name + "\" on this machine; it has:" + known);
}

}  // namespace dcr

#include "streams.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "coders.hpp"
#include "level.hpp"
#include "pieces.hpp"

namespace dcr {
namespace {

// Calls f(i, e) for the e-th symbol that is an escape, symbols[i].
template <class F>
void for_escapes(const uint8_t* symbols, size_t K, F&& f) {
    size_t e = 0;
    for (const uint8_t* at = symbols; (at = static_cast<const uint8_t*>(std::memchr(at, ESCAPE, symbols + K - at))); ++at)
        f(size_t(at - symbols), e++);
}

template <class W>
void fill_exceptions(const uint8_t* symbols, size_t K, const uint8_t* exceptions, size_t bytes, W* out) {
    const size_t escaped = level().coders->of<W>().decode(symbols, K, out);
    if (bytes != escaped * sizeof(W))
        throw std::invalid_argument("the symbol stream has " + std::to_string(escaped) + " escapes, but " +
                                    std::to_string(bytes) + " bytes of exceptions");
    if (escaped == 0) return;
    for_escapes(symbols, K, [&](size_t i, size_t e) { std::memcpy(out + i, exceptions + e * sizeof(W), sizeof(W)); });
}

// A few bytes at a time, so that what is read stays in the cache until all of its planes are written.
constexpr size_t PLANE_STEP = 4096;

template <class W>
void split_planes(const W* values, size_t n, uint8_t* planes) {
    for (size_t start = 0; start < n; start += PLANE_STEP) {
        const size_t end = std::min(n, start + PLANE_STEP);
        for (size_t byte = 0; byte < sizeof(W); ++byte) {
            uint8_t* plane = planes + byte * n;
            for (size_t i = start; i < end; ++i) plane[i] = uint8_t(values[i] >> (8 * byte));
        }
    }
}

template <class W>
void join_planes(const uint8_t* const* planes, size_t n, W* values) {
    for (size_t start = 0; start < n; start += PLANE_STEP) {
        const size_t end = std::min(n, start + PLANE_STEP);
        for (size_t i = start; i < end; ++i) values[i] = planes[0][i];
        for (size_t byte = 1; byte < sizeof(W); ++byte) {
            const uint8_t* plane = planes[byte];
            for (size_t i = start; i < end; ++i) values[i] = W(values[i] | W(W(plane[i]) << (8 * byte)));
        }
    }
}

}  // namespace

void planes_of(const void* values, size_t width, size_t n, uint8_t* planes) {
    with_width(width, [&](auto zero) { split_planes(static_cast<const decltype(zero)*>(values), n, planes); });
}

void of_planes(const uint8_t* const* planes, size_t width, size_t n, void* values) {
    with_width(width, [&](auto zero) { join_planes(planes, n, static_cast<decltype(zero)*>(values)); });
}

size_t gaps_room(const uint32_t* positions, size_t K) { return K + (K ? positions[K - 1] / ESCAPE : 0) + GAP_SLACK; }

size_t gaps_of(const uint32_t* positions, size_t K, uint8_t* out) { return level().coders->gaps(positions, K, out); }

void positions_of(const uint8_t* gaps, size_t G, size_t K, uint64_t numel, uint32_t* out) {
    const Reached reached = level().coders->positions(gaps, G, K, numel, out);
    if (reached.elements > numel)
        throw std::invalid_argument("the gap stream leaves the frame of " + std::to_string(numel) + " elements");
    if (reached.read != G || reached.written != K || (G && gaps[G - 1] == ESCAPE))
        throw std::invalid_argument("the gap stream does not hold " + std::to_string(K) + " gaps");
}

size_t symbols_of(const void* values, size_t width, size_t K, uint8_t* symbols) {
    return with_width(width, [&](auto zero) {
        using W = decltype(zero);
        return level().coders->of<W>().encode(static_cast<const W*>(values), K, symbols);
    });
}

void exceptions_of(const void* values, size_t width, const uint8_t* symbols, size_t K, void* exceptions) {
    for_escapes(symbols, K, [&](size_t i, size_t e) {
        std::memcpy(static_cast<char*>(exceptions) + e * width, static_cast<const char*>(values) + i * width, width);
    });
}

void values_of(const uint8_t* symbols, size_t K, const uint8_t* exceptions, size_t bytes, size_t width, void* out) {
    with_width(width, [&](auto zero) {
        fill_exceptions(symbols, K, exceptions, bytes, static_cast<decltype(zero)*>(out));
    });
}

}  // namespace dcr

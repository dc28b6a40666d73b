#include "huffman.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "level.hpp"

namespace dcr {
namespace {

constexpr unsigned REPEAT = 15;                    // a nibble: the previous length again, as often as the next one says
constexpr size_t FEWEST = 3, MOST = FEWEST + 15;   // repeats
constexpr size_t SIZES = 4 * (LANES - 1);          // bytes; the size of the last bit stream is what is left

using Counts = std::array<std::array<uint64_t, 256>, LANES>;

// Each lane is counted in two places, by turns: to count the same byte again at once would wait for the last time.
Counts count(const uint8_t* data, size_t n) {
    constexpr size_t PLACES = 2 * LANES;
    static_assert(PLACES == 8);
    std::array<std::array<uint64_t, 256>, PLACES> places{};
    size_t i = 0;
    for (; i + PLACES <= n; i += PLACES) {
        const uint64_t word = little_word(data + i);
        for (size_t place = 0; place < PLACES; ++place) ++places[place][word >> 8 * place & 0xFF];
    }
    for (; i < n; ++i) ++places[i % PLACES][data[i]];
    Counts counts;
    for (size_t lane = 0; lane < LANES; ++lane)
        for (size_t byte = 0; byte < 256; ++byte) counts[lane][byte] = places[lane][byte] + places[lane + LANES][byte];
    return counts;
}

// Optimal lengths of at most LONGEST bits, by package-merge (Larmore and Hirschberg 1990). At each of the LONGEST levels
// the bytes, lightest first, are merged with pairs of the level before; the 2n - 2 lightest at the last level are
// bought, with all that they are made of, and each time that a byte is bought its code gets a bit longer. Of equal
// weights a byte comes before a pair, and a lower byte before a higher one.
Lengths lengths_of(const std::array<uint64_t, 256>& totals) {
    Lengths lengths{};
    std::vector<uint8_t> bytes;
    for (unsigned byte = 0; byte < 256; ++byte)
        if (totals[byte]) bytes.push_back(uint8_t(byte));
    const size_t n = bytes.size();
    if (n < 2) return lengths;
    std::stable_sort(bytes.begin(), bytes.end(), [&](uint8_t a, uint8_t b) { return totals[a] < totals[b]; });

    // Each list lies between two weights that lose every comparison, so which one is taken from is never a branch; and
    // they are merged from both ends at once, since each step waits for the one before it.
    constexpr uint64_t LIGHTER = 0, HEAVIER = UINT64_MAX;
    std::array<uint64_t, 258> leaves;
    leaves[0] = LIGHTER, leaves[n + 1] = HEAVIER;
    for (size_t i = 0; i < n; ++i) leaves[i + 1] = totals[bytes[i]];
    std::array<std::array<bool, 512>, LONGEST> is_byte;
    std::array<uint64_t, 512> merged, pairs;
    pairs[0] = LIGHTER;
    size_t paired = 0;
    for (auto& flags : is_byte) {
        pairs[paired + 1] = HEAVIER;
        const size_t size = n + paired;  // below 2n
        size_t b = 1, p = 1, last_b = n, last_p = paired;
        for (size_t i = 0, last = size - 1; i <= last; ++i, --last) {
            const bool take = leaves[b] <= pairs[p], take_last = leaves[last_b] > pairs[last_p];
            flags[last] = take_last;
            merged[last] = take_last ? leaves[last_b] : pairs[last_p];
            last_b -= take_last;
            last_p -= !take_last;
            flags[i] = take;
            merged[i] = take ? leaves[b] : pairs[p];
            b += take;
            p += !take;
        }
        paired = size / 2;
        for (size_t i = 0; i < paired; ++i) pairs[i + 1] = merged[2 * i] + merged[2 * i + 1];
    }
    size_t bought = 2 * n - 2;
    for (unsigned level = LONGEST; level-- > 0;) {
        const size_t single = size_t(std::count(is_byte[level].begin(), is_byte[level].begin() + bought, true));
        for (size_t i = 0; i < single; ++i) ++lengths[bytes[i]];
        bought = 2 * (bought - single);
    }
    return lengths;
}

// The last `length` bits of a code in reverse.
unsigned turned(unsigned code, unsigned length) {
    code = (code & 0x5555) << 1 | (code >> 1 & 0x5555);
    code = (code & 0x3333) << 2 | (code >> 2 & 0x3333);
    code = (code & 0x0F0F) << 4 | (code >> 4 & 0x0F0F);
    code = (code & 0x00FF) << 8 | (code >> 8 & 0x00FF);
    return code >> (16 - length);
}

// The canonical code: shorter ones first, then by byte. Written lowest bit first, so the bits are turned round.
std::array<uint16_t, 256> codes_of(const Lengths& lengths) {
    std::array<unsigned, LONGEST + 1> counts{}, next{};
    for (const uint8_t length : lengths) ++counts[length];
    for (unsigned length = 2; length <= LONGEST; ++length) next[length] = (next[length - 1] + counts[length - 1]) << 1;
    std::array<uint16_t, 256> codes{};
    for (size_t byte = 0; byte < 256; ++byte)
        if (const unsigned length = lengths[byte]) codes[byte] = uint16_t(turned(next[length]++, length));
    return codes;
}

std::vector<uint8_t> table_of(const Lengths& lengths) {
    std::vector<uint8_t> nibbles;
    uint8_t previous = 0;
    for (size_t i = 0; i < 256;) {
        size_t run = 0;
        while (run < MOST && i + run < 256 && lengths[i + run] == previous) ++run;
        if (run >= FEWEST) {
            nibbles.insert(nibbles.end(), {uint8_t(REPEAT), uint8_t(run - FEWEST)});
            i += run;
        } else {
            nibbles.push_back(previous = lengths[i++]);
        }
    }
    if (nibbles.size() % 2) nibbles.push_back(0);
    std::vector<uint8_t> table(nibbles.size() / 2);
    for (size_t i = 0; i < table.size(); ++i) table[i] = uint8_t(nibbles[2 * i] | nibbles[2 * i + 1] << 4);
    return table;
}

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument("a Huffman-coded stream " + why); }

// Reads the table that `bytes` starts with; returns its size.
size_t read_table(const uint8_t* bytes, size_t size, Lengths& lengths) {
    size_t at = 0;  // in nibbles
    const auto next = [&] {
        if (at / 2 >= size) refuse("ends within its table");
        const unsigned nibble = (bytes[at / 2] >> (at % 2 * 4)) & 15;
        ++at;
        return nibble;
    };
    uint8_t previous = 0;
    for (size_t i = 0; i < 256;) {
        const unsigned nibble = next();
        if (nibble != REPEAT) {
            if (nibble > LONGEST) refuse("has a code of " + std::to_string(nibble) + " bits");
            lengths[i++] = previous = uint8_t(nibble);
            continue;
        }
        const size_t run = FEWEST + next();
        if (run > 256 - i) refuse("has more than 256 lengths in its table");
        std::fill_n(lengths.begin() + i, run, previous);
        i += run;
    }
    if (at % 2 && next() != 0) refuse("has a table that does not end in zero bits");
    return at / 2;
}

// Whether every sequence of bits means something, and one thing only.
bool is_complete(const Lengths& lengths) {
    uint64_t sum = 0;
    for (const uint8_t length : lengths)
        if (length) sum += uint64_t(1) << (LONGEST - length);
    return sum == uint64_t(1) << LONGEST;
}

uint32_t little_u32(const uint8_t* at) { return at[0] | at[1] << 8 | at[2] << 16 | uint32_t(at[3]) << 24; }

size_t symbols_in(size_t n, size_t lane) { return (n + LANES - 1 - lane) / LANES; }

}  // namespace

Packing plan_packing(const uint8_t* data, size_t n) {
    const Counts counts = count(data, n);
    std::array<uint64_t, 256> totals{};
    for (const auto& lane : counts)
        for (size_t byte = 0; byte < 256; ++byte) totals[byte] += lane[byte];
    Packing packing;
    packing.lengths = lengths_of(totals);
    if (!is_complete(packing.lengths)) return packing;
    packing.table = table_of(packing.lengths);
    size_t size = packing.table.size() + SIZES;
    for (size_t lane = 0; lane < LANES; ++lane) {
        uint64_t bits = 0;
        for (size_t byte = 0; byte < 256; ++byte) bits += counts[lane][byte] * packing.lengths[byte];
        packing.sizes[lane] = (bits + 7) / 8;
        size += packing.sizes[lane];
    }
    if (n <= UINT32_MAX && size + n / 50 < n) packing.size = size;
    return packing;
}

void pack(const Packing& packing, const uint8_t* data, size_t n, uint8_t* out) {
    const std::array<uint16_t, 256> bits = codes_of(packing.lengths);
    std::array<uint32_t, 256> codes;
    for (size_t byte = 0; byte < 256; ++byte) codes[byte] = bits[byte] | uint32_t(packing.lengths[byte]) << 16;
    std::memcpy(out, packing.table.data(), packing.table.size());
    uint8_t* at = out + packing.table.size();
    for (size_t lane = 0; lane + 1 < LANES; ++lane)
        for (unsigned byte = 0; byte < 4; ++byte) *at++ = uint8_t(packing.sizes[lane] >> (8 * byte));
    uint8_t* starts[LANES];
    for (size_t lane = 0; lane < LANES; ++lane) {
        starts[lane] = at;
        at += packing.sizes[lane];
    }
    level().coders->write_bits(data, n, codes.data(), starts);
}

Packed open_packed(const uint8_t* bytes, size_t size, size_t n) {
    Packed packed{bytes, n, {}, {}, {}};
    size_t at = read_table(bytes, size, packed.lengths);
    if (!is_complete(packed.lengths)) refuse("has a table that is no complete code");
    if (size - at < SIZES) refuse("ends within its sizes");
    size_t start = at + SIZES;
    for (size_t lane = 0; lane < LANES; ++lane, at += 4) {
        const size_t left = size - start, bytes_here = lane + 1 < LANES ? little_u32(bytes + at) : left;
        // Every code has at least one bit: this bounds what a short stream can claim to hold.
        if (bytes_here > left || (symbols_in(n, lane) + 7) / 8 > bytes_here)
            refuse("has a bit stream of " + std::to_string(bytes_here) + " bytes for " +
                   std::to_string(symbols_in(n, lane)) + " symbols, where " + std::to_string(left) + " are left");
        packed.starts[lane] = start;
        packed.ends[lane] = start += bytes_here;
    }
    return packed;
}

void unpack(const Packed& packed, uint8_t* out) {
    const std::array<uint16_t, 256> codes = codes_of(packed.lengths);
    std::array<uint16_t, 1 << LONGEST> table;
    for (unsigned byte = 0; byte < 256; ++byte) {
        const unsigned length = packed.lengths[byte];
        if (length == 0) continue;
        for (unsigned code = codes[byte]; code < table.size(); code += 1u << length)
            table[code] = uint16_t(length | byte << 8);
    }
    uint64_t at[LANES];
    for (size_t lane = 0; lane < LANES; ++lane) at[lane] = 8 * uint64_t(packed.starts[lane]);
    level().coders->read_bits(packed.bytes, table.data(), at, packed.ends.data(), packed.n, out);
    for (size_t lane = 0; lane < LANES; ++lane) {
        if ((at[lane] + 7) / 8 != packed.ends[lane]) refuse("does not end where its last code does");
        if (at[lane] % 8 && packed.bytes[at[lane] / 8] >> (at[lane] % 8)) refuse("does not end in zero bits");
    }
}

}  // namespace dcr

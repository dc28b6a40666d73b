// A bounded fuzz of the codec's decoders: mutated inputs, at every dispatch level, in buffers of exactly their size.
//
//     fuzz_decoders ROUNDS CORPUS_FILE...          see tests/native/run.sh
//
// An input is: decoder (1 byte: 0 positions_of, 1 values_of, 2 unpack, 3 merge), two 32-bit arguments, the stream. A decoder may
// refuse an input; what it accepts must be sound. The same rounds always do the same, so a failure can be repeated.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/classes.hpp"
#include "cpu/huffman.hpp"
#include "cpu/level.hpp"
#include "cpu/streams.hpp"

namespace {

using Input = std::vector<uint8_t>;

constexpr size_t HEADER = 9;
constexpr uint32_t LARGEST = 1 << 20;  // of what a decoder may be asked for: its caller knows the frame

uint64_t state = 0x9E3779B97F4A7C15;
uint64_t random_word() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}
size_t below(size_t n) { return n ? size_t(random_word() % n) : 0; }

uint32_t argument(const Input& input, size_t at) {
    return input[at] | input[at + 1] << 8 | input[at + 2] << 16 | uint32_t(input[at + 3]) << 24;
}

void demand(bool sound, const char* what) {
    if (sound) return;
    std::fprintf(stderr, "unsound: %s\n", what);
    std::abort();
}

void decode_positions(const uint8_t* stream, size_t size, uint32_t K, uint32_t numel) {
    if (K > size || K > numel) return;
    const std::unique_ptr<uint32_t[]> out(new uint32_t[K]);
    dcr::positions_of(stream, size, K, numel, out.get());
    for (size_t i = 0; i < K; ++i) demand(out[i] < numel && (i == 0 || out[i] > out[i - 1]), "positions do not ascend");
}

void decode_values(const uint8_t* stream, size_t size, uint32_t K, uint32_t width_log) {
    const size_t width = size_t(1) << (width_log & 3);
    if (K > size) return;
    const std::unique_ptr<uint8_t[]> symbols(new uint8_t[K]), exceptions(new uint8_t[size - K]);
    const std::unique_ptr<uint64_t[]> out(new uint64_t[(K * width + 7) / 8]);
    std::copy(stream, stream + K, symbols.get());
    std::copy(stream + K, stream + size, exceptions.get());
    dcr::values_of(symbols.get(), K, exceptions.get(), size - K, width, out.get());
}

void decode_packed(const uint8_t* stream, size_t size, uint32_t n) {
    const dcr::Packed packed = dcr::open_packed(stream, size, n);
    const std::unique_ptr<uint8_t[]> out(new uint8_t[n]);
    dcr::unpack(packed, out.get());
}

// The stream: cuts, the counts of all classes but the last (a byte each), numbers within classes (4 bytes each), and the
// old bits of a frame. Values are the numbers again.
void decode_classes(const uint8_t* stream, size_t size, uint32_t K, uint32_t width_log) {
    const size_t width = size_t(1) << (width_log & 3), head = 2 * dcr::CUTS;
    if (size < head || K > (size - head) / 4) return;
    const size_t N = (size - head - 4 * K) / width;
    size_t counts[dcr::CLASSES], left = K;
    for (size_t c = 0; c + 1 < dcr::CLASSES; ++c) {
        counts[c] = std::min<size_t>(stream[dcr::CUTS + c], left);
        left -= counts[c];
    }
    counts[dcr::CLASSES - 1] = left;
    const auto words = [](size_t bytes) { return std::unique_ptr<uint64_t[]>(new uint64_t[(bytes + 7) / 8]); };
    const auto ranks = std::unique_ptr<uint32_t[]>(new uint32_t[K]), positions = std::unique_ptr<uint32_t[]>(new uint32_t[K]);
    const auto values = words(K * width), merged = words(K * width);
    const std::unique_ptr<uint8_t[]> base(new uint8_t[N * width]);  // aligned for any width by operator new
    std::memcpy(ranks.get(), stream + head, 4 * K);
    std::memcpy(base.get(), stream + head + 4 * K, N * width);
    std::memset(values.get(), 1, K * width);
    dcr::merge(base.get(), N, width, stream, counts, ranks.get(), values.get(), positions.get(), merged.get());
    for (size_t i = 0; i < K; ++i)
        demand(positions[i] < N && (i == 0 || positions[i] > positions[i - 1]), "merged positions do not ascend");
}

// Returns whether the input was accepted.
bool decode(const Input& input) {
    if (input.size() < HEADER) return false;
    const uint32_t a = std::min(argument(input, 1), LARGEST), b = argument(input, 5);
    const size_t size = input.size() - HEADER;
    const std::unique_ptr<uint8_t[]> stream(new uint8_t[size]);  // exactly as long, so that one byte further is noticed
    std::copy(input.begin() + HEADER, input.end(), stream.get());
    try {
        switch (input[0] % 4) {
            case 0: decode_positions(stream.get(), size, a, b); break;
            case 1: decode_values(stream.get(), size, a, b); break;
            case 3: decode_classes(stream.get(), size, a, b); break;
            default: decode_packed(stream.get(), size, a);
        }
        return true;
    } catch (const std::invalid_argument&) {
        return false;
    }
}

void mutate(Input& input) {
    for (size_t times = 1 + below(4); times > 0; --times) {
        const size_t at = below(2) ? below(input.size()) : below(std::min<size_t>(input.size(), 64));
        switch (below(7)) {
            case 0: if (!input.empty()) input[at] ^= uint8_t(1 << below(8)); break;
            case 1: if (!input.empty()) input[at] = uint8_t(random_word()); break;
            case 2: if (!input.empty()) input[at] = below(2) ? 255 : 0; break;
            case 3: input.resize(at); break;
            case 4: input.insert(input.begin() + at, below(20), uint8_t(below(2) ? 255 : random_word())); break;
            case 5: input.erase(input.begin() + at, input.begin() + at + below(std::min<size_t>(20, input.size() - at))); break;
            default: if (input.size() >= HEADER) input[1 + below(8)] += uint8_t(1 + below(3)); break;
        }
    }
}

// What the encoders write fits the room that they ask for, and comes back.
void round_trip() {
    const size_t n = below(3000);
    Input data(n);
    const size_t letters = 1 + below(256), skew = 1 + below(4);
    for (uint8_t& byte : data) {
        size_t letter = letters;
        for (size_t i = 0; i < skew; ++i) letter = std::min(letter, below(letters + 1));
        byte = uint8_t(letter);
    }
    const dcr::Packing packing = dcr::plan_packing(data.data(), n);
    if (packing.size) {
        const std::unique_ptr<uint8_t[]> packed(new uint8_t[packing.size]), out(new uint8_t[n]);
        dcr::pack(packing, data.data(), n, packed.get());
        dcr::unpack(dcr::open_packed(packed.get(), packing.size, n), out.get());
        demand(std::equal(data.begin(), data.end(), out.get()), "a packed stream comes back changed");
    }
    std::vector<uint32_t> positions;
    const size_t spread = 1 + below(3000);
    for (uint32_t at = 0; positions.size() < n; at += uint32_t(1 + below(spread))) positions.push_back(at);
    const std::unique_ptr<uint8_t[]> gaps(new uint8_t[dcr::gaps_room(positions.data(), n)]);
    const size_t size = dcr::gaps_of(positions.data(), n, gaps.get());
    const std::unique_ptr<uint32_t[]> out(new uint32_t[n]);
    dcr::positions_of(gaps.get(), size, n, uint64_t(1) << 32, out.get());
    demand(std::equal(positions.begin(), positions.end(), out.get()), "positions come back changed");

    std::vector<uint16_t> base(n), changed;
    std::vector<uint32_t> at;
    for (uint16_t& word : base) word = uint16_t(random_word());
    for (uint32_t i = 0; i < n; i += uint32_t(1 + below(40))) at.push_back(i), changed.push_back(uint16_t(random_word()));
    const size_t K = at.size();
    uint8_t cuts[dcr::CUTS] = {uint8_t(below(100)), uint8_t(100 + below(50)), uint8_t(150 + below(100))};
    size_t counts[dcr::CLASSES];
    const std::unique_ptr<uint32_t[]> ranks(new uint32_t[K]), found(new uint32_t[K]);
    const std::unique_ptr<uint16_t[]> grouped(new uint16_t[K]), merged(new uint16_t[K]);
    dcr::split(base.data(), n, 2, cuts, at.data(), changed.data(), K, ranks.get(), grouped.get(), counts);
    dcr::merge(base.data(), n, 2, cuts, counts, ranks.get(), grouped.get(), found.get(), merged.get());
    demand(std::equal(at.begin(), at.end(), found.get()), "positions by class come back changed");
    demand(std::equal(changed.begin(), changed.end(), merged.get()), "values by class come back changed");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 3) return std::fprintf(stderr, "usage: fuzz_decoders ROUNDS CORPUS_FILE...\n"), 2;
    std::vector<Input> corpus;
    for (int i = 2; i < argc; ++i) {
        std::ifstream file(argv[i], std::ios::binary);
        corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    for (const dcr::Level& level : dcr::levels()) {
        dcr::use_level(level.name);
        size_t accepted = 0, rounds = std::strtoull(argv[1], nullptr, 10);
        for (const Input& input : corpus) demand(decode(input), "the corpus holds what writers make");
        for (size_t round = 0; round < rounds; ++round) {
            Input input = corpus[below(corpus.size())];
            mutate(input);
            accepted += decode(input);
            if (round % 16 == 0) round_trip();
        }
        std::printf("%s: %zu rounds, %zu accepted\n", level.name, rounds, accepted);
    }
    return 0;
}

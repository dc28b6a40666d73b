// The compression of BLAKE3 in as many lanes as a vector has. Included by each level's file, within its namespace and
// behind its DCR_TARGET: vectors wider than the machine's are cut up before a function is inlined, so every function here
// has to be the level's own.
#include "blake3.hpp"

#ifndef DCR_INLINE
#define DCR_INLINE __attribute__((always_inline)) inline
#endif

constexpr unsigned PIECE_START = 1, PIECE_END = 2, PARENT = 4, ROOT = 8;  // flags
constexpr size_t BLOCK_BYTES = 64, BLOCK_WORDS = 16, BLOCKS = PIECE_BYTES / BLOCK_BYTES;
constexpr uint32_t START[VALUE_WORDS] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                         0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

// Which word of the block each step of each round takes.
struct Schedule {
    uint8_t word[7][BLOCK_WORDS];
    constexpr Schedule() : word{} {
        constexpr uint8_t PERMUTED[BLOCK_WORDS] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
        for (uint8_t i = 0; i < BLOCK_WORDS; ++i) word[0][i] = i;
        for (int round = 1; round < 7; ++round)
            for (size_t i = 0; i < BLOCK_WORDS; ++i) word[round][i] = word[round - 1][PERMUTED[i]];
    }
};
constexpr Schedule SCHEDULE;

// A word of every lane; of one lane, the word itself.
template <size_t LANES_>
struct Vector {
    typedef uint32_t type __attribute__((vector_size(4 * LANES_)));
};
template <>
struct Vector<1> {
    typedef uint32_t type;
};

template <unsigned BITS, class V>
DCR_TARGET DCR_INLINE void rotate(V& x) {
    x = x >> BITS | x << (32 - BITS);
}

template <class V>
DCR_TARGET DCR_INLINE void mix(V& a, V& b, V& c, V& d, const V& x, const V& y) {
    a += b + x;
    d ^= a;
    rotate<16>(d);
    c += d;
    b ^= c;
    rotate<12>(b);
    a += b + y;
    d ^= a;
    rotate<8>(d);
    c += d;
    b ^= c;
    rotate<7>(b);
}

// value [8] becomes what it is after a block; counter, length and flags: words 12 to 15 of the state.
template <class V>
DCR_TARGET DCR_INLINE void compress(V* value, const V* block, const V& counter_low, const V& counter_high, uint32_t length,
                                    uint32_t flags) {
    const V zero = counter_low ^ counter_low;
    V state[16] = {value[0],        value[1],        value[2],        value[3],        value[4],     value[5],
                   value[6],        value[7],        zero + START[0], zero + START[1], zero + START[2], zero + START[3],
                   counter_low,     counter_high,    zero + length,   zero + flags};
#pragma GCC unroll 7
    for (int round = 0; round < 7; ++round) {
        const uint8_t* word = SCHEDULE.word[round];
        mix(state[0], state[4], state[8], state[12], block[word[0]], block[word[1]]);
        mix(state[1], state[5], state[9], state[13], block[word[2]], block[word[3]]);
        mix(state[2], state[6], state[10], state[14], block[word[4]], block[word[5]]);
        mix(state[3], state[7], state[11], state[15], block[word[6]], block[word[7]]);
        mix(state[0], state[5], state[10], state[15], block[word[8]], block[word[9]]);
        mix(state[1], state[6], state[11], state[12], block[word[10]], block[word[11]]);
        mix(state[2], state[7], state[8], state[13], block[word[12]], block[word[13]]);
        mix(state[3], state[4], state[9], state[14], block[word[14]], block[word[15]]);
    }
    for (size_t i = 0; i < VALUE_WORDS; ++i) value[i] = state[i] ^ state[i + 8];
}

// Every second lane from the lower (or upper) half of a, the others from that of b.
template <size_t LANES_, bool UPPER, class V, size_t... I>
DCR_TARGET DCR_INLINE void interleave(const V& a, const V& b, V& out, std::index_sequence<I...>) {
#if defined(__clang__)
    out = __builtin_shufflevector(a, b, int(I / 2 + (UPPER ? LANES_ / 2 : 0) + I % 2 * LANES_)...);
#else
    out = __builtin_shuffle(a, b, V{uint32_t(I / 2 + (UPPER ? LANES_ / 2 : 0) + I % 2 * LANES_)...});
#endif
}

// Word i of every lane's block, for all i; LANES_ words of all lanes at a time are a square that is turned by interleaving.
template <size_t LANES_, class V>
DCR_TARGET DCR_INLINE void load_blocks(const uint8_t* const* from, V* block) {
    for (size_t first = 0; first < BLOCK_WORDS; first += LANES_) {
        V rows[LANES_], turned[LANES_];
        for (size_t lane = 0; lane < LANES_; ++lane) std::memcpy(&rows[lane], from[lane] + 4 * first, sizeof(V));
#pragma GCC unroll 4
        for (size_t done = 1; done < LANES_; done *= 2) {
            for (size_t i = 0; i < LANES_ / 2; ++i) {
                interleave<LANES_, false>(rows[i], rows[i + LANES_ / 2], turned[2 * i], std::make_index_sequence<LANES_>());
                interleave<LANES_, true>(rows[i], rows[i + LANES_ / 2], turned[2 * i + 1],
                                         std::make_index_sequence<LANES_>());
            }
            for (size_t i = 0; i < LANES_; ++i) rows[i] = turned[i];
        }
        for (size_t i = 0; i < LANES_; ++i) block[first + i] = rows[i];
    }
}

template <class V>
DCR_TARGET DCR_INLINE void begin(V* value, const V& any) {
    for (size_t i = 0; i < VALUE_WORDS; ++i) value[i] = (any ^ any) + START[i];
}

template <size_t LANES_, class V>
DCR_TARGET DCR_INLINE void store_values(const V* value, size_t first, size_t count, uint32_t* values) {
    uint32_t words[VALUE_WORDS][LANES_];
    std::memcpy(words, value, sizeof words);
    for (size_t lane = 0; lane < count; ++lane)
        for (size_t i = 0; i < VALUE_WORDS; ++i) values[VALUE_WORDS * (first + lane) + i] = words[i][lane];
}

template <size_t LANES_>
DCR_TARGET void hash_pieces(const uint8_t* data, size_t pieces, uint32_t* values) {
    using V = typename Vector<LANES_>::type;
    for (size_t first = 0; first < pieces; first += LANES_) {
        const uint8_t* from[LANES_];
        V low, high, value[VALUE_WORDS], block[BLOCK_WORDS];
        for (size_t lane = 0; lane < LANES_; ++lane) {
            from[lane] = data + PIECE_BYTES * std::min(first + lane, pieces - 1);
            low[lane] = uint32_t(first + lane);
            high[lane] = uint32_t(uint64_t(first + lane) >> 32);
        }
        begin(value, low);
        for (size_t i = 0; i < BLOCKS; ++i) {
            load_blocks<LANES_>(from, block);
            compress(value, block, low, high, BLOCK_BYTES, (i == 0 ? PIECE_START : 0) | (i + 1 == BLOCKS ? PIECE_END : 0));
            for (const uint8_t*& at : from) at += BLOCK_BYTES;
        }
        store_values<LANES_>(value, first, std::min(LANES_, pieces - first), values);
    }
}

template <size_t LANES_>
DCR_TARGET void hash_parents(const uint32_t* children, size_t parents, uint32_t* values) {
    using V = typename Vector<LANES_>::type;
    for (size_t first = 0; first < parents; first += LANES_) {
        const uint8_t* from[LANES_];
        V zero{}, value[VALUE_WORDS], block[BLOCK_WORDS];
        for (size_t lane = 0; lane < LANES_; ++lane)
            from[lane] = reinterpret_cast<const uint8_t*>(children + BLOCK_WORDS * std::min(first + lane, parents - 1));
        load_blocks<LANES_>(from, block);
        begin(value, zero);
        compress(value, block, zero, zero, BLOCK_BYTES, PARENT);
        store_values<LANES_>(value, first, std::min(LANES_, parents - first), values);
    }
}

// The kernels against plain loops, at every dispatch level: for machines without Python (a cross build under an emulator)
// and for sanitizers, in buffers of exactly their size. tests/kernels/test_kernels.py is the full comparison.
//
//     check_kernels ROUNDS        see run.sh; the same rounds always do the same
//
//     B  rows of a table      N  elements of a table      K  changed elements      T  tensors
#include "cpu/kernels.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/blake3.hpp"
#include "cpu/cast.hpp"
#include "cpu/level.hpp"

namespace {

using namespace dcr;

constexpr size_t T = 3;

uint64_t state = 0x9E3779B97F4A7C15;
uint64_t random_word() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}
uint64_t below(uint64_t n) { return random_word() % n; }

void demand(bool sound, const char* what) {
    if (sound) return;
    std::fprintf(stderr, "wrong at level %s: %s\n", level().name, what);
    std::abort();
}

// An array of exactly its size, so that a sanitizer sees a step too far.
template <class W>
struct Exact {
    explicit Exact(size_t n) : data(new W[n]), size(n) { std::memset(static_cast<void*>(data.get()), 0, n * sizeof(W)); }
    std::unique_ptr<W[]> data;
    size_t size;
    W* get() const { return data.get(); }
    W& operator[](size_t i) const { return data[i]; }
    bool operator==(const Exact& other) const {
        return size == other.size && std::equal(get(), get() + size, other.get());
    }
};

template <class W>
Exact<W> random_bits(size_t n) {
    Exact<W> bits(n);
    for (size_t i = 0; i < n; ++i) bits[i] = W(random_word());
    return bits;
}

// Boxes that follow each other in one storage, none of which holds an element twice; and where each element lies.
struct Layout {
    std::vector<int64_t> rows;
    std::vector<uint64_t> here, there, tensor;  // [N], by number
    size_t elements = 0;                        // of the storage

    size_t B() const { return rows.size() / COLUMNS; }

    void add_row() {
        const int ndim = int(below(4));
        uint64_t n[4], stride[4], there_stride[4], span = 1;
        for (int d = 0; d < ndim; ++d) n[d] = 1 + below(d == ndim - 1 ? 600 : 6);
        for (int d = ndim; d-- > 0;) {  // the last dim is the closest, most of the time
            stride[d] = span + below(3) * below(2);
            there_stride[d] = below(1000);
            span = stride[d] * (n[d] - 1) + span;
        }
        if (ndim > 1 && below(3) == 0) {
            std::swap(n[0], n[ndim - 1]);
            std::swap(stride[0], stride[ndim - 1]);
        }
        uint64_t first = elements;
        for (int d = 0; d < ndim; ++d) {
            if (below(4)) continue;
            first += stride[d] * (n[d] - 1);
            stride[d] = -stride[d];  // backwards
        }
        if (ndim > 0 && below(8) == 0) n[below(uint64_t(ndim))] = 0;
        int64_t row[COLUMNS] = {0, int64_t(first), int64_t(below(T)), int64_t(below(100)), ndim};
        for (int d = 0; d < ndim; ++d) {
            row[5 + d] = int64_t(n[d]);
            row[5 + MAX_DIMS + d] = int64_t(stride[d]);
            row[5 + 2 * MAX_DIMS + d] = int64_t(there_stride[d]);
        }
        number(row, 0, row[1], row[3]);
        elements += span + below(5);
        rows.insert(rows.end(), row, row + COLUMNS);
    }

    void number(const int64_t* row, int d, int64_t at, int64_t index) {
        if (d == row[4]) {
            here.push_back(uint64_t(at));
            there.push_back(uint64_t(index));
            tensor.push_back(uint64_t(row[2]));
            return;
        }
        for (int64_t i = 0; i < row[5 + d]; ++i)
            number(row, d + 1, at + i * row[5 + MAX_DIMS + d], index + i * row[5 + 2 * MAX_DIMS + d]);
    }
};

using Lanes = std::vector<uint64_t>;

// The digest's mixing, as dcr/kernels/reference.py has it.
void mix(const Layout& layout, size_t number, uint64_t bits, const Lanes& keys, Lanes& sums) {
    const uint64_t t = layout.tensor[number];
    uint64_t u = (layout.there[number] ^ keys[2 * t]) * 0x9E3779B97F4A7C15u;
    u ^= u >> 32;
    uint64_t x = u + (bits ^ keys[2 * t + 1]) * 0xD6E8FEB86659FD93u;
    x ^= x >> 32;
    x *= 0xBF58476D1CE4E5B9u;
    x ^= x >> 29;
    uint64_t y = x * 0x94D049BB133111EBu;
    y ^= y >> 32;
    sums[2 * t] += x;
    sums[2 * t + 1] += y;
}

template <class W>
struct Check {
    Layout layout;
    Exact<W> storage;
    std::vector<Array> arrays;
    size_t N;
    Lanes keys;
    std::vector<uint32_t> positions;
    size_t K;

    static Layout random_layout() {
        Layout layout;
        for (size_t rows = 1 + below(5); rows > 0; --rows) layout.add_row();
        return layout;
    }

    Check() : layout(random_layout()), storage(random_bits<W>(layout.elements + 4)), N(layout.here.size()) {
        arrays = {{storage.get(), storage.size, sizeof(W), true}};
        for (size_t i = 0; i < 2 * T; ++i) keys.push_back(random_word());
        const uint64_t share = below(3) == 0 ? 2 : 1 + below(150);
        for (size_t i = 0; i < N; ++i)
            if (below(share) == 0) positions.push_back(uint32_t(i));
        K = positions.size();
        positions.shrink_to_fit();
    }

    Table table(Follow follow) const { return Table(arrays, layout.rows.data(), layout.B(), follow, T, true); }
    W bits_of(size_t number) const { return storage[layout.here[number]]; }

    void reads() const {
        Exact<W> dense(N), gathered(K);
        read(table(Follow::HERE), NONE, dense.get());
        for (size_t i = 0; i < N; ++i) demand(dense[i] == bits_of(i), "read");
        gather(table(Follow::HERE), positions.data(), K, gathered.get());
        for (size_t i = 0; i < K; ++i) demand(gathered[i] == bits_of(positions[i]), "gather");
    }

    void compares() const {
        Exact<W> base(N);
        for (size_t i = 0; i < N; ++i) base[i] = bits_of(i);
        for (const uint32_t position : positions) base[position] ^= W(1) << below(8 * sizeof(W));
        Changes found = compare(table(Follow::HERE), base.get(), NONE);
        demand(found.size() == K, "compare finds more or less than what changed");
        const Memory taken_at = found.take_positions(), taken_now = found.take_bits(), taken_old = found.take_old();
        const uint32_t* at = static_cast<const uint32_t*>(taken_at.get());
        const W *now = static_cast<const W*>(taken_now.get()), *old = static_cast<const W*>(taken_old.get());
        for (size_t i = 0; i < K; ++i)
            demand(at[i] == positions[i] && now[i] == bits_of(at[i]) && old[i] == base[at[i]], "compare");
    }

    void digests() const {
        Lanes found(2 * T), expected(2 * T);
        digest(table(Follow::SCAN), keys.data(), NONE, found.data());
        for (size_t i = 0; i < N; ++i) mix(layout, i, bits_of(i), keys, expected);
        demand(found == expected, "digest");
        const Exact<W> bits = random_bits<W>(K);
        std::fill(found.begin(), found.end(), 0);
        std::fill(expected.begin(), expected.end(), 0);
        digest_at(table(Follow::THERE), keys.data(), positions.data(), bits.get(), sizeof(W), K, found.data());
        for (size_t i = 0; i < K; ++i) mix(layout, positions[i], bits[i], keys, expected);
        demand(found == expected, "digest_at");
    }

    void prepares() const {
        const Exact<W> values = random_bits<W>(K);
        const Operation operation = Operation(below(3));
        Exact<W> old(K), now(K);
        Lanes old_sums(2 * T), new_sums(2 * T), expected_old(2 * T), expected_new(2 * T), again_old(2 * T), again_new(2 * T);
        prepare(table(Follow::BOTH), keys.data(), positions.data(), values.get(), K, operation, old.get(), now.get(),
                old_sums.data(), new_sums.data());
        for (size_t i = 0; i < K; ++i) {
            const W before = bits_of(positions[i]);
            const W after = operation == Operation::OVERWRITE ? values[i]
                            : operation == Operation::XOR     ? W(values[i] ^ before)
                                                              : W(values[i] + before);
            demand(old[i] == before && now[i] == after, "prepare");
            mix(layout, positions[i], before, keys, expected_old);
            mix(layout, positions[i], after, keys, expected_new);
        }
        demand(old_sums == expected_old && new_sums == expected_new, "the digests of prepare");
        digest_both(table(Follow::THERE), keys.data(), positions.data(), old.get(), now.get(), sizeof(W), K,
                    again_old.data(), again_new.data());
        demand(again_old == expected_old && again_new == expected_new, "digest_both");
    }

    void scatters() const {
        const Exact<W> bits = random_bits<W>(K);
        Exact<W> expected(storage.size);
        std::copy(storage.get(), storage.get() + storage.size, expected.get());
        for (size_t i = 0; i < K; ++i) expected[layout.here[positions[i]]] = bits[i];
        const size_t wrong = scatter(table(Follow::HERE), positions.data(), bits.get(), K);
        demand(wrong == 0 && storage == expected, "scatter");
    }

    void selects() const {
        std::vector<int64_t> runs;
        std::vector<uint32_t> indices, local;
        uint32_t held = 0;
        for (uint64_t at = below(50); at < N; at += below(300)) {
            const uint64_t count = below(200);
            runs.insert(runs.end(), {int64_t(at), int64_t(count)});
            for (size_t i = 0; i < K; ++i)
                if (positions[i] >= at && positions[i] < at + count) {
                    indices.push_back(uint32_t(i));
                    local.push_back(uint32_t(positions[i] - at + held));
                }
            held += uint32_t(count);
            at += count;
        }
        const Selection selection = plan_selection(positions.data(), K, runs.data(), runs.size() / 2);
        Exact<uint32_t> found_indices(selection.size), found_local(selection.size);
        select(selection, positions.data(), found_indices.get(), found_local.get());
        demand(selection.size == indices.size() &&
                   std::equal(indices.begin(), indices.end(), found_indices.get()) &&
                   std::equal(local.begin(), local.end(), found_local.get()),
               "select");
    }

    void all() const {
        reads();
        compares();
        digests();
        prepares();
        scatters();
        selects();
    }
};

// Everything differs: what is found fills its room to the last element, whose vector is not full.
template <class W>
void fills() {
    constexpr size_t N = 1 << 17, FEW = 5;
    const Exact<W> storage = random_bits<W>(N), base(N);
    for (size_t i = 0; i < N; ++i) base[i] = W(~storage[i]);
    int64_t rows[2][COLUMNS] = {{0, 0, 0, 0, 1}, {0, FEW, 0, 0, 1}};
    rows[0][5] = FEW, rows[1][5] = N - FEW;
    rows[0][5 + MAX_DIMS] = rows[1][5 + MAX_DIMS] = 1;
    Changes found = compare(Table({{storage.get(), N, sizeof(W), true}}, rows[0], 2, Follow::HERE), base.get(), NONE);
    demand(found.size() == N, "compare does not find everything");
    const Memory taken_at = found.take_positions(), taken_now = found.take_bits(), taken_old = found.take_old();
    for (size_t i = 0; i < N; ++i) demand(static_cast<const uint32_t*>(taken_at.get())[i] == i, "compare of everything");
    demand(!std::memcmp(taken_now.get(), storage.get(), N * sizeof(W)), "new bits of everything");
    demand(!std::memcmp(taken_old.get(), base.get(), N * sizeof(W)), "old bits of everything");
}

void casts() {
    const Check<uint32_t> check;
    for (const int kind : {F32_BF16, F32_F16}) {
        Exact<uint16_t> cast(check.N), base(check.N);
        read(check.table(Follow::HERE), kind, cast.get());
        for (size_t i = 0; i < check.N; ++i) {
            const uint32_t bits = check.bits_of(i);
            demand(cast[i] == (kind == F32_BF16 ? bf16_of(bits) : f16_of(bits)), "cast");
            base[i] = cast[i];
        }
        for (const uint32_t position : check.positions) base[position] ^= 1;
        Changes found = compare(check.table(Follow::HERE), base.get(), kind);
        demand(found.size() == check.K, "compare with a cast finds more or less than what changed");
        const Memory taken_at = found.take_positions(), taken_now = found.take_bits(), taken_old = found.take_old();
        const uint32_t* at = static_cast<const uint32_t*>(taken_at.get());
        const uint16_t *now = static_cast<const uint16_t*>(taken_now.get()),
                       *old = static_cast<const uint16_t*>(taken_old.get());
        for (size_t i = 0; i < check.K; ++i)
            demand(at[i] == check.positions[i] && now[i] == cast[at[i]] && old[i] == base[at[i]], "compare with a cast");
    }
}

// A published vector, and data of any size as the portable level hashes it.
void hashes() {
    const Exact<uint8_t> counted(31'744), data = random_bits<uint8_t>(below(40'000));
    for (size_t i = 0; i < counted.size; ++i) counted[i] = uint8_t(i % 251);
    Exact<uint8_t> found(BLAKE3_BYTES), expected(BLAKE3_BYTES);
    blake3(counted.get(), counted.size, found.get());
    demand(found[0] == 0x62 && found[1] == 0xB6 && found[30] == 0x5C && found[31] == 0x47, "blake3 of a published vector");
    blake3(data.get(), data.size, found.get());
    const std::string name = level().name;
    use_level("portable");
    blake3(data.get(), data.size, expected.get());
    use_level(name);
    demand(found == expected, "blake3");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) return std::fprintf(stderr, "usage: check_kernels ROUNDS\n"), 2;
    const size_t rounds = std::strtoull(argv[1], nullptr, 10);
    for (const Level& level : levels()) {
        use_level(level.name);
        fills<uint8_t>(), fills<uint16_t>(), fills<uint32_t>(), fills<uint64_t>();
        for (size_t round = 0; round < rounds; ++round) {
            Check<uint8_t>().all();
            Check<uint16_t>().all();
            Check<uint32_t>().all();
            Check<uint64_t>().all();
            casts();
            hashes();
        }
        std::printf("%s: %zu rounds\n", level.name, rounds);
    }
    return 0;
}

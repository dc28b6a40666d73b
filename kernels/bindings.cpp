// dcr._native: the kernels as python functions over numpy arrays. See dcr/_native.pyi for the signatures.
//
// Arrays are borrowed through the buffer protocol and checked before any work starts; what does not fit raises
// ValueError. The GIL is released while a kernel runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "cpu/blake3.hpp"
#include "cpu/cast.hpp"
#include "cpu/classes.hpp"
#include "cpu/huffman.hpp"
#include "cpu/kernels.hpp"
#include "cpu/level.hpp"
#include "cpu/streams.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace dcr::bindings {
namespace {

void check_kind(int kind, const Table& table) {
    if (kind < NONE || kind > F32_F16) throw std::invalid_argument("no value map " + std::to_string(kind));
    if (kind != NONE && table.width != 0 && table.width != 4)
        throw std::invalid_argument("value map " + std::to_string(kind) + " reads 4 bytes per element, the storages have " +
                                    std::to_string(table.width));
}

// Bytes per element of a result; a table without storages has width 1, as in dcr.layout.views.
size_t result_width(int kind, const Table& table) {
    return width_after(kind, table.width ? table.width : 1);
}

// Bytes per element that an argument must have: those of the result, but a table without storages takes any.
size_t argument_width(int kind, const Table& table) { return table.width ? width_after(kind, table.width) : 0; }

nb::object read(nb::handle storages, nb::handle rows, int kind) {
    const LentTable lent(storages, rows);
    const Table table = lent.table(Follow::HERE);
    check_kind(kind, table);
    nb::object out = empty(table.numel, result_width(kind, table));
    void* data = data_of(out);
    nb::gil_scoped_release released;
    dcr::read(table, kind, data);
    return out;
}

// What differs from a base: positions, new bits, old bits.
struct Compared {
    nb::object positions, bits, old;
    size_t size;

    Compared(const LentTable& lent, nb::handle base_, int kind) {
        const Table table = lent.table(Follow::HERE);
        check_kind(kind, table);
        const size_t width = result_width(kind, table);
        const Lent base(base_, "base");
        base.expect(UNSIGNED, argument_width(kind, table), 1).expect_size(table.numel);
        Changes found(width);
        {
            nb::gil_scoped_release released;
            found = dcr::compare(table, base.data<void>(), kind);
        }
        size = found.size();
        positions = owned(found.take_positions(), size, 4);
        bits = owned(found.take_bits(), size, width), old = owned(found.take_old(), size, width);
    }
};

nb::tuple compare(nb::handle storages, nb::handle rows, nb::handle base, int kind) {
    const Compared found(LentTable(storages, rows), base, kind);
    return nb::make_tuple(found.positions, found.bits);
}

nb::object gather(nb::handle storages, nb::handle rows, nb::handle positions_) {
    const LentTable lent(storages, rows);
    const Table table = lent.table(Follow::HERE);
    const Lent positions(positions_, "positions");
    positions.expect(UNSIGNED, 4, 1);
    check_positions(positions.data<uint32_t>(), positions.length(), table.numel);
    nb::object out = empty(positions.length(), result_width(NONE, table));
    void* data = data_of(out);
    nb::gil_scoped_release released;
    dcr::gather(table, positions.data<uint32_t>(), positions.length(), data);
    return out;
}

size_t scatter(nb::handle storages, nb::handle rows, nb::handle positions_, nb::handle bits_) {
    const LentTable lent(storages, rows);
    const Table table = lent.table(Follow::HERE, -1, true);
    const Lent positions(positions_, "positions"), bits(bits_, "bits");
    positions.expect(UNSIGNED, 4, 1);
    bits.expect(UNSIGNED, argument_width(NONE, table), 1).expect_size(positions.length());
    nb::gil_scoped_release released;
    check_positions(positions.data<uint32_t>(), positions.length(), table.numel);
    return dcr::scatter(table, positions.data<uint32_t>(), bits.data<void>(), positions.length());
}

struct LentKeys : Lent {
    explicit LentKeys(nb::handle keys) : Lent(keys, "keys") { expect(UNSIGNED, 8, 2).expect_columns(2); }
};

// Sums [T, 2], all zero.
nb::object zeros(size_t T) {
    return nb::module_::import_("numpy").attr("zeros")(nb::make_tuple(T, 2), "uint64");
}

nb::tuple prepare(nb::handle storages, nb::handle rows, nb::handle keys_, nb::handle positions_, nb::handle values_,
                  int operation) {
    const LentTable lent(storages, rows);
    const LentKeys keys(keys_);
    const Table table = lent.table(Follow::BOTH, int64_t(keys.length()));
    const Lent positions(positions_, "positions"), values(values_, "values");
    const size_t K = positions.expect(UNSIGNED, 4, 1).length(), width = result_width(NONE, table);
    values.expect(UNSIGNED, argument_width(NONE, table), 1).expect_size(K);
    if (operation < int(Operation::OVERWRITE) || operation > int(Operation::STEP))
        throw std::invalid_argument("no operation " + std::to_string(operation));
    nb::object old = empty(K, width), now = empty(K, width);
    nb::object old_sums = zeros(keys.length()), new_sums = zeros(keys.length());
    void *old_data = data_of(old), *now_data = data_of(now);
    uint64_t* old_lanes = static_cast<uint64_t*>(data_of(old_sums));
    uint64_t* new_lanes = static_cast<uint64_t*>(data_of(new_sums));
    {
        nb::gil_scoped_release released;
        check_positions(positions.data<uint32_t>(), K, table.numel);
        dcr::prepare(table, keys.data<uint64_t>(), positions.data<uint32_t>(), values.data<void>(), K,
                     Operation(operation), old_data, now_data, old_lanes, new_lanes);
    }
    return nb::make_tuple(now, old, new_sums, old_sums);
}

nb::tuple capture(nb::handle storages, nb::handle rows, nb::handle keys_, nb::handle base, int kind) {
    const LentTable lent(storages, rows);
    const LentKeys keys(keys_);
    const Table table = lent.table(Follow::THERE, int64_t(keys.length()));
    const Compared found(lent, base, kind);
    nb::object new_sums = zeros(keys.length()), old_sums = zeros(keys.length());
    uint64_t* new_lanes = static_cast<uint64_t*>(data_of(new_sums));
    uint64_t* old_lanes = static_cast<uint64_t*>(data_of(old_sums));
    const uint32_t* positions = static_cast<const uint32_t*>(data_of(found.positions));
    const void *bits = data_of(found.bits), *old = data_of(found.old);
    {
        nb::gil_scoped_release released;
        digest_both(table, keys.data<uint64_t>(), positions, old, bits, result_width(kind, table), found.size, old_lanes,
                    new_lanes);
    }
    return nb::make_tuple(found.positions, found.bits, found.old, new_sums, old_sums);
}

nb::object digest(nb::handle storages, nb::handle rows, nb::handle keys_, int kind) {
    const LentTable lent(storages, rows);
    const LentKeys keys(keys_);
    const Table table = lent.table(Follow::SCAN, int64_t(keys.length()));
    check_kind(kind, table);
    nb::object sums = zeros(keys.length());
    uint64_t* data = static_cast<uint64_t*>(data_of(sums));
    nb::gil_scoped_release released;
    dcr::digest(table, keys.data<uint64_t>(), kind, data);
    return sums;
}

nb::object digest_at(nb::handle storages, nb::handle rows, nb::handle keys_, nb::handle positions_, nb::handle bits_) {
    const LentTable lent(storages, rows);
    const LentKeys keys(keys_);
    const Table table = lent.table(Follow::THERE, int64_t(keys.length()));
    const Lent positions(positions_, "positions"), bits(bits_, "bits");
    positions.expect(UNSIGNED, 4, 1);
    bits.expect(UNSIGNED, 0, 1).expect_size(positions.length());
    nb::object sums = zeros(keys.length());
    uint64_t* data = static_cast<uint64_t*>(data_of(sums));
    nb::gil_scoped_release released;
    check_positions(positions.data<uint32_t>(), positions.length(), table.numel);
    dcr::digest_at(table, keys.data<uint64_t>(), positions.data<uint32_t>(), bits.data<void>(), bits.width(),
                   positions.length(), data);
    return sums;
}

// The first `size` elements of an array.
nb::object first(const nb::object& array, size_t size) { return array[nb::slice(nb::int_(0), nb::int_(size), nb::none())]; }

void check_ascending(nb::handle positions_, uint32_t numel) {
    const Lent positions(positions_, "positions");
    positions.expect(UNSIGNED, 4, 1);
    nb::gil_scoped_release released;
    check_positions(positions.data<uint32_t>(), positions.length(), numel);
}

nb::tuple select(nb::handle positions_, nb::handle runs_) {
    const Lent positions(positions_, "positions"), runs(runs_, "runs");
    positions.expect(UNSIGNED, 4, 1);
    runs.expect(SIGNED, 8, 2).expect_columns(2);
    const uint32_t* data = positions.data<uint32_t>();
    Selection selection;
    {
        nb::gil_scoped_release released;
        check_positions(data, positions.length(), UINT32_MAX);
        selection = plan_selection(data, positions.length(), runs.data<int64_t>(), runs.length());
    }
    nb::object indices = empty(selection.size, 4), local = empty(selection.size, 4);
    uint32_t* indices_data = static_cast<uint32_t*>(data_of(indices));
    uint32_t* local_data = static_cast<uint32_t*>(data_of(local));
    {
        nb::gil_scoped_release released;
        dcr::select(selection, data, indices_data, local_data);
    }
    return nb::make_tuple(indices, local);
}

nb::bytes blake3(nb::handle data_) {
    const Lent data(data_, "data");
    data.expect("B", 1, 1);
    uint8_t out[BLAKE3_BYTES];
    {
        nb::gil_scoped_release released;
        dcr::blake3(data.data<uint8_t>(), data.length(), out);
    }
    return nb::bytes(out, sizeof out);
}

nb::object gaps_of(nb::handle positions_) {
    const Lent positions(positions_, "positions");
    positions.expect(UNSIGNED, 4, 1);
    const uint32_t* data = positions.data<uint32_t>();
    const size_t K = positions.length();
    check_positions(data, K, UINT32_MAX);
    nb::object out = empty(gaps_room(data, K), 1);
    uint8_t* to = static_cast<uint8_t*>(data_of(out));
    size_t size;
    {
        nb::gil_scoped_release released;
        size = dcr::gaps_of(data, K, to);
    }
    return first(out, size);
}

nb::object positions_of(nb::handle gaps_, size_t changed, uint64_t numel) {
    const Lent gaps(gaps_, "gaps");
    gaps.expect(UNSIGNED, 1, 1);
    if (changed > gaps.length() || changed > numel || numel > uint64_t(1) << 32)
        throw std::invalid_argument("the gap stream does not hold " + std::to_string(changed) + " gaps");
    nb::object out = empty(changed, 4);
    uint32_t* to = static_cast<uint32_t*>(data_of(out));
    nb::gil_scoped_release released;
    dcr::positions_of(gaps.data<uint8_t>(), gaps.length(), changed, numel, to);
    return out;
}

nb::tuple symbols_of(nb::handle values_) {
    const Lent values(values_, "values");
    values.expect(UNSIGNED, 0, 1);
    const size_t K = values.length(), width = values.width();
    nb::object symbols = empty(K, 1);
    uint8_t* to = static_cast<uint8_t*>(data_of(symbols));
    size_t escaped;
    {
        nb::gil_scoped_release released;
        escaped = dcr::symbols_of(values.data<void>(), width, K, to);
    }
    nb::object exceptions = empty(escaped, width);
    if (escaped) dcr::exceptions_of(values.data<void>(), width, to, K, data_of(exceptions));
    return nb::make_tuple(symbols, exceptions);
}

nb::object values_of(nb::handle symbols_, nb::handle exceptions_, size_t width) {
    const Lent symbols(symbols_, "symbols"), exceptions(exceptions_, "exceptions");
    symbols.expect(UNSIGNED, 1, 1);
    exceptions.expect(UNSIGNED, 1, 1);
    if (width != 1 && width != 2 && width != 4 && width != 8)
        throw std::invalid_argument("no elements have " + std::to_string(width) + " bytes");
    nb::object out = empty(symbols.length(), width);
    void* to = data_of(out);
    nb::gil_scoped_release released;
    dcr::values_of(symbols.data<uint8_t>(), symbols.length(), exceptions.data<uint8_t>(), exceptions.length(), width, to);
    return out;
}

nb::object planes_of(nb::handle values_) {
    const Lent values(values_, "values");
    values.expect(UNSIGNED, 0, 1);
    nb::object out = empty(values.length() * values.width(), 1);
    uint8_t* to = static_cast<uint8_t*>(data_of(out));
    nb::gil_scoped_release released;
    dcr::planes_of(values.data<void>(), values.width(), values.length(), to);
    return out;
}

nb::object of_planes(nb::list planes_) {
    std::deque<Lent> lent;
    std::vector<const uint8_t*> planes;
    for (nb::handle plane : planes_) {
        lent.emplace_back(plane, "plane").expect(UNSIGNED, 1, 1).expect_size(lent.front().length());
        planes.push_back(lent.back().data<uint8_t>());
    }
    const size_t width = planes.size();
    if (width != 1 && width != 2 && width != 4 && width != 8)
        throw std::invalid_argument("no elements have " + std::to_string(width) + " bytes");
    nb::object out = empty(lent.front().length(), width);
    void* to = data_of(out);
    nb::gil_scoped_release released;
    dcr::of_planes(planes.data(), width, lent.front().length(), to);
    return out;
}

nb::object pack(nb::handle data_) {
    const Lent data(data_, "data");
    data.expect(UNSIGNED, 1, 1);
    Packing packing;
    {
        nb::gil_scoped_release released;
        packing = plan_packing(data.data<uint8_t>(), data.length());
    }
    nb::object out = empty(packing.size, 1);
    if (packing.size == 0) return out;
    uint8_t* to = static_cast<uint8_t*>(data_of(out));
    nb::gil_scoped_release released;
    dcr::pack(packing, data.data<uint8_t>(), data.length(), to);
    return out;
}

nb::object unpack(nb::handle packed_, size_t size) {
    const Lent packed(packed_, "packed");
    packed.expect(UNSIGNED, 1, 1);
    const Packed opened = open_packed(packed.data<uint8_t>(), packed.length(), size);
    nb::object out = empty(size, 1);
    uint8_t* to = static_cast<uint8_t*>(data_of(out));
    nb::gil_scoped_release released;
    dcr::unpack(opened, to);
    return out;
}

struct LentCuts : Lent {
    explicit LentCuts(nb::handle cuts) : Lent(cuts, "cuts") { expect(UNSIGNED, 1, 1).expect_size(CUTS); }
};

// The old bits of a frame, whose positions are 32-bit.
struct LentBase : Lent {
    explicit LentBase(nb::handle base) : Lent(base, "base") {
        expect(UNSIGNED, 0, 1);
        if (length() > UINT32_MAX) throw std::invalid_argument("base: a frame has less than 2^32 elements");
    }
};

nb::tuple split(nb::handle base_, nb::handle cuts_, nb::handle positions_, nb::handle values_) {
    const LentBase base(base_);
    const LentCuts cuts(cuts_);
    const Lent positions(positions_, "positions"), values(values_, "values");
    positions.expect(UNSIGNED, 4, 1);
    values.expect(UNSIGNED, base.width(), 1).expect_size(positions.length());
    const size_t K = positions.length();
    nb::object ranks = empty(K, 4), grouped = empty(K, base.width());
    uint32_t* to = static_cast<uint32_t*>(data_of(ranks));
    void* bits = data_of(grouped);
    std::vector<size_t> counts(CLASSES);
    {
        nb::gil_scoped_release released;
        dcr::split(base.data<void>(), base.length(), base.width(), cuts.data<uint8_t>(), positions.data<uint32_t>(),
                   values.data<void>(), K, to, bits, counts.data());
    }
    return nb::make_tuple(ranks, grouped, counts);
}

nb::tuple merge(nb::handle base_, nb::handle cuts_, const std::vector<size_t>& counts, nb::handle ranks_,
                nb::handle values_) {
    const LentBase base(base_);
    const LentCuts cuts(cuts_);
    const Lent ranks(ranks_, "ranks"), values(values_, "values");
    size_t K = 0;
    if (counts.size() != CLASSES) throw std::invalid_argument("counts: expected one per class");
    for (const size_t count : counts) {
        if (count > base.length()) throw std::invalid_argument("counts: a class has more elements than its frame");
        K += count;
    }
    ranks.expect(UNSIGNED, 4, 1).expect_size(K);
    values.expect(UNSIGNED, base.width(), 1).expect_size(K);
    nb::object positions = empty(K, 4), merged = empty(K, base.width());
    uint32_t* to = static_cast<uint32_t*>(data_of(positions));
    void* bits = data_of(merged);
    {
        nb::gil_scoped_release released;
        dcr::merge(base.data<void>(), base.length(), base.width(), cuts.data<uint8_t>(), counts.data(),
                   ranks.data<uint32_t>(), values.data<void>(), to, bits);
    }
    return nb::make_tuple(positions, merged);
}

nb::dict features() {
    std::vector<std::string> names;
    for (const Level& level : levels()) names.emplace_back(level.name);
    nb::dict found;
    found["level"] = dcr::level().name;
    found["levels"] = names;
#if defined(__clang__)
    found["compiler"] = __VERSION__;  // clang names itself
#else
    found["compiler"] = "gcc " __VERSION__;
#endif
    return found;
}

}  // namespace
}  // namespace dcr::bindings

NB_MODULE(_native, module) {
    module.def("read", &dcr::bindings::read, "storages"_a, "rows"_a, "kind"_a);
    module.def("compare", &dcr::bindings::compare, "storages"_a, "rows"_a, "base"_a, "kind"_a);
    module.def("capture", &dcr::bindings::capture, "storages"_a, "rows"_a, "keys"_a, "base"_a, "kind"_a);
    module.def("gather", &dcr::bindings::gather, "storages"_a, "rows"_a, "positions"_a);
    module.def("prepare", &dcr::bindings::prepare, "storages"_a, "rows"_a, "keys"_a, "positions"_a, "values"_a,
               "operation"_a);
    module.def("scatter", &dcr::bindings::scatter, "storages"_a, "rows"_a, "positions"_a, "bits"_a);
    module.def("digest", &dcr::bindings::digest, "storages"_a, "rows"_a, "keys"_a, "kind"_a);
    module.def("digest_at", &dcr::bindings::digest_at, "storages"_a, "rows"_a, "keys"_a, "positions"_a, "bits"_a);
    module.def("check_ascending", &dcr::bindings::check_ascending, "positions"_a, "numel"_a);
    module.def("select", &dcr::bindings::select, "positions"_a, "runs"_a);
    module.def("blake3", &dcr::bindings::blake3, "data"_a);
    module.def("gaps_of", &dcr::bindings::gaps_of, "positions"_a);
    module.def("positions_of", &dcr::bindings::positions_of, "gaps"_a, "changed"_a, "numel"_a);
    module.def("symbols_of", &dcr::bindings::symbols_of, "values"_a);
    module.def("values_of", &dcr::bindings::values_of, "symbols"_a, "exceptions"_a, "width"_a);
    module.def("planes_of", &dcr::bindings::planes_of, "values"_a);
    module.def("of_planes", &dcr::bindings::of_planes, "planes"_a);
    module.def("pack", &dcr::bindings::pack, "data"_a);
    module.def("unpack", &dcr::bindings::unpack, "packed"_a, "size"_a);
    module.def("split", &dcr::bindings::split, "base"_a, "cuts"_a, "positions"_a, "values"_a);
    module.def("merge", &dcr::bindings::merge, "base"_a, "cuts"_a, "counts"_a, "ranks"_a, "values"_a);
    module.def("features", &dcr::bindings::features);
    module.def("use_level", [](const std::string& name) { return dcr::use_level(name).name; }, "name"_a);
}

// Arrays between python and the kernels: borrowed ones, checked before any work starts, and new ones for results.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/kernels.hpp"
#include "pool.hpp"

namespace dcr::bindings {

namespace nb = nanobind;

// A python buffer, held for as long as this lives: C-contiguous, any dimensions, plain numbers.
class Lent {
  public:
    Lent(nb::handle object, const char* name) : name_(name) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_ND | PyBUF_FORMAT) == 0) return;
        PyErr_Clear();
        throw std::invalid_argument(std::string(name) + ": expected a C-contiguous array");
    }
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;
    ~Lent() { PyBuffer_Release(&view_); }

    // Checks the kind of number (by its struct codes), the bytes per element, and the dimensions.
    const Lent& expect(const char* codes, size_t width, int ndim) const {
        const std::string format = view_.format ? view_.format : "B";
        if (format.size() != 1 || std::string(codes).find(format) == std::string::npos)
            throw std::invalid_argument(name_ + ": expected format in \"" + codes + "\", found \"" + format + "\"");
        if (width != 0 && size_t(view_.itemsize) != width)
            throw std::invalid_argument(name_ + ": expected " + std::to_string(width) + " bytes per element, found " +
                                        std::to_string(view_.itemsize));
        if (view_.ndim != ndim)
            throw std::invalid_argument(name_ + ": expected " + std::to_string(ndim) + " dimensions, found " +
                                        std::to_string(view_.ndim));
        return *this;
    }
    const Lent& expect_size(size_t size) const {
        if (length() != size)
            throw std::invalid_argument(name_ + ": expected " + std::to_string(size) + " elements, found " +
                                        std::to_string(length()));
        return *this;
    }
    const Lent& expect_columns(size_t columns) const {
        if (size_t(view_.shape[1]) != columns)
            throw std::invalid_argument(name_ + ": expected " + std::to_string(columns) + " columns, found " +
                                        std::to_string(view_.shape[1]));
        return *this;
    }

    size_t length() const { return size_t(view_.shape[0]); }
    size_t width() const { return size_t(view_.itemsize); }
    template <class T>
    const T* data() const { return static_cast<const T*>(view_.buf); }
    Array array() const { return {view_.buf, length(), width(), !view_.readonly}; }

  private:
    std::string name_;
    Py_buffer view_;
};

constexpr const char* UNSIGNED = "BHILQ";
constexpr const char* SIGNED = "ilq";

// The arrays of one call that describe its table.
struct LentTable {
    std::deque<Lent> storages;  // a deque, because a Lent stays where it is
    Lent rows;

    LentTable(nb::handle storages_, nb::handle rows_) : rows(rows_, "rows") {
        for (nb::handle storage : nb::iter(storages_)) storages.emplace_back(storage, "storage").expect(UNSIGNED, 0, 1);
        rows.expect(SIGNED, 8, 2).expect_columns(COLUMNS);
    }
    Table table(Follow follow, int64_t tensors = -1, bool write = false) const {
        std::vector<Array> arrays;
        arrays.reserve(storages.size());
        for (const Lent& storage : storages) arrays.push_back(storage.array());
        return Table(arrays, rows.data<int64_t>(), rows.length(), follow, tensors, write);
    }
};

// A numpy array of unsigned integers over memory that `owner` frees.
inline nb::object array_over(void* data, size_t size, size_t width, const nb::capsule& owner) {
    const nb::dlpack::dtype unsigned_int{uint8_t(nb::dlpack::dtype_code::UInt), uint8_t(8 * width), 1};
    return nb::cast(nb::ndarray<nb::numpy>(data, {size}, owner, {}, unsigned_int));
}

// The same over memory that it takes over.
inline nb::object owned(Memory memory, size_t size, size_t width) {
    void* data = memory.get();
    return array_over(data, size, width, nb::capsule(memory.release(), [](void* taken) noexcept { Freed()(taken); }));
}

// A new numpy array of unsigned integers, not initialised.
inline nb::object empty(size_t size, size_t width) {
    if (size * width < Pool::LARGE)
        return nb::module_::import_("numpy").attr("empty")(size, nb::str(("uint" + std::to_string(8 * width)).c_str()));
    void* data = Pool::shared().take(size * width);
    return array_over(data, size, width, nb::capsule(data, [](void* taken) noexcept { Pool::shared().give(taken); }));
}

inline void* data_of(const nb::object& array) { return Lent(array, "result").array().data; }

}  // namespace dcr::bindings

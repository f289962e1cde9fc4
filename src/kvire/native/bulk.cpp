#include "bulk.h"

#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "gil.h"
#include "isa.h"

namespace nb = nanobind;

namespace kvire {
namespace {

// A buffer of a Python object, held for as long as this lives.
class Held {
public:
    Held(nb::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0) throw nb::python_error();
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() { PyBuffer_Release(&buffer_); }

    char* data() const { return static_cast<char*>(buffer_.buf); }
    int64_t bytes() const { return buffer_.len; }

private:
    Py_buffer buffer_;
};

struct Piece {
    Held head, data;
    std::unique_ptr<Held> target;  // null: the data stays where it is
};

std::vector<std::unique_ptr<Piece>> held(const nb::list& pieces, size_t parts) {
    std::vector<std::unique_ptr<Piece>> all;
    all.reserve(pieces.size());
    for (nb::handle object : pieces) {
        const auto piece = nb::cast<nb::tuple>(object);
        if (piece.size() != parts) throw std::invalid_argument("a piece with too many or too few parts");
        all.push_back(std::unique_ptr<Piece>(new Piece{
            {piece[0], PyBUF_SIMPLE},
            {piece[1], PyBUF_SIMPLE},
            parts > 2 ? std::make_unique<Held>(piece[2], PyBUF_WRITABLE) : nullptr}));
        const Piece& last = *all.back();
        if (last.head.bytes() > kMostHeadBytes || last.data.bytes() < kLeastHashed)
            throw std::invalid_argument("a head that is too long, or data that is too short");
        if (last.target && last.target->bytes() != last.data.bytes())
            throw std::invalid_argument("a target of another length");
    }
    return all;
}

nb::bytes digests(const nb::list& pieces, size_t parts) {
    constexpr size_t kDigestBytes = 16;
    const auto all = held(pieces, parts);
    std::vector<unsigned char> found(kDigestBytes * all.size());
    {
        const GilReleased unlocked;
        unsigned char* digest = found.data();
        for (const auto& piece : all) {
            const char* data = piece->data.data();
            if (piece->target) {
                std::memcpy(piece->target->data(), data, piece->data.bytes());
                data = piece->target->data();
            }
            kernels().xxh3_128(piece->head.data(), piece->head.bytes(), data, piece->data.bytes(), digest);
            digest += kDigestBytes;
        }
    }
    return nb::bytes(found.data(), found.size());
}

}  // namespace

nb::bytes checksums(const nb::list& pieces) { return digests(pieces, 2); }

nb::bytes copied_checksums(const nb::list& pieces) { return digests(pieces, 3); }

}  // namespace kvire

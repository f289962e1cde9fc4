// Work on many buffers in one call: between copies and checksums of single blocks, threads would spend more time on
// taking the GIL from each other than on the work.
#pragma once

#include <nanobind/nanobind.h>

namespace kvire {

// pieces: a list of (head, data), each of bytes or anything with a contiguous buffer. ValueError for a head longer than
// kMostHeadBytes or data shorter than kLeastHashed.
nanobind::bytes checksums(const nanobind::list& pieces);

// pieces: a list of (head, source, target), the last two of equal lengths and apart; targets writable. Each is copied,
// and the checksum is that of the copy, made while it is in the cache. Errors as above, before any copy.
nanobind::bytes copied_checksums(const nanobind::list& pieces);

}  // namespace kvire

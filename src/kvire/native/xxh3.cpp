// XXH3-128 (seed 0, the default secret) of long inputs: the checksum of frames (docs/format.md), written from its
// specification; tests/codec/test_bulk.py compares it with the xxhash library.
//
// Compiled once per instruction set; simd.h says what must not be used here.
#include "kernel_functions.h"
#include "simd.h"

namespace kvire {
namespace KVIRE_ISA_NAMESPACE {
namespace {

constexpr int64_t kStripe = 64, kStripesPerBlock = 16, kBlock = kStripe * kStripesPerBlock, kSecretBytes = 192;

alignas(64) constexpr unsigned char kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d,
    0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0,
    0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0,
    0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b,
    0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac,
    0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51,
    0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34,
    0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49,
    0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8,
    0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b,
    0x40, 0x7e};
constexpr uint64_t kPrime32[3] = {0x9E3779B1u, 0x85EBCA77u, 0xC2B2AE3Du};
constexpr uint64_t kPrime64[5] = {0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u, 0x85EBCA77C2B2AE63u,
                                  0x27D4EB2F165667C5u};

KVIRE_INLINE uint64_t read64(const void* from) {
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

struct alignas(32) Lanes {
    uint64_t lane[8];
};

// One stripe of 64 bytes into the lanes.
KVIRE_INLINE void accumulate(Lanes& sums, const char* stripe, const unsigned char* secret) {
#if defined(__AVX2__)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        __m256i* const sum = (__m256i*)sums.lane + half;
        const __m256i data = _mm256_loadu_si256((const __m256i*)stripe + half);
        const __m256i keyed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i*)secret + half));
        const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
        const __m256i swapped = _mm256_shuffle_epi32(data, 0x4E);  // each lane's data goes to its neighbour
        *sum = _mm256_add_epi64(product, _mm256_add_epi64(*sum, swapped));
    }
#else
    for (int i = 0; i < 8; ++i) {
        const uint64_t data = read64(stripe + 8 * i), keyed = data ^ read64(secret + 8 * i);
        sums.lane[i ^ 1] += data;
        sums.lane[i] += (keyed & 0xffffffffu) * (keyed >> 32);
    }
#endif
}

// After each block of stripes.
KVIRE_INLINE void scramble(Lanes& sums) {
    for (int i = 0; i < 8; ++i) {
        uint64_t& lane = sums.lane[i];
        lane = ((lane ^ (lane >> 47)) ^ read64(kSecret + kSecretBytes - kStripe + 8 * i)) * kPrime32[0];
    }
}

KVIRE_INLINE uint64_t folded_product(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

KVIRE_INLINE uint64_t merged(const Lanes& sums, const unsigned char* secret, uint64_t start) {
    for (int i = 0; i < 4; ++i)
        start += folded_product(sums.lane[2 * i] ^ read64(secret + 16 * i),
                                sums.lane[2 * i + 1] ^ read64(secret + 16 * i + 8));
    start = (start ^ (start >> 37)) * 0x165667919E3779F9u;
    return start ^ (start >> 32);
}

KVIRE_INLINE void put_big_endian(uint64_t value, unsigned char* to) {
    for (int i = 0; i < 8; ++i) to[i] = (unsigned char)(value >> (56 - 8 * i));
}

// What has been taken in: the lanes, and how many stripes of the current block.
struct State {
    Lanes sums;
    int64_t stripes;
};

KVIRE_INLINE void take(State& state, const char* stripe) {
    if (state.stripes == kStripesPerBlock) {
        scramble(state.sums);
        state.stripes = 0;
    }
    accumulate(state.sums, stripe, kSecret + 8 * state.stripes);
    ++state.stripes;
}

}  // namespace

void xxh3_128(const char* head, int64_t head_bytes, const char* data, int64_t data_bytes, unsigned char* digest) {
    State state{{{kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2], kPrime64[3], kPrime32[1], kPrime64[4],
                  kPrime32[0]}},
                0};
    // The head and as much of the data as fills its last stripe, in one piece.
    char joined[kMostHeadBytes + kStripe];
    const int64_t borrowed = (kStripe - head_bytes % kStripe) % kStripe;
    memcpy(joined, head, (size_t)head_bytes);
    memcpy(joined + head_bytes, data, (size_t)borrowed);
    for (int64_t at = 0; at < head_bytes + borrowed; at += kStripe) take(state, joined + at);

    const char* at = data + borrowed;
    const char* const last = data + data_bytes - kStripe;  // overlaps the stripe before, unless that ends here
    while (state.stripes < kStripesPerBlock && at < last) take(state, at), at += kStripe;
    while (last - at >= kBlock) {  // whole blocks, and something behind them
        scramble(state.sums);
        for (int64_t i = 0; i < kStripesPerBlock; ++i, at += kStripe) accumulate(state.sums, at, kSecret + 8 * i);
    }
    while (at < last) take(state, at), at += kStripe;
    if (state.stripes == kStripesPerBlock) scramble(state.sums);
    accumulate(state.sums, last, kSecret + kSecretBytes - kStripe - 7);

    const uint64_t length = (uint64_t)(head_bytes + data_bytes);
    put_big_endian(merged(state.sums, kSecret + kSecretBytes - kStripe - 11, ~(length * kPrime64[1])), digest);
    put_big_endian(merged(state.sums, kSecret + 11, length * kPrime64[0]), digest + 8);
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace kvire

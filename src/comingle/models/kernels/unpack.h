// Unpacks quantised weights: each is a value of a table, chosen by 8 or 4 bits, times the scale of its block.
#pragma once

#include "mixture_vector.h"

extern "C" struct Unpack {
    int64_t count, block, bits, bf16, threads;  // count: weights; block: weights that share a scale
    const uint8_t* packed;
    const float *scales, *table;  // table: 256 or 16 values
    void* out;
};

namespace {

// Index in the table of weight `i`; of two weights in a byte the first one is in the upper half.
template <int BITS>
uint8_t index_of(const uint8_t* bytes, int64_t i) {
    return BITS == 8 ? bytes[i] : i % 2 ? bytes[i / 2] & 15 : bytes[i / 2] >> 4;
}

// Values of LANES weights.
template <int BITS>
V look_up(const uint8_t* bytes, const float* table) {
#ifdef __AVX512F__
    if (BITS == 8) {
        const __m128i indices = _mm_loadu_si128((const __m128i*)bytes);
        return (V)_mm512_i32gather_ps(_mm512_cvtepu8_epi32(indices), table, sizeof(float));
    }
    const __m128i pairs = _mm_loadl_epi64((const __m128i*)bytes), mask = _mm_set1_epi8(15);
    const __m128i first = _mm_and_si128(_mm_srli_epi16(pairs, 4), mask), second = _mm_and_si128(pairs, mask);
    const __m512i indices = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(first, second));
    return (V)_mm512_permutexvar_ps(indices, _mm512_loadu_ps(table));
#else
    float values[LANES];
    for (int k = 0; k < LANES; ++k) values[k] = table[index_of<BITS>(bytes, k)];
    return load(values);
#endif
}

// The block of weights that begins at `start`; block sizes are even multiples of LANES.
template <int BITS, class S>
void unpack_block(const Unpack& m, int64_t start) {
    const int64_t size = std::min(m.block, m.count - start), whole = size / LANES * LANES;
    const uint8_t* bytes = m.packed + start * BITS / 8;
    const float scale = m.scales[start / m.block];
    S* out = (S*)m.out + start;
    for (int64_t i = 0; i < whole; i += LANES) store(out + i, look_up<BITS>(bytes + i * BITS / 8, m.table) * scale);
    for (int64_t i = whole; i < size; ++i) put(out + i, m.table[index_of<BITS>(bytes, i)] * scale);
}

template <int BITS>
void unpack_blocks(const Unpack& m) {
#pragma omp parallel for num_threads(m.threads)
    for (int64_t start = 0; start < m.count; start += m.block)
        if (m.bf16)
            unpack_block<BITS, uint16_t>(m, start);
        else
            unpack_block<BITS, float>(m, start);
}

}  // namespace

extern "C" void unpack_weights(const Unpack* m) {
    if (m->bits == 8)
        unpack_blocks<8>(*m);
    else
        unpack_blocks<4>(*m);
}

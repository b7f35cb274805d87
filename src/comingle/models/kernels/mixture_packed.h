// Products with packed 8-bit weights.
//
// 32 consecutive inputs of an output share a scale in float32; weights are integers from -127 to 127. The
// inputs of a product are rounded alike, per token, with scales t_b = max |x| / 127. Products of integers are exact:
//
//     y_o = sum_b s_ob t_b sum_{i in b} w_oi x_i
//
// Fine products add the same for what rounding has removed, with scales t_b / 254, so that inputs have 15 bits.
//
// Weights of 16 outputs are interleaved, four inputs at a time, as dot-product instructions read them (VNNI, NEON). An
// output is a lane of all vectors, so the order of additions does not depend on the width of the processor's vectors.
#pragma once

#include <cmath>

#include "mixture_rows.h"
#if defined(__AVX2__) && !defined(__AVX512F__)
#include <immintrin.h>
#endif
#ifdef __ARM_FEATURE_DOTPROD
#include <arm_neon.h>
#endif

extern "C" struct PackedProduct {
    RowsLinear linear;  // packed, with a bias of float32
    int64_t n, fine, threads;
    const float* x;
    float* y;
};

namespace {

constexpr int GROUP = 16, PARTS = GROUP / LANES;
constexpr int64_t SPAN = 32, FOURS = SPAN / 4, TOKENS_OF_TASK = 64;

typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

// Four inputs of 16 outputs; `add` adds their products with four inputs x to the sums of the outputs. Unsigned
// instructions read w + OFFSET.
#if defined(__AVX512VNNI__)
constexpr int OFFSET = 128;
struct Fours {
    __m512i w;
    explicit Fours(const int8_t* from) : w(_mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(-128))) {}
    void add(I (&sums)[PARTS], const int8_t* x) const {
        int32_t four;
        std::memcpy(&four, x, 4);
        sums[0] = (I)_mm512_dpbusd_epi32((__m512i)sums[0], w, _mm512_set1_epi32(four));
    }
};
#elif defined(__AVX2__)
#ifdef __AVXVNNI__
constexpr int OFFSET = 128;
#else
constexpr int OFFSET = 0;
#endif
struct Fours {
    __m256i w[2];
    explicit Fours(const int8_t* from) {
        for (int h = 0; h < 2; ++h) {
            w[h] = _mm256_loadu_si256((const __m256i*)(from + 32 * h));
            if (OFFSET) w[h] = _mm256_xor_si256(w[h], _mm256_set1_epi8(-128));
        }
    }
    void add(I (&sums)[PARTS], const int8_t* from) const {
        int32_t four;
        std::memcpy(&four, from, 4);
        const __m256i x = _mm256_set1_epi32(four);
        __m256i halves[2];
        std::memcpy(halves, sums, sizeof halves);
        for (int h = 0; h < 2; ++h) {
#ifdef __AVXVNNI__
            halves[h] = _mm256_dpbusd_avx_epi32(halves[h], w[h], x);
#else  // at most 2 * 127 * 127, so that 16 bits suffice
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[h]), _mm256_sign_epi8(x, w[h]));
            halves[h] = _mm256_add_epi32(halves[h], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
        }
        std::memcpy(sums, halves, sizeof halves);
    }
};
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int OFFSET = 0;
struct Fours {
    int8x16_t w[PARTS];
    explicit Fours(const int8_t* from) {
        for (int p = 0; p < PARTS; ++p) w[p] = vld1q_s8(from + 16 * p);
    }
    void add(I (&sums)[PARTS], const int8_t* from) const {
        int32_t four;
        std::memcpy(&four, from, 4);
        const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
        for (int p = 0; p < PARTS; ++p) sums[p] = (I)vdotq_s32((int32x4_t)sums[p], w[p], x);
    }
};
#else
#define COMINGLE_PLAIN_LOOPS
constexpr int OFFSET = 0;
struct Fours {
    const int8_t* w;
    explicit Fours(const int8_t* from) : w(from) {}
    void add(I (&sums)[PARTS], const int8_t* x) const {
        int32_t found[GROUP];
        std::memcpy(found, sums, sizeof found);
        for (int o = 0; o < GROUP; ++o)
            found[o] += w[4 * o] * x[0] + w[4 * o + 1] * x[1] + w[4 * o + 2] * x[2] + w[4 * o + 3] * x[3];
        std::memcpy(sums, found, sizeof found);
    }
};
#endif
#ifdef COMINGLE_PLAIN_LOOPS
constexpr int FOURS_AT_ONCE = 1;  // the compiler vectorises over outputs
#else
constexpr int FOURS_AT_ONCE = 8;
#endif

// Inputs of `n` tokens as integers, with a scale and OFFSET times the sum of each block.
struct Levels {
    int64_t blocks;
    Buffer<int8_t> values;
    Buffer<float> scales;
    Buffer<int32_t> sums;
    Levels(int64_t n, int64_t widest)
        : blocks(0), values(n * ((widest + SPAN - 1) / SPAN) * SPAN), scales(n * ((widest + SPAN - 1) / SPAN)),
          sums(n * ((widest + SPAN - 1) / SPAN)) {}

    // `rest` gets what rounding removes, if there is one.
    void fill(int64_t token, const float* x, int64_t d_in, Levels* rest) {
        blocks = (d_in + SPAN - 1) / SPAN;
        if (rest) rest->blocks = blocks;
        for (int64_t b = 0; b < blocks; ++b) {
            V parts[SPAN / LANES], largest = {};
            for (int p = 0; p < SPAN / LANES; ++p) {
                const int64_t from = b * SPAN + p * LANES;
                parts[p] = from < d_in ? load_upto(x + from, d_in - from) : V{};
                const V magnitude = (V)((U)parts[p] & 0x7fffffffu);
                largest = magnitude > largest ? magnitude : largest;
            }
            const float most = largest_of(largest), inverse = most > 0 ? 127.f / most : 0.f;
            const float scale = most / 127.f;
            V rounded[SPAN / LANES];
            put_block(token * blocks + b, parts, inverse, scale, rounded);
            if (!rest) continue;
            for (int p = 0; p < SPAN / LANES; ++p) parts[p] = parts[p] * inverse - rounded[p];
            rest->put_block(token * blocks + b, parts, 254.f, scale / 254.f, rounded);
        }
    }

    // Stores the nearest integers to the values times a factor, and their scale.
    void put_block(int64_t block, const V* x, float factor, float scale, V* rounded) {
        I sum = {};
        for (int p = 0; p < SPAN / LANES; ++p) {
            rounded[p] = (x[p] * factor + 12582912.f) - 12582912.f;  // 1.5 * 2^23: rounds to the nearest integer
            const I level = __builtin_convertvector(rounded[p], I);
            const Bytes bytes = __builtin_convertvector(level, Bytes);
            std::memcpy(values + block * SPAN + p * LANES, &bytes, sizeof bytes);
            sum += level;
        }
        int32_t total = 0;
        for (int i = 0; OFFSET && i < LANES; ++i) total += sum[i];
        *(scales + block) = scale;
        *(sums + block) = OFFSET * total;
    }
};

// out(r, o) = w(o) . x(r) for R tokens from `token` on and 16 G outputs.
template <int R, int G>
void packed_dots(const Levels& x, int64_t token, const int8_t* w, const float* scales, int64_t blocks, float* out) {
    V sums[R][G][PARTS] = {};
    for (int64_t b = 0; b < blocks; ++b) {
        I whole[R][G][PARTS];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g)
                for (int p = 0; p < PARTS; ++p) whole[r][g][p] = I{} - *(x.sums + ((token + r) * blocks + b));
#pragma GCC unroll FOURS_AT_ONCE
        for (int64_t k = 0; k < FOURS; ++k)
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) {
                const Fours four(w + ((g * blocks + b) * FOURS + k) * 4 * GROUP);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r)
                    four.add(whole[r][g], x.values + (((token + r) * blocks + b) * FOURS + k) * 4);
            }
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)
            for (int p = 0; p < PARTS; ++p) {
                const V scale = load(scales + (g * blocks + b) * GROUP + p * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const V part = __builtin_convertvector(whole[r][g][p], V) * scale;
                    sums[r][g][p] += part * *(x.scales + ((token + r) * blocks + b));
                }
            }
    }
    for (int r = 0; r < R; ++r)
        for (int g = 0; g < G; ++g)
            for (int p = 0; p < PARTS; ++p) store(out + r * CHUNK + g * GROUP + p * LANES, sums[r][g][p]);
}

// out(t, c) for `count` tokens from `first` on and `columns` outputs from `column` on; rows of `out` have stride CHUNK.
inline void packed_chunk(const RowsLinear& l, const Levels& x, int64_t first, int64_t count, int64_t column, int64_t columns,
                         float* out) {
    const int64_t blocks = (l.d_in + SPAN - 1) / SPAN;
    for (int64_t g = 0; g * GROUP < columns;) {
        const int64_t left = (columns + GROUP - 1) / GROUP - g, start = column / GROUP + g;
        const int8_t* w = (const int8_t*)l.weight + start * blocks * SPAN * GROUP;
        const float* scales = l.scales + start * blocks * GROUP;
        float* to = out + g * GROUP;
        int64_t t = 0, done = 1;
        if (left >= 4 && count < 4) {
            done = 4;
            for (; t + 2 <= count; t += 2) packed_dots<2, 4>(x, first + t, w, scales, blocks, to + t * CHUNK);
            for (; t < count; ++t) packed_dots<1, 4>(x, first + t, w, scales, blocks, to + t * CHUNK);
        } else if (left >= 2) {
            done = 2;
            for (; t + 4 <= count; t += 4) packed_dots<4, 2>(x, first + t, w, scales, blocks, to + t * CHUNK);
            for (; t + 2 <= count; t += 2) packed_dots<2, 2>(x, first + t, w, scales, blocks, to + t * CHUNK);
            for (; t < count; ++t) packed_dots<1, 2>(x, first + t, w, scales, blocks, to + t * CHUNK);
        } else {
            for (; t < count; ++t) packed_dots<1, 1>(x, first + t, w, scales, blocks, to + t * CHUNK);
        }
        g += done;
    }
}


// The inputs of a product: rounded, and for fine products the rest.
struct Input {
    Levels whole, rest;
    Input(int64_t n, int64_t widest) : whole(n, widest), rest(n, widest) {}
    void fill(int64_t token, const float* x, int64_t d_in, bool fine) { whole.fill(token, x, d_in, fine ? &rest : nullptr); }
};

// As packed_chunk; `more` is memory of the size of `out`.
inline void packed_product(const RowsLinear& l, const Input& x, bool fine, int64_t first, int64_t count, int64_t column,
                           int64_t columns, float* out, float* more) {
    packed_chunk(l, x.whole, first, count, column, columns, out);
    if (!fine) return;
    packed_chunk(l, x.rest, first, count, column, columns, more);
    for (int64_t t = 0; t < count; ++t)
        for (int64_t c = 0; c < columns; ++c) out[t * CHUNK + c] += more[t * CHUNK + c];
}

// One part of a product: a chunk of outputs of some tokens.
inline void packed_part(const PackedProduct& p, const Input& x, int64_t first, int64_t column) {
    const RowsLinear& l = p.linear;
    const int64_t count = std::min(TOKENS_OF_TASK, p.n - first), columns = std::min(CHUNK, l.d_out - column);
    float out[TOKENS_OF_TASK * CHUNK], more[TOKENS_OF_TASK * CHUNK];
    packed_product(l, x, p.fine, first, count, column, columns, out, more);
    for (int64_t t = 0; t < count; ++t)
        for (int64_t c = 0; c < columns; ++c)
            p.y[(first + t) * l.d_out + column + c] = out[t * CHUNK + c] + (l.bias ? ((const float*)l.bias)[column + c] : 0.f);
}

}  // namespace

// y = W x + b of a packed linear without adapters.
extern "C" void packed_forward(const PackedProduct* p) {
    const RowsLinear& l = p->linear;
    Input x(p->n, l.d_in);
    const int64_t chunks = (l.d_out + CHUNK - 1) / CHUNK, slices = (p->n + TOKENS_OF_TASK - 1) / TOKENS_OF_TASK;
#pragma omp parallel num_threads(p->threads)
    {
#pragma omp for
        for (int64_t t = 0; t < p->n; ++t) x.fill(t, p->x + t * l.d_in, l.d_in, p->fine);
#pragma omp for
        for (int64_t task = 0; task < chunks * slices; ++task)
            packed_part(*p, x, task % slices * TOKENS_OF_TASK, task / slices * CHUNK);
    }
}

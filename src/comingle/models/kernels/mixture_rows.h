// Linear layers and experts for a few rows of tokens, such as the next tokens of texts that are generated.
//
//     linear     y_r = W x_r + b + B_r^T (s A_r x_r)
//     experts    pre_rj = W x_r + b + B_rj^T (s A_rj x_r)    h_rj = act(pre_rj)    gated: act(gate_rj) up_rj
//                y_r = W2 (sum_j p_rj h_rj) + b2 + sum_j B2_rj^T (s p_rj A2_rj h_rj)
//
// Reading weights dominates the time, so they are read once for all rows: a task is a chunk of a linear layer's
// outputs. A row's result depends neither on other rows nor on the number of threads, as each sum has a fixed order.
// Each `share` consecutive rows use the same adapters: they are texts of one user.
#pragma once

#include "mixture_tile.h"

extern "C" {
// A linear layer with its LoRA: weight (d_out, d_in), stored as (d_in, d_out) if `turned`; a (rows / share, ranks,
// d_in); b (rows / share, ranks, d_out); ranks may be 0. Packed weights (mixture_packed.h) have `scales`.
struct RowsLinear {
    const void *weight, *bias, *a, *b;
    int64_t d_in, d_out, ranks, turned;
    const float* scales;
};

// A single linear layer is in `last`. For experts, `first` has the layers that read x; ranks is experts * rank.
struct Rows {
    int64_t rows, share, experts, firsts, act, bf16, threads;
    float scale;
    RowsLinear first[2], last;
    const void* x;
    const float* gates;
    void* y;
};
}

namespace {

constexpr int64_t CHUNK = 64;
// Outputs of a few rows that are computed side by side, enough to hide the latency of additions.
constexpr int ALONE = 8;
// How far ahead weights are prefetched, in bytes. The hardware prefetcher does not follow the weights of several outputs
// side by side, and reads them at half the speed.
constexpr int64_t AHEAD = 8192;

template <int N>
struct Floats {
    typedef float type __attribute__((vector_size(4 * N)));
};

template <int N = LANES>
float add_up(typename Floats<N>::type v) {
    if constexpr (N == 4) {
        return (v[0] + v[2]) + (v[1] + v[3]);
    } else {
        typename Floats<N / 2>::type halves[2];
        std::memcpy(halves, &v, sizeof v);
        return add_up<N / 2>(halves[0] + halves[1]);
    }
}

#ifdef __AVX512F__
// add_up of eight vectors, in the same order of additions.
inline void add_up_eight(const V* v, float* to) {
    __m512 halves[4], quarters[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m512 a = halves[2 * i], b = halves[2 * i + 1];
        quarters[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    const __m512 pairs = _mm512_add_ps(_mm512_shuffle_ps(quarters[0], quarters[1], 0x44),
                                       _mm512_shuffle_ps(quarters[0], quarters[1], 0xee));
    const __m512 all = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xb1));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm256_storeu_ps(to, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, all)));
}
#endif

// Sums of all vectors; rows of `out` have the given stride.
template <int R, int O>
void add_up_all(const V (&sums)[R][O], float* out, int64_t stride) {
#ifdef __AVX512F__
    if constexpr (R * O % 8 == 0) {
        float found[R * O];
#pragma GCC unroll 8
        for (int i = 0; i < R * O; i += 8) add_up_eight(&sums[0][0] + i, found + i);
        for (int r = 0; r < R; ++r) std::memcpy(out + r * stride, found + r * O, sizeof(float) * O);
        return;
    }
#endif
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int o = 0; o < O; ++o) out[r * stride + o] = add_up(sums[r][o]);
}

template <int BYTES>
void prefetch(const char* from) {
#pragma GCC unroll 16
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// Keeps the compiler from loading a vector again for each of its uses.
inline void into_register(V& v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__AVX__)
    asm("" : "+x"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
}

// out(r, o) = x(r, :) . w(o, :) for R rows and O outputs; rows of `out` have the given stride. If `Ahead`, as many bytes of
// later weights are prefetched.
template <int R, int O, bool Ahead = false, class X, class S>
void dots(const X* x, const S* w, int64_t width, float* out, int64_t stride = CHUNK) {
    V sums[R][O] = {};
    auto add = [&](auto load_x, auto load_w) {
        V left[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            left[r] = load_x(r);
            into_register(left[r]);
        }
#pragma GCC unroll 8
        for (int o = 0; o < O; ++o) {
            V right = load_w(o);
            into_register(right);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r][o] += left[r] * right;
        }
    };
    int64_t k = 0;
    for (; k + LANES <= width; k += LANES) {
        if (Ahead) prefetch<O * LANES * sizeof(S)>((const char*)(w + O * k) + AHEAD);
        add([&](int r) { return load(x + r * width + k); }, [&](int o) { return load(w + o * width + k); });
    }
    if (k < width)
        add([&](int r) { return load_upto(x + r * width + k, width - k); },
            [&](int o) { return load_upto(w + o * width + k, width - k); });
    add_up_all(sums, out, stride);
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define ROWS_DOTS 1

// The same for inputs in bfloat16, with dot-product instructions: two products per lane.
template <int R, int O, bool Ahead = false>
void dots(const uint16_t* x, const uint16_t* w, int64_t width, float* out, int64_t stride = CHUNK) {
    constexpr int64_t PAIRS = 2 * LANES;
    V sums[R][O] = {};
    auto add = [&](auto read, int64_t k) {
        __m512bh left[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) left[r] = (__m512bh)read(x + r * width + k);
#pragma GCC unroll 8
        for (int o = 0; o < O; ++o) {
            const __m512bh right = (__m512bh)read(w + o * width + k);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r][o] = (V)_mm512_dpbf16_ps((__m512)sums[r][o], left[r], right);
        }
    };
    int64_t k = 0;
    for (; k + PAIRS <= width; k += PAIRS) {
        if (Ahead) prefetch<O * PAIRS * 2>((const char*)(w + O * k) + AHEAD);
        add([](const uint16_t* from) { return _mm512_loadu_si512(from); }, k);
    }
    if (k < width) {
        const __mmask32 some = (1u << (width - k)) - 1;
        add([some](const uint16_t* from) { return _mm512_maskz_loadu_epi16(some, from); }, k);
    }
    add_up_all(sums, out, stride);
}
#endif

// The same for any number of rows: R at a time, then R / 2, R / 4 and so on. If `Ahead`, the first of these prefetch.
template <int R, int O, bool Ahead, class X, class S>
void dots_of_rows(const X* x, int64_t rows, const S* w, int64_t width, float* out) {
    int64_t r = 0;
    if (Ahead && R <= rows) {
        dots<R, O, true>(x, w, width, out);
        r = R;
    }
    for (; r + R <= rows; r += R) dots<R, O>(x + r * width, w, width, out + r * CHUNK);
    if constexpr (R > 1)
        if (r < rows) {
            if (r == 0) return dots_of_rows<R / 2, O, Ahead>(x, rows, w, width, out);
            dots_of_rows<R / 2, O, false>(x + r * width, rows - r, w, width, out + r * CHUNK);
        }
}

// The same with `w` transposed: CHUNK contiguous outputs, and inputs with stride `stride`.
template <int R, class X, class S>
void sums_of_inputs(const X* x, const S* w, int64_t stride, int64_t width, float* out) {
    constexpr int COUNT = std::min<int>(CHUNK / LANES, SUMS_AT_ONCE / R);  // vectors of outputs per iteration
    for (int64_t from = 0; from < CHUNK; from += COUNT * LANES) {
        V sums[R][COUNT] = {};
        for (int64_t k = 0; k < width; ++k) {
#pragma GCC unroll 8
            for (int c = 0; c < COUNT; ++c) {
                const V column = load(w + k * stride + from + c * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) sums[r][c] += widen(x[r * width + k]) * column;
            }
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < COUNT; ++c) store(out + r * CHUNK + from + c * LANES, sums[r][c]);
    }
}

// `v` plus ranks [from, to) of B^T z, for a row's z and `count` columns from `column`.
template <class S>
V plus_lora(const RowsLinear& l, const float* z, int64_t text, int64_t from, int64_t to, int64_t column, int64_t count, V v) {
    const S* b = (const S*)l.b + text * l.ranks * l.d_out + column;
    for (int64_t k = from; k < to; ++k) v += z[k] * load_upto(b + k * l.d_out, count);
    return v;
}

// Products of base weights with the inputs of all rows.
template <class S>
struct Products {
    const int64_t rows;

    // One chunk of W x + b for all rows, as (rows, CHUNK).
    template <class X>
    void chunk(const RowsLinear& l, const X* x, int64_t column, int64_t columns, float* out) const {
        if (l.turned)
            turned(l, x, column, columns, out);
        else {
            const S* w = (const S*)l.weight + column * l.d_in;
            constexpr int MOST = SUMS_AT_ONCE / ALONE;  // rows whose sums of ALONE outputs fit into registers
            if (rows <= MOST)
                outputs<ALONE>(x, w, l.d_in, columns, out);
            else if (rows <= 2 * MOST)
                outputs<ALONE / 2>(x, w, l.d_in, columns, out);
            else if (rows <= 4 * MOST)
                outputs<ALONE / 4>(x, w, l.d_in, columns, out);
            else
                blocks<ALONE / 2>(x, w, l.d_in, columns, out);
        }
        if (l.bias) add_bias(l, column, columns, out);
    }

    // Outputs of all rows, O at a time.
    template <int O, class X>
    void outputs(const X* x, const S* w, int64_t width, int64_t columns, float* out) const {
        int64_t o = 0;
        for (; o + O <= columns; o += O) dots_of_rows<SUMS_AT_ONCE / O, O, true>(x, rows, w + o * width, width, out + o);
        for (; o < columns; ++o)
            for (int64_t r = 0; r < rows; ++r) dots<1, 1>(x + r * width, w + o * width, width, out + r * CHUNK + o);
    }

    // As `outputs` for many rows: a block of rows at a time, whose inputs stay in the L1 cache, times all outputs. With each
    // block an equal part of the weights of the next `columns` outputs is prefetched.
    template <int O, class X>
    void blocks(const X* x, const S* w, int64_t width, int64_t columns, float* out) const {
        constexpr int R = SUMS_AT_ONCE / O;
        const int64_t whole = columns / O * O, size = O * width * int64_t(sizeof(S));
        for (int64_t r = 0; r < rows; r += R) {
            const int64_t some = std::min<int64_t>(R, rows - r);
            for (int64_t o = 0; o < whole; o += O) {
                const char* ahead = (const char*)(w + (columns + o) * width);
                const int64_t from = size * r / rows, to = size * (r + some) / rows;
                for (int64_t i = (from + 63) / 64 * 64; i < to; i += 64) __builtin_prefetch(ahead + i, 0, 2);
                dots_of_rows<R, O, false>(x + r * width, some, w + o * width, width, out + r * CHUNK + o);
            }
            for (int64_t o = whole; o < columns; ++o)
                for (int64_t i = r; i < r + some; ++i) dots<1, 1>(x + i * width, w + o * width, width, out + i * CHUNK + o);
        }
    }

    void add_bias(const RowsLinear& l, int64_t column, int64_t columns, float* out) const {
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < columns; ++c) out[r * CHUNK + c] += widen(((const S*)l.bias)[column + c]);
    }

    template <class X>
    void turned(const RowsLinear& l, const X* x, int64_t column, int64_t columns, float* out) const {
        const S* w = (const S*)l.weight + column;
        if (columns < CHUNK) {  // an incomplete last chunk
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t c = 0; c < columns; ++c) {
                    float sum = 0.f;
                    for (int64_t k = 0; k < l.d_in; ++k) sum += widen(x[r * l.d_in + k]) * widen(w[k * l.d_out + c]);
                    out[r * CHUNK + c] = sum;
                }
            return;
        }
        int64_t r = 0;
        constexpr int BLOCK = REGISTERS == 32 ? 3 : 4;
        for (; r + BLOCK <= rows; r += BLOCK)
            sums_of_inputs<BLOCK>(x + r * l.d_in, w, l.d_out, l.d_in, out + r * CHUNK);
        for (; r < rows; ++r) sums_of_inputs<1>(x + r * l.d_in, w, l.d_out, l.d_in, out + r * CHUNK);
    }
};

template <class S>
struct Step {
    const Rows& m;
    const Products<S> products{m.rows};

    // z(r, k) = s A(r, k) . x(r): row r has `sets` inputs, each for an equal share of the ranks.
    template <class X>
    void lora_down(const RowsLinear& l, const X* x, int64_t sets, float* z) const {
        const int64_t share = l.ranks ? l.ranks / sets : 1;
#pragma omp for
        for (int64_t i = 0; i < m.rows * l.ranks; ++i) {
            const int64_t r = i / l.ranks, k = i % l.ranks;
            const S* a = (const S*)l.a + (r / m.share * l.ranks + k) * l.d_in;
            dots<1, 1>(x + (r * sets + k / share) * l.d_in, a, l.d_in, z + i);
            z[i] *= m.scale;
        }
    }

    V lora(const RowsLinear& l, const float* z, int64_t r, int64_t from, int64_t to, int64_t column, int64_t count, V v) const {
        return plus_lora<S>(l, z + r * l.ranks, r / m.share, from, to, column, count, v);
    }

    template <class X>
    void linear(const RowsLinear& l, const X* x, const float* z) const {
        Buffer<float> base(m.rows * CHUNK);
#pragma omp for
        for (int64_t column = 0; column < l.d_out; column += CHUNK) {
            const int64_t columns = std::min(CHUNK, l.d_out - column);
            products.chunk(l, x, column, columns, base + 0);
            for (int64_t r = 0; r < m.rows; ++r)
                for (int64_t c = 0; c < columns; c += LANES) {
                    V v = lora(l, z, r, 0, l.ranks, column + c, columns - c, load(base + r * CHUNK + c));
                    store_upto((S*)m.y + r * l.d_out + column + c, v, columns - c);
                }
        }
    }

    // h(r, j) and sum_j p_rj h(r, j), per chunk.
    template <class Act>
    void hidden(const float* z, float* h, float* mixed) const {
        const RowsLinear& l = m.first[0];
        const int64_t rank = l.ranks / m.experts, size = m.rows * CHUNK;
        Buffer<float> base(m.firsts * size);
#pragma omp for
        for (int64_t column = 0; column < l.d_out; column += CHUNK) {
            const int64_t columns = std::min(CHUNK, l.d_out - column);
            for (int64_t i = 0; i < m.firsts; ++i) products.chunk(m.first[i], (const S*)m.x, column, columns, base + i * size);
            for (int64_t r = 0; r < m.rows; ++r)
                for (int64_t c = 0; c < columns; c += LANES) {
                    V sum = {};
                    for (int64_t j = 0; j < m.experts; ++j) {
                        auto pre = [&](int64_t i) {
                            return lora(m.first[i], z + i * m.rows * l.ranks, r, j * rank, (j + 1) * rank, column + c,
                                        columns - c, load(base + i * size + r * CHUNK + c));
                        };
                        V value = Act::value(pre(0));
                        if (m.firsts == 2) value *= pre(1);
                        store_upto(h + (r * m.experts + j) * l.d_out + column + c, value, columns - c);
                        sum += m.gates[r * m.experts + j] * value;
                    }
                    store_upto(mixed + r * l.d_out + column + c, sum, columns - c);
                }
        }
    }

    void act(const float* z, float* h, float* mixed) const {
        if (m.act == 0) hidden<GeluTanh<true>>(z, h, mixed);
        if (m.act == 1) hidden<GeluErf<true>>(z, h, mixed);
        if (m.act == 2) hidden<Silu<true>>(z, h, mixed);
        if (m.act == 3) hidden<Relu<true>>(z, h, mixed);
    }

    void gate(float* z) const {
#pragma omp for
        for (int64_t i = 0; i < m.rows * m.last.ranks; ++i) z[i] *= m.gates[i / (m.last.ranks / m.experts)];
    }

    void run() const {
        const int64_t firsts = m.firsts * m.rows * m.first[0].ranks, wide = m.rows * m.first[0].d_out;
        Buffer<float> z(m.rows * m.last.ranks), z_first(firsts), h(wide * m.experts), mixed(wide);
#pragma omp parallel num_threads(m.threads)
        if (m.firsts == 0) {
            lora_down(m.last, (const S*)m.x, 1, z + 0);
            linear(m.last, (const S*)m.x, z + 0);
        } else {
            for (int64_t i = 0; i < m.firsts; ++i) lora_down(m.first[i], (const S*)m.x, 1, z_first + i * firsts / m.firsts);
            act(z_first + 0, h + 0, mixed + 0);
            lora_down(m.last, h + 0, m.experts, z + 0);
            gate(z + 0);
            linear(m.last, mixed + 0, z + 0);
        }
    }
};

}  // namespace

extern "C" void rows_forward(const Rows* m) {
    if (m->bf16)
        Step<uint16_t>{*m}.run();
    else
        Step<float>{*m}.run();
}

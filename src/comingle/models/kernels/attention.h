// Causal attention, forward and backward, without a tensor of tokens by tokens.
//
//     forward    s_ti = q_t . k_i for i <= t     e_ti = exp(scale (s_ti - max_i s_ti))     p_ti = e_ti / sum_i e_ti
//                o_t = sum_i p_ti v_i
//     backward   dv_i = sum_t p_ti do_t     ds_ti = p_ti (dp_ti - sum_i p_ti dp_ti) scale, dp_ti = do_t . v_i
//                dq_t = sum_i ds_ti k_i     dk_i = sum_t ds_ti q_t
//
// A task is one key head with all query heads that read it. It processes BLOCK queries with all keys up to their last;
// products skip keys above the diagonal for ROWS queries at a time.
//
// The operands of products are units: a float, or in bfloat16 two adjacent entries of the summed dimension, for which
// some processors have a dot-product instruction. `Floats` and `Pairs` implement the two kinds.
#pragma once

#include <algorithm>
#include <cmath>

#include "mixture_vector.h"

extern "C" struct Attention {
    int64_t batch, heads, groups, tokens, width, bf16, threads;  // groups: heads of keys and values
    float scale;
    // Strides of batch, head and token, in entries; rows have `width` contiguous entries.
    const void *q, *k, *v, *out, *d_out;
    int64_t q_steps[3], k_steps[3], v_steps[3], out_steps[3], d_out_steps[3];
    float* sums;  // the largest s and the sum of e: (batch, heads, tokens, 2)
    void *d_q, *d_k, *d_v;
    int64_t d_q_steps[3], d_k_steps[3], d_v_steps[3];
};

namespace {

typedef int32_t I __attribute__((vector_size(4 * LANES)));

constexpr int BLOCK = 32, ROWS = 4, VECTORS = REGISTERS / 8;

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Floats {
    using Unit = float;
    using Narrow = float;
    static constexpr int U = 1;
    static constexpr bool FINE = true;
    static V add(V sum, Unit left, const Unit* right) { return sum + left * load(right); }
    // Units along a row, and units across U rows.
    template <class S>
    static void along(const S* row, int64_t width, Unit* to) {
        for (int64_t d = 0; d < width; ++d) to[d] = widen(row[d]);
    }
    template <class S>
    static void across(const S* row, int64_t, int64_t, int64_t width, Unit* to) { along(row, width, to); }
    static void put_units(Unit* to, V first, V) { store(to, first); }
};

#ifdef __AVX512BF16__
struct Pairs {
    using Unit = uint32_t;
    using Narrow = uint16_t;
    static constexpr int U = 2;
    static constexpr bool FINE = false;
    static V add(V sum, Unit left, const Unit* right) {
        return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)left), (__m512bh)_mm512_loadu_si512(right));
    }
    static void along(const uint16_t* row, int64_t width, Unit* to) {
        to[width / 2] = 0;  // for odd widths; else overwritten
        for (int64_t d = 0; d < width; d += LANES) {
            Half half;
            if (d + LANES > width) return (void)std::memcpy((uint16_t*)to + d, row + d, (width - d) * sizeof *row);
            std::memcpy(&half, row + d, sizeof half);
            std::memcpy((uint16_t*)to + d, &half, sizeof half);
        }
    }
    static void across(const uint16_t* row, int64_t step, int64_t left, int64_t width, Unit* to) {
        const uint16_t* next = row + (left > 1 ? step : 0);
        const Unit high = left > 1 ? 0xffff0000u : 0u;
        for (int64_t d = 0; d < width; ++d) to[d] = row[d] | (Unit(next[d]) << 16 & high);
    }
    static void put_units(Unit* to, V first, V second) {
        Half halves[2];
        store((uint16_t*)&halves[0], first);
        store((uint16_t*)&halves[1], second);
        U32 units = __builtin_convertvector(halves[0], U32) | __builtin_convertvector(halves[1], U32) << 16;
        std::memcpy(to, &units, sizeof units);
    }
    using U32 = ::U;
};
#endif

// C (ROWS, N vectors) = (or +=) sum_k A[row * row_step + k * k_step] B[k * width + column].
template <class P, int N>
void product(const typename P::Unit* a, int64_t row_step, int64_t k_step, const typename P::Unit* b, int64_t width, int64_t k,
             float* c, int64_t c_width, bool more) {
    V sums[ROWS][N];
    for (int r = 0; r < ROWS; ++r)
        for (int n = 0; n < N; ++n) sums[r][n] = more ? load(c + r * c_width + n * LANES) : V{};
    for (int64_t i = 0; i < k; ++i)
        for (int r = 0; r < ROWS; ++r)
            for (int n = 0; n < N; ++n)
                sums[r][n] = P::add(sums[r][n], a[r * row_step + i * k_step], b + i * width + n * LANES);
    for (int r = 0; r < ROWS; ++r)
        for (int n = 0; n < N; ++n) store(c + r * c_width + n * LANES, sums[r][n]);
}

// The same for a number of columns that is a multiple of LANES.
template <class P>
void products(const typename P::Unit* a, int64_t row_step, int64_t k_step, const typename P::Unit* b, int64_t width, int64_t k,
              float* c, int64_t c_width, int64_t columns, bool more) {
    for (int64_t n = 0; n < columns; n += VECTORS * LANES) {
        const int64_t left = std::min<int64_t>(VECTORS, (columns - n) / LANES);
        auto call = left == 1 ? product<P, 1> : left == 2 ? product<P, 2> : left == 3 ? product<P, 3> : product<P, 4>;
        call(a, row_step, k_step, b + n, width, k, c + n, c_width, more);
    }
}

template <class P, class S>
struct Heads {
    using Unit = typename P::Unit;
    const Attention& m;
    const int64_t tokens = m.tokens, width = m.width, units = (width + P::U - 1) / P::U;
    const int64_t wide = up(width, LANES), keys = up(tokens, BLOCK), share = m.heads / m.groups;

    static const S* row(const void* from, const int64_t* steps, int64_t b, int64_t h, int64_t t) {
        return (const S*)from + b * steps[0] + h * steps[1] + t * steps[2];
    }

    // Rows of a block, padded with zero rows: (BLOCK, units), for sums over the width. Writes one unit too many.
    void along(const S* from, int64_t step, int64_t first, Unit* to) const {
        for (int64_t t = first; t < first + BLOCK; ++t, to += units)
            if (t < tokens)
                P::along(from + t * step, width, to);
            else
                std::fill_n(to, units, Unit(0));
    }
    // All rows, transposed: (units, keys).
    void turned(const S* from, int64_t step, Unit* to) const {
        Buffer<Unit> block(BLOCK * units + 1);
        for (int64_t first = 0; first < keys; first += BLOCK) {
            along(from, step, first, block + 0);
            for (int64_t i = 0; i < units; ++i)
                for (int64_t r = 0; r < BLOCK; ++r) to[i * keys + first + r] = *(block + (r * units + i));
        }
    }
    // All rows, for sums over rows: (keys / U, wide).
    void across(const S* from, int64_t step, Unit* to) const {
        std::fill_n(to, keys / P::U * wide, Unit(0));
        for (int64_t t = 0; t < tokens; t += P::U, to += wide) P::across(from + t * step, step, tokens - t, width, to);
    }

    // Products of a block's rows with all keys up to the last of each ROWS rows.
    void scores(const Unit* rows, const Unit* columns, int64_t first, float* to) const {
        for (int64_t r = 0; r < BLOCK; r += ROWS)
            products<P>(rows + r * units, units, 1, columns, keys, units, to + r * keys, keys,
                        up(first + r + ROWS, LANES), false);
    }

    // Fills entries after the diagonal of query t with `rest`.
    static V upto(V v, int64_t c, int64_t t, float rest) { return numbers() > int32_t(t - c) ? V{} + rest : v; }
    static I numbers() {
        I n;
        for (int i = 0; i < LANES; ++i) n[i] = i;
        return n;
    }

    void forward() const {
#pragma omp parallel for num_threads(m.threads) schedule(dynamic, 1)
        for (int64_t task = 0; task < m.batch * m.groups; ++task) forward_task(task / m.groups, task % m.groups);
    }

    void forward_task(int64_t b, int64_t g) const {
        Buffer<Unit> k(units * keys), v(keys / P::U * wide), q(BLOCK * units + 1);
        Buffer<float> s(BLOCK * keys), o(BLOCK * wide), total(BLOCK);
        Buffer<typename P::Narrow> p(BLOCK * keys);
        turned(row(m.k, m.k_steps, b, g, 0), m.k_steps[2], k + 0);
        across(row(m.v, m.v_steps, b, g, 0), m.v_steps[2], v + 0);
        for (int64_t h = g * share; h < (g + 1) * share; ++h)
            for (int64_t first = 0; first < tokens; first += BLOCK) {
                expect(m.out, m.out_steps, b, h, first, first + BLOCK);
                along(row(m.q, m.q_steps, b, h, 0), m.q_steps[2], first, q + 0);
                scores(q + 0, k + 0, first, s + 0);
                for (int64_t r = 0; r < BLOCK; ++r) {
                    const int64_t t = first + r, end = up(first + r / ROWS * ROWS + ROWS, LANES);
                    const float top = softmax(s + r * keys, t, end, p + r * keys, *(total + r) = 0);
                    if (t >= tokens) continue;
                    float* sums = m.sums + ((b * m.heads + h) * tokens + t) * 2;
                    sums[0] = top, sums[1] = *(total + r);
                }
                for (int64_t r = 0; r < BLOCK; r += ROWS) {
                    const int64_t step = keys / P::U;
                    products<P>((const Unit*)(p + r * keys), step, 1, v + 0, wide, (first + r + ROWS + P::U - 1) / P::U,
                                o + r * wide, wide, wide, false);
                }
                for (int64_t r = 0; r < BLOCK && first + r < tokens; ++r)
                    write(o + r * wide, 1 / *(total + r), (S*)row(m.out, m.out_steps, b, h, first + r));
            }
    }

    // Computes e up to query t, zeros up to `end`, and the sum of e; returns the largest s.
    float softmax(const float* s, int64_t t, int64_t end, typename P::Narrow* p, float& total) const {
        V most = V{} - INFINITY, sum_of = {};
        for (int64_t c = 0; c <= t; c += LANES) {
            V x = upto(load(s + c), c, t, -INFINITY);
            most = most > x ? most : x;
        }
        const float top = largest_of(most);
        for (int64_t c = 0; c < end; c += LANES) {
            V x = c <= t ? upto(exp2<P::FINE>((load(s + c) - top) * (m.scale * LOG2_E)), c, t, 0) : V{};
            sum_of += x;
            store(p + c, x);
        }
        total = total_of(sum_of);
        return top;
    }

    // Prefetches output rows, which are too far apart for the hardware prefetcher.
    void expect(const void* to, const int64_t* steps, int64_t b, int64_t h, int64_t first, int64_t end) const {
        for (int64_t t = first; t < std::min(end, tokens); ++t)
            for (int64_t d = 0; d < width; d += 64 / sizeof(S)) __builtin_prefetch(row(to, steps, b, h, t) + d, 1, 2);
    }

    void write(const float* from, float by, S* to) const {
        for (int64_t d = 0; d < width; d += LANES) store_upto(to + d, load(from + d) * by, width - d);
    }

    void backward() const {
#pragma omp parallel for num_threads(m.threads) schedule(dynamic, 1)
        for (int64_t task = 0; task < m.batch * m.groups; ++task) backward_task(task / m.groups, task % m.groups);
    }

    void backward_task(int64_t b, int64_t g) const {
        const int64_t all = units * keys, flat = keys / P::U * wide;
        Buffer<Unit> k(all), v(all), k_flat(flat), q_flat(flat), o_flat(flat), q(BLOCK * units + 1), o(BLOCK * units + 1);
        Buffer<Unit> p(BLOCK / P::U * keys), d_s(BLOCK / P::U * keys);
        Buffer<typename P::Narrow> rows(BLOCK * keys);
        Buffer<float> s(BLOCK * keys), d_p(BLOCK * keys), d_k(keys * wide), d_v(keys * wide), d_q(BLOCK * wide);
        const S *keys_at = row(m.k, m.k_steps, b, g, 0), *values_at = row(m.v, m.v_steps, b, g, 0);
        turned(keys_at, m.k_steps[2], k + 0);
        across(keys_at, m.k_steps[2], k_flat + 0);
        turned(values_at, m.v_steps[2], v + 0);
        std::fill_n(d_k + 0, keys * wide, 0.f);
        std::fill_n(d_v + 0, keys * wide, 0.f);
        for (int64_t h = g * share; h < (g + 1) * share; ++h) {
            const S *q_at = row(m.q, m.q_steps, b, h, 0), *o_at = row(m.d_out, m.d_out_steps, b, h, 0);
            across(q_at, m.q_steps[2], q_flat + 0);
            across(o_at, m.d_out_steps[2], o_flat + 0);
            for (int64_t first = 0; first < tokens; first += BLOCK) {
                expect(m.d_q, m.d_q_steps, b, h, first, first + BLOCK);
                along(q_at, m.q_steps[2], first, q + 0);
                along(o_at, m.d_out_steps[2], first, o + 0);
                scores(q + 0, k + 0, first, s + 0);
                scores(o + 0, v + 0, first, d_p + 0);
                for (int64_t r = 0; r < BLOCK; r += P::U)
                    slopes(m.sums + (b * m.heads + h) * tokens * 2, first, r, s + 0, d_p + 0, p + 0, d_s + 0, rows + 0);
                for (int64_t r = 0; r < BLOCK; r += ROWS)
                    products<P>((const Unit*)(rows + r * keys), keys / P::U, 1, k_flat + 0, wide,
                                (first + r + ROWS + P::U - 1) / P::U, d_q + r * wide, wide, wide, false);
                for (int64_t r = 0; r < BLOCK && first + r < tokens; ++r)
                    write(d_q + r * wide, 1, (S*)row(m.d_q, m.d_q_steps, b, h, first + r));
                // Queries before a key of this block do not read it.
                for (int64_t i = 0; i < first + BLOCK; i += ROWS) {
                    const int64_t from = std::max<int64_t>(0, i - first) / P::U, count = BLOCK / P::U - from;
                    const int64_t at = (first / P::U + from) * wide;
                    products<P>(p + from * keys + i, 1, keys, o_flat + at, wide, count, d_v + i * wide, wide, wide, true);
                    products<P>(d_s + from * keys + i, 1, keys, q_flat + at, wide, count, d_k + i * wide, wide, wide, true);
                }
            }
        }
        expect(m.d_k, m.d_k_steps, b, g, 0, tokens);
        expect(m.d_v, m.d_v_steps, b, g, 0, tokens);
        for (int64_t t = 0; t < tokens; ++t) {
            write(d_k + t * wide, 1, (S*)row(m.d_k, m.d_k_steps, b, g, t));
            write(d_v + t * wide, 1, (S*)row(m.d_v, m.d_v_steps, b, g, t));
        }
    }

    // p and ds of U queries from row `r` of the block: as units for sums over queries, and ds as rows for sums over
    // keys. Overwrites s and dp.
    void slopes(const float* sums, int64_t first, int64_t r, float* s, float* d_p, Unit* p, Unit* d_s,
                typename P::Narrow* rows) const {
        const int64_t end = up(first + BLOCK, LANES);
        for (int64_t u = 0; u < P::U; ++u)
            slope(sums, first + r + u, end, s + (r + u) * keys, d_p + (r + u) * keys, rows + (r + u) * keys);
        s += r * keys, d_p += r * keys, p += r / P::U * keys, d_s += r / P::U * keys;
        for (int64_t c = 0; c < end; c += LANES) {
            const int64_t other = c + (P::U - 1) * keys;
            P::put_units(p + c, load(s + c), load(s + other));
            P::put_units(d_s + c, load(d_p + c), load(d_p + other));
        }
    }

    // For query t overwrites s with p and dp with ds, which is also stored in `row`; zeros after t up to `end`.
    void slope(const float* sums, int64_t t, int64_t end, float* s, float* d_p, typename P::Narrow* row) const {
        // Rows after the last query are padding: they have no weights.
        const float top = t < tokens ? sums[2 * t] : 0, part = t < tokens ? 1 / sums[2 * t + 1] : 0;
        V inner_of = {};
        for (int64_t c = 0; c <= t && c < end; c += LANES) {
            V p = upto(exp2<P::FINE>((load(s + c) - top) * (m.scale * LOG2_E)) * part, c, t, 0);
            inner_of += p * load(d_p + c);
            store(s + c, p);
        }
        const float inner = total_of(inner_of);
        for (int64_t c = 0; c < end; c += LANES) {
            V slope = c <= t ? load(s + c) * (load(d_p + c) - inner) * m.scale : V{};
            if (c > t) store(s + c, V{});
            store(d_p + c, slope);
            store(row + c, slope);
        }
    }
};

template <class Call>
void with_units(const Attention& m, Call call) {
#ifdef __AVX512BF16__
    if (m.bf16) return call(Heads<Pairs, uint16_t>{m});
#endif
    if (m.bf16) return call(Heads<Floats, uint16_t>{m});
    call(Heads<Floats, float>{m});
}

}  // namespace

extern "C" void attention_forward(const Attention* m) {
    with_units(*m, [](const auto& heads) { heads.forward(); });
}

extern "C" void attention_backward(const Attention* m) {
    with_units(*m, [](const auto& heads) { heads.backward(); });
}

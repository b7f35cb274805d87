// Tiles of a mixture: loading, storing, and elementwise operations, forward and backward.
#pragma once

#include "mixture_products.h"

namespace {

constexpr int AREA = TOKENS * COLUMNS;

template <class S>
void read_edge(const S* from, int64_t stride, int rows, int columns, const S* bias, int start, float* to) {
    for (int t = 0; t < TOKENS; ++t)
        for (int c = start; c < start + LANES; ++c)
            to[t * COLUMNS + c] = t < rows && c < columns ? widen(from[t * stride + c]) + (bias ? widen(bias[c]) : 0.f) : 0.f;
}

// Loads rows of a tensor into a tile, padded with zeros, and adds `bias` if there is one; and stores them.
template <class S>
void read_tile(const S* from, int64_t stride, int rows, int columns, const S* bias, float* to) {
    for (int c = 0; c < COLUMNS; c += LANES) {
        if (c + LANES > columns) {
            read_edge(from, stride, rows, columns, bias, c, to);
            continue;
        }
        const V add = bias ? load(bias + c) : V{};
        for (int t = 0; t < rows; ++t) store(to + t * COLUMNS + c, load(from + t * stride + c) + add);
        for (int t = rows; t < TOKENS; ++t) store(to + t * COLUMNS + c, V{});
    }
}

template <class S>
void write_tile(const float* from, int rows, int columns, S* to, int64_t stride) {
    for (int t = 0; t < rows; ++t)
        for (int c = 0; c < columns; c += LANES)
            if (c + LANES <= columns)
                store(to + t * stride + c, load(from + t * COLUMNS + c));
            else
                for (int i = c; i < columns; ++i) put(to + t * stride + i, from[t * COLUMNS + i]);
}

// Prefetches the next block's rows, which are too far apart for the hardware prefetcher.
template <bool Write, class S>
void prefetch_tile(const S* from, int64_t stride) {
    for (int t = 0; t < TOKENS; ++t)
        for (size_t c = 0; c < COLUMNS; c += 64 / sizeof(S)) __builtin_prefetch(from + t * stride + c, Write, 2);
}

// One expert's tile: pre-activations, gates `p`, and operands of the products.
template <class Item>
struct Tile {
    float pre[2][AREA], d_h[AREA], p[TOKENS];
    Item h[AREA], rows[2][AREA], pairs[2][AREA];
};

template <class P, class Act, bool Gated>
void activate(Tile<typename P::Item>& tile, float* mixed) {
    for (int t = 0; t < TOKENS; t += 2)
        for (int c = 0; c < COLUMNS; c += LANES) {
            V h[2];
            for (int k = 0; k < 2; ++k) {
                int at = (t + k) * COLUMNS + c;
                h[k] = Act::value(load(tile.pre[0] + at));
                if (Gated) h[k] *= load(tile.pre[1] + at);
                store(mixed + at, load(mixed + at) + tile.p[t + k] * h[k]);
            }
            P::put_row(tile.h, t, c, h[0], h[1]);
        }
}

template <class P, class Act, bool Gated>
void activate_backward(Tile<typename P::Item>& tile, const float* d_mixed, float (*d_base)[AREA], float* d_gates) {
    for (int t = 0; t < TOKENS; t += 2) {
        V d_gate[2] = {load(d_gates + t * LANES), load(d_gates + (t + 1) * LANES)};
        for (int c = 0; c < COLUMNS; c += LANES) {
            V h[2], d[2][2];
            for (int k = 0; k < 2; ++k) {
                int at = (t + k) * COLUMNS + c;
                V slope, y = Act::both(load(tile.pre[0] + at), slope), up = Gated ? load(tile.pre[1] + at) : V{};
                V d_m = load(d_mixed + at), d_h = tile.p[t + k] * d_m + load(tile.d_h + at);
                h[k] = Gated ? y * up : y;
                d_gate[k] += d_m * h[k];
                d[0][k] = d_h * (Gated ? slope * up : slope);
                store(d_base[0] + at, load(d_base[0] + at) + d[0][k]);
                if (Gated) {
                    d[1][k] = d_h * y;
                    store(d_base[1] + at, load(d_base[1] + at) + d[1][k]);
                }
            }
            P::put_pair(tile.h, t, c, h[0], h[1]);
            for (int i = 0; i <= Gated; ++i) {
                P::put_row(tile.rows[i], t, c, d[i][0], d[i][1]);
                P::put_pair(tile.pairs[i], t, c, d[i][0], d[i][1]);
            }
        }
        store(d_gates + t * LANES, d_gate[0]);
        store(d_gates + (t + 1) * LANES, d_gate[1]);
    }
}

// The elementwise loops do not depend on the rank: P has rank 0 here, so each is compiled once.
template <class P>
struct Kernels {
    using Item = typename P::Item;
    using Forward = void (*)(Tile<Item>&, float*);
    using Backward = void (*)(Tile<Item>&, const float*, float (*)[AREA], float*);

    template <class Act>
    static void choose(bool gated, Forward& forward, Backward& backward) {
        forward = gated ? activate<P, Act, true> : activate<P, Act, false>;
        backward = gated ? activate_backward<P, Act, true> : activate_backward<P, Act, false>;
    }
    static void choose(int64_t act, bool gated, Forward& forward, Backward& backward) {
        constexpr bool fine = P::FINE;
        if (act == 0) choose<GeluTanh<fine>>(gated, forward, backward);
        if (act == 1) choose<GeluErf<fine>>(gated, forward, backward);
        if (act == 2) choose<Silu<fine>>(gated, forward, backward);
        if (act == 3) choose<Relu<fine>>(gated, forward, backward);
    }
};

}  // namespace

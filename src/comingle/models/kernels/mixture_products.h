// The narrow products of a mixture, on a tile of TOKENS tokens and COLUMNS columns that fits into the L1 cache.
//
//     outer   out(tokens, columns) = init + left(tokens, rank) factor(rank, columns)
//     inner   sums(tokens, rank)  += rows(tokens, columns) factor(rank, columns)^T
//     cross   grads(rank, columns) += left(tokens, rank)^T pairs(tokens, columns)
//
// `Wide` computes them in float32 on any processor, `Dots` in bfloat16 with dot-product instructions (two products per
// lane), `Tiles` in bfloat16 with AMX (sixteen rows per instruction). In the latter two, right operands hold pairs of
// adjacent entries of the summed dimension.
#pragma once

#include <algorithm>

#include "mixture_vector.h"

constexpr int TOKENS = 32;   // of a tile: the length of an AMX instruction's sums
constexpr int COLUMNS = 64;  // of a block

// A task is RANGE tokens of a user times all columns, or a part of them in wide models: long rows are read fast, and
// the factors and their gradients fit into the L2 cache.
constexpr int RANGE = 512;
inline int64_t columns_of_a_chunk(int64_t hidden) {
    const int64_t chunks = (hidden + 2047) / 2048;
    return ((hidden + chunks - 1) / chunks + COLUMNS - 1) / COLUMNS * COLUMNS;
}

template <int R>
struct Wide {
    using Item = float;
    static constexpr bool FINE = true;
    static constexpr int SUMS = TOKENS * R * LANES;  // floats of `sums`: one vector per sum, reduced at the end
    static constexpr int GROUP = std::min(R, SUMS_AT_ONCE);  // ranks per iteration
    struct Session {};

    static void put_row(Item* rows, int t, int c, V first, V second) {
        store(rows + t * COLUMNS + c, first);
        store(rows + (t + 1) * COLUMNS + c, second);
    }
    static void put_pair(Item* pairs, int t, int c, V first, V second) { put_row(pairs, t, c, first, second); }

    // `factor(r, c)` returns an element of the chunk's columns. Both packed forms are (rank, chunk).
    template <class F>
    static void pack_outer(F factor, int64_t chunk, Item* to) {
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < chunk; ++c) to[r * chunk + c] = factor(r, c);
    }
    template <class F>
    static void pack_inner(F factor, int64_t chunk, Item* to) {
        pack_outer(factor, chunk, to);
    }

    static void pack_left(const float* left, Item* to) { std::copy_n(left, TOKENS * R, to); }
    static void pack_cross(const float* left, Item* to) { std::copy_n(left, TOKENS * R, to); }

    static void outer(const Item* left, const Item* factor, const float* init, float* out, int64_t chunk) {
        for (int from = 0; from < R; from += GROUP, init = out)
            for (int c = 0; c < COLUMNS; c += LANES) {
                V f[GROUP];
                for (int r = 0; r < GROUP; ++r) f[r] = load(factor + (from + r) * chunk + c);
                for (int t = 0; t < TOKENS; ++t) {
                    V v = init ? load(init + t * COLUMNS + c) : V{};
                    for (int r = 0; r < GROUP; ++r) v += left[t * R + from + r] * f[r];
                    store(out + t * COLUMNS + c, v);
                }
            }
    }

    static void inner(const Item* rows, const Item* factor, float* sums, int64_t chunk) {
        for (int i = 0; i < TOKENS * R; i += GROUP) {
            const int t = i / R, from = i % R;
            V v[GROUP];
            for (int r = 0; r < GROUP; ++r) v[r] = load(sums + (i + r) * LANES);
            for (int c = 0; c < COLUMNS; c += LANES) {
                V row = load(rows + t * COLUMNS + c);
                for (int r = 0; r < GROUP; ++r) v[r] += row * load(factor + (from + r) * chunk + c);
            }
            for (int r = 0; r < GROUP; ++r) store(sums + (i + r) * LANES, v[r]);
        }
    }
    static float total(const float* sums, int t, int r) { return sum(load(sums + (t * R + r) * LANES)); }

    static void cross(const Item* left, const Item* pairs, float* grads, int64_t chunk) {
        for (int from = 0; from < R; from += GROUP)
            for (int c = 0; c < COLUMNS; c += LANES) {
                V v[GROUP];
                for (int r = 0; r < GROUP; ++r) v[r] = load(grads + (from + r) * chunk + c);
                for (int t = 0; t < TOKENS; ++t) {
                    V row = load(pairs + t * COLUMNS + c);
                    for (int r = 0; r < GROUP; ++r) v[r] += left[t * R + from + r] * row;
                }
                for (int r = 0; r < GROUP; ++r) store(grads + (from + r) * chunk + c, v[r]);
            }
    }

    // Offset of column `c` in a packed factor.
    static const Item* outer_from(const Item* factor, int c) { return factor + c; }
    static const Item* inner_from(const Item* factor, int c) { return factor + c; }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define MIXTURE_DOTS 1

// Common part of the two bfloat16 implementations.
template <int R>
struct Halves {
    using Item = uint16_t;
    static constexpr bool FINE = false;

    static __m512i both(V first, V second) {
        return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
    static void put_row(Item* rows, int t, int c, V first, V second) {
        __m512i v = both(first, second);
        _mm256_storeu_si256((__m256i*)(rows + t * COLUMNS + c), _mm512_castsi512_si256(v));
        _mm256_storeu_si256((__m256i*)(rows + (t + 1) * COLUMNS + c), _mm512_extracti64x4_epi64(v, 1));
    }
    static void put_pair(Item* pairs, int t, int c, V first, V second) {
        const __m512i turns = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                               22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        _mm512_storeu_si512(pairs + t * COLUMNS + 2 * c, _mm512_permutexvar_epi16(turns, both(first, second)));
    }

    // (rank / 2, chunk, 2)
    template <class F>
    static void pack_outer(F factor, int64_t chunk, Item* to) {
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < chunk; ++c) put(to + ((r / 2) * chunk + c) * 2 + r % 2, factor(r, c));
    }
    // (tokens, rank) and (rank, tokens)
    static void pack_left(const float* left, Item* to) {
        for (int i = 0; i < TOKENS * R; i += LANES) store(to + i, load(left + i));
    }
    static void pack_cross(const float* left, Item* to) {
        for (int t = 0; t < TOKENS; ++t)
            for (int r = 0; r < R; ++r) put(to + r * TOKENS + t, left[t * R + r]);
    }

    static const Item* outer_from(const Item* factor, int c) { return factor + 2 * c; }
};

template <int R>
struct Dots : Halves<R> {
    using Item = uint16_t;
    static constexpr int SUMS = TOKENS * R * LANES;
    struct Session {};

    static __m512bh vector(const Item* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static __m512bh twice(const Item* from) {  // broadcasts a pair to all lanes
        int both;
        std::memcpy(&both, from, sizeof both);
        return (__m512bh)_mm512_set1_epi32(both);
    }
    static V dot(V sum, __m512bh left, __m512bh right) { return (V)_mm512_dpbf16_ps((__m512)sum, left, right); }

    // (rank, chunk)
    template <class F>
    static void pack_inner(F factor, int64_t chunk, Item* to) {
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < chunk; ++c) put(to + r * chunk + c, factor(r, c));
    }

    static void outer(const Item* left, const Item* factor, const float* init, float* out, int64_t chunk) {
        for (int c = 0; c < COLUMNS; c += LANES) {
            __m512bh f[R / 2];
            for (int r = 0; r < R / 2; ++r) f[r] = vector(factor + (r * chunk + c) * 2);
            for (int t = 0; t < TOKENS; ++t) {
                V v = init ? load(init + t * COLUMNS + c) : V{};
                for (int r = 0; r < R / 2; ++r) v = dot(v, twice(left + t * R + 2 * r), f[r]);
                store(out + t * COLUMNS + c, v);
            }
        }
    }

    static void inner(const Item* rows, const Item* factor, float* sums, int64_t chunk) {
        for (int t = 0; t < TOKENS; ++t)
            for (int r = 0; r < R; ++r) {
                V v = load(sums + (t * R + r) * LANES);
                for (int c = 0; c < COLUMNS; c += 2 * LANES)
                    v = dot(v, vector(rows + t * COLUMNS + c), vector(factor + r * chunk + c));
                store(sums + (t * R + r) * LANES, v);
            }
    }
    static float total(const float* sums, int t, int r) {
        return total_of(load(sums + (t * R + r) * LANES));
    }

    static void cross(const Item* left, const Item* pairs, float* grads, int64_t chunk) {
        for (int from = 0; from < R; from += Wide<R>::GROUP)
            for (int c = 0; c < COLUMNS; c += LANES) {
                V v[Wide<R>::GROUP];
                for (int r = 0; r < Wide<R>::GROUP; ++r) v[r] = load(grads + (from + r) * chunk + c);
                for (int t = 0; t < TOKENS; t += 2) {
                    __m512bh row = vector(pairs + t * COLUMNS + 2 * c);
                    for (int r = 0; r < Wide<R>::GROUP; ++r) v[r] = dot(v[r], twice(left + (from + r) * TOKENS + t), row);
                }
                for (int r = 0; r < Wide<R>::GROUP; ++r) store(grads + (from + r) * chunk + c, v[r]);
            }
    }

    static const Item* inner_from(const Item* factor, int c) { return factor + c; }
};
#endif

#if defined(__AMX_BF16__) && defined(MIXTURE_DOTS) && defined(__linux__)
#define MIXTURE_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

// Linux enables the AMX tile registers only on request.
inline bool may_use_tiles() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return granted;
}

template <int R>
struct Tiles : Halves<R> {
    using Item = uint16_t;
    static constexpr int SUMS = TOKENS * R;

    // Configures the shapes of the eight tile registers; restores the previous configuration at the end.
    struct alignas(64) Shapes {
        uint8_t palette = 0, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    };
    struct Session {
        Shapes before;
        Session() {
            _tile_storeconfig(&before);
            Shapes own;
            own.palette = 1;
            const int shape[8][2] = {{16, 2 * R}, {R / 2, 64}, {16, 64}, {16, 64},
                                     {16, 4 * R}, {16, 4 * R}, {R, 64}, {R, 64}};
            for (int i = 0; i < 8; ++i) own.rows[i] = uint8_t(shape[i][0]), own.bytes[i] = uint16_t(shape[i][1]);
            _tile_loadconfig(&own);
        }
        ~Session() {
            if (before.palette)
                _tile_loadconfig(&before);
            else
                _tile_release();
        }
    };

    // (chunk / 2, rank, 2)
    template <class F>
    static void pack_inner(F factor, int64_t chunk, Item* to) {
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < chunk; ++c) put(to + ((c / 2) * R + r) * 2 + c % 2, factor(r, c));
    }
    static void outer(const Item* left, const Item* factor, const float* init, float* out, int64_t chunk) {
        for (int t = 0; t < TOKENS; t += 16) {
            _tile_loadd(0, left + t * R, 2 * R);
            for (int c = 0; c < COLUMNS; c += 16) {
                _tile_loadd(1, factor + 2 * c, 4 * chunk);
                if (init)
                    _tile_loadd(2, init + t * COLUMNS + c, 4 * COLUMNS);
                else
                    _tile_zero(2);
                _tile_dpbf16ps(2, 0, 1);
                _tile_stored(2, out + t * COLUMNS + c, 4 * COLUMNS);
            }
        }
    }

    static void inner(const Item* rows, const Item* factor, float* sums, int64_t) {
        for (int t = 0; t < TOKENS; t += 16) {
            _tile_loadd(5, sums + t * R, 4 * R);
            for (int c = 0; c < COLUMNS; c += 32) {
                _tile_loadd(3, rows + t * COLUMNS + c, 2 * COLUMNS);
                _tile_loadd(4, factor + c * R, 4 * R);
                _tile_dpbf16ps(5, 3, 4);
            }
            _tile_stored(5, sums + t * R, 4 * R);
        }
    }
    static float total(const float* sums, int t, int r) { return sums[t * R + r]; }

    static void cross(const Item* left, const Item* pairs, float* grads, int64_t chunk) {
        _tile_loadd(6, left, 2 * TOKENS);
        for (int c = 0; c < COLUMNS; c += 16) {
            _tile_loadd(7, grads + c, 4 * chunk);
            _tile_loadd(3, pairs + 2 * c, 4 * COLUMNS);
            _tile_dpbf16ps(7, 6, 3);
            _tile_stored(7, grads + c, 4 * chunk);
        }
    }

    static const Item* inner_from(const Item* factor, int c) { return factor + c * R; }
};
#endif

// The gradient of one user's convolution weights.
//
//   dW[o, i, k, l] = sum over h, w and images of dy[h, w, o] x[h s + k d - p, w s + l d - p, i]
//
// Vectors hold channels and adjacent taps here instead of images: a product is an entry of dy times a vector of x, so
// no vector has to be summed over its lanes. For this x is transposed first.

#pragma once

#include "layers.h"

// Indices into the concatenation of two vectors.
template <typename T>
inline Vec<T> choose(Vec<T> a, Vec<T> b, Vec<Index<T>> order) {
#ifdef __clang__
    constexpr int64_t SIZE = Vector<T>::SIZE;
    Vec<T> found;
    for (int64_t i = 0; i < SIZE; ++i) found[i] = order[i] < SIZE ? a[order[i]] : b[order[i] - SIZE];
    return found;
#else
    return __builtin_shuffle(a, b, order);
#endif
}

// Transposes a square: interleaves rows i and i + SIZE / 2, log2(SIZE) times.
template <typename T>
inline void transpose(Vec<T>* rows) {
    constexpr int64_t SIZE = Vector<T>::SIZE;
    Vec<Index<T>> low{}, high{};
    for (int64_t i = 0; i < SIZE; ++i) {
        low[i] = Index<T>(i / 2 + i % 2 * SIZE);
        high[i] = Index<T>(low[i] + SIZE / 2);
    }
#pragma GCC unroll 4
    for (int64_t n = SIZE; n > 1; n /= 2) {
        Vec<T> made[SIZE];
#pragma GCC unroll 8
        for (int64_t i = 0; i < SIZE / 2; ++i) {
            made[2 * i] = choose<T>(rows[i], rows[i + SIZE / 2], low);
            made[2 * i + 1] = choose<T>(rows[i], rows[i + SIZE / 2], high);
        }
#pragma GCC unroll 16
        for (int64_t i = 0; i < SIZE; ++i) rows[i] = made[i];
    }
}

// x as (height, lanes, padded width, channels), in which adjacent taps of a row are contiguous.
template <typename T>
struct Turned {
    static constexpr int64_t SIZE = Vector<T>::SIZE;
    const Step& s;
    const int64_t entries, padding, front, width, row;  // of an image's row; `row` is the size for all images
    T* rows;

    Turned(const Step& s, T* room)
        : s(s), entries(s.width * s.channels), padding(s.padding[1] * s.channels), front(whole(padding)),
          width(whole(front + entries + padding)), row(s.lanes * width), rows(room) {}

    static int64_t whole(int64_t count) { return (count + SIZE - 1) / SIZE * SIZE; }

    // Entries of the buffer, which starts as zeros: padding is never written. Vectors may extend past the last row.
    int64_t size() const { return s.height * row + SIZE; }

    // Offset of a pixel of the padded image.
    const T* at(int64_t h, int64_t w) const { return rows + h * row + front - padding + w * s.channels; }

    // Whether a tap reads a row.
    bool reads(int64_t h) const {
        for (int64_t k = 0; k < s.kernel[0]; ++k) {
            const int64_t from = h + s.padding[0] - k * s.dilation[0];
            if (from >= 0 && from % s.stride[0] == 0 && from / s.stride[0] < s.out_height) return true;
        }
        return false;
    }

    void fill(const T* x, int64_t threads) const {
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t h = 0; h < s.height; ++h) {
            if (!reads(h)) continue;
            const T* from = x + h * entries * s.lanes;
            T* to = rows + h * row + front;
            int64_t e = 0;
            for (; e + SIZE <= entries; e += SIZE)
                for (int64_t n = 0; n < s.lanes; n += SIZE) {
                    Vec<T> square[SIZE];
#pragma GCC unroll 16
                    for (int64_t i = 0; i < SIZE; ++i) square[i] = load<T>(from + (e + i) * s.lanes + n);
                    transpose<T>(square);
#pragma GCC unroll 16
                    for (int64_t i = 0; i < SIZE; ++i) store<T>(to + (n + i) * width + e, square[i]);
                }
            for (; e < entries; ++e)
                for (int64_t n = 0; n < s.lanes; ++n) to[n * width + e] = from[e * s.lanes + n];
        }
    }
};

constexpr int64_t PLACES = 8;  // pixels per block: the taps of a block read them from the cache
constexpr int64_t MANY = 3;    // vectors per block: BLOCK MANY sums fit into registers

// sums[j][o] += dy[o] x[j] over images and pixels of a row, for OUT outputs and SOME vectors.
template <typename T, int OUT, int SOME>
void tile(
    const Step& s, const T* dy, const T* x, const int64_t* offsets, int64_t pixels, int64_t width, T* const* sums,
    int64_t stride
) {
    const int64_t step_y = s.outputs * s.lanes, step_x = s.stride[1] * s.channels, lanes = s.lanes, images = s.images;
    int64_t offset[SOME];
    for (int j = 0; j < SOME; ++j) offset[j] = offsets[j];
    Vec<T> found[OUT][SOME] = {};
    for (int64_t n = 0; n < images; ++n, ++dy, x += width) {
        // Two output pointers: more addresses would not fit into registers.
        const T *by = dy, *behind = dy + OUT / 2 * lanes, *from = x;
        for (int64_t p = 0; p < pixels; ++p, by += step_y, behind += step_y, from += step_x) {
            Vec<T> values[SOME];
#pragma GCC unroll 4
            for (int j = 0; j < SOME; ++j) values[j] = load<T>(from + offset[j]);
#pragma GCC unroll 8
            for (int o = 0; o < OUT; ++o) {
                const T one = o < OUT / 2 ? by[o * lanes] : behind[(o - OUT / 2) * lanes];
#pragma GCC unroll 4
                for (int j = 0; j < SOME; ++j) found[o][j] += one * values[j];
            }
        }
    }
    for (int j = 0; j < SOME; ++j)
        for (int o = 0; o < OUT; ++o) {
            T* to = sums[j] + o * stride;
            store<T>(to, load<T>(to) + found[o][j]);
        }
}

template <typename T>
using Tile = void (*)(const Step&, const T*, const T*, const int64_t*, int64_t, int64_t, T* const*, int64_t);

template <typename T, int OUT>
Tile<T> tile_of(int64_t some) {
    return some == 1 ? tile<T, OUT, 1> : some == 2 ? tile<T, OUT, 2> : tile<T, OUT, 3>;
}

template <typename T>
Tile<T> tile_of(int64_t out, int64_t some) {
    if (out == 1) return tile_of<T, 1>(some);
    if (out == 2) return tile_of<T, 2>(some);
    return out == 4 ? tile_of<T, 4>(some) : tile_of<T, BLOCK>(some);
}

// The layout of vectors. Adjacent taps of a row are contiguous. One sweep over the image sums `channels` channels: the
// lanes of a vector if they divide the channels, else all.
template <typename T>
struct Plan {
    static constexpr int64_t SIZE = Vector<T>::SIZE;
    const int64_t all, joined, taps, channels, vectors;
    std::vector<int64_t> starts;  // offset of each vector in a row of taps, for the first channels
    std::vector<Index<T>> table;  // index into an output's sums (vectors, taps, SIZE) of each (channel, tap)

    explicit Plan(const Step& s)
        : all(s.kernel[0] * s.kernel[1]), joined(s.dilation[1] == 1 ? s.kernel[1] : 1), taps(all / joined),
          channels(s.channels % SIZE ? s.channels : SIZE),
          vectors(s.channels % SIZE ? (joined * channels + SIZE - 1) / SIZE : joined), table(channels * all) {
        for (int64_t v = 0; v < vectors; ++v) starts.push_back(s.channels % SIZE ? v * SIZE : v * s.channels);
        for (int64_t c = 0; c < channels; ++c)
            for (int64_t tap = 0; tap < all; ++tap) {
                const int64_t e = tap % joined * channels + c;
                table[c * all + tap] = Index<T>((e / SIZE * taps + tap / joined) * SIZE + e % SIZE);
            }
    }
    int64_t size() const { return vectors * taps * SIZE; }
};

// Adds a row of pixels to the sums of `out` outputs from `first`, for taps inside of the image, MANY vectors at once.
template <typename T>
void add_row(
    const Plan<T>& plan, const Turned<T>& x, const T* dy, int64_t h, int64_t first, int64_t out, int64_t channel, T* sums
) {
    const Step& s = x.s;
    int64_t offsets[MANY], count = 0;
    T* totals[MANY];
    const T *given = dy + (h * s.out_width * s.outputs + first) * s.lanes, *origin = x.at(0, 0) + channel;
    const auto flush = [&] {
        const Tile<T> tile = tile_of<T>(out, count);
        for (int64_t w = 0; w < s.out_width; w += PLACES)
            tile(s, given + w * s.outputs * s.lanes, origin + w * s.stride[1] * s.channels, offsets,
                 std::min(PLACES, s.out_width - w), x.width, totals, plan.size());
        count = 0;
    };
    for (const int64_t start : plan.starts)
        for (int64_t k = 0; k < s.kernel[0]; ++k) {
            const int64_t row = h * s.stride[0] + k * s.dilation[0] - s.padding[0];
            for (int64_t l = 0; l < s.kernel[1]; l += plan.joined, sums += plan.SIZE) {
                if (row < 0 || row >= s.height) continue;
                offsets[count] = row * x.row + l * s.dilation[1] * s.channels + start;
                totals[count++] = sums;
                if (count == MANY) flush();
            }
        }
    if (count) flush();
}

// The order of additions depends on sizes alone. Outputs are processed in blocks of a power of two.
template <typename T>
void weight_gradient(const Turned<T>& x, const T* dy, T* found, int64_t threads) {
    const Step& s = x.s;
    const Plan<T> plan(s);
    const int64_t blocks = (s.outputs + BLOCK - 1) / BLOCK, parts = s.channels / plan.channels;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < blocks * parts; ++task) {
        const int64_t channel = task % parts * plan.channels;
        int64_t first = task / parts * BLOCK;
        const int64_t end = std::min(s.outputs, first + BLOCK);
        for (int64_t out = BLOCK; out > 0; out /= 2) {
            if (first + out > end) continue;
            std::vector<T> sums(out * plan.size(), T(0));
            for (int64_t h = 0; h < s.out_height; ++h) add_row<T>(plan, x, dy, h, first, out, channel, sums.data());
            for (int64_t o = 0; o < out; ++o) {
                T* to = found + ((first + o) * s.channels + channel) * plan.all;
                const T* sum = sums.data() + o * plan.size();
                for (size_t m = 0; m < plan.table.size(); ++m) to[m] = sum[plan.table[m]];
            }
            first += out;
        }
    }
}

// Convolutions of one user: sums over taps and channels of a weight times a vector of images.
//
//   forward   y[h, w, o] = b[o] + sum_{k, l, i} W[o, i, k, l] x[h s + k d - p, w s + l d - p, i]
//   backward  dx[h s + k d - p, w s + l d - p, i] += W[o, i, k, l] dy[h, w, o]
//
// Taps outside of the image are skipped instead of multiplied by 0.

#pragma once

#include "layers.h"

struct Run {  // channels (and adjacent taps) that are contiguous in both maps and weights
    int64_t from, weight, length;
};

// Sums the runs' products for BLOCK outputs and MANY vectors of images, then `added`; stores the first `outputs`.
template <typename T, int MANY>
inline void pixel(
    const T* x, const T* weight, const Run* runs, int64_t count, int64_t lanes, const T* bias, const T* added, T* y,
    int64_t outputs
) {
    constexpr int64_t SIZE = Vector<T>::SIZE;
    Vec<T> sums[BLOCK][MANY];
    for (int64_t o = 0; o < BLOCK; ++o)
        for (int j = 0; j < MANY; ++j) sums[o][j] = Vec<T>{} + (bias ? bias[o] : T(0));
    for (int64_t r = 0; r < count; ++r) {
        const T *from = x + runs[r].from * lanes, *by = weight + runs[r].weight * BLOCK;
        for (int64_t i = 0; i < runs[r].length; ++i, from += lanes, by += BLOCK) {
            Vec<T> values[MANY];
#pragma GCC unroll 4
            for (int j = 0; j < MANY; ++j) values[j] = load<T>(from + j * SIZE);
#pragma GCC unroll 8
            for (int64_t o = 0; o < BLOCK; ++o)
#pragma GCC unroll 4
                for (int j = 0; j < MANY; ++j) sums[o][j] += by[o] * values[j];
        }
    }
    for (int64_t o = 0; o < outputs; ++o)
        for (int j = 0; j < MANY; ++j) {
            const int64_t at = o * lanes + j * SIZE;
            store<T>(y + at, added ? sums[o][j] + load<T>(added + at) : sums[o][j]);
        }
}

// The runs of each output pixel, that is the offsets of its taps in the input, for a convolution or its gradient.
struct Taps {
    int64_t height, width, channels;  // of the input
    int64_t kernel[2], stride[2], padding[2], dilation[2];
    bool transposed;

    // The input index that tap k of output index `at` reads along an axis; -1 for none.
    int64_t place(int axis, int64_t at, int64_t k) const {
        const int64_t size = axis ? width : height;
        int64_t found = transposed ? at + padding[axis] - k * dilation[axis] : at * stride[axis] - padding[axis] + k * dilation[axis];
        if (transposed) {
            if (found < 0 || found % stride[axis]) return -1;
            found /= stride[axis];
        }
        return found >= 0 && found < size ? found : -1;
    }

    int64_t runs(int64_t h, int64_t w, Run* found) const {
        int64_t count = 0;
        for (int64_t k = 0; k < kernel[0]; ++k) {
            const int64_t row = place(0, h, k);
            if (row < 0) continue;
            bool joined = false;
            // A transposed convolution reads taps in reverse, as its weights are stored.
            for (int64_t l = 0; l < kernel[1]; ++l) {
                const int64_t column = place(1, w, transposed ? kernel[1] - 1 - l : l);
                if (column < 0) { joined = false; continue; }
                const int64_t from = (row * width + column) * channels;
                if (joined && found[count - 1].from + found[count - 1].length == from) {
                    found[count - 1].length += channels;
                } else {
                    found[count++] = {from, (k * kernel[1] + l) * channels, channels};
                }
                joined = true;
            }
        }
        return count;
    }
};

template <typename T>
void convolve(
    const Taps& taps, const T* x, const T* packed, const T* bias, const T* added, T* y, int64_t high, int64_t wide,
    int64_t outputs, int64_t lanes, int64_t threads
) {
    constexpr int64_t SIZE = Vector<T>::SIZE;
    const int64_t all = taps.kernel[0] * taps.kernel[1] * taps.channels, blocks = (outputs + BLOCK - 1) / BLOCK;
    const int64_t rows = std::max<int64_t>(1, 16 / wide), tasks = (high + rows - 1) / rows;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < tasks; ++task) {
        const int64_t first = task * rows * wide, last = std::min(high, (task + 1) * rows) * wide;
        std::vector<Run> runs((last - first) * taps.kernel[0] * taps.kernel[1]);
        std::vector<int64_t> counts(last - first);
        for (int64_t p = first; p < last; ++p)
            counts[p - first] = taps.runs(p / wide, p % wide, runs.data() + (p - first) * taps.kernel[0] * taps.kernel[1]);
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t some = std::min(BLOCK, outputs - b * BLOCK);
            const T *weight = packed + b * all * BLOCK, *level = bias ? bias + b * BLOCK : nullptr;
            for (int64_t p = first; p < last; ++p) {
                const Run* own = runs.data() + (p - first) * taps.kernel[0] * taps.kernel[1];
                const int64_t at = (p * outputs + b * BLOCK) * lanes, count = counts[p - first];
                const T* more = added ? added + at : nullptr;
                for (int64_t n = 0; n < lanes; n += 2 * SIZE) {
                    const auto some_images = n + 2 * SIZE <= lanes ? pixel<T, 2> : pixel<T, 1>;
                    some_images(x + n, weight, own, count, lanes, level, more ? more + n : more, y + at + n, some);
                }
            }
        }
    }
}

// Packs weights (outputs, inputs, taps) as (output blocks, taps, inputs, BLOCK); by input blocks for the gradient of x.
template <typename T>
std::vector<T> pack(const T* weight, int64_t outputs, int64_t inputs, int64_t high, int64_t wide, bool transposed) {
    const int64_t taps = high * wide, to = transposed ? inputs : outputs, from = transposed ? outputs : inputs;
    const int64_t step_to = transposed ? taps : inputs * taps, step_from = transposed ? inputs * taps : taps;
    std::vector<T> found((to + BLOCK - 1) / BLOCK * taps * from * BLOCK, T(0));
    for (int64_t block = 0; block < to; block += BLOCK) {
        const int64_t some = std::min(BLOCK, to - block);
        for (int64_t i = 0; i < from; ++i) {
            const T* own = weight + block * step_to + i * step_from;
            T* at = found.data() + block * taps * from + i * BLOCK;
            // Too far apart for the hardware prefetcher.
            for (int64_t e = 0; transposed && e < some * taps; e += Vector<T>::SIZE)
                __builtin_prefetch(own + 6 * step_from + e);
            for (int64_t k = 0; k < high; ++k)
                for (int64_t l = 0; l < wide; ++l, at += from * BLOCK) {
                    const T* tap = own + k * wide + (transposed ? wide - 1 - l : l);
                    for (int64_t o = 0; o < some; ++o) at[o] = tap[o * step_to];
                }
        }
    }
    return found;
}

// Arguments of a step: one convolution with norm, ReLU and pooling, for all users.
//
// Maps are (users, height, width, channels, lanes): each image is a lane, so vectors hold images whatever the shape of
// the layer. Lanes after the first `images` are padding; their gradients are 0.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

enum Kind : int64_t { PLAIN = 0, BATCH_NORM = 1, GROUP_NORM = 2 };

struct Step {
    int64_t users, images, lanes, threads;
    int64_t height, width, channels;                      // of the input
    int64_t out_height, out_width, outputs;               // of the convolution's output, before pooling
    int64_t kernel[2], stride[2], padding[2], dilation[2];
    int64_t norm, groups, uses_running_statistics, relu, pool;      // norm is a Kind; pool is 1 for none
    int64_t weight_stride, bias_stride, gamma_stride, beta_stride;  // between users
    double eps;
    const void *x, *weight, *bias, *gamma, *beta;
    const void *added;   // to the input of ReLU, of z's size; only without pooling
    void *y;             // output of the convolution; only for a norm's backward pass
    void *mean, *rstd;   // (users, outputs, lanes); output, or input if `uses_running_statistics`
    void *z;             // output of the step
    uint8_t *taken;      // index in the pooling window of each entry of z
    const void *dz;
    const void *passed;  // gradient of x from other layers, added to dx
    void *dx, *d_weight, *d_bias, *d_gamma, *d_beta, *d_added;  // (users, ...), contiguous; null if not needed
};

constexpr uint8_t NONE = 255;  // no index: ReLU has set the entry to 0

#ifdef __AVX512F__
constexpr int64_t BYTES = 64, BLOCK = 8;  // of a vector; output channels per block: 2 BLOCK sums fit into registers
#else
constexpr int64_t BYTES = 32, BLOCK = 4;
#endif

template <typename T>
struct Vector {
    typedef T type __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
    static constexpr int64_t SIZE = BYTES / sizeof(T);
};

template <typename T>
using Vec = typename Vector<T>::type;

// Integer of the size of T.
template <typename T>
using Index = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

template <typename T>
inline Vec<T> load(const T* from) {
    return *reinterpret_cast<const Vec<T>*>(from);
}

template <typename T>
inline void store(T* to, Vec<T> value) {
    *reinterpret_cast<Vec<T>*>(to) = value;
}

// The first aligned address from `from` on.
template <typename T>
inline T* aligned(T* from) {
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(from) + BYTES - 1) / BYTES * BYTES);
}

// Distributes users over threads, or the rows of each user if there are fewer users than threads.
inline int64_t inner_threads(const Step& s) { return s.users >= s.threads ? 1 : s.threads; }

// What a step is told: one convolution and what stands behind it, of all users.
//
// Maps are (users, height, width, channels, lanes): an image is a lane, so that every product is of vectors of images,
// whatever the layer's shape. Lanes behind the first `images` fill vectors up; their gradients are 0.

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
    int64_t height, width, channels;                      // of what goes in
    int64_t high, wide, outputs;                          // of what the convolution yields
    int64_t kernel[2], stride[2], padding[2], dilation[2];
    int64_t norm, groups, given, relu, pool;              // a Kind; pool is 1 for none
    int64_t weight_stride, bias_stride, gamma_stride, beta_stride;  // between users
    double eps;
    const void *x, *weight, *bias, *gamma, *beta;
    const void *added;   // to what ReLU sees, of z's size; only without pooling
    void *y;             // of the convolution; kept for a norm's backward pass only
    void *mean, *rstd;   // (users, outputs, lanes), written, or given for batch norm
    void *z;             // of the whole step
    uint8_t *taken;      // which place of its window each entry of z is from
    const void *dz;
    const void *passed;  // added to dx: what others have found at x
    void *dx, *d_weight, *d_bias, *d_gamma, *d_beta, *d_added;  // any may be missing; (users, ...), contiguous
};

constexpr uint8_t NONE = 255;  // of no place: ReLU made it 0

#ifdef __AVX512F__
constexpr int64_t BYTES = 64, BLOCK = 8;  // of a vector; output channels at once: 2 BLOCK sums stay in registers
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

// As wide as T.
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

// The first place of a vector behind `from`.
template <typename T>
inline T* aligned(T* from) {
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(from) + BYTES - 1) / BYTES * BYTES);
}

// Threads share users out among them; where there are fewer users, each user's rows.
inline int64_t inner_threads(const Step& s) { return s.users >= s.threads ? 1 : s.threads; }

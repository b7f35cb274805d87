// Vectors of the size of a register: loads and stores in both number formats, exponential, activations and their
// derivatives.
//
// Uses the vector extension of GCC and Clang, so one source serves all processors. Vectors wider than a register would
// be kept in memory, and each operation would load and store them.
// Nothing here may be compiled with value-changing options (-ffast-math): the rounding trick in exp2 depends on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
constexpr int SUMS_AT_ONCE = REGISTERS / 2;  // the other registers hold operands

typedef float V __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES)));

// Memory of a task, aligned to a cache line.
template <class T>
struct Buffer {
    std::unique_ptr<T, decltype(&std::free)> memory;
    explicit Buffer(int64_t size) : memory((T*)std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64), std::free) {}
    T* operator+(int64_t i) const { return memory.get() + i; }
};

inline V load(const float* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline void store(float* to, V v) { std::memcpy(to, &v, sizeof v); }

inline float sum(V v) {
    float parts[LANES], total = 0;
    std::memcpy(parts, &v, sizeof v);
    for (float part : parts) total += part;
    return total;
}

// Sum and maximum of all lanes; the AVX-512 intrinsics reduce by halves.
inline float total_of(V v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    return sum(v);
#endif
}
inline float largest_of(V v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int i = 1; i < LANES; ++i) most = std::max(most, v[i]);
    return most;
#endif
}

// bfloat16 is the upper half of a float.
inline V load(const uint16_t* from) {
    Half half;
    std::memcpy(&half, from, sizeof half);
    return (V)(__builtin_convertvector(half, U) << 16);
}

// Rounds to nearest, ties to even. NaNs that arithmetic yields stay NaN.
inline void store(uint16_t* to, V v) {
#ifdef __AVX512BF16__
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
#else
    U bits = (U)v;
    Half half = __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, Half);
#endif
    std::memcpy(to, &half, sizeof half);
}

inline float widen(float x) { return x; }

inline float widen(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void put(float* to, float x) { *to = x; }

inline void put(uint16_t* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    *to = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Loads the first `count` lanes, sets the others to `rest`; and stores the first `count`.
template <class S>
V load_upto(const S* from, int64_t count, float rest = 0) {
    if (count >= LANES) return load(from);
    float parts[LANES];
    std::fill_n(parts, LANES, rest);
    for (int64_t i = 0; i < count; ++i) parts[i] = widen(from[i]);
    return load(parts);
}

template <class S>
void store_upto(S* to, V v, int64_t count) {
    if (count >= LANES) return store(to, v);
    float parts[LANES];
    store(parts, v);
    for (int64_t i = 0; i < count; ++i) put(to + i, parts[i]);
}

// Minimax polynomials for 2^f, |f| <= 1/2. Relative error: 7.5e-8 for float32 results, 7.5e-5 (1/25 of the rounding
// error) for bfloat16 results.
template <bool Fine>
inline V exp2_fraction(V f) {
    if (!Fine) return ((f * 0.05517167f + 0.24261113f) * f + 0.69326097f) * f + 0.99992806f;
    V p = (f * 0.0013276471f + 0.009675541f) * f + 0.055507131f;
    return ((p * f + 0.2402212f) * f + 0.69314694f) * f + 1.0000001f;
}

// 2^x, clamped to the range of float32 (without AVX-512 to a slightly smaller range).
template <bool Fine>
inline V exp2(V x) {
#ifdef __AVX512DQ__
    __m512 f = _mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 whole = _mm512_sub_ps((__m512)x, f);
    return (V)_mm512_scalef_ps((__m512)exp2_fraction<Fine>((V)f), whole);
#else
    x = x > 126.f ? V{} + 126.f : x;
    x = x < -126.f ? V{} - 126.f : x;
    V shifted = x + 12582912.f;  // 1.5 * 2^23: rounds to an integer in the lowest bits
    V p = exp2_fraction<Fine>(x - (shifted - 12582912.f));
    return (V)((U)p + ((U)shifted << 23));
#endif
}

// 1 / x for x >= 1.
template <bool Fine>
inline V reciprocal(V x) {
#ifdef __AVX512F__
    V guess = (V)_mm512_rcp14_ps((__m512)x);
    if (!Fine) return guess;
    // One Newton step doubles the 14 bits of precision. For an infinite x it would compute 0 * infinity, not 0.
    V better = guess * (2.f - x * guess);
    return x > 1e38f ? guess : better;
#else
    return 1.f / x;
#endif
}

constexpr float LOG2_E = 1.44269504f;

// Each activation maps a pre-activation to its value, and to value and derivative (formulas as in expert_mlp.py).
template <bool Fine>
struct GeluTanh {
    static constexpr float c = 1.59576912f;  // 2 sqrt(2 / pi)
    static V gate(V x, V square) {
        V t = x * (square * (-LOG2_E * c * 0.044715f) - LOG2_E * c);
        return reciprocal<Fine>(1.f + exp2<Fine>(t));
    }
    static V value(V x) { return x * gate(x, x * x); }
    static V both(V x, V& slope) {
        V square = x * x, s = gate(x, square), y = x * s;
        slope = s + (y - y * s) * (square * (3 * 0.044715f * c) + c);
        return y;
    }
};

template <bool Fine>
struct GeluErf {
    // Abramowitz & Stegun 7.1.26: erfc(u) = polynomial(t) exp(-u^2), t = 1 / (1 + p u), absolute error 1.5e-7.
    static V cdf(V x, V& density) {
        V u = (x < 0.f ? -x : x) * 0.70710678f;
        density = exp2<Fine>(u * u * -LOG2_E);
        V t = reciprocal<Fine>(1.f + 0.3275911f * u);
        V p = ((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f;
        V tail = 0.5f * (p * t + 0.254829592f) * t * density;
        return x < 0.f ? tail : 1.f - tail;
    }
    static V value(V x) {
        V density;
        return x * cdf(x, density);
    }
    static V both(V x, V& slope) {
        V density, s = cdf(x, density);
        slope = s + x * density * 0.39894228f;
        return x * s;
    }
};

template <bool Fine>
struct Silu {
    static V gate(V x) { return reciprocal<Fine>(1.f + exp2<Fine>(x * -LOG2_E)); }
    static V value(V x) { return x * gate(x); }
    static V both(V x, V& slope) {
        V s = gate(x), y = x * s;
        slope = s + (y - y * s);
        return y;
    }
};

template <bool Fine>
struct Relu {
    static V value(V x) { return x < 0.f ? V{} : x; }
    static V both(V x, V& slope) {
        slope = x > 0.f ? V{} + 1.f : V{};
        return value(x);
    }
};

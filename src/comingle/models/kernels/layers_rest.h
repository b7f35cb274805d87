// Norm, ReLU and max-pooling of one user's maps, in as few passes as possible.
//
// With m and r the mean and 1 / sqrt(variance + eps) of x over its set (batch norm: a channel's pixels and images;
// group norm: an image's pixels and a group's channels):
//
//   forward   h = (x - m) r,   z = max(0, gamma h + beta)                       (max only with relu)
//   backward  g = dz [gamma h + beta > 0],   dbeta = sum g,   dgamma = sum g h,
//             dx = r (gamma g - mean(gamma g) - h mean(gamma g h)),   or r gamma g if m and r are given
//
// A pixel has outputs * lanes entries; statistics and parameters are tables of this size. Sums over pixels are in T
// within PIXELS pixels and in double over these partial sums.

#pragma once

#include "layers.h"

constexpr int64_t PIXELS = 128;  // pixels of a partial sum, which is in T

template <typename T>
struct Rest {
    const Step& s;
    int64_t entries, pixels, threads;
    const T *gamma, *beta;  // of this user
    T *mean, *rstd;

    using Table = std::vector<double>;

    // Sums of one or two terms of each entry over pixels; the order of additions depends on sizes alone.
    template <typename F>
    void sums(Table& first, Table& second, F terms) const {
        const int64_t tasks = (pixels + PIXELS - 1) / PIXELS;
        std::vector<T> parts(tasks * entries * 2, T(0));
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t task = 0; task < tasks; ++task) {
            T *a = parts.data() + task * entries * 2, *b = a + entries;
            for (int64_t p = task * PIXELS; p < std::min(pixels, (task + 1) * PIXELS); ++p)
#pragma omp simd
                for (int64_t e = 0; e < entries; ++e) terms(p * entries + e, e, a[e], b[e]);
        }
        first.assign(entries, 0.0);
        second.assign(entries, 0.0);
        for (int64_t task = 0; task < tasks; ++task)
            for (int64_t e = 0; e < entries; ++e) {
                first[e] += parts[task * entries * 2 + e];
                second[e] += parts[task * entries * 2 + entries + e];
            }
    }

    // Each entry's mean over its whole set.
    void average(Table& table) const {
        const int64_t lanes = s.lanes;
        if (s.norm == BATCH_NORM) {
            for (int64_t c = 0; c < s.outputs; ++c) {
                double* own = table.data() + c * lanes;
                double sum = 0;
                for (int64_t n = 0; n < s.images; ++n) sum += own[n];
                std::fill(own, own + lanes, sum / double(pixels * s.images));
            }
            return;
        }
        const int64_t group = s.outputs / s.groups;
        for (int64_t g = 0; g < s.groups; ++g)
            for (int64_t n = 0; n < lanes; ++n) {
                double sum = 0;
                for (int64_t c = g * group; c < (g + 1) * group; ++c) sum += table[c * lanes + n];
                for (int64_t c = g * group; c < (g + 1) * group; ++c) table[c * lanes + n] = sum / double(pixels * group);
            }
    }

    void statistics(const T* x) const {
        Table found, none;
        sums(found, none, [=](int64_t at, int64_t, T& a, T&) { a += x[at]; });
        average(found);
        for (int64_t e = 0; e < entries; ++e) mean[e] = T(found[e]);
        const T* m = mean;
        sums(found, none, [=](int64_t at, int64_t e, T& a, T&) {
            const T d = x[at] - m[e];
            a += d * d;
        });
        average(found);
        for (int64_t e = 0; e < entries; ++e) rstd[e] = T(1 / std::sqrt(found[e] + s.eps));
    }

    // z = x * scale + shift
    void lines(std::vector<T>& scale, std::vector<T>& shift) const {
        scale.resize(entries);
        shift.resize(entries);
        for (int64_t e = 0; e < entries; ++e) {
            const int64_t c = e / s.lanes;
            const double by = double(rstd[e]) * (gamma ? double(gamma[c]) : 1.0);
            scale[e] = T(by);
            shift[e] = T((beta ? double(beta[c]) : 0.0) - double(mean[e]) * by);
        }
    }

    void forward(const T* x, const T* added, T* z, bool relu) const {
        if (!s.uses_running_statistics) statistics(x);
        std::vector<T> scale, shift;
        lines(scale, shift);
        const T *by = scale.data(), *up = shift.data(), low = relu ? T(0) : -std::numeric_limits<T>::infinity();
        const int64_t some = entries;
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t p = 0; p < pixels; ++p) {
            const T* own = x + p * some;
            T* to = z + p * some;
            if (added) {
                const T* other = added + p * some;
#pragma omp simd
                for (int64_t e = 0; e < some; ++e) {
                    const T h = own[e] * by[e] + up[e] + other[e];
                    to[e] = h < low ? low : h;
                }
                continue;
            }
#pragma omp simd
            for (int64_t e = 0; e < some; ++e) {
                const T h = own[e] * by[e] + up[e];
                to[e] = h < low ? low : h;  // propagates NaN
            }
        }
    }

    void backward(const T* dz, const T* x, T* dx, T* d_gamma, T* d_beta, bool relu) const {
        std::vector<T> scale, shift, slope(entries), level(entries);
        lines(scale, shift);
        Table first, second;
        const T *by = scale.data(), *up = shift.data(), *m = mean, *r = rstd;
        const T low = relu ? T(0) : -std::numeric_limits<T>::infinity();
        sums(first, second, [=](int64_t at, int64_t e, T& a, T& b) {
            const T given = dz[at], g = x[at] * by[e] + up[e] > low ? given : T(0);
            a += g;
            b += g * ((x[at] - m[e]) * r[e]);
        });
        parameters(first, d_beta);
        parameters(second, d_gamma);
        for (int64_t e = 0; e < entries; ++e) {
            const double weight = gamma ? double(gamma[e / s.lanes]) : 1.0;
            first[e] *= weight;
            second[e] *= weight;
        }
        average(first);
        average(second);
        // dx = scale g - r mean(gamma g) - (x - m) r^2 mean(gamma g h) = scale g + slope x + level
        for (int64_t e = 0; e < entries; ++e) {
            const double inverse = r[e], tilt = s.uses_running_statistics ? 0 : -inverse * inverse * second[e];
            const bool fills = e % s.lanes >= s.images;
            slope[e] = T(fills ? 0 : tilt);
            level[e] = T(fills || s.uses_running_statistics ? 0 : -inverse * first[e] - double(m[e]) * tilt);
        }
        const T *ps = slope.data(), *pl = level.data();
        const int64_t some = entries;
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t p = 0; p < pixels; ++p) {
            const T *own = x + p * some, *given = dz + p * some;
            T* to = dx + p * some;
#pragma omp simd
            for (int64_t e = 0; e < some; ++e) {
                const T kept = given[e], g = own[e] * by[e] + up[e] > low ? kept : T(0);
                to[e] = by[e] * g + ps[e] * own[e] + pl[e];
            }
        }
    }

    void parameters(const Table& table, T* found) const {
        for (int64_t c = 0; found && c < s.outputs; ++c) {
            double sum = 0;
            for (int64_t n = 0; n < s.images; ++n) sum += table[c * s.lanes + n];
            found[c] = T(sum);
        }
    }
};

// The maximum of each window, the first of equal ones; NaN counts as largest. Indices are computed in integers of the
// size of T, as some compilers do not vectorise the loop otherwise.
template <typename T>
void pool_forward(const Step& s, const T* x, T* z, uint8_t* taken, int64_t threads) {
    const int64_t entries = s.outputs * s.lanes, size = s.pool, up = s.out_height / size, across = s.out_width / size;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<Index<T>> room(entries);
        Index<T>* place = room.data();
#pragma omp for
        for (int64_t p = 0; p < up * across; ++p) {
            const T* corner = x + (p / across * size * s.out_width + p % across * size) * entries;
            T* best = z + p * entries;
            std::copy(corner, corner + entries, best);
            std::fill(place, place + entries, Index<T>(0));
            for (int64_t k = 1; k < size * size; ++k) {
                const T* v = corner + (k / size * s.out_width + k % size) * entries;
#pragma omp simd
                for (int64_t e = 0; e < entries; ++e) {
                    const bool larger = v[e] > best[e] || v[e] != v[e];
                    place[e] = larger ? Index<T>(k) : place[e];
                    best[e] = larger ? v[e] : best[e];
                }
            }
            if (s.relu) {
#pragma omp simd
                for (int64_t e = 0; e < entries; ++e) {
                    place[e] = best[e] <= T(0) ? Index<T>(NONE) : place[e];
                    best[e] = best[e] < T(0) ? T(0) : best[e];
                }
            }
            std::copy(place, place + entries, taken + p * entries);
        }
    }
}

template <typename T>
void pool_backward(const Step& s, const T* dz, const uint8_t* taken, T* dx, int64_t threads) {
    const int64_t entries = s.outputs * s.lanes, size = s.pool, up = s.out_height / size, across = s.out_width / size;
    if (up * size != s.out_height || across * size != s.out_width)
        std::fill(dx, dx + s.out_height * s.out_width * entries, T(0));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < up * across; ++p) {
        T* corner = dx + (p / across * size * s.out_width + p % across * size) * entries;
        const T* g = dz + p * entries;
        const uint8_t* place = taken + p * entries;
        for (int64_t k = 0; k < size * size; ++k) {
            T* to = corner + (k / size * s.out_width + k % size) * entries;
#pragma omp simd
            for (int64_t e = 0; e < entries; ++e) to[e] = place[e] == k ? g[e] : T(0);
        }
    }
}

// Cross-entropy of rows of logits; overwrites the logits with the unnormalised softmax exp(logit - max).
//
// A row is read from memory once: it is still cached when its maximum is known.
#pragma once

#include <cmath>

#include "mixture_vector.h"

extern "C" struct Softmax {
    int64_t rows, columns, bf16, keep, threads;  // without `keep` the logits are not overwritten
    void* logits;
    const int64_t* targets;
    float *loss, *total;
};

namespace {

template <class S>
void softmax_row(const Softmax& m, int64_t r) {
    constexpr int SUMS = 4;  // independent sums hide the latency of additions
    S* row = (S*)m.logits + r * m.columns;
    const float picked = widen(row[m.targets[r]]);
    V most = V{} - INFINITY, sums[SUMS] = {};
    for (int64_t c = 0; c < m.columns; c += LANES) {
        V v = load_upto(row + c, m.columns - c, -INFINITY);
        most = most > v ? most : v;  // NaN is handled below
    }
    const float top = largest_of(most);
    for (int64_t c = 0; c < m.columns; c += SUMS * LANES)
        for (int k = 0; k < SUMS && c + k * LANES < m.columns; ++k) {
            const int64_t at = c + k * LANES, left = m.columns - at;
            V weight = exp2<true>((load_upto(row + at, left, -INFINITY) - top) * LOG2_E);
            sums[k] += weight;
            if (m.keep) store_upto(row + at, weight, left);
        }
    m.total[r] = sum(sums[0] + sums[1] + (sums[2] + sums[3]));
    m.loss[r] = top + std::log(m.total[r]) - picked;
}

}  // namespace

// Returns whether all targets are columns.
extern "C" bool softmax_forward(const Softmax* m) {
    for (int64_t r = 0; r < m->rows; ++r)
        if (m->targets[r] < 0 || m->targets[r] >= m->columns) return false;
#pragma omp parallel for num_threads(m->threads)
    for (int64_t r = 0; r < m->rows; ++r)
        if (m->bf16)
            softmax_row<uint16_t>(*m, r);
        else
            softmax_row<float>(*m, r);
    return true;
}

// Fused computation of the hidden layer of an expert mixture, without a tensor (users, experts, n, hidden).
//
// With s the LoRA scale, per expert j (B_j and A_j of shape (rank, hidden), act as in expert_mlp.py):
//
//     forward    pre_j = base + s z_j B_j      h_j = act(pre_j)     gated: h_j = act(gate_j) up_j, each with base, B_j
//                mixed = sum_j p_j h_j         z_last_j = s h_j A_j^T          gated_j = p_j z_last_j
//     backward   recompute pre_j, h_j and slopes (cheaper than reading them); d_z_last_j = s p_j d_gated_j
//                d_h_j = p_j d_mixed + d_z_last_j A_j     d_pre_j = d_h_j act'(pre_j)     d_base = sum_j d_pre_j
//                d_z_j = s d_pre_j B_j^T       d_B_j = s z_j^T d_pre_j         d_A_j = d_z_last_j^T h_j
//                d_p_j = d_mixed . h_j + d_gated_j . z_last_j
//
// A task is a range of one user's tokens times a chunk of columns. Neither depends on the number of threads or on other
// users. Sums over columns are added in the order of chunks, sums over tokens in the order of ranges.
#include "mixture_decode.h"
#include "mixture_rows.h"
#include "mixture_tile.h"

extern "C" struct Mixture {
    int64_t users, n, hidden, experts, rank, first, act, bf16, threads, z_stride;
    float scale;
    const void *base[2], *bias[2], *z, *b[2], *a;  // a bias may be null
    const float* gates;
    void *mixed, *z_last, *gated;
    // Backward pass only; d_b and d_a are null if the factors need no gradient.
    const void *d_mixed, *d_gated;
    void *d_base[2], *d_z, *d_b[2], *d_a;
    float* d_gates;
};

namespace {

template <template <int> class P, int R, class S>
struct Run {
    using Ops = P<R>;
    using Item = typename Ops::Item;
    const Mixture& m;
    const int64_t first = m.first, experts = m.experts, pairs = first * experts;
    const int64_t chunk_columns = columns_of_a_chunk(m.hidden), chunks = (m.hidden + chunk_columns - 1) / chunk_columns;
    const int64_t tokens = m.users * m.n, ranges = (m.n + RANGE - 1) / RANGE, tasks = m.users * ranges * chunks;
    typename Kernels<P<0>>::Forward forward_tile;
    typename Kernels<P<0>>::Backward backward_tile;

    explicit Run(const Mixture& mixture) : m(mixture) {
        Kernels<P<0>>::choose(m.act, first == 2, forward_tile, backward_tile);
    }

    // Partial sums over the columns of a chunk: (tokens, width) for each chunk; `finish` adds them.
    struct Parts {
        int64_t width;
        Buffer<float> memory;
        Parts(const Run& run, int64_t w) : width(w), memory(run.chunks * run.tokens * w) {}
        float* at(const Run& run, int64_t chunk, int64_t token) const {
            return memory + (chunk * run.tokens + token) * width;
        }
        float total(const Run& run, int64_t token, int64_t i) const {
            float all = 0;
            for (int64_t chunk = 0; chunk < run.chunks; ++chunk) all += at(run, chunk, token)[i];
            return all;
        }
    };

    // The packed columns of an expert's factor, by user, expert and first column of the chunk.
    auto element(const void* factor, int64_t user, int64_t j, int64_t column) const {
        const S* from = (const S*)factor + (user * experts + j) * R * m.hidden + column;
        int64_t left = m.hidden - column, hidden = m.hidden;
        return [=](int r, int c) { return c < left ? widen(from[r * hidden + c]) : 0.f; };
    }

    // Columns [at, at + R) of `rows` rows of a (tokens, width) tensor, times scale and each row's `p`; then zero rows.
    static void left(const void* from, int64_t width, int64_t token, int64_t at, int rows, float scale, const float* p,
                     float* to) {
        std::fill_n(to, TOKENS * R, 0.f);
        for (int t = 0; t < rows; ++t) {
            const S* row = (const S*)from + (token + t) * width + at;
            for (int r = 0; r < R; ++r) to[t * R + r] = widen(row[r]) * (p ? p[t] * scale : scale);
        }
    }

    static constexpr const S* none = nullptr;
    const S* bias(int64_t i, int64_t column) const { return m.bias[i] ? (const S*)m.bias[i] + column : none; }

    void gates(int64_t token, int64_t j, int rows, float* p) const {
        for (int t = 0; t < TOKENS; ++t) p[t] = t < rows ? m.gates[(token + t) * experts + j] : 0.f;
    }

    void forward() const {
        Parts z_last(*this, experts * R);
#pragma omp parallel for num_threads(m.threads) schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; ++task)
            forward_task(task / chunks / ranges, task / chunks % ranges, task % chunks, z_last);
#pragma omp parallel for num_threads(m.threads)
        for (int64_t token = 0; token < tokens; ++token)
            for (int64_t i = 0; i < experts * R; ++i) {
                float z = z_last.total(*this, token, i) * m.scale;
                put((S*)m.z_last + token * experts * R + i, z);
                put((S*)m.gated + token * experts * R + i, z * m.gates[token * experts + i / R]);
            }
    }

    void forward_task(int64_t user, int64_t range, int64_t chunk, const Parts& z_last) const {
        [[maybe_unused]] typename Ops::Session session;
        const int64_t column = chunk * chunk_columns, size = R * chunk_columns, width = std::min(chunk_columns, m.hidden - column);
        Buffer<Item> b(pairs * size), a(experts * size), z(pairs * TOKENS * R);
        Buffer<float> sums(experts * Ops::SUMS), base(2 * AREA), mixed(AREA), floats(TOKENS * R), p(experts * TOKENS);
        auto memory = Buffer<Tile<Item>>(1);
        Tile<Item>& tile = *(memory + 0);
        for (int64_t j = 0; j < experts; ++j) {
            Ops::pack_inner(element(m.a, user, j, column), chunk_columns, a + j * size);
            for (int64_t i = 0; i < first; ++i)
                Ops::pack_outer(element(m.b[i], user, j, column), chunk_columns, b + (i * experts + j) * size);
        }
        for (int64_t t = range * RANGE, end = std::min(m.n, t + RANGE); t < end; t += TOKENS) {
            const int64_t token = user * m.n + t;
            const int rows = int(std::min<int64_t>(TOKENS, end - t));
            for (int64_t k = 0; k < pairs; ++k) {
                left(m.z, m.z_stride, token, k * R, rows, m.scale, nullptr, floats + 0);
                Ops::pack_left(floats + 0, z + k * TOKENS * R);
            }
            for (int64_t j = 0; j < experts; ++j) gates(token, j, rows, p + j * TOKENS);
            std::fill_n(sums + 0, experts * Ops::SUMS, 0.f);
            for (int64_t c = 0; c < width; c += COLUMNS) {
                const int64_t place = token * m.hidden + column + c;
                const int columns = int(std::min<int64_t>(COLUMNS, width - c));
                const int64_t next = c + COLUMNS < width ? place + COLUMNS : place - c + TOKENS * m.hidden;
                for (int64_t i = 0; i < first; ++i) {
                    read_tile((const S*)m.base[i] + place, m.hidden, rows, columns, bias(i, column + c), base + i * AREA);
                    prefetch_tile<false>((const S*)m.base[i] + next, m.hidden);
                }
                prefetch_tile<true>((const S*)m.mixed + next, m.hidden);
                std::fill_n(mixed + 0, AREA, 0.f);
                for (int64_t j = 0; j < experts; ++j) {
                    std::copy_n(p + j * TOKENS, TOKENS, tile.p);
                    for (int64_t i = 0; i < first; ++i)
                        Ops::outer(z + (i * experts + j) * TOKENS * R,
                                   Ops::outer_from(b + (i * experts + j) * size, c), base + i * AREA, tile.pre[i], chunk_columns);
                    forward_tile(tile, mixed + 0);
                    Ops::inner(tile.h, Ops::inner_from(a + j * size, c), sums + j * Ops::SUMS, chunk_columns);
                }
                write_tile(mixed + 0, rows, columns, (S*)m.mixed + place, m.hidden);
            }
            for (int r = 0; r < rows; ++r)
                for (int64_t i = 0; i < experts * R; ++i)
                    z_last.at(*this, chunk, token + r)[i] = Ops::total(sums + i / R * Ops::SUMS, r, i % R);
        }
    }

    void backward() const {
        Parts d_z(*this, pairs * R), d_gates(*this, experts);
        Buffer<float> d_factors(m.d_a ? ranges * m.users * (pairs + experts) * R * m.hidden : 0);
#pragma omp parallel for num_threads(m.threads) schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; ++task)
            backward_task(task / chunks / ranges, task / chunks % ranges, task % chunks, d_z, d_gates, d_factors);
        if (m.d_a) add_ranges(d_factors);
#pragma omp parallel for num_threads(m.threads)
        for (int64_t token = 0; token < tokens; ++token) {
            for (int64_t i = 0; i < pairs * R; ++i)
                put((S*)m.d_z + token * pairs * R + i, d_z.total(*this, token, i) * m.scale);
            for (int64_t j = 0; j < experts; ++j) {
                float total = d_gates.total(*this, token, j);
                for (int64_t i = (token * experts + j) * R, end = i + R; i < end; ++i)
                    total += widen(((const S*)m.d_gated)[i]) * widen(((const S*)m.z_last)[i]);
                m.d_gates[token * experts + j] = total;
            }
        }
    }

    void backward_task(int64_t user, int64_t range, int64_t chunk, const Parts& d_z, const Parts& d_gates,
                       const Buffer<float>& d_factors) const {
        [[maybe_unused]] typename Ops::Session session;
        const int64_t column = chunk * chunk_columns, size = R * chunk_columns, width = std::min(chunk_columns, m.hidden - column);
        const int64_t thin = TOKENS * R;
        Buffer<Item> b(pairs * size), turned(pairs * size), a(experts * size);
        Buffer<Item> z(pairs * thin), z_cross(pairs * thin), d_last(experts * thin), d_last_cross(experts * thin);
        Buffer<float> sums(pairs * Ops::SUMS), lanes(experts * TOKENS * LANES), base(2 * AREA), d_mixed(AREA);
        Buffer<float> d_base(2 * AREA), floats(thin), p(experts * TOKENS), d_b(pairs * size), d_a(experts * size);
        auto memory = Buffer<Tile<Item>>(1);
        Tile<Item>& tile = *(memory + 0);
        const bool factors = m.d_a != nullptr;
        if (factors) {
            std::fill_n(d_b + 0, pairs * size, 0.f);
            std::fill_n(d_a + 0, experts * size, 0.f);
        }
        for (int64_t j = 0; j < experts; ++j) {
            Ops::pack_outer(element(m.a, user, j, column), chunk_columns, a + j * size);
            for (int64_t i = 0; i < first; ++i) {
                auto factor = element(m.b[i], user, j, column);
                Ops::pack_outer(factor, chunk_columns, b + (i * experts + j) * size);
                Ops::pack_inner(factor, chunk_columns, turned + (i * experts + j) * size);
            }
        }
        for (int64_t t = range * RANGE, end = std::min(m.n, t + RANGE); t < end; t += TOKENS) {
            const int64_t token = user * m.n + t;
            const int rows = int(std::min<int64_t>(TOKENS, end - t));
            for (int64_t k = 0; k < pairs; ++k) {
                left(m.z, m.z_stride, token, k * R, rows, m.scale, nullptr, floats + 0);
                Ops::pack_left(floats + 0, z + k * thin);
                Ops::pack_cross(floats + 0, z_cross + k * thin);
            }
            for (int64_t j = 0; j < experts; ++j) {
                gates(token, j, rows, p + j * TOKENS);
                left(m.d_gated, experts * R, token, j * R, rows, m.scale, p + j * TOKENS, floats + 0);
                Ops::pack_left(floats + 0, d_last + j * thin);
                Ops::pack_cross(floats + 0, d_last_cross + j * thin);
            }
            std::fill_n(sums + 0, pairs * Ops::SUMS, 0.f);
            std::fill_n(lanes + 0, experts * TOKENS * LANES, 0.f);
            for (int64_t c = 0; c < width; c += COLUMNS) {
                const int64_t place = token * m.hidden + column + c;
                const int columns = int(std::min<int64_t>(COLUMNS, width - c));
                const int64_t next = c + COLUMNS < width ? place + COLUMNS : place - c + TOKENS * m.hidden;
                for (int64_t i = 0; i < first; ++i) {
                    read_tile((const S*)m.base[i] + place, m.hidden, rows, columns, bias(i, column + c), base + i * AREA);
                    prefetch_tile<false>((const S*)m.base[i] + next, m.hidden);
                    prefetch_tile<true>((const S*)m.d_base[i] + next, m.hidden);
                }
                read_tile((const S*)m.d_mixed + place, m.hidden, rows, columns, none, d_mixed + 0);
                prefetch_tile<false>((const S*)m.d_mixed + next, m.hidden);
                std::fill_n(d_base + 0, first * AREA, 0.f);
                for (int64_t j = 0; j < experts; ++j) {
                    std::copy_n(p + j * TOKENS, TOKENS, tile.p);
                    for (int64_t i = 0; i < first; ++i)
                        Ops::outer(z + (i * experts + j) * thin, Ops::outer_from(b + (i * experts + j) * size, c),
                                   base + i * AREA, tile.pre[i], chunk_columns);
                    Ops::outer(d_last + j * thin, Ops::outer_from(a + j * size, c), nullptr, tile.d_h, chunk_columns);
                    backward_tile(tile, d_mixed + 0, (float (*)[AREA])(d_base + 0), lanes + j * TOKENS * LANES);
                    for (int64_t i = 0; i < first; ++i) {
                        const int64_t k = i * experts + j;
                        Ops::inner(tile.rows[i], Ops::inner_from(turned + k * size, c), sums + k * Ops::SUMS, chunk_columns);
                        if (factors) Ops::cross(z_cross + k * thin, tile.pairs[i], d_b + k * size + c, chunk_columns);
                    }
                    if (factors) Ops::cross(d_last_cross + j * thin, tile.h, d_a + j * size + c, chunk_columns);
                }
                for (int64_t i = 0; i < first; ++i)
                    write_tile(d_base + i * AREA, rows, columns, (S*)m.d_base[i] + place, m.hidden);
            }
            for (int r = 0; r < rows; ++r) {
                for (int64_t i = 0; i < pairs * R; ++i)
                    d_z.at(*this, chunk, token + r)[i] = Ops::total(sums + i / R * Ops::SUMS, r, i % R);
                for (int64_t j = 0; j < experts; ++j)
                    d_gates.at(*this, chunk, token + r)[j] = sum(load(lanes + (j * TOKENS + r) * LANES));
            }
        }
        if (!factors) return;
        for (int64_t k = 0; k < pairs + experts; ++k)
            for (int64_t r = 0; r < R; ++r)
                std::copy_n((k < pairs ? d_b + k * size : d_a + (k - pairs) * size) + r * chunk_columns, width,
                            factor_row(d_factors, range, user, k, r) + column);
    }

    // Row r of the k-th factor's gradient in one range; all B come first, then A.
    float* factor_row(const Buffer<float>& from, int64_t range, int64_t user, int64_t k, int64_t r) const {
        return from + (((range * m.users + user) * (pairs + experts) + k) * R + r) * m.hidden;
    }

    void add_ranges(const Buffer<float>& d_factors) const {
#pragma omp parallel for num_threads(m.threads)
        for (int64_t row = 0; row < m.users * (pairs + experts) * R; ++row) {
            const int64_t r = row % R, k = row / R % (pairs + experts), user = row / R / (pairs + experts);
            float* total = factor_row(d_factors, 0, user, k, r);
            for (int64_t range = 1; range < ranges; ++range) {
                const float* part = factor_row(d_factors, range, user, k, r);
                for (int64_t c = 0; c < m.hidden; ++c) total[c] += part[c];
            }
            S* to = (S*)(k < pairs ? m.d_b[k / experts] : m.d_a) + ((user * experts + k % experts) * R + r) * m.hidden;
            for (int64_t c = 0; c < m.hidden; ++c) put(to + c, total[c]);
        }
    }
};

template <int R, class Call>
bool with_format(const Mixture& m, Call call) {
#ifdef MIXTURE_TILES
    if (m.bf16 && may_use_tiles()) return call(Run<Tiles, R, uint16_t>(m)), true;
#endif
#ifdef MIXTURE_DOTS
    if (m.bf16) return call(Run<Dots, R, uint16_t>(m)), true;
#endif
    if (m.bf16) return call(Run<Wide, R, uint16_t>(m)), true;
    return call(Run<Wide, R, float>(m)), true;
}

template <class Call>
bool with_rank(const Mixture& m, Call call) {
    if (m.rank == 4) return with_format<4>(m, call);
    if (m.rank == 8) return with_format<8>(m, call);
    if (m.rank == 16) return with_format<16>(m, call);
    return false;
}

}  // namespace

// Both return false if they were not compiled for the rank.
extern "C" bool mixture_forward(const Mixture* m) {
    return with_rank(*m, [](const auto& run) { run.forward(); });
}

extern "C" bool mixture_backward(const Mixture* m) {
    return with_rank(*m, [](const auto& run) { run.backward(); });
}

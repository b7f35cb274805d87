// A forward pass of a whole language model of the Llama family for a few rows: a token of each text, or `share`
// consecutive tokens of each text, such as a part of its prompt. Texts have adapters of their own.
//
//     x = embedding                                                     (rows, width), from the caller
//     per layer    n = norm(x)     q, k, v = W n + b + B (s A n)        then rotate q and k; cache k and v
//                  x += O(attention(q, cached k, cached v))
//                  n = norm(x)     p = gates(router n)                  x += experts(n) as in mixture_rows.h
//     logits = head(norm(x))
//
// A pass is a single parallel region. Its phases are separated by barriers that spin, since a phase takes only some
// microseconds, and threads that sleep in between would take longer to wake up. Activations are float32; weights,
// factors and the cache have the model's number format. Products with bfloat16 weights read their input in bfloat16 where
// the processor has instructions for it.
#pragma once

#include <omp.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <atomic>
#include <cmath>
#include <thread>
#include <type_traits>
#include <vector>

#include "mixture_packed.h"

extern "C" {
// Weights of the norms have `width` entries; `router` is (texts, experts, width) or null for equal gates; keys and values
// are (texts, groups, capacity, head), of which positions before `stop` are cached.
struct DecodeLayer {
    const void *attention_norm, *mlp_norm;
    RowsLinear q, k, v, o, gate, up, down;
    const float* router;
    void *keys, *values;
};

// `present` is (texts, experts): whether a text has an expert. `cos` and `sin` are (rows, head). `starts` has the position
// of each text's first token; earlier ones are padding. `head_layer` maps to the vocabulary; `logits` (texts, vocabulary)
// are those after each text's last token, or null.
struct Decode {
    int64_t rows, share, layers, width, heads, groups, head, hidden, experts, top_k, act, capacity, stop, bf16, threads;
    float epsilon, attention_scale, scale;
    const DecodeLayer* layer;
    const void* norm;
    RowsLinear head_layer;
    const uint8_t* present;
    const float *x, *cos, *sin;
    const int64_t* starts;
    float* logits;
};
}

namespace {

// Threads that share the tasks of one phase after another. Each begins with consecutive tasks, since weights that follow
// are prefetched, and then takes what others have left.
class Team {
    struct alignas(64) Share {
        std::atomic<int64_t> taken{0};
    };
    std::vector<Share> shares;
    int64_t size = 1;
    std::atomic<int64_t> arrived{0}, phase{0};

   public:
    explicit Team(int64_t most) : shares(most) {}

    // To be called by all threads of a parallel region.
    void meet() {
#pragma omp single
        size = omp_get_num_threads();
    }

    // Calls `task(i)` for i < count, each by one thread, and waits until all are done.
    template <class Task>
    void each(int64_t count, Task task) {
        for (int64_t i = 0, first = omp_get_thread_num(); i < size; ++i) {
            const int64_t of = (first + i) % size, from = of * count / size, end = (of + 1) * count / size;
            for (int64_t t; (t = from + shares[of].taken.fetch_add(1, std::memory_order_relaxed)) < end;) task(t);
        }
        const int64_t now = phase.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            for (Share& share : shares) share.taken.store(0, std::memory_order_relaxed);
            arrived.store(0, std::memory_order_relaxed);
            phase.store(now + 1, std::memory_order_release);
            return;
        }
        for (int64_t spins = 0; phase.load(std::memory_order_acquire) == now; ++spins)
            if (spins > 1000)  // some ten microseconds: a thread of the team has lost its processor
                std::this_thread::yield();
            else
                relax();
    }

   private:
    static void relax() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
};

// Keeps a thread of a team on a CPU of its own until it is destroyed, if the team has as many threads as the process has
// CPUs. Otherwise Linux leaves two of them on one CPU for tens of milliseconds where threads of a lower priority, which
// train, occupy the other CPU.
class OwnCpu {
#ifdef __linux__
    cpu_set_t allowed;
    bool is_set = false;

   public:
    OwnCpu(int64_t thread, int64_t threads) {
        if (threads == 1 || sched_getaffinity(0, sizeof allowed, &allowed) || CPU_COUNT(&allowed) != threads) return;
        int cpu = -1;
        for (int64_t passed = -1; passed < thread; passed += CPU_ISSET(cpu, &allowed) ? 1 : 0) ++cpu;
        cpu_set_t own;
        CPU_ZERO(&own);
        CPU_SET(cpu, &own);
        is_set = sched_setaffinity(0, sizeof own, &own) == 0;
    }
    ~OwnCpu() {
        if (is_set) sched_setaffinity(0, sizeof allowed, &allowed);
    }
#else
   public:
    OwnCpu(int64_t, int64_t) {}
#endif
};

template <class S>
struct DecodeStep {
#ifdef ROWS_DOTS
    static constexpr bool DOTS = std::is_same_v<S, uint16_t>;
#else
    static constexpr bool DOTS = false;
#endif
    const Decode& m;
    const int64_t texts;
    const Rows shape, last_shape;  // only `rows` and `share`, which the functions of Step read
    const Step<S> rows, last_rows;
    Buffer<float> x, qkv, attended, z, logits, gates, h, mixed;
    mutable Team team;

    explicit DecodeStep(const Decode& m)
        : m(m), texts(m.rows / m.share), shape(shape_of(m.rows, m.share)), last_shape(shape_of(texts, 1)), rows{shape},
          last_rows{last_shape}, x(m.rows * m.width), qkv(m.rows * (m.heads + 2 * m.groups) * m.head),
          attended(m.rows * m.heads * m.head), z(m.rows * most_ranks()), logits(m.rows * m.experts),
          gates(m.rows * m.experts), h(m.rows * m.experts * m.hidden), mixed(m.rows * m.hidden),
          team(m.threads) {
        std::copy_n(m.x, m.rows * m.width, x + 0);
    }

    Rows shape_of(int64_t rows, int64_t share) const {
        return {rows, share, m.experts, 2, m.act, m.bf16, m.threads, m.scale, {}, {}, nullptr, nullptr, nullptr};
    }

    // The ranks of the factors A that read the same input, added up.
    int64_t most_ranks() const {
        int64_t most = 1;
        for (int64_t i = 0; i < m.layers; ++i) {
            const DecodeLayer& l = m.layer[i];
            most = std::max({most, l.q.ranks + l.k.ranks + l.v.ranks, l.gate.ranks + l.up.ranks, l.o.ranks, l.down.ranks});
        }
        return most;
    }

    // x / sqrt(mean(x^2) + epsilon) * weight for all rows. Every thread computes all of it: that is faster than waiting.
    void norm(const void* weight, float* to) const {
        for (int64_t r = 0; r < m.rows; ++r) {
            const float* from = x + r * m.width;
            V squares = {};
            for (int64_t c = 0; c < m.width; c += LANES) {
                const V v = load_upto(from + c, m.width - c);
                squares += v * v;
            }
            const float factor = 1.f / std::sqrt(add_up(squares) / float(m.width) + m.epsilon);
            for (int64_t c = 0; c < m.width; c += LANES) {
                const int64_t count = m.width - c;
                const V v = load_upto(from + c, count) * factor * load_upto((const S*)weight + c, count);
                store_upto(to + r * m.width + c, v, count);
            }
        }
    }

    // z = s A in for several layers with the same input; the products of a layer follow those of the one before. Row r
    // of `in` has `sets` inputs, each for an equal share of the ranks.
    template <size_t N>
    void thin(const RowsLinear* const (&layers)[N], const float* in, int64_t sets) const {
        int64_t from[N + 1] = {};
        for (size_t i = 0; i < N; ++i) from[i + 1] = from[i] + m.rows * layers[i]->ranks;
        if (from[N] == 0) return;
        team.each(from[N], [&](int64_t task) {
            size_t i = 0;
            while (task >= from[i + 1]) ++i;
            const RowsLinear& l = *layers[i];
            const int64_t r = (task - from[i]) / l.ranks, k = (task - from[i]) % l.ranks;
            const float* input = in + (r * sets + k / (l.ranks / sets)) * l.d_in;
            dots<1, 1>(input, (const S*)l.a + (r / m.share * l.ranks + k) * l.d_in, l.d_in, z + task);
            *(z + task) *= m.scale;
        });
    }

    // Input of products. Packed weights read it rounded, dot products of bfloat16 as bfloat16; every thread rounds all rows.
    struct Read {
        const float* x;
        bool fine;
        Input rounded;
        Buffer<uint16_t> narrow;
    };
    void round(Read& in, const float* x, const RowsLinear& reader, int64_t count, bool fine) const {
        in.x = x, in.fine = fine;
        for (int64_t r = 0; reader.scales && r < count; ++r) in.rounded.fill(r, x + r * reader.d_in, reader.d_in, fine);
        const int64_t size = count * reader.d_in;
        for (int64_t i = 0; DOTS && !reader.scales && i < size; i += LANES)
            store_upto(in.narrow + i, load_upto(x + i, size - i), size - i);
    }

    // Some outputs of W in + b for the rows of `some`.
    void product(const Step<S>& some, const RowsLinear& l, const Read& in, int64_t column, int64_t columns, float* base) const {
        if (!l.scales && DOTS) return some.chunk(l, in.narrow + 0, column, columns, base);
        if (!l.scales) return some.chunk(l, in.x, column, columns, base);
        packed_product(l, in.rounded, in.fine, 0, some.m.rows, column, columns, base, base + some.m.rows * CHUNK);
        if (l.bias) some.add_bias(l, column, columns, base);
    }

    // Calls `use(r, column, count, v)` with vectors of W in + b + B z, for all rows and the columns of one chunk.
    template <class Use>
    void chunk(const RowsLinear& l, const Read& in, const float* z, int64_t number, float* base, Use use) const {
        const int64_t column = number * outputs(l), columns = std::min(outputs(l), l.d_out - column);
        product(rows, l, in, column, columns, base);
        for (int64_t r = 0; r < m.rows; ++r)
            for (int64_t c = 0; c < columns; c += LANES) {
                const V v = load(base + r * CHUNK + c);
                use(r, column + c, columns - c, rows.lora(l, z, r, 0, l.ranks, column + c, columns - c, v));
            }
    }
    // Outputs of a chunk: few, so that threads get equal shares.
    static int64_t outputs(const RowsLinear& l) { return l.turned ? CHUNK : CHUNK / 2; }
    static int64_t chunks(const RowsLinear& l) { return (l.d_out + outputs(l) - 1) / outputs(l); }

    // Adds the output of a layer to the residual stream.
    void add_output(const RowsLinear& l, const Read& in, float* base) const {
        team.each(chunks(l), [&](int64_t number) {
            chunk(l, in, z + 0, number, base, [&](int64_t r, int64_t column, int64_t count, V v) {
                float* to = x + r * m.width + column;
                store_upto(to, load_upto(to, count) + v, count);
            });
        });
    }

    void project(const DecodeLayer& l, const Read& in, float* base) const {
        const RowsLinear* const layers[] = {&l.q, &l.k, &l.v};
        thin(layers, in.x, 1);
        const int64_t width = (m.heads + 2 * m.groups) * m.head;
        team.each(chunks(l.q) + chunks(l.k) + chunks(l.v), [&](int64_t number) {
            int64_t to = 0, ranks = 0;
            size_t i = 0;
            for (; number >= chunks(*layers[i]); ++i) {
                number -= chunks(*layers[i]);
                to += layers[i]->d_out;
                ranks += m.rows * layers[i]->ranks;
            }
            chunk(*layers[i], in, z + ranks, number, base, [&](int64_t r, int64_t column, int64_t count, V v) {
                store_upto(qkv + r * width + to + column, v, count);
            });
        });
    }

    // Rotates a head by the row's position: (a, b) -> (a cos - b sin, b cos + a sin) with the halves a and b.
    void rotate(float* head, int64_t r) const {
        const int64_t half = m.head / 2;
        const float *cos = m.cos + r * m.head, *sin = m.sin + r * m.head;
        for (int64_t i = 0; i < half; ++i) {
            const float a = head[i], b = head[i + half];
            head[i] = a * cos[i] - b * sin[i];
            head[i + half] = b * cos[i + half] + a * sin[i + half];
        }
    }

    // Rotates queries and keys, and writes keys and values to the cache.
    void cache(const DecodeLayer& l) const {
        const int64_t per_group = m.heads / m.groups, width = (m.heads + 2 * m.groups) * m.head;
        team.each(m.rows * m.groups, [&](int64_t task) {
            const int64_t r = task / m.groups, g = task % m.groups;
            float *q = qkv + r * width + g * per_group * m.head, *k = qkv + r * width + (m.heads + g) * m.head;
            const float* v = k + m.groups * m.head;
            for (int64_t i = 0; i < per_group; ++i) rotate(q + i * m.head, r);
            rotate(k, r);
            const int64_t at = ((r / m.share * m.groups + g) * m.capacity + m.stop + r % m.share) * m.head;
            for (int64_t c = 0; c < m.head; ++c) {
                put((S*)l.keys + at + c, k[c]);
                put((S*)l.values + at + c, v[c]);
            }
        });
    }

    // Heads with the same keys are computed together, as many as still give all threads something to do.
    void attend(const DecodeLayer& l, float* scores) const {
        const int64_t per_group = m.heads / m.groups, most = m.rows * m.groups < 8 * m.threads ? 1 : HEADS;
        const int64_t parts = (per_group + most - 1) / most;
        team.each(m.rows * m.groups * parts, [&](int64_t task) {
            const int64_t r = task / (m.groups * parts), g = task / parts % m.groups, first = task % parts * most;
            const int64_t count = std::min(most, per_group - first), head = g * per_group + first;
            if (count == 1) attend_heads<1>(l, scores, r, head);
            if (count == 2) attend_heads<2>(l, scores, r, head);
            if (count == 3) attend_heads<3>(l, scores, r, head);
            if (count == 4) attend_heads<4>(l, scores, r, head);
        });
    }
    static constexpr int64_t HEADS = 4;
    int64_t most_scores() const { return m.stop + m.share + CHUNK; }

    // Attention of H heads of a row with the same keys, from `head` on.
    template <int H>
    void attend_heads(const DecodeLayer& l, float* scores, int64_t r, int64_t head) const {
        constexpr int AT_ONCE = REGISTERS < 32 && H > 1 ? 2 : H % 2 ? ALONE : ALONE / 2;
        const int64_t per_group = m.heads / m.groups, width = (m.heads + 2 * m.groups) * m.head;
        const int64_t text = r / m.share, from = m.starts[text], count = m.stop + r % m.share + 1 - from;
        const int64_t at = ((text * m.groups + head / per_group) * m.capacity + from) * m.head;
        const float* q = qkv + r * width + head * m.head;
        float* to = attended + (r * m.heads + head) * m.head;
        if (count <= 0) return (void)std::fill_n(to, H * m.head, 0.f);  // padding
        const S *keys = (const S*)l.keys + at, *values = (const S*)l.values + at;
        int64_t t = 0;
        for (; t + AT_ONCE <= count; t += AT_ONCE)
            dots<H, AT_ONCE>(q, keys + t * m.head, m.head, scores + t, most_scores());
        for (; t < count; ++t) dots<H, 1>(q, keys + t * m.head, m.head, scores + t, most_scores());
        float totals[H];
        for (int h = 0; h < H; ++h) totals[h] = exponentials(scores + h * most_scores(), count);
        int64_t c = 0;
        for (; c + 2 * LANES <= m.head; c += 2 * LANES) mix_values<H, 2>(scores, values + c, count, totals, to + c);
        for (; c + LANES <= m.head; c += LANES) mix_values<H, 1>(scores, values + c, count, totals, to + c);
        for (; c < m.head; ++c)
            for (int h = 0; h < H; ++h) {
                float sum = 0;
                for (t = 0; t < count; ++t) sum += scores[h * most_scores() + t] * widen(values[t * m.head + c]);
                to[h * m.head + c] = sum / totals[h];
            }
    }

    // Replaces scores by their exponentials, up to a factor; returns the sum of these.
    float exponentials(float* scores, int64_t count) const {
        float most = scores[0];
        for (int64_t t = 1; t < count; ++t) most = std::max(most, scores[t]);
        V sums = {};
        for (int64_t t = 0; t < count; t += LANES) {
            const V e = exp2<true>((load_upto(scores + t, count - t, -1e30f) - most) * (m.attention_scale * LOG2_E));
            sums += e;
            store_upto(scores + t, e, count - t);
        }
        return add_up(sums);
    }

    // COUNT vectors of H heads' means of values, with weights `scores` whose sums are `totals`.
    template <int H, int COUNT>
    void mix_values(const float* scores, const S* values, int64_t count, const float* totals, float* to) const {
        V sums[H][COUNT] = {};
        for (int64_t t = 0; t < count; ++t)
#pragma GCC unroll 4
            for (int i = 0; i < COUNT; ++i) {
                const V value = load(values + t * m.head + i * LANES);
#pragma GCC unroll 4
                for (int h = 0; h < H; ++h) sums[h][i] += scores[h * most_scores() + t] * value;
            }
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
            for (int i = 0; i < COUNT; ++i) store(to + h * m.head + i * LANES, sums[h][i] / totals[h]);
    }

    // The softmax over a row's `top_k` largest logits among its experts; equal gates without a router. Every thread
    // computes all gates after the logits are complete.
    void choose_gates(const DecodeLayer& l, const float* in, float* p) const {
        if (l.router)
            team.each(m.rows * m.experts, [&](int64_t task) {
                const int64_t r = task / m.experts, weight = r / m.share * m.experts + task % m.experts;
                dots<1, 1>(in + r * m.width, l.router + weight * m.width, m.width, logits + task);
            });
        for (int64_t r = 0; r < m.rows; ++r) {
            const uint8_t* present = m.present + r / m.share * m.experts;
            float* row = p + r * m.experts;
            const float* logit = logits + r * m.experts;
            float total = 0;
            for (int64_t j = 0; j < m.experts; ++j) row[j] = present[j] && !l.router ? 1.f : 0.f;
            float most = 0;
            for (int64_t picked = 0; l.router && picked < m.top_k; ++picked) {
                int64_t best = -1;
                for (int64_t j = 0; j < m.experts; ++j)
                    if (present[j] && row[j] == 0.f && (best < 0 || logit[j] > logit[best])) best = j;
                if (best < 0) break;
                if (picked == 0) most = logit[best];
                row[best] = std::max(std::exp(logit[best] - most), 1e-38f);
            }
            for (int64_t j = 0; j < m.experts; ++j) total += row[j];
            for (int64_t j = 0; j < m.experts; ++j) row[j] /= total;
        }
    }

    template <class Act>
    void experts(const DecodeLayer& l, Read& in, float* base, float* p) const {
        choose_gates(l, in.x, p);
        const RowsLinear* const layers[] = {&l.gate, &l.up};
        thin(layers, in.x, 1);
        const int64_t size = m.rows * CHUNK;
        team.each(chunks(l.gate), [&](int64_t number) {
            const int64_t column = number * outputs(l.gate), columns = std::min(outputs(l.gate), m.hidden - column);
            product(rows, l.gate, in, column, columns, base);
            product(rows, l.up, in, column, columns, base + size);
            for (int64_t r = 0; r < m.rows; ++r)
                for (int64_t c = 0; c < columns; c += LANES) {
                    const int64_t count = columns - c;
                    V sum = {};
                    for (int64_t j = 0; j < m.experts; ++j) {
                        auto pre = [&](const RowsLinear& layer, const float* z, const float* product) {
                            const int64_t rank = layer.ranks / m.experts;
                            const V v = load(product + r * CHUNK + c);
                            return rows.lora(layer, z, r, j * rank, (j + 1) * rank, column + c, count, v);
                        };
                        const V value = Act::value(pre(l.gate, z + 0, base)) * pre(l.up, z + m.rows * l.gate.ranks, base + size);
                        store_upto(h + (r * m.experts + j) * m.hidden + column + c, value, count);
                        sum += p[r * m.experts + j] * value;
                    }
                    store_upto(mixed + r * m.hidden + column + c, sum, count);
                }
        });
        const RowsLinear* const last[] = {&l.down};
        if (l.down.ranks) {
            thin(last, h + 0, m.experts);
            const int64_t rank = l.down.ranks / m.experts;
            team.each(m.rows * l.down.ranks, [&](int64_t i) { *(z + i) *= p[i / rank]; });
        }
        round(in, mixed + 0, l.down, m.rows, false);
        add_output(l.down, in, base);
    }

    // The logits after each text's last token.
    void predict(float* normed, Read& in, float* base) const {
        const RowsLinear& l = m.head_layer;
        norm(m.norm, normed);
        for (int64_t t = 0; t < texts; ++t) std::copy_n(normed + ((t + 1) * m.share - 1) * m.width, m.width, normed + t * m.width);
        round(in, normed, l, texts, true);
        team.each(chunks(l), [&](int64_t number) {
            const int64_t column = number * outputs(l), columns = std::min(outputs(l), l.d_out - column);
            product(last_rows, l, in, column, columns, base);
            for (int64_t t = 0; t < texts; ++t) std::copy_n(base + t * CHUNK, columns, m.logits + t * l.d_out + column);
        });
    }

    template <class Act>
    void run() const {
#pragma omp parallel num_threads(m.threads)
        {
            const OwnCpu cpu(omp_get_thread_num(), omp_get_num_threads());
            team.meet();
            Buffer<float> normed(m.rows * m.width), base(2 * m.rows * CHUNK), scores(HEADS * most_scores()), p(m.rows * m.experts);
            const int64_t widest = std::max({m.width, m.heads * m.head, m.hidden});
            Read in{nullptr, false, Input(m.rows, widest), Buffer<uint16_t>(m.rows * widest)};
            for (int64_t i = 0; i < m.layers; ++i) {
                const DecodeLayer& l = m.layer[i];
                norm(l.attention_norm, normed + 0);
                round(in, normed + 0, l.q, m.rows, true);
                project(l, in, base + 0);
                cache(l);
                attend(l, scores + 0);
                const RowsLinear* const out[] = {&l.o};
                thin(out, attended + 0, 1);
                round(in, attended + 0, l.o, m.rows, true);
                add_output(l.o, in, base + 0);
                norm(l.mlp_norm, normed + 0);
                round(in, normed + 0, l.gate, m.rows, false);
                experts<Act>(l, in, base + 0, p + 0);
            }
            if (m.logits) predict(normed + 0, in, base + 0);
        }
    }

    void run_with_activation() const {
        if (m.act == 0) run<GeluTanh<true>>();
        if (m.act == 1) run<GeluErf<true>>();
        if (m.act == 2) run<Silu<true>>();
        if (m.act == 3) run<Relu<true>>();
    }
};

}  // namespace

extern "C" void decode_step(const Decode* m) {
    if (m->bf16)
        DecodeStep<uint16_t>(*m).run_with_activation();
    else
        DecodeStep<float>(*m).run_with_activation();
}

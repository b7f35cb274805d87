// A forward pass of a whole language model of the Llama family over the rows of one or several batches, such as the next
// tokens of all texts and a part of another text's prompt. Each weight is read once for all rows. Each text has adapters of
// its own.
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
// A layer with a batch's adapters and cache. Weights of the norms have `width` entries; `router` is (texts, experts, width)
// or null for equal gates; keys and values are (texts, groups, capacity, head), of which positions before `stop` are cached.
struct DecodeLayer {
    const void *attention_norm, *mlp_norm;
    RowsLinear q, k, v, o, gate, up, down;
    const float* router;
    void *keys, *values;
};

// `share` consecutive tokens of each text. `present` is (texts, experts): whether a text has an expert. `x` is (rows, width),
// `cos` and `sin` are (rows, head). `starts` has the position of each text's first token; earlier ones are padding. `logits`
// (texts, vocabulary) are those after each text's last token, or null.
struct DecodeBatch {
    int64_t rows, share, capacity, stop;
    const DecodeLayer* layer;
    const uint8_t* present;
    const float *x, *cos, *sin;
    const int64_t* starts;
    float* logits;
};

// `head_layer` maps to the vocabulary. Batches have the same weights, and factors of the same ranks.
struct Decode {
    int64_t batches, layers, width, heads, groups, head, hidden, experts, top_k, act, bf16, threads;
    float epsilon, attention_scale, scale;
    const DecodeBatch* batch;
    const void* norm;
    RowsLinear head_layer;
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
    using Linear = RowsLinear DecodeLayer::*;

    // Row `row` of a batch: token `token` of text `text`.
    struct RowRef {
        const DecodeBatch& batch;
        int64_t row, text, token;
    };

    const Decode& m;
    const int64_t num_rows, num_predicted;  // rows, and texts whose logits are wanted
    Buffer<float> x, qkv, attended, z, router_logits, gates, h, mixed;
    mutable Team team;

    explicit DecodeStep(const Decode& m)
        : m(m), num_rows(sum([](const DecodeBatch& b) { return b.rows; })),
          num_predicted(sum([](const DecodeBatch& b) { return b.logits ? b.rows / b.share : 0; })), x(num_rows * m.width),
          qkv(num_rows * (m.heads + 2 * m.groups) * m.head), attended(num_rows * m.heads * m.head), z(num_rows * most_ranks()),
          router_logits(num_rows * m.experts), gates(num_rows * m.experts), h(num_rows * m.experts * m.hidden),
          mixed(num_rows * m.hidden), team(m.threads) {
        float* to = x + 0;
        for (int64_t i = 0; i < m.batches; ++i) to = std::copy_n(m.batch[i].x, m.batch[i].rows * m.width, to);
    }

    template <class Number>
    int64_t sum(Number number) const {
        int64_t total = 0;
        for (int64_t i = 0; i < m.batches; ++i) total += number(m.batch[i]);
        return total;
    }

    RowRef place(int64_t row) const {
        const DecodeBatch* b = m.batch;
        for (; row >= b->rows; ++b) row -= b->rows;
        return {*b, row, row / b->share, row % b->share};
    }

    // Largest sum of the ranks of linears that read the same input.
    int64_t most_ranks() const {
        int64_t most = 1;
        for (int64_t i = 0; i < m.layers; ++i) {
            const DecodeLayer& l = m.batch->layer[i];
            most = std::max({most, l.q.ranks + l.k.ranks + l.v.ranks, l.gate.ranks + l.up.ranks, l.o.ranks, l.down.ranks});
        }
        return most;
    }

    // x / sqrt(mean(x^2) + epsilon) * weight for all rows. Every thread computes all of it: that is faster than waiting.
    void norm(const void* weight, float* to) const {
        for (int64_t r = 0; r < num_rows; ++r) {
            const float* from = x + r * m.width;
            V squares = {};
            for (int64_t c = 0; c < m.width; c += LANES) {
                const V v = load_upto(from + c, m.width - c);
                squares += v * v;
            }
            const float factor = 1.f / std::sqrt(add_up(squares) / float(m.width) + m.epsilon);
            for (int64_t c = 0; c < m.width; c += LANES) {
                const int64_t left = m.width - c;
                const V v = load_upto(from + c, left) * factor * load_upto((const S*)weight + c, left);
                store_upto(to + r * m.width + c, v, left);
            }
        }
    }

    // z_i(r, k) = scale A_i(k) . in(r) for linears i with the same input, as blocks (num_rows, ranks_i) one after another in
    // `z`. `in` is (num_rows, sets, d_in): one set, or for `down` one of each expert, with an equal share of the ranks. A
    // task is up to AT_ONCE ranks of one row and set.
    template <size_t N>
    void lora_down(int64_t layer, const Linear (&linears)[N], const float* in, int64_t sets) const {
        constexpr int AT_ONCE = ALONE / 2;  // more would leave threads without a task where there is one row
        int64_t first_task[N + 1] = {}, z_offset[N + 1] = {}, tasks_per_input[N] = {};
        for (size_t i = 0; i < N; ++i) {
            const int64_t ranks = (m.batch->layer[layer].*linears[i]).ranks;
            tasks_per_input[i] = (ranks / sets + AT_ONCE - 1) / AT_ONCE;
            first_task[i + 1] = first_task[i] + num_rows * sets * tasks_per_input[i];
            z_offset[i + 1] = z_offset[i] + num_rows * ranks;
        }
        if (first_task[N] == 0) return;
        team.each(first_task[N], [&](int64_t task) {
            size_t i = 0;
            while (task >= first_task[i + 1]) ++i;
            task -= first_task[i];
            const int64_t input = task / tasks_per_input[i], r = input / sets;  // `sets` inputs of each row
            const RowRef at = place(r);
            const RowsLinear& l = at.batch.layer[layer].*linears[i];
            const int64_t share = l.ranks / sets, first = task % tasks_per_input[i] * AT_ONCE, k = input % sets * share + first;
            const int64_t count = std::min<int64_t>(AT_ONCE, share - first);
            const S* a = (const S*)l.a + (at.text * l.ranks + k) * l.d_in;
            float* to = z + z_offset[i] + r * l.ranks + k;
            if (count == AT_ONCE)
                dots<1, AT_ONCE>(in + input * l.d_in, a, l.d_in, to);
            else
                for (int64_t j = 0; j < count; ++j) dots<1, 1>(in + input * l.d_in, a + j * l.d_in, l.d_in, to + j);
            for (int64_t j = 0; j < count; ++j) to[j] *= m.scale;
        });
    }

    // Input of products in the form that the weights need: integers for packed weights (more of them if `fine`, see
    // mixture_packed.h), bfloat16 for dot products of bfloat16, else `x`. Every thread converts all rows.
    struct ProductInput {
        const float* x;
        bool fine;
        Input packed;
        Buffer<uint16_t> bf16;
    };
    void prepare(ProductInput& in, const float* x, const RowsLinear& reader, int64_t count, bool fine) const {
        in.x = x, in.fine = fine;
        for (int64_t r = 0; reader.scales && r < count; ++r) in.packed.fill(r, x + r * reader.d_in, reader.d_in, fine);
        const int64_t size = count * reader.d_in;
        for (int64_t i = 0; DOTS && !reader.scales && i < size; i += LANES)
            store_upto(in.bf16 + i, load_upto(x + i, size - i), size - i);
    }

    // Some outputs of W in + b for the first `rows` rows.
    void product(int64_t rows, const RowsLinear& l, const ProductInput& in, int64_t column, int64_t columns, float* base) const {
        const Products<S> products{rows};
        if (!l.scales && DOTS) return products.chunk(l, in.bf16 + 0, column, columns, base);
        if (!l.scales) return products.chunk(l, in.x, column, columns, base);
        packed_product(l, in.packed, in.fine, 0, rows, column, columns, base, base + rows * CHUNK);
        if (l.bias) products.add_bias(l, column, columns, base);
    }

    // Calls `use(r, column, left, v)` for all rows and vectors of outputs of one chunk: v has the outputs of W in + b + B z
    // from `column` on, of which `left` exist.
    template <class Use>
    void chunk(int64_t layer, Linear linear, const ProductInput& in, const float* z, int64_t number, float* base, Use use) const {
        const RowsLinear& shared = m.batch->layer[layer].*linear;
        const int64_t column = number * chunk_width(shared), columns = std::min(chunk_width(shared), shared.d_out - column);
        product(num_rows, shared, in, column, columns, base);
        for (int64_t r = 0; r < num_rows; ++r) {
            const RowRef at = place(r);
            const RowsLinear& l = at.batch.layer[layer].*linear;
            for (int64_t c = 0; c < columns; c += LANES) {
                const V v = load(base + r * CHUNK + c);
                use(r, column + c, columns - c, plus_lora<S>(l, z + r * l.ranks, at.text, 0, l.ranks, column + c, columns - c, v));
            }
        }
    }
    // Outputs of a chunk: few, so that threads get equal shares; a whole one where weights lie transposed, since only whole
    // chunks of these are summed as vectors.
    static int64_t chunk_width(const RowsLinear& l) { return l.turned ? CHUNK : CHUNK / 2; }
    static int64_t num_chunks(const RowsLinear& l) { return (l.d_out + chunk_width(l) - 1) / chunk_width(l); }

    // Adds the output of a linear to the residual stream.
    void add_output(int64_t layer, Linear linear, const ProductInput& in, float* base) const {
        team.each(num_chunks(m.batch->layer[layer].*linear), [&](int64_t number) {
            chunk(layer, linear, in, z + 0, number, base, [&](int64_t r, int64_t column, int64_t columns, V v) {
                float* to = x + r * m.width + column;
                store_upto(to, load_upto(to, columns) + v, columns);
            });
        });
    }

    // The queries, keys and values of all rows, (num_rows, heads + 2 groups, head).
    void project(int64_t layer, const ProductInput& in, float* base) const {
        const Linear linears[] = {&DecodeLayer::q, &DecodeLayer::k, &DecodeLayer::v};
        lora_down(layer, linears, in.x, 1);
        const DecodeLayer& l = m.batch->layer[layer];
        const int64_t width = (m.heads + 2 * m.groups) * m.head;
        team.each(num_chunks(l.q) + num_chunks(l.k) + num_chunks(l.v), [&](int64_t number) {
            int64_t to = 0, ranks = 0;
            size_t i = 0;
            for (; number >= num_chunks(l.*linears[i]); ++i) {
                number -= num_chunks(l.*linears[i]);
                to += (l.*linears[i]).d_out;
                ranks += num_rows * (l.*linears[i]).ranks;
            }
            chunk(layer, linears[i], in, z + ranks, number, base, [&](int64_t r, int64_t column, int64_t columns, V v) {
                store_upto(qkv + r * width + to + column, v, columns);
            });
        });
    }

    // Rotates a head by the row's position: (a, b) -> (a cos - b sin, b cos + a sin) with the halves a and b.
    void rotate(float* head, const RowRef& at) const {
        const int64_t half = m.head / 2;
        const float *cos = at.batch.cos + at.row * m.head, *sin = at.batch.sin + at.row * m.head;
        for (int64_t i = 0; i < half; ++i) {
            const float a = head[i], b = head[i + half];
            head[i] = a * cos[i] - b * sin[i];
            head[i + half] = b * cos[i + half] + a * sin[i + half];
        }
    }

    // Rotates queries and keys, and writes keys and values to the cache.
    void cache(int64_t layer) const {
        const int64_t per_group = m.heads / m.groups, width = (m.heads + 2 * m.groups) * m.head;
        team.each(num_rows * m.groups, [&](int64_t task) {
            const int64_t r = task / m.groups, g = task % m.groups;
            const RowRef at = place(r);
            const DecodeLayer& l = at.batch.layer[layer];
            float *q = qkv + r * width + g * per_group * m.head, *k = qkv + r * width + (m.heads + g) * m.head;
            const float* v = k + m.groups * m.head;
            for (int64_t i = 0; i < per_group; ++i) rotate(q + i * m.head, at);
            rotate(k, at);
            const int64_t position = at.batch.stop + at.token;
            const int64_t to = ((at.text * m.groups + g) * at.batch.capacity + position) * m.head;
            for (int64_t c = 0; c < m.head; ++c) {
                put((S*)l.keys + to + c, k[c]);
                put((S*)l.values + to + c, v[c]);
            }
        });
    }

    // A task is up to HEADS query heads of a row that share keys; a single one if there would be fewer than 8 tasks per
    // thread.
    void attend(int64_t layer, float* scores) const {
        const int64_t per_group = m.heads / m.groups, most = num_rows * m.groups < 8 * m.threads ? 1 : HEADS;
        const int64_t parts = (per_group + most - 1) / most;
        team.each(num_rows * m.groups * parts, [&](int64_t task) {
            const int64_t r = task / (m.groups * parts), g = task / parts % m.groups, first = task % parts * most;
            const int64_t heads = std::min(most, per_group - first), head = g * per_group + first;
            if (heads == 1) attend_heads<1>(layer, scores, r, head);
            if (heads == 2) attend_heads<2>(layer, scores, r, head);
            if (heads == 3) attend_heads<3>(layer, scores, r, head);
            if (heads == 4) attend_heads<4>(layer, scores, r, head);
        });
    }
    static constexpr int64_t HEADS = 4;
    int64_t most_scores() const {
        int64_t most = 0;
        for (int64_t i = 0; i < m.batches; ++i) most = std::max(most, m.batch[i].stop + m.batch[i].share);
        return most + CHUNK;
    }

    // Attention of H heads of a row with the same keys, from `head` on.
    template <int H>
    void attend_heads(int64_t layer, float* scores, int64_t r, int64_t head) const {
        // Keys whose products with H heads fit into registers; H * AT_ONCE is a multiple of eight, as `add_up_all` needs.
        constexpr int AT_ONCE = REGISTERS < 32 && H > 1 ? 2 : H % 2 ? ALONE : ALONE / 2;
        const int64_t per_group = m.heads / m.groups, width = (m.heads + 2 * m.groups) * m.head;
        const RowRef row = place(r);
        const DecodeLayer& l = row.batch.layer[layer];
        const int64_t from = row.batch.starts[row.text], count = row.batch.stop + row.token + 1 - from;
        const int64_t at = ((row.text * m.groups + head / per_group) * row.batch.capacity + from) * m.head;
        const float* q = qkv + r * width + head * m.head;
        float* to = attended + (r * m.heads + head) * m.head;
        if (count <= 0) return (void)std::fill_n(to, H * m.head, 0.f);  // padding
        const int64_t stride = most_scores();
        const S *keys = (const S*)l.keys + at, *values = (const S*)l.values + at;
        int64_t t = 0;
        for (; t + AT_ONCE <= count; t += AT_ONCE)
            dots<H, AT_ONCE>(q, keys + t * m.head, m.head, scores + t, stride);
        for (; t < count; ++t) dots<H, 1>(q, keys + t * m.head, m.head, scores + t, stride);
        float totals[H];
        for (int h = 0; h < H; ++h) totals[h] = exponentials(scores + h * stride, count);
        int64_t c = 0;
        for (; c + 2 * LANES <= m.head; c += 2 * LANES) mix_values<H, 2>(scores, stride, values + c, count, totals, to + c);
        for (; c < m.head; c += LANES) mix_values<H, 1>(scores, stride, values + c, count, totals, to + c, m.head - c);
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

    // to(h, :) = sum_t scores(h, t) values(t, :) / totals[h] for H heads and COUNT vectors of columns, of which only `left`
    // columns exist if COUNT is 1.
    template <int H, int COUNT>
    void mix_values(const float* scores, int64_t stride, const S* values, int64_t count, const float* totals, float* to,
                    int64_t left = LANES) const {
        V sums[H][COUNT] = {};
        for (int64_t t = 0; t < count; ++t)
#pragma GCC unroll 4
            for (int i = 0; i < COUNT; ++i) {
                const S* from = values + t * m.head + i * LANES;
                const V value = COUNT > 1 ? load(from) : load_upto(from, left);
#pragma GCC unroll 4
                for (int h = 0; h < H; ++h) sums[h][i] += scores[h * stride + t] * value;
            }
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
            for (int i = 0; i < COUNT; ++i) {
                float* at = to + h * m.head + i * LANES;
                const V mean = sums[h][i] / totals[h];
                if constexpr (COUNT > 1)
                    store(at, mean);
                else
                    store_upto(at, mean, left);
            }
    }

    // The softmax over a row's `top_k` largest logits among its experts; equal gates without a router. Every thread
    // computes all gates after the logits are complete.
    void choose_gates(int64_t layer, const float* in, float* p) const {
        const bool routed = m.batch->layer[layer].router;
        if (routed)
            team.each(num_rows * m.experts, [&](int64_t task) {
                const RowRef at = place(task / m.experts);
                const float* router = at.batch.layer[layer].router + (at.text * m.experts + task % m.experts) * m.width;
                dots<1, 1>(in + task / m.experts * m.width, router, m.width, router_logits + task);
            });
        for (int64_t r = 0; r < num_rows; ++r) {
            const RowRef at = place(r);
            const uint8_t* present = at.batch.present + at.text * m.experts;
            float* row = p + r * m.experts;
            const float* logit = router_logits + r * m.experts;
            float total = 0;
            for (int64_t j = 0; j < m.experts; ++j) row[j] = present[j] && !routed ? 1.f : 0.f;
            float most = 0;
            for (int64_t picked = 0; routed && picked < m.top_k; ++picked) {
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
    void experts(int64_t layer, ProductInput& in, float* base, float* p) const {
        choose_gates(layer, in.x, p);
        const Linear linears[] = {&DecodeLayer::gate, &DecodeLayer::up};
        lora_down(layer, linears, in.x, 1);
        const DecodeLayer& l = m.batch->layer[layer];
        const int64_t size = num_rows * CHUNK;
        team.each(num_chunks(l.gate), [&](int64_t number) {
            const int64_t column = number * chunk_width(l.gate), columns = std::min(chunk_width(l.gate), m.hidden - column);
            product(num_rows, l.gate, in, column, columns, base);
            product(num_rows, l.up, in, column, columns, base + size);
            for (int64_t r = 0; r < num_rows; ++r) {
                const RowRef at = place(r);
                const DecodeLayer& own = at.batch.layer[layer];
                for (int64_t c = 0; c < columns; c += LANES) {
                    const int64_t left = columns - c;
                    V sum = {};
                    for (int64_t j = 0; j < m.experts; ++j) {
                        auto pre = [&](const RowsLinear& linear, const float* z, const float* product) {
                            const int64_t rank = linear.ranks / m.experts;
                            const V v = load(product + r * CHUNK + c);
                            return plus_lora<S>(linear, z + r * linear.ranks, at.text, j * rank, (j + 1) * rank, column + c, left, v);
                        };
                        const V gate = pre(own.gate, z + 0, base);
                        const V value = Act::value(gate) * pre(own.up, z + num_rows * l.gate.ranks, base + size);
                        store_upto(h + (r * m.experts + j) * m.hidden + column + c, value, left);
                        sum += p[r * m.experts + j] * value;
                    }
                    store_upto(mixed + r * m.hidden + column + c, sum, left);
                }
            }
        });
        if (l.down.ranks) {
            const Linear last[] = {&DecodeLayer::down};
            lora_down(layer, last, h + 0, m.experts);
            const int64_t rank = l.down.ranks / m.experts;
            team.each(num_rows * l.down.ranks, [&](int64_t i) { *(z + i) *= p[i / rank]; });
        }
        prepare(in, mixed + 0, l.down, num_rows, false);
        add_output(layer, &DecodeLayer::down, in, base);
    }

    // The logits after the last tokens of the texts of batches that want them.
    void predict(float* normed, ProductInput& in, float* base) const {
        const RowsLinear& l = m.head_layer;
        norm(m.norm, normed);
        std::vector<float*> to;
        for (int64_t r = 0; r < num_rows; ++r) {
            const RowRef at = place(r);
            if (!at.batch.logits || at.token + 1 < at.batch.share) continue;
            std::copy_n(normed + r * m.width, m.width, normed + int64_t(to.size()) * m.width);
            to.push_back(at.batch.logits + at.text * l.d_out);
        }
        prepare(in, normed, l, num_predicted, true);
        team.each(num_chunks(l), [&](int64_t number) {
            const int64_t column = number * chunk_width(l), columns = std::min(chunk_width(l), l.d_out - column);
            product(num_predicted, l, in, column, columns, base);
            for (int64_t t = 0; t < num_predicted; ++t) std::copy_n(base + t * CHUNK, columns, to[t] + column);
        });
    }

    template <class Act>
    void run() const {
#pragma omp parallel num_threads(m.threads)
        {
            const OwnCpu cpu(omp_get_thread_num(), omp_get_num_threads());
            team.meet();
            Buffer<float> normed(num_rows * m.width), base(2 * num_rows * CHUNK), scores(HEADS * most_scores()), p(num_rows * m.experts);
            const int64_t widest = std::max({m.width, m.heads * m.head, m.hidden});
            ProductInput in{nullptr, false, Input(num_rows, widest), Buffer<uint16_t>(num_rows * widest)};
            for (int64_t i = 0; i < m.layers; ++i) {
                const DecodeLayer& l = m.batch->layer[i];
                norm(l.attention_norm, normed + 0);
                prepare(in, normed + 0, l.q, num_rows, true);
                project(i, in, base + 0);
                cache(i);
                attend(i, scores + 0);
                const Linear out[] = {&DecodeLayer::o};
                lora_down(i, out, attended + 0, 1);
                prepare(in, attended + 0, l.o, num_rows, true);
                add_output(i, &DecodeLayer::o, in, base + 0);
                norm(l.mlp_norm, normed + 0);
                prepare(in, normed + 0, l.gate, num_rows, false);
                experts<Act>(i, in, base + 0, p + 0);
            }
            if (num_predicted) predict(normed + 0, in, base + 0);
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

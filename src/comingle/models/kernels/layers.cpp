// Convolutions with separate weights for each user, followed by norm, ReLU and max-pooling, forward and backward.
//
// All passes of a step are computed for one user before the next user, so each pass finds its input in the cache. The
// order of additions depends on sizes alone: a user's results depend neither on the number of threads nor on the other
// users of the cohort.

#include "layers.h"
#include "layers_convolution.h"
#include "layers_gradient.h"
#include "layers_rest.h"

namespace {

template <typename T>
const T* at(const void* from, int64_t offset) {
    return from ? static_cast<const T*>(from) + offset : nullptr;
}

template <typename T>
T* at(void* from, int64_t offset) {
    return from ? static_cast<T*>(from) + offset : nullptr;
}

struct Sizes {
    int64_t x, y, z, weight;  // entries per user
    explicit Sizes(const Step& s)
        : x(s.height * s.width * s.channels * s.lanes),
          y(s.out_height * s.out_width * s.outputs * s.lanes),
          z((s.out_height / s.pool) * (s.out_width / s.pool) * s.outputs * s.lanes),
          weight(s.outputs * s.channels * s.kernel[0] * s.kernel[1]) {}
};

// Entries of scratch memory that a thread needs for one user.
template <typename T>
struct Needs {
    int64_t first, second, turned;
    explicit Needs(const Step& s)
        : first(Sizes(s).y), second(s.norm != PLAIN ? first : 0),
          turned(s.d_weight ? Turned<T>(s, nullptr).size() + Vector<T>::SIZE : 0) {}
    int64_t all() const { return first + second + turned; }
};

template <typename T>
struct Room {
    std::unique_ptr<T[]> first, second;  // uninitialised
    std::vector<T> turned;
    explicit Room(const Needs<T>& needs) : first(new T[needs.first]), second(new T[needs.second]), turned(needs.turned) {}
};

Taps taps_of(const Step& s, bool transposed) {
    Taps taps{};
    taps.height = transposed ? s.out_height : s.height;
    taps.width = transposed ? s.out_width : s.width;
    taps.channels = transposed ? s.outputs : s.channels;
    taps.transposed = transposed;
    for (int axis = 0; axis < 2; ++axis) {
        taps.kernel[axis] = s.kernel[axis];
        taps.stride[axis] = s.stride[axis];
        taps.padding[axis] = s.padding[axis];
        taps.dilation[axis] = s.dilation[axis];
    }
    return taps;
}

template <typename T>
Rest<T> rest_of(const Step& s, int64_t user, int64_t threads) {
    const int64_t table = s.outputs * s.lanes;
    return {s, table, s.out_height * s.out_width, threads,
            at<T>(s.gamma, user * s.gamma_stride), at<T>(s.beta, user * s.beta_stride),
            at<T>(s.mean, user * table), at<T>(s.rstd, user * table)};
}

// Bias padded to a whole number of blocks.
template <typename T>
std::vector<T> filled(const T* bias, int64_t outputs) {
    std::vector<T> found((outputs + BLOCK - 1) / BLOCK * BLOCK, T(0));
    if (bias) std::copy(bias, bias + outputs, found.begin());
    return found;
}

template <typename T>
void forward_of(const Step& s, const Sizes& sizes, int64_t user, Room<T>& room) {
    const int64_t threads = inner_threads(s);
    const bool pools = s.pool > 1, norms = s.norm != PLAIN;
    T *z = at<T>(s.z, user * sizes.z), *y = norms ? at<T>(s.y, user * sizes.y) : pools ? room.first.get() : z;
    const T* weight = at<T>(s.weight, user * s.weight_stride);
    const auto packed = pack<T>(weight, s.outputs, s.channels, s.kernel[0], s.kernel[1], false);
    const auto bias = filled<T>(at<T>(s.bias, user * s.bias_stride), s.outputs);
    const T *x = at<T>(s.x, user * sizes.x), *added = at<T>(s.added, user * sizes.z);
    convolve<T>(
        taps_of(s, false), x, packed.data(), bias.data(), norms ? nullptr : added, y,
        s.out_height, s.out_width, s.outputs, s.lanes, threads
    );
    if (norms) {
        T* to = pools ? room.second.get() : z;
        rest_of<T>(s, user, threads).forward(y, added, to, s.relu && !pools);
        y = to;
    }
    if (pools) {
        pool_forward<T>(s, y, z, s.taken + user * sizes.z, threads);
    } else if (!norms) {
        const T low = s.relu ? T(0) : -std::numeric_limits<T>::infinity();
#pragma omp simd
        for (int64_t e = 0; e < sizes.z; ++e) z[e] = z[e] < low ? low : z[e];
    }
}

template <typename T>
void backward_of(const Step& s, const Sizes& sizes, int64_t user, Room<T>& room) {
    const int64_t threads = inner_threads(s);
    const bool pools = s.pool > 1, norms = s.norm != PLAIN;
    const T *dy = at<T>(s.dz, user * sizes.z), *x = at<T>(s.x, user * sizes.x);
    if (pools) {
        pool_backward<T>(s, dy, s.taken + user * sizes.z, room.first.get(), threads);
        dy = room.first.get();
    } else if (s.relu && (!norms || s.added)) {
        const T* z = at<T>(s.z, user * sizes.z);
        T* to = s.d_added ? at<T>(s.d_added, user * sizes.z) : room.first.get();
#pragma omp simd
        for (int64_t e = 0; e < sizes.z; ++e) to[e] = z[e] > T(0) ? dy[e] : T(0);
        dy = to;
    }
    const Rest<T> rest = rest_of<T>(s, user, threads);
    if (norms) {
        T *d_gamma = at<T>(s.d_gamma, user * s.outputs), *d_beta = at<T>(s.d_beta, user * s.outputs);
        rest.backward(dy, at<T>(s.y, user * sizes.y), room.second.get(), d_gamma, d_beta, s.relu && !pools && !s.added);
        dy = room.second.get();
    }
    if (s.d_bias) {
        typename Rest<T>::Table found, none;
        rest.sums(found, none, [=](int64_t at, int64_t, T& a, T&) { a += dy[at]; });
        rest.parameters(found, at<T>(s.d_bias, user * s.outputs));
    }
    if (s.d_weight) {
        const Turned<T> turned(s, aligned(room.turned.data()));
        turned.fill(x, threads);
        weight_gradient<T>(turned, dy, at<T>(s.d_weight, user * sizes.weight), threads);
    }
    if (!s.dx) return;
    const T* weight = at<T>(s.weight, user * s.weight_stride);
    const auto packed = pack<T>(weight, s.outputs, s.channels, s.kernel[0], s.kernel[1], true);
    const T* passed = at<T>(s.passed, user * sizes.x);
    T* dx = at<T>(s.dx, user * sizes.x);
    convolve<T>(taps_of(s, true), dy, packed.data(), nullptr, passed, dx, s.height, s.width, s.channels, s.lanes, threads);
}

template <typename T, typename F>
void for_each_user(const Step& s, F work) {
    const Sizes sizes(s);
    const int64_t outer = inner_threads(s) == 1 ? s.threads : 1;
#pragma omp parallel num_threads(outer) if (outer > 1)
    {
        Room<T> room{Needs<T>(s)};
#pragma omp for schedule(dynamic)
        for (int64_t user = 0; user < s.users; ++user) work(s, sizes, user, room);
    }
}

}  // namespace

extern "C" {
int64_t room_float(const Step* s) { return Needs<float>(*s).all(); }
int64_t room_double(const Step* s) { return Needs<double>(*s).all(); }
void forward_float(const Step* s) { for_each_user<float>(*s, forward_of<float>); }
void forward_double(const Step* s) { for_each_user<double>(*s, forward_of<double>); }
void backward_float(const Step* s) { for_each_user<float>(*s, backward_of<float>); }
void backward_double(const Step* s) { for_each_user<double>(*s, backward_of<double>); }
}

// The product of a few rows with a weight that lies output first: out [M, N] = y [M, K] · w [N, K]ᵀ, float32.
//
// It takes as long as the weight's way from memory: a tile's columns are asked for (prefetched) while those before it are
// multiplied, and each is used for all rows while it is there.  Nothing is packed, as general matrix products do first.

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kSums = 16;  // numbers of a register; how many of them hold sums
#else
constexpr int kLanes = 8, kSums = 8;
#endif
constexpr int kRows = 8;                     // of a tile, at most
constexpr int64_t kBlock = 64;               // columns that stay in the second cache while all rows meet them
constexpr int64_t kPieceBytes = 128 * 1024;  // of the weight, that a thread takes at once
constexpr int64_t kLineFloats = 16;          // of a cache line

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef float Anywhere __attribute__((vector_size(kLanes * sizeof(float)), aligned(alignof(float)), may_alias));

inline Vector Load(const float* at) { return *reinterpret_cast<const Anywhere*>(at); }

inline float Sum(Vector v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}

// R rows with C columns of w; `after`: the columns that come next.
template <int R, int C>
inline void Tile(const float* y, const float* w, const float* after, float* out, int64_t k, int64_t n) {
  Vector sums[C][R];
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) sums[c][r] = Vector{};
  int64_t at = 0;
  for (; at + kLanes <= k; at += kLanes) {
    Vector ws[C];
    for (int c = 0; c < C; ++c) {
      ws[c] = Load(w + c * k + at);
      if (at % kLineFloats == 0) __builtin_prefetch(after + c * k + at);
    }
    for (int r = 0; r < R; ++r) {
      Vector ys = Load(y + r * k + at);
      for (int c = 0; c < C; ++c) sums[c][r] += ws[c] * ys;
    }
  }
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) {
      float total = Sum(sums[c][r]);
      for (int64_t i = at; i < k; ++i) total += w[c * k + i] * y[r * k + i];
      out[r * n + c] = total;
    }
}

// R rows with columns begin … end.
template <int R>
void Columns(const float* y, const float* w, float* out, int64_t k, int64_t n, int64_t begin, int64_t end) {
  constexpr int C = std::max(1, std::min(4, kSums / R));
  int64_t c = begin;
  for (; c + C <= end; c += C) Tile<R, C>(y, w + c * k, w + (c + C) * k, out + c, k, n);
  for (; c < end; ++c) Tile<R, 1>(y, w + c * k, w + c * k, out + c, k, n);
}

using Part = void (*)(const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
constexpr Part kParts[] = {nullptr,    Columns<1>, Columns<2>, Columns<3>, Columns<4>,
                           Columns<5>, Columns<6>, Columns<7>, Columns<8>};

// Pieces of the weight, which threads take until there are none.  It lives until the last thread has looked.
struct Work {
  const float *y, *w;
  float* out;
  int64_t rows, k, n, width, pieces;
  std::atomic<int64_t> next{0}, done{0};

  void Run() {
    for (int64_t piece; (piece = next.fetch_add(1)) < pieces;) {
      const int64_t end = std::min(n, (piece + 1) * width);
      for (int64_t c = piece * width; c < end; c += kBlock)
        for (int64_t r = 0; r < rows; r += kRows)
          kParts[std::min<int64_t>(kRows, rows - r)](y + r * k, w, out + r * n, k, n, c, std::min(end, c + kBlock));
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

ffi::Error Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> y, ffi::Buffer<ffi::F32> w,
                   ffi::ResultBuffer<ffi::F32> out) {
  auto work = std::make_shared<Work>();
  work->y = y.typed_data(), work->w = w.typed_data(), work->out = out->typed_data();
  work->rows = y.dimensions()[0], work->k = y.dimensions()[1], work->n = w.dimensions()[0];
  work->width = std::max(kBlock, kPieceBytes / int64_t{sizeof(float)} / work->k / kBlock * kBlock);
  work->pieces = (work->n + work->width - 1) / work->width;
  const int64_t helpers = std::min(pool.num_threads(), work->pieces) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->Run(); });
  work->Run();  // alone, if all other threads are busy: nobody waits for a thread that has not begun
  while (work->done.load(std::memory_order_acquire) < work->pieces) std::this_thread::yield();
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_jax_product, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

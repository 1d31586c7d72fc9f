// What takes a CPU long with a few rows: their product with a weight, their norm, and their attention over pages.  All
// float32.
//
// The product, out [M, N] = y [M, K] · w [N, K]ᵀ of a weight that lies output first, takes little longer than the
// weight's way from memory: a tile's columns are asked for (prefetched) while those before it are multiplied, and each
// is used for all rows while it is there.  Nothing is packed, as general matrix products do first.
//
// Attention means what `ops/reference/attention.py` says.  XLA makes a dozen programs a layer of it, some microseconds
// each; here threads take eight queries of one key/value head at a time, or eight times as many of a long block.

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kSums = 24;  // numbers of a register; how many of them hold sums
#else
constexpr int kLanes = 8, kSums = 12;
#endif
constexpr int kRows = 8;                     // of a tile, at most
constexpr int64_t kBlock = 48;               // columns that a thread takes at once, and all rows meet
constexpr int64_t kLongBlock = 128;          // rows of a block for which a thread takes several tiles at once
constexpr int64_t kNormFloats = 16384;       // that a thread norms at once: to wake another for fewer takes longer
constexpr int64_t kLineFloats = 16;          // of a cache line
constexpr float kLeast = -87.0f;             // e to the power of less is 0 here

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

// out [N] = the sums of N vectors, each in the same order whatever N is and wherever it stands.
template <int N>
inline void SumAll(const Vector (&v)[N], float* out) {
#if defined(__AVX512F__)
  for (int from = 0; from < N; from += kLanes) {  // a tree over sixteen of them: 45 instructions, not 16 times 8
    __m512 a[kLanes];
    for (int i = 0; i < kLanes; ++i) a[i] = from + i < N ? (__m512)v[from + i] : _mm512_setzero_ps();
    for (int i = 0; i < 8; ++i)
      a[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; ++i) {
      const __m512d even = (__m512d)a[2 * i], odd = (__m512d)a[2 * i + 1];
      a[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(even, odd), (__m512)_mm512_unpackhi_pd(even, odd));
    }
    for (int i = 0; i < 2; ++i)
      a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                           _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
    const __m512 sums = _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x88), _mm512_shuffle_f32x4(a[0], a[1], 0xdd));
    _mm512_mask_storeu_ps(out + from, static_cast<__mmask16>((1u << std::min(kLanes, N - from)) - 1), sums);
  }
#else
  for (int i = 0; i < N; ++i) out[i] = Sum(v[i]);
#endif
}

// R rows with C columns of w.  `after`: F of the columns that come next, which are asked for meanwhile.
template <int R, int C, int F>
inline void Tile(const float* y, const float* w, const float* after, float* out, int64_t k, int64_t n) {
  Vector sums[C * R];
  for (int i = 0; i < C * R; ++i) sums[i] = Vector{};
  int64_t at = 0;
#pragma GCC unroll 2
  for (; at + kLanes <= k; at += kLanes) {
    Vector ws[C];
    for (int c = 0; c < C; ++c) ws[c] = Load(w + c * k + at);
    for (int c = 0; c < F; ++c)
      if (at % kLineFloats == 0) __builtin_prefetch(after + c * k + at);
    for (int r = 0; r < R; ++r) {
      const Vector ys = Load(y + r * k + at);
      for (int c = 0; c < C; ++c) sums[c * R + r] += ws[c] * ys;
    }
  }
  float totals[C * R];
  SumAll(sums, totals);
  for (int c = 0; c < C; ++c)
    for (int r = 0; r < R; ++r) {
      float total = totals[c * R + r];
      for (int64_t i = at; i < k; ++i) total += w[c * k + i] * y[r * k + i];
      out[r * n + c] = total;
    }
}

// R rows with as many columns of w, from c on, as there are tiles of C before `end`; the first that is left.  More than
// four rows are two tiles, the second of weights that the first has brought: eight rows of one tile would load more of y
// than processors can beside so many products.
template <int R, int C>
inline int64_t Tiles(const float* y, const float* w, float* out, int64_t k, int64_t n, int64_t c, int64_t end) {
  constexpr int First = std::min(R, 4), Second = R - First, F = Second ? C / 2 : C;
  for (; c + C <= end; c += C) {
    const float *tile = w + c * k, *after = tile + C * k;
    Tile<First, C, F>(y, tile, after, out + c, k, n);
    if constexpr (Second) Tile<Second, C, C - F>(y + First * k, tile, after + F * k, out + First * n + c, k, n);
  }
  return c;
}

// R rows with columns begin … end.
template <int R>
void Columns(const float* y, const float* w, float* out, int64_t k, int64_t n, int64_t begin, int64_t end) {
  int64_t c = Tiles<R, R == 1 ? 4 : kSums / 4>(y, w, out, k, n, begin, end);
  c = Tiles<R, 2>(y, w, out, k, n, c, end);
  Tiles<R, 1>(y, w, out, k, n, c, end);
}

using Part = void (*)(const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
constexpr Part kParts[] = {nullptr,    Columns<1>, Columns<2>, Columns<3>, Columns<4>,
                           Columns<5>, Columns<6>, Columns<7>, Columns<8>};

// Pieces of work for so many threads.  Each takes those of its own range first, one after another, so that what it has
// prefetched is what it needs; then what is left of the others'.  It lives until the last thread has looked.
struct Work {
  struct alignas(64) Range {  // a cache line each
    std::atomic<int64_t> next;
    int64_t end;
  };
  std::function<void(int64_t)> run;
  std::vector<Range> ranges;
  std::atomic<int64_t> arrived{0}, done{0};

  Work(int64_t pieces, int64_t threads, std::function<void(int64_t)> f) : run(std::move(f)), ranges(threads) {
    for (int64_t i = 0; i < threads; ++i)
      ranges[i].next = i * pieces / threads, ranges[i].end = (i + 1) * pieces / threads;
  }

  void Take() {
    const int64_t threads = ranges.size(), me = arrived.fetch_add(1);
    for (int64_t i = 0; i < threads; ++i) {
      Range& range = ranges[(me + i) % threads];
      for (int64_t piece; (piece = range.next.fetch_add(1)) < range.end;) {
        run(piece);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  }
};

void Share(ffi::ThreadPool& pool, int64_t pieces, std::function<void(int64_t)> run) {
  const int64_t threads = std::max<int64_t>(1, std::min(pool.num_threads(), pieces));
  auto work = std::make_shared<Work>(pieces, threads, std::move(run));
  for (int64_t i = 1; i < threads; ++i) pool.Schedule([work] { work->Take(); });
  work->Take();  // alone, if all other threads are busy: nobody waits for a thread that has not begun
  while (work->done.load(std::memory_order_acquire) < pieces) std::this_thread::yield();
}

ffi::Error Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> y_in, ffi::Buffer<ffi::F32> w_in,
                   ffi::ResultBuffer<ffi::F32> result) {
  const float *y = y_in.typed_data(), *w = w_in.typed_data();
  float* out = result->typed_data();
  const int64_t rows = y_in.dimensions()[0], k = y_in.dimensions()[1], n = w_in.dimensions()[0];
  Share(pool, (n + kBlock - 1) / kBlock, [=](int64_t piece) {
    const int64_t begin = piece * kBlock, end = std::min(n, begin + kBlock);
    for (int64_t r = 0; r < rows; r += kRows)
      kParts[std::min<int64_t>(kRows, rows - r)](y + r * k, w, out + r * n, k, n, begin, end);
  });
  return ffi::Error::Success();
}

// A row's total = x + delta, and normed = total over its root mean square, times weight.
void AddNormRow(const float* x, const float* delta, const float* weight, float eps, int64_t width, float* total,
                float* normed) {
  Vector squares = Vector{};
  float rest = 0;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Vector sum = Load(x + i) + Load(delta + i);
    std::memcpy(total + i, &sum, sizeof sum);
    squares += sum * sum;
  }
  for (; i < width; ++i) total[i] = x[i] + delta[i], rest += total[i] * total[i];
  const float scale = 1.0f / std::sqrt((Sum(squares) + rest) / static_cast<float>(width) + eps);
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) {
    const Vector v = Load(total + j) * scale * Load(weight + j);
    std::memcpy(normed + j, &v, sizeof v);
  }
  for (; j < width; ++j) normed[j] = total[j] * scale * weight[j];
}

ffi::Error AddNorm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x_in, ffi::Buffer<ffi::F32> delta_in,
                   ffi::Buffer<ffi::F32> weight_in, ffi::ResultBuffer<ffi::F32> total_out,
                   ffi::ResultBuffer<ffi::F32> normed_out, float eps) {
  const float *x = x_in.typed_data(), *delta = delta_in.typed_data(), *weight = weight_in.typed_data();
  float *total = total_out->typed_data(), *normed = normed_out->typed_data();
  const int64_t width = weight_in.element_count(), rows = x_in.element_count() / std::max<int64_t>(1, width);
  const int64_t some = std::max<int64_t>(1, kNormFloats / std::max<int64_t>(1, width));
  Share(pool, (rows + some - 1) / some, [=](int64_t piece) {
    for (int64_t r = piece * some; r < std::min(rows, (piece + 1) * some); ++r)
      AddNormRow(x + r * width, delta + r * width, weight, eps, width, total + r * width, normed + r * width);
  });
  return ffi::Error::Success();
}

// e^x for x ≤ 0, to about two units in the last place; compilers make vectors of it.
inline float Exp(float x) {
  const float kept = x < kLeast ? kLeast : x;  // not a number stays so
  const float whole = kept * 1.44269504f + 12582912.0f - 12582912.0f;  // rounded, by what a float of that size holds
  const float part = kept - whole * 0.693359375f + whole * 2.12194440e-4f;  // ln 2 in two, the first of few bits
  float power = 1.0f / 5040;
  for (float over : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) power = power * part + over;
  const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < kLeast ? 0.0f : power * scale + (kept - kept);
}

struct Shape {
  int64_t block, heads, dim, kv_heads, group, page, pages, width, window;  // B, N, D, G, R, C, P, W; window 0: none
  bool causal;
};

// The tokens that a tile of queries meets: committed ones from `begin` on, in pages, and then the block's first `block`.
struct Tokens {
  const float* pool;
  const int32_t* table;
  const float* own;  // their values [block, D]
  int64_t begin, length, block, page, page_floats, pages;

  // Of a table entry that is none (a slot that nobody reads) some page, as XLA's gather has it.
  const float* Page(int64_t t) const {
    return pool + std::clamp<int64_t>(table[t / page], 0, pages - 1) * page_floats;
  }
};

// out [R, D] = weights [R, all tokens] · values, of which those of a page lie `values` floats after its begin.
template <int R>
void Mix(const Tokens& a, const float* weights, int64_t dim, int64_t values, float* out) {
  const int64_t stride = a.length + a.block;
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    Vector sums[R];
    for (int r = 0; r < R; ++r) sums[r] = Vector{};
    auto add = [&](int64_t t, const float* value) {
      const Vector v = Load(value + d);
      for (int r = 0; r < R; ++r) sums[r] += weights[r * stride + t] * v;
    };
    for (int64_t t = a.begin; t < a.length; t += a.page) {
      const float* page = a.Page(t) + values;
      for (int64_t i = 0; i < std::min(a.page, a.length - t); ++i) add(t + i, page + i * dim);
    }
    for (int64_t i = 0; i < a.block; ++i) add(a.length + i, a.own + i * dim);
    for (int r = 0; r < R; ++r) std::memcpy(out + r * dim + d, &sums[r], sizeof(Vector));
  }
  for (; d < dim; ++d)
    for (int r = 0; r < R; ++r) {
      float sum = 0;
      for (int64_t t = a.begin; t < a.length; ++t)
        sum += weights[r * stride + t] * a.Page(t)[values + t % a.page * dim + d];
      for (int64_t i = 0; i < a.block; ++i) sum += weights[r * stride + a.length + i] * a.own[i * dim + d];
      out[r * dim + d] = sum;
    }
}

using Mixing = void (*)(const Tokens&, const float*, int64_t, int64_t, float*);
constexpr Mixing kMixings[] = {nullptr, Mix<1>, Mix<2>, Mix<3>, Mix<4>, Mix<5>, Mix<6>, Mix<7>, Mix<8>};

// The largest of values [n]; what is not a number does not count.
inline float Largest(const float* values, int64_t n) {
  constexpr float least = -std::numeric_limits<float>::infinity();
  Vector most = Vector{} + least;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vector v = Load(values + i);
    most = v > most ? v : most;
  }
  float best = least;
  for (int lane = 0; lane < kLanes; ++lane) best = std::max(best, static_cast<float>(most[lane]));
  for (; i < n; ++i) best = values[i] > best ? values[i] : best;
  return best;
}

inline float Total(const float* values, int64_t n) {
  Vector sums = Vector{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sums += Load(values + i);
  float total = Sum(sums);
  for (; i < n; ++i) total += values[i];
  return total;
}

// Scores from … length and low … high become weights, the others of begin … end 0; the sum of all.
float Soften(float* scores, int64_t begin, int64_t from, int64_t length, int64_t low, int64_t high, int64_t end) {
  std::fill(scores + begin, scores + from, 0.0f);
  std::fill(scores + length, scores + low, 0.0f);
  std::fill(scores + high, scores + end, 0.0f);
  const float best = std::max(Largest(scores + from, length - from), Largest(scores + low, high - low));
  float total = 0;
  for (auto [first, last] : {std::pair{from, length}, std::pair{low, high}}) {
    for (int64_t t = first; t < last; ++t) scores[t] = Exp(scores[t] - best);
    total += Total(scores + first, last - first);
  }
  return total;
}

// Of a request and its key/value head g, whose query m is row m / R of the block and head m % R of g's.
struct Head {
  const float *q, *kv, *pool;  // the request's [B, N, D] and [B, 2, G, D], and all pages
  const int32_t* table;
  int64_t length, g;
  float* out;  // [B, N, D]
};

// The block's own keys and values of a head, [rows, D] each.  What is not a number in a value counts through the key: it
// spoils all of the rows that see it, and no others.
void OwnTokens(const Shape& a, const Head& h, int64_t rows, float* keys, float* values) {
  for (int64_t j = 0; j < rows; ++j) {
    const float *key = h.kv + (j * 2 * a.kv_heads + h.g) * a.dim, *value = key + a.kv_heads * a.dim;
    const bool spoilt = std::any_of(value, value + a.dim, [](float x) { return x != x; });
    for (int64_t d = 0; d < a.dim; ++d) {
      keys[j * a.dim + d] = spoilt ? std::numeric_limits<float>::quiet_NaN() : key[d];
      values[j * a.dim + d] = value[d] == value[d] ? value[d] : 0.0f;
    }
  }
}

// Of the block, what the queries before `end` see.
inline int64_t Seen(const Shape& a, int64_t end) { return a.causal ? (end - 1) / a.group + 1 : a.block; }

// A tile: queries first … end, at most kRows.
void AttendTile(const Shape& a, const Head& h, const float* keys, const float* values, int64_t first, int64_t end) {
  const int64_t own = Seen(a, end), length = h.length;
  const int64_t rows = end - first, all = length + own, head = a.page * a.dim;
  static thread_local std::vector<float> queries, scores, mixed;
  queries.resize(rows * a.dim), scores.resize(rows * all), mixed.resize(rows * a.dim);
  const float scale = 1.0f / std::sqrt(static_cast<float>(a.dim));
  auto place = [&](int64_t m) { return (m / a.group * a.heads + h.g * a.group + m % a.group) * a.dim; };
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < a.dim; ++d) queries[r * a.dim + d] = h.q[place(first + r) + d] * scale;
  const int64_t oldest = a.window ? std::max<int64_t>(0, length + first / a.group - a.window + 1) : 0;
  const Tokens tokens{h.pool + h.g * head, h.table, values, std::min(oldest / a.page * a.page, length), length,
                      own, a.page, 2 * a.kv_heads * head, a.pages};

  for (int64_t t = tokens.begin; t < length; t += a.page)
    kParts[rows](queries.data(), tokens.Page(t), scores.data() + t, a.dim, all, 0, std::min(a.page, length - t));
  kParts[rows](queries.data(), keys, scores.data() + length, a.dim, all, 0, own);

  float totals[kRows];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = (first + r) / a.group;
    const int64_t from = a.window ? std::clamp(length + row - a.window + 1, tokens.begin, length) : tokens.begin;
    const int64_t low = a.window ? std::max<int64_t>(0, row - a.window + 1) : 0;
    const int64_t high = a.causal ? row + 1 : a.window ? std::min(a.block, row + a.window) : a.block;
    totals[r] = Soften(scores.data() + r * all, tokens.begin, from, length, length + low, length + high, all);
  }
  kMixings[rows](tokens, scores.data(), a.dim, a.kv_heads * head, mixed.data());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < a.dim; ++d) h.out[place(first + r) + d] = mixed[r * a.dim + d] / totals[r];
}

void Attend(const Shape& a, const Head& h, int64_t first, int64_t end) {
  const int64_t own = Seen(a, end);
  static thread_local std::vector<float> keys, values;
  keys.resize(own * a.dim), values.resize(own * a.dim);
  OwnTokens(a, h, own, keys.data(), values.data());
  for (; first < end; first += kRows)
    AttendTile(a, h, keys.data(), values.data(), first, std::min<int64_t>(end, first + kRows));
}

ffi::Error Attention(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> q_in, ffi::Buffer<ffi::F32> kv_in,
                     ffi::Buffer<ffi::F32> pool_in, ffi::Buffer<ffi::S32> table_in, ffi::Buffer<ffi::S32> lengths_in,
                     ffi::ResultBuffer<ffi::F32> result, bool causal, int64_t window) {
  const auto sizes = q_in.dimensions(), paged = pool_in.dimensions();
  const Shape a{sizes[1],          sizes[2], sizes[3], paged[2], sizes[2] / paged[2],
                paged[3], paged[0], table_in.dimensions()[1], window,   causal};
  const float *q = q_in.typed_data(), *kv = kv_in.typed_data(), *pool = pool_in.typed_data();
  const int32_t *table = table_in.typed_data(), *lengths = lengths_in.typed_data();
  float* out = result->typed_data();
  const int64_t some = (a.block < kLongBlock ? 1 : 8) * kRows;  // queries that share a copy of the block's own tokens
  const int64_t queries = a.block * a.group, shares = (queries + some - 1) / some, row = a.heads * a.dim;
  Share(threads, sizes[0] * a.kv_heads * shares, [=](int64_t piece) {
    const int64_t s = piece / (a.kv_heads * shares), g = piece / shares % a.kv_heads, first = piece % shares * some;
    const int64_t length = std::clamp<int64_t>(lengths[s], 0, a.width * a.page);
    const Head head{q + s * a.block * row, kv + s * a.block * 2 * a.kv_heads * a.dim, pool, table + s * a.width,
                    length, g, out + s * a.block * row};
    Attend(a, head, first, std::min(queries, first + some));
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_jax_product, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_jax_add_norm, AddNorm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_jax_attention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("causal")
                                  .Attr<int64_t>("window"));

// The arguments of a call, and its tensors packed as operands of matrix products.
#pragma once
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <variant>
#include <vector>

#include "dropout.h"
#include "masks.h"

namespace sqrtdk {

using at::Half;

constexpr int64_t ROWS = 128;   // query rows of a tile
constexpr int64_t BLOCK = 512;  // keys of a block
constexpr int64_t RAGGED = 64;  // a product is compiled for each number of keys, so that these are multiples of this
constexpr int64_t BIASES = 2;   // one over all pairs, one of distances
constexpr float INF = std::numeric_limits<float>::infinity();
// What a product of bfloat16 is computed in: pairs of them, where the CPU multiplies those.
#ifdef __AVX512BF16__
using Narrow = BFloat16;
#else
using Narrow = float;
#endif

// Elements that a matrix product takes side by side.
template <typename T>
constexpr int64_t PAIR = std::is_same_v<T, float> ? 1 : 2;

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Where the operand made of some float32 numbers goes: over them, or beside them where it is of another type.
template <typename T>
T* in_place_of(std::vector<float>& numbers, std::vector<T>& operand) {
  if constexpr (std::is_same_v<T, float>)
    return numbers.data();
  else
    return operand.data();
}

// A strided view (B, H, rows, columns); a stride of 0 repeats. A table (B, H, 1, L + S - 1) of one number for each
// distance j - i, from 1 - L on, is such a view too: each row begins one number before the row above it.
template <typename T>
struct View {
  const T* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, column = 0;
  explicit View(const at::Tensor& t)
      : data(t.const_data_ptr<T>()), batch(t.stride(0)), head(t.stride(1)), row(t.stride(2)), column(t.stride(3)) {}
  int64_t offset(int64_t b, int64_t h, int64_t i) const { return b * batch + h * head + i * row; }
  const T* at(int64_t b, int64_t h, int64_t i) const { return data + offset(b, h, i); }
};

// Of float32 or half numbers, which are widened piece by piece.
using Bias = std::variant<View<float>, View<BFloat16>, View<Half>>;

// Calls put(row, key, x) for `rows` rows and `keys` keys of a bias from (row, key) on, in the order in which they lie.
template <typename Put>
void read_bias(const Bias& bias, int64_t b, int64_t h, int64_t row, int64_t rows, int64_t key, int64_t keys,
               const Put& put) {
  std::visit(
      [&](const auto& view) {
        const auto* from = view.at(b, h, row) + key * view.column;
        const int64_t down = view.row, along = view.column;
        const auto by_rows = [&](auto step) {
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < keys; ++c) put(r, c, static_cast<float>(from[r * down + c * step]));
        };
        if (along == 0) return by_rows(std::integral_constant<int64_t, 0>());
        if (down == 0 || std::abs(down) >= along) return by_rows(along);
        for (int64_t c = 0; c < keys; ++c)
          for (int64_t r = 0; r < rows; ++r) put(r, c, static_cast<float>(from[r * down + c * along]));
      },
      bias);
}

struct Call {
  int64_t batch, heads, key_heads, value_heads, length, keys, width, value_width;
  float factor = 1.0f;
  std::optional<View<float>> scale;  // (B, H, L, 1), in place of the factor
  float softcap = 0.0f;              // 0: none
  std::vector<Bias> biases;          // (B, H, L, S), as `visible`, at most BIASES
  std::optional<View<bool>> visible;
  std::optional<Dropout> dropout;
  const float* sinks = nullptr;                  // (H)
  int64_t above = INT64_MAX, below = INT64_MAX;  // row i sees keys i - below ... i + above

  bool plain() const { return softcap == 0.0f && biases.empty() && !visible; }
  int64_t first(int64_t row) const { return below == INT64_MAX ? 0 : std::clamp<int64_t>(row - below, 0, keys); }
  int64_t last(int64_t row) const { return above == INT64_MAX ? keys : std::clamp<int64_t>(row + above + 1, 0, keys); }
  // Of `n` keys from `j` on, the first and the one after the last that the mask shows to some of the rows, in whole
  // runs of RAGGED; twice the same where it shows none.
  std::pair<int64_t, int64_t> shown(int64_t b, int64_t h, int64_t row, int64_t rows, int64_t j, int64_t n) const {
    int64_t from = 0, to = n;
    if (!visible) return {from, to};
    const auto hidden = [&](int64_t key, int64_t keys) {
      const int64_t down = visible->row, along = visible->column;
      const bool* at = visible->at(b, h, row) + (j + key) * along;
      for (int64_t i = 0; i < (down == 0 ? 1 : rows); ++i, at += down) {
        bool any = false;
        if (along == 1)
          for (int64_t k = 0; k < keys; ++k) any |= at[k];
        else
          for (int64_t k = 0; k < keys; ++k) any |= at[k * along];
        if (any) return false;
      }
      return true;
    };
    while (from < to && hidden(from, std::min(RAGGED, to - from))) from = std::min(from + RAGGED, to);
    for (int64_t last = (to - 1) / RAGGED * RAGGED; from < last && hidden(last, to - last); last -= RAGGED) to = last;
    return {from, to};
  }
  // Of a bias (#B, #H, #L, #S), or of a table of distances (#B, #H, 1, L + S - 1).
  template <typename T>
  View<T> bias_view(const at::Tensor& bias, bool distances) const {
    if (!distances) return View<T>(bias.expand({batch, heads, length, keys}));
    View<T> view(bias.expand({batch, heads, 1, length + keys - 1}));
    view.data += length - 1, view.row = -1;
    return view;
  }
  void add_bias(const at::Tensor& bias, bool distances) {
    if (bias.scalar_type() == at::kBFloat16)
      biases.push_back(bias_view<BFloat16>(bias, distances));
    else if (bias.scalar_type() == at::kHalf)
      biases.push_back(bias_view<Half>(bias, distances));
    else
      biases.push_back(bias_view<float>(bias, distances));
  }
  float factor_of(int64_t b, int64_t h, int64_t row) const { return scale ? *scale->at(b, h, row) : factor; }
};

// ---- packing: rows beyond `end` are 0

template <typename In, typename T>
void copy_row(const View<In>& from, int64_t b, int64_t h, int64_t i, int64_t end, int64_t width, int64_t padded,
              T* to) {
  if (i >= end) return std::fill(to, to + padded, T(0.0f));
  const In* row = from.at(b, h, i);
  if (std::is_same_v<In, T> && from.column == 1)
    std::memcpy(to, row, width * sizeof(T));
  else
    for (int64_t e = 0; e < width; ++e) to[e] = T(static_cast<float>(row[e * from.column]));
  std::fill(to + width, to + padded, T(0.0f));
}

// Left side: [count][padded].
template <typename In, typename T>
void pack_left(const View<In>& from, int64_t b, int64_t h, int64_t begin, int64_t end, int64_t count, int64_t width,
               T* to) {
  const int64_t padded = up(width, PAIR<T>);
  for (int64_t i = 0; i < count; ++i) copy_row(from, b, h, begin + i, end, width, padded, to + i * padded);
}

// Right side of a product over the rows: [count][width], for bfloat16 [count / 2][width][2].
template <typename In, typename T>
void pack_right(const View<In>& from, int64_t b, int64_t h, int64_t begin, int64_t end, int64_t count, int64_t width,
                T* to) {
  if constexpr (PAIR<T> == 1) {
    pack_left(from, b, h, begin, end, count, width, to);
  } else {
    std::vector<T> rows(2 * width);
    for (int64_t i = 0; i < count; i += 2, to += 2 * width) {
      for (int64_t k = 0; k < 2; ++k) copy_row(from, b, h, begin + i + k, end, width, width, rows.data() + k * width);
      for (int64_t e = 0; e < width; ++e) to[2 * e] = rows[e], to[2 * e + 1] = rows[width + e];
    }
  }
}

// Right side of a product over the columns: [width][count], for bfloat16 [width / 2][count][2]. Without `PAIRS` a left
// side that is turned: [width][count].
template <bool PAIRS = true, typename In, typename T>
void pack_turned(const View<In>& from, int64_t b, int64_t h, int64_t begin, int64_t end, int64_t count, int64_t width,
                 T* to) {
  constexpr int64_t SIDE = PAIRS ? PAIR<T> : 1;
  const int64_t padded = up(width, PAIR<T>), words = up(width, SIDE) / SIDE;
  std::vector<T> rows(LANES * padded);
  for (int64_t i = 0; i < count; i += LANES) {
    pack_left(from, b, h, begin + i, end, LANES, width, rows.data());
    for (int64_t w = 0; w < words; ++w)
      for (int64_t k = 0; k < LANES; ++k)
        std::copy_n(&rows[k * padded + w * SIDE], SIDE, to + (w * count + i + k) * SIDE);
  }
}

// Every run of `count` rows of every head, `size` elements each, packed in parallel.
template <typename T, typename Pack>
std::unique_ptr<T[]> packed(int64_t heads, int64_t rows, int64_t count, int64_t size, const Pack& pack) {
  const int64_t runs = (rows + count - 1) / count;
  std::unique_ptr<T[]> all(new T[heads * runs * size]);
  at::parallel_for(0, heads * runs, 1, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t) pack(t / runs, t % runs * count, all.get() + t * size);
  });
  return all;
}

// c (m, n) = a (m, k) b (k, n), or c + a b, of packed operands; the rows of a, b, c are lda, ldb, ldc apart.
template <typename T>
void multiply(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add, const T* a, const T* b,
              float* c) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    for (int64_t i = 0; !add && i < m; ++i) std::fill(c + i * ldc, c + i * ldc + n, 0.0f);
    return;
  }
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, PAIR<T> == 2);
}

// Whether products of bfloat16 are computed in pairs of it: torch can be told to leave its library for that alone, and
// the library not to know this CPU.
inline bool multiplies_narrow() {
  if (!std::is_same_v<Narrow, BFloat16> || !at::globalContext().userEnabledMkldnn()) return false;
  static const bool able = [] {
    const std::vector<Narrow> ones(LANES * LANES, Narrow(1.0f));
    std::vector<float> sums(LANES * LANES);
    try {
      multiply<Narrow>(LANES, LANES, LANES, LANES, LANES, LANES, false, ones.data(), ones.data(), sums.data());
    } catch (const std::exception&) {  // c10's where torch refuses, dnnl's where its library makes no kernel
      return false;
    }
    at::native::cpublas::brgemm_release();
    return true;
  }();
  return able;
}

// Runs units 0 ... count - 1 on all threads, each taken by the next free one; `make` builds what a thread works with.
template <typename Make>
void run_units(int64_t count, const Make& make) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), count), 1, [&](int64_t from, int64_t to) {
    for (int64_t worker = from; worker < to; ++worker) {
      auto work = make();
      for (int64_t unit = next++; unit < count; unit = next++) work(unit);
    }
    at::native::cpublas::brgemm_release();
  });
}

}  // namespace sqrtdk

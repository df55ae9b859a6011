// The two matrix products of attention alone, in the tiles of the compiled kernel: no softmax between them can take
// less.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "../src/sqrtdk/impl/kernel/operands.h"

namespace sqrtdk {
namespace {

template <typename In, typename T>
void multiply_alone(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, float* out) {
  const View<In> q(query), k(key), v(value);
  const int64_t heads = query.size(1), length = query.size(2), keys = key.size(2), width = query.size(3);
  const int64_t units = query.size(0) * heads, tiles = (length + ROWS - 1) / ROWS, span = up(keys, BLOCK);
  const auto left = packed<T>(units, keys, BLOCK, width * BLOCK, [&](int64_t unit, int64_t j, T* to) {
    pack_turned(k, unit / heads, unit % heads, j, keys, BLOCK, width, to);
  });
  const auto right = packed<T>(units, keys, BLOCK, width * BLOCK, [&](int64_t unit, int64_t j, T* to) {
    pack_right(v, unit / heads, unit % heads, j, keys, BLOCK, width, to);
  });
  run_units(units * tiles, [&]() {
    return [&, rows = std::vector<T>(ROWS * width), logits = std::vector<float>(ROWS * BLOCK),
            weights = std::vector<T>(PAIR<T> == 1 ? 0 : ROWS * BLOCK, T(1.0f))](int64_t task) mutable {
      const int64_t unit = task / tiles, start = task % tiles * ROWS, count = std::min(ROWS, length - start);
      pack_left(q, unit / heads, unit % heads, start, start + count, count, width, rows.data());
      for (int64_t j = 0; j < keys; j += BLOCK) {
        const int64_t n = std::min(BLOCK, keys - j);
        multiply(count, n, width, width, BLOCK, BLOCK, false, rows.data(), left.get() + (unit * span + j) * width,
                 logits.data());
        multiply(count, width, n, BLOCK, width, width, j > 0, in_place_of(logits, weights),
                 right.get() + (unit * span + j) * width, out + (unit * length + start) * width);
      }
    };
  });
}

// query, key and value (B, H, L, E), all of one size but for the rows of the query; keys and width are even.
at::Tensor products(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  at::Tensor out = at::empty(query.sizes(), query.options().dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  if (query.scalar_type() == at::kFloat)
    multiply_alone<float, float>(query, key, value, to);
  else if (multiplies_narrow())
    multiply_alone<BFloat16, Narrow>(query, key, value, to);
  else
    multiply_alone<BFloat16, float>(query, key, value, to);
  return out;
}

}  // namespace
}  // namespace sqrtdk

TORCH_LIBRARY(sqrtdk_limit, m) { m.def("products", &sqrtdk::products); }

// Few queries and many keys: the time is that of reading the keys, so nothing of them is copied that need not be.
#pragma once
#include "forward.h"

namespace sqrtdk {

constexpr int64_t FEW = 16, MANY = 64;  // queries and keys of a call that is bound by reading its keys

// Few queries: keys are split over the threads, and are not packed, since each is used once.
template <typename In, typename S>
void decode(const Call& call, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
            const Results& results) {
  const View<In> q(query), k(key), v(value);
  const int64_t kh = call.key_heads, group = call.heads / kh, rows = group * call.length, columns = up(rows, LANES);
  const int64_t width = up(call.width, PAIR<S>), ev = call.value_width, units = call.batch * kh;
  const int64_t low = call.first(0) / BLOCK, end = call.last(call.length - 1);  // keys that some row sees
  const int64_t blocks = std::max<int64_t>((end + BLOCK - 1) / BLOCK - low, 1);
  const int64_t parts = std::clamp<int64_t>((4 * at::get_num_threads() + units - 1) / units, 1, blocks);
  const auto queries = packed<S>(units, columns, columns, width * columns, [&](int64_t unit, int64_t, S* to) {
    std::vector<S> left(columns * width, S(0.0f));
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t h = unit % kh * group + i / call.length;
      copy_row(q, unit / kh, h, i % call.length, call.length, call.width, width, left.data() + i * width);
    }
    if (rows <= ALONE) return static_cast<void>(std::copy(left.begin(), left.end(), to));
    for (int64_t e = 0; e < width; ++e) {  // as the right side of K Q^T
      for (int64_t i = 0; i < columns; ++i)
        to[(e / PAIR<S> * columns + i) * PAIR<S> + e % PAIR<S>] = left[i * width + e];
    }
  });
  std::vector<Row> row_parts(units * parts * rows);
  std::vector<float> output_parts(units * parts * rows * ev);
  run_units(units * parts, [&]() {
    return [&, tile = Tile<float>(call, results.planes != nullptr)](int64_t task) mutable {
      const int64_t unit = task / parts, part = task % parts;
      tile.template stretch<In, S>(k, v, queries.get() + unit * width * columns, unit / kh, unit % kh,
                                   (low + part * blocks / parts) * BLOCK,
                                   std::min((low + (part + 1) * blocks / parts) * BLOCK, end));
      for (int64_t i = 0; i < rows; ++i) row_parts[task * rows + i] = tile.row(i);
      std::copy(tile.output(0), tile.output(rows), output_parts.data() + task * rows * ev);
    };
  });
  at::parallel_for(0, units * rows, 16, [&](int64_t from, int64_t to) {
    for (int64_t x = from; x < to; ++x) {
      const int64_t unit = x / rows, i = x % rows, first = unit * parts * rows + i;
      const int64_t h = unit % kh * group + i / call.length;
      float* o = output_parts.data() + first * ev;
      for (int64_t part = 1; part < parts; ++part) {
        const int64_t other = first + part * rows;
        join(row_parts[first], o, row_parts[other], output_parts.data() + other * ev, ev);
      }
      const int64_t at = ((unit / kh) * call.heads + h) * call.length + i % call.length;
      finish<In>(call, h, row_parts[first], o, results, at);
    }
  });
}

}  // namespace sqrtdk

// The forward pass.
#pragma once
#include "row.h"

namespace sqrtdk {

constexpr int64_t ALONE = 4;  // rows up to which dot products beat a matrix product of sixteen columns

template <typename T>
class Tile {
 public:
  Tile(const Call& call, bool wanted)
      : call_(call),
        wanted_(wanted),
        logits_(ROWS * BLOCK),
        weights_(PAIR<T> == 1 ? 0 : ROWS * BLOCK),
        query_(ROWS * up(call.width, PAIR<T>)),
        biases_(call.biases.size() * LANES * BLOCK),
        output_(ROWS * call.value_width) {}

  const Row& row(int64_t i) const { return rows_[i]; }
  const float* output(int64_t i) const { return output_.data() + i * call_.value_width; }

  // The rows from `start` of one head over all keys; `keys` are packed blocks, `stride` lies between two rows of
  // values.
  template <typename In>
  void run(const View<In>& query, const T* keys, const T* values, int64_t stride, int64_t b, int64_t h, int64_t start) {
    const int64_t rows = std::min(ROWS, call_.length - start), width = up(call_.width, PAIR<T>);
    pack_left(query, b, h, start, start + rows, rows, call_.width, query_.data());
    std::fill(output_.begin(), output_.end(), 0.0f);
    std::fill(rows_, rows_ + rows, Row());
    const int64_t begin = call_.first(start) / BLOCK * BLOCK, end = call_.last(start + rows - 1);
    for (int64_t j = begin; j < end; j += BLOCK) {
      const auto [from, to] = call_.shown(b, h, start, rows, j, std::min(BLOCK, end - j));
      if (from == to) continue;
      const int64_t at = j + from, n = up(to - from, LANES);
      multiply(rows, n, width, width, BLOCK, BLOCK, false, query_.data(), keys + j * width + from * PAIR<T>,
               logits_.data());
      for (int64_t i = 0; i < rows; ++i) block_row(b, h, start + i, i, at, n, n);
      const int64_t there = PAIR<T> == 1 ? std::min(n, call_.keys - at) : n;  // values that are not packed end here
      multiply(rows, call_.value_width, there, BLOCK, stride, call_.value_width, true, weights(), values + at * stride,
               output_.data());
    }
  }

  // The rows of all heads of one key head over some keys, which are read where they lie: see `decode`, which packs
  // `query`; `S` is its type.
  template <typename In, typename S>
  void stretch(const View<In>& key, const View<In>& value, const S* query, int64_t b, int64_t kh, int64_t from,
               int64_t to) {
    const int64_t group = call_.heads / call_.key_heads, rows = group * call_.length, columns = up(rows, LANES);
    const int64_t width = up(call_.width, PAIR<S>), ev = call_.value_width;
    const bool direct = std::is_same_v<In, S> && key.column == 1 && key.row >= width && width == call_.width;
    const bool as_is = std::is_same_v<In, float> && value.column == 1 && value.row >= ev;
    std::vector<S> left(direct ? 0 : BLOCK * width);
    std::vector<float> turned(BLOCK * columns), right(as_is ? 0 : BLOCK * ev);
    std::fill(output_.begin(), output_.end(), 0.0f);
    std::fill(rows_, rows_ + rows, Row());
    for (int64_t j = from; j < to; j += BLOCK) {
      const int64_t n = std::min(BLOCK, to - j), padded = up(n, LANES);
      const S* keys = left.data();
      if constexpr (std::is_same_v<In, S>) keys = direct ? key.at(b, kh, j) : keys;
      if (!direct) pack_left(key, b, kh, j, to, n, call_.width, left.data());
      const int64_t stride = direct ? key.row : width;
      if (rows > ALONE) multiply(n, columns, width, stride, columns, columns, false, keys, query, turned.data());
      for (int64_t c = 0; rows <= ALONE && c < n; ++c) {
        for (int64_t i = 0; i < rows; ++i) logits_[i * BLOCK + c] = dot(keys + c * stride, query + i * width, width);
      }
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t c = 0; rows > ALONE && c < padded; c += LANES) {
          store(logits_.data() + i * BLOCK + c, gathered(turned.data() + c * columns + i, columns));
        }
        block_row(b, kh * group + i / call_.length, i % call_.length, i, j, padded, to - j);
      }
      const float* values = right.data();
      if constexpr (std::is_same_v<In, float>) values = as_is ? value.at(b, kh, j) : values;
      if (!as_is) pack_left(value, b, kh, j, to, n, ev, right.data());
      const int64_t apart = as_is ? value.row : ev, whole = n / RAGGED * RAGGED;
      multiply(rows, ev, whole, BLOCK, apart, ev, true, logits_.data(), values, output_.data());
      for (int64_t c = whole; c < n; ++c) {
        for (int64_t i = 0; i < rows; ++i) {
          const float p = logits_[i * BLOCK + c];
          for (int64_t e = 0; e < ev; ++e) output_[i * ev + e] += p * values[c * apart + e];
        }
      }
    }
  }

 private:
  T* weights() { return in_place_of(logits_, weights_); }

  // One row of a block: logits to weights, statistics, and the output so far in terms of the new maximum.
  void block_row(int64_t b, int64_t h, int64_t position, int64_t i, int64_t j, int64_t n, int64_t limit) {
    float* z = logits_.data() + i * BLOCK;
    T* p = weights() + i * BLOCK;
    const int64_t begin = std::clamp<int64_t>(call_.first(position) - j, 0, n);
    const int64_t end = std::clamp<int64_t>(call_.last(position) - j, begin, std::max(begin, std::min(n, limit)));
    const float factor = call_.factor_of(b, h, position);
    const bool plain = call_.plain(), wanted = wanted_;
    int64_t from = begin / LANES * LANES, to = up(end, LANES);
    const int64_t count = plain ? end - begin : prepare(b, h, position, z, j, begin, end, factor, from, to);
    Row& row = rows_[i];
    if (count == 0) return clear(p, 0, n);
    const auto by_sixteen = [&](const auto& body) INLINE {
      int64_t c = from;
      if (!plain) {
        for (; c < to; c += LANES) body(c, lanes_[c / LANES]);
        return;
      }
      if (c < begin) body(c, between(c, begin, end)), c += LANES;
      for (; c + LANES <= end; c += LANES) body(c, All());
      if (c < to) body(c, between(c, begin, end));
    };
    const float scale = plain ? factor : 1.0f;
    const bool turned = scale < 0.0f;  // the largest product is the smallest logit
    Lanes top = every(-INF), low = every(INF), total = {};
    by_sixteen([&](int64_t c, auto seen) INLINE {
      const Lanes x = load(z + c);
      top = where(seen, larger(top, x), top);
      total = where(seen, total + x, total);
      if (wanted || turned) low = where(seen, smaller(low, x), low);
    });
    const float above = turned ? smallest(low) : largest(top), most = above * scale;
    const float least = (turned ? largest(top) : smallest(low)) * scale;
    float centre = sum(total) * scale / static_cast<float>(count);
    if (!std::isfinite(centre)) centre = careful_mean(z, from, to, begin, end, scale);
    const bool changed = most > row.max;
    if (changed) {
      const bool first = row.max == -INF;
      const float keep = row.shift(most);
      float* o = output_.data() + i * call_.value_width;
      if (!first)
        for (int64_t e = 0; e < call_.value_width; ++e) o[e] *= keep;
      largest_[i] = above;
    }
    if (wanted) centre = std::min(std::max(centre, least), most);  // of equal logits exactly they; NaN stays
    row.min = std::min(row.min, least);
    row.bad |= std::isnan(centre) || row.max == INF;  // a finite sum holds no NaN
    clear(p, 0, from);
    clear(p, to, n);
    if (row.max == -INF && !row.bad) {  // no key of any weight yet
      row.n += static_cast<double>(count);
      return clear(p, from, to);
    }
    // from the product that gives the maximum, whose weight is then 1 to the last bit; in units of log 2
    const Lanes level = every(largest_[i]), unit = every(scale * LOG2E),
                apart = every(std::min((row.max - centre) * LOG2E, std::numeric_limits<float>::max()));
    Lanes rest = {}, c2 = {}, c3 = {}, a = {}, m2 = {};
    int64_t ties = 0;
    by_sixteen([&](int64_t c, auto seen) INLINE {
      const Lanes x = load(z + c), off = (x - level) * unit, d = at_least_floor(off), e = kept(seen, power_of_two(d));
      store(p + c, e);
      const auto add = [&](auto others) INLINE {
        rest = where(others, rest + e, rest);
        if (!wanted) return;
        const Lanes root = exponent_raised<ROOT_EXPONENT>(e), square = root * root;
        c2 = where(others, c2 + square, c2);
        c3 = where(others, square * e + c3, c3);
        a = where(others, e * d + a, a);
      };
      if (changed) {
        const Mask tied = seen & equal(x * every(scale), every(row.max));
        ties += sqrtdk::count(tied);
        add(without(seen, tied));
      } else {
        add(seen);
      }
      if (wanted) m2 = where(seen, (off + apart) * (off + apart) + m2, m2);
    });
    if (call_.dropout) call_.dropout->apply(b * call_.heads + h, position, j, from, to, p);
    const float again = ties > 1 ? static_cast<float>(ties - 1) : 0.0f;  // equal largest keys but one
    row.rest += sum(rest) + again;
    if (!wanted) {
      row.n += static_cast<double>(count);
      return;
    }
    row.c2 += sum(c2) + again * ROOT * ROOT;
    row.c3 += sum(c3) + again * ROOT * ROOT;
    row.a += LN2 * sum(a);
    row.add(static_cast<double>(count), centre, LN2 * LN2 * sum(m2));
  }

  // The mean of logits whose sum is infinite or NaN in float32; NaN only where one of them is.
  float careful_mean(const float* z, int64_t from, int64_t to, int64_t begin, int64_t end, float factor) const {
    double sum = 0.0, count = 0.0;
    for (int64_t c = from; c < to; ++c) {
      if (!(call_.plain() ? c >= begin && c < end : has(lanes_[c / LANES], c % LANES))) continue;
      sum += static_cast<double>(z[c] * factor), count += 1.0;
    }
    return static_cast<float>(sum / count);
  }

  static void clear(T* p, int64_t from, int64_t to) { std::fill(p + from, p + to, T(0.0f)); }

  // Scale, softcap, bias and mask; which keys are seen goes to `lanes_`, their number is returned, and `from` and `to`
  // move to the first and last sixteen that hold one.
  int64_t prepare(int64_t b, int64_t h, int64_t position, float* z, int64_t j, int64_t begin, int64_t end, float factor,
                  int64_t& from, int64_t& to) {
    const int64_t biases = static_cast<int64_t>(call_.biases.size());
    const float* of_row[BIASES];
    for (int64_t k = 0; k < biases; ++k) of_row[k] = bias_row(k, b, h, position, j);
    const bool* visible = call_.visible ? call_.visible->at(b, h, position) : nullptr;
    int64_t count = 0;
    for (int64_t c = from, stop = std::exchange(to, from); c < stop; c += LANES) {
      Mask seen = between(c, begin, end);
      if (visible) seen = shown(visible + (j + c) * call_.visible->column, call_.visible->column, seen);
      lanes_[c / LANES] = seen;
      const int64_t more = sqrtdk::count(seen);
      if (more == 0) continue;
      if (count == 0) from = c;
      count += more, to = c + LANES;
      Lanes x = load(z + c) * every(factor);
      if (call_.softcap != 0.0f) x = every(call_.softcap) * tanh(x / every(call_.softcap));
      for (int64_t k = 0; k < biases; ++k) x = x + load(of_row[k] + c, seen);
      store(z + c, x);
    }
    return count;
  }

  // A row of a bias from key `j` on: where it lies, or of sixteen rows that are read at once.
  const float* bias_row(int64_t k, int64_t b, int64_t h, int64_t position, int64_t j) {
    const auto* view = std::get_if<View<float>>(&call_.biases[k]);
    if (view && view->column == 1) return view->at(b, h, position) + j;
    float* rows = biases_.data() + k * LANES * BLOCK;
    if (position % LANES == 0) {
      const int64_t count = std::min(LANES, call_.length - position), end = call_.last(position + count - 1);
      read_bias(call_.biases[k], b, h, position, count, j, std::min(BLOCK, end - j),
                [&](int64_t r, int64_t c, float x) { rows[r * BLOCK + c] = x; });
    }
    return rows + position % LANES * BLOCK;
  }

  const Call& call_;
  const bool wanted_;
  std::vector<float> logits_;
  std::vector<T> weights_, query_;
  std::vector<float> biases_, output_;
  Row rows_[ROWS];
  float largest_[ROWS];  // the product that gives a row's maximum
  Mask lanes_[BLOCK / LANES];
};

template <typename In, typename T>
void forward(const Call& call, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
             const Results& results) {
  const View<In> q(query), k(key), v(value);
  const int64_t kh = call.key_heads, vh = call.value_heads, width = up(call.width, PAIR<T>), ev = call.value_width;
  const int64_t span = up(call.keys, BLOCK), tiles = (call.length + ROWS - 1) / ROWS;
  const auto keys = packed<T>(call.batch * kh, call.keys, BLOCK, width * BLOCK, [&](int64_t bh, int64_t j, T* to) {
    pack_turned(k, bh / kh, bh % kh, j, call.keys, BLOCK, call.width, to);
  });
  const bool direct = std::is_same_v<In, float> && v.column == 1 && v.row >= ev;
  const int64_t stride = direct ? v.row : ev;
  const auto values =
      packed<T>(direct ? 0 : call.batch * vh, call.keys, BLOCK, ev * BLOCK,
                [&](int64_t bh, int64_t j, T* to) { pack_right(v, bh / vh, bh % vh, j, call.keys, BLOCK, ev, to); });
  const auto values_of = [&](int64_t b, int64_t h) {
    if constexpr (std::is_same_v<In, float>)
      if (direct) return v.at(b, h, 0);
    return static_cast<const T*>(values.get() + (b * vh + h) * span * ev);
  };
  run_units(call.batch * call.heads * tiles, [&]() {
    return [&, tile = Tile<T>(call, results.planes != nullptr)](int64_t unit) mutable {
      const int64_t bh = unit / tiles, b = bh / call.heads, h = bh % call.heads, at = bh * call.length;
      const int64_t start = (tiles - 1 - unit % tiles) * ROWS;  // rows that see most keys first
      tile.run(q, keys.get() + (b * kh + h * kh / call.heads) * span * width, values_of(b, h * vh / call.heads), stride,
               b, h, start);
      for (int64_t i = start; i < std::min(start + ROWS, call.length); ++i) {
        finish<In>(call, h, tile.row(i - start), tile.output(i - start), results, at + i);
      }
    };
  });
}

}  // namespace sqrtdk

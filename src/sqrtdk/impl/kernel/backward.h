// The backward pass.
#pragma once
#include "operands.h"

namespace sqrtdk {

// Of every query row, in tiles of ROWS; those beyond L see no key.
struct RowTerms {
  std::vector<float> scale, lse, constant, entropy;  // constant: -D + dlse - dH H; entropy: dH
  std::vector<int32_t> first, last;
};

inline RowTerms row_terms(const Call& call, const float* lse, const float* constant, const float* entropy) {
  const int64_t tiles = (call.length + ROWS - 1) / ROWS, all = call.batch * call.heads * tiles * ROWS;
  RowTerms terms;
  for (auto* of : {&terms.scale, &terms.lse, &terms.constant, &terms.entropy}) of->assign(all, 0.0f);
  terms.first.assign(all, 0), terms.last.assign(all, 0);
  for (int64_t bh = 0; bh < call.batch * call.heads; ++bh) {
    for (int64_t i = 0; i < call.length; ++i) {
      const int64_t to = bh * tiles * ROWS + i, from = bh * call.length + i;
      terms.scale[to] = call.factor_of(bh / call.heads, bh % call.heads, i);
      terms.lse[to] = lse[from], terms.constant[to] = constant[from];
      if (entropy) terms.entropy[to] = entropy[from];
      terms.first[to] = static_cast<int32_t>(call.first(i)), terms.last[to] = static_cast<int32_t>(call.last(i));
    }
  }
  return terms;
}

// What a thread works with: logits and their gradients of one block of keys (rows) and one tile of queries (columns).
template <typename T>
class TurnedTile {
 public:
  TurnedTile(const Call& call, const RowTerms& terms)
      : call_(call), terms_(terms), logits_(BLOCK * ROWS), gradients_(BLOCK * ROWS) {
    if constexpr (PAIR<T> == 2)
      for (auto* of : {&weights_, &left_, &right_}) of->resize(BLOCK * ROWS);
  }

  float* logits() { return logits_.data(); }
  float* gradients() { return gradients_.data(); }
  T* weights() { return in_place_of(logits_, weights_); }
  T* left() { return in_place_of(gradients_, left_); }
  T* right() { return in_place_of(gradients_, right_); }

  // Products and dP^T to weights and the gradient of the products; `n` keys from `j`, an even number, and `columns`
  // queries.
  void differentiate(int64_t b, int64_t h, int64_t tile, int64_t tiles, int64_t columns, int64_t j, int64_t n) {
    const int64_t base = ((b * call_.heads + h) * tiles + tile) * ROWS, start = tile * ROWS;
    const int64_t rows = std::min(ROWS, call_.length - start);
    const bool whole = rows == ROWS && j + n <= call_.keys && call_.plain() && call_.first(start + rows - 1) <= j &&
                       call_.last(start) >= j + n;
    for (int64_t c = 0; c < n; c += 2) {
      for (int64_t v = 0; v < columns; v += LANES) {
        Lanes p[2], dz[2];
        for (int64_t k = 0; k < 2; ++k)
          one(b, h, base + v, start + v, rows - v, j + c + k, (c + k) * ROWS + v, whole, p[k], dz[k]);
        for (int64_t k = 0; k < 2; ++k) {
          store(weights() + (c + k) * ROWS + v, p[k]);
          store(left() + (c + k) * ROWS + v, dz[k]);
        }
        if constexpr (PAIR<T> == 2) store_rows(right_.data() + c * ROWS + 2 * v, dz[0], dz[1]);
      }
    }
  }

 private:
  // Sixteen queries and one key.
  void one(int64_t b, int64_t h, int64_t at, int64_t row, int64_t rows, int64_t key, int64_t offset, bool whole,
           Lanes& p, Lanes& dz) {
    const Lanes scale = load(&terms_.scale[at]);
    Lanes z = load(&logits_[offset]) * scale, slope = scale;
    if (call_.softcap != 0.0f) {
      const Lanes t = tanh(z / every(call_.softcap));
      z = every(call_.softcap) * t;
      slope = slope * (every(1.0f) - t * t);
    }
    const auto finish = [&](auto seen) {
      const Lanes x = z - load(&terms_.lse[at]);
      p = kept(seen, power_of_two(at_least_floor(smaller(Lanes{}, x) * every(LOG2E))));
      const Lanes inner = load(&gradients_[offset]) + load(&terms_.constant[at]) - load(&terms_.entropy[at]) * x;
      dz = kept(seen, p * inner * slope);
    };
    if (whole) return finish(All());
    Mask seen = spans(&terms_.first[at], &terms_.last[at], static_cast<int32_t>(key));
    if ((call_.bias || call_.visible) && count(seen)) masked(b, h, row, rows, key, z, seen);
    finish(seen);
  }

  // Bias and mask of sixteen rows and one key.
  void masked(int64_t b, int64_t h, int64_t row, int64_t rows, int64_t key, Lanes& z, Mask& seen) {
    const Mask there = between(0, 0, rows);
    if (call_.bias) {
      const View<float>& bias = *call_.bias;
      z = z + gathered(bias.at(b, h, row) + key * bias.column, bias.row, there);
    }
    if (call_.visible) {
      const View<bool>& visible = *call_.visible;
      seen = shown(visible.at(b, h, row) + key * visible.column, visible.row, there & seen);
    }
  }

  const Call& call_;
  const RowTerms& terms_;
  std::vector<float> logits_, gradients_;
  std::vector<T> weights_, left_, right_;
};

template <typename In, typename T>
void backward(const Call& call, const RowTerms& terms, const at::Tensor& query, const at::Tensor& key,
              const at::Tensor& value, const at::Tensor& gradient, at::Tensor& dq, at::Tensor& dk, at::Tensor& dv) {
  const View<In> q(query), k(key), v(value), g(gradient);
  const int64_t heads = call.heads, kh = call.key_heads, group = heads / kh, e = call.width, ev = call.value_width;
  const int64_t we = up(e, PAIR<T>), wv = up(ev, PAIR<T>), length = call.length, keys = call.keys;
  const int64_t tiles = (length + ROWS - 1) / ROWS, blocks = (keys + BLOCK - 1) / BLOCK;
  const auto of_rows = [&](int64_t size, const auto& pack) {
    return packed<T>(call.batch * heads, length, ROWS, size, pack);
  };
  const auto of_keys = [&](int64_t size, const auto& pack) {
    return packed<T>(call.batch * kh, keys, BLOCK, size, pack);
  };
  const auto q_turned = of_rows(
      we * ROWS, [&](int64_t bh, int64_t i, T* to) { pack_turned(q, bh / heads, bh % heads, i, length, ROWS, e, to); });
  const auto g_turned = of_rows(wv * ROWS, [&](int64_t bh, int64_t i, T* to) {
    pack_turned(g, bh / heads, bh % heads, i, length, ROWS, ev, to);
  });
  const auto q_right = of_rows(
      e * ROWS, [&](int64_t bh, int64_t i, T* to) { pack_right(q, bh / heads, bh % heads, i, length, ROWS, e, to); });
  const auto g_right = of_rows(
      ev * ROWS, [&](int64_t bh, int64_t i, T* to) { pack_right(g, bh / heads, bh % heads, i, length, ROWS, ev, to); });
  const auto k_left =
      of_keys(we * BLOCK, [&](int64_t bh, int64_t j, T* to) { pack_left(k, bh / kh, bh % kh, j, keys, BLOCK, e, to); });
  const auto v_left = of_keys(
      wv * BLOCK, [&](int64_t bh, int64_t j, T* to) { pack_left(v, bh / kh, bh % kh, j, keys, BLOCK, ev, to); });
  const auto k_turned = of_keys(
      e * BLOCK, [&](int64_t bh, int64_t j, T* to) { pack_left_turned(k, bh / kh, bh % kh, j, keys, BLOCK, e, to); });
  const int64_t columns = call.batch * kh;
  const int64_t parts = std::clamp<int64_t>((2 * at::get_num_threads() + columns - 1) / columns, 1, blocks);
  const int64_t plane = call.batch * heads * tiles * e * ROWS;
  std::vector<float> dq_turned(parts * plane, 0.0f);
  In *dk_to = dk.mutable_data_ptr<In>(), *dv_to = dv.mutable_data_ptr<In>();
  run_units(columns * parts, [&]() {
    return [&, tile = TurnedTile<T>(call, terms), dk_sum = std::vector<float>(BLOCK * e),
            dv_sum = std::vector<float>(BLOCK * ev)](int64_t unit) mutable {
      const int64_t column = unit / parts, part = unit % parts, b = column / kh;
      for (int64_t block = part; block < blocks; block += parts) {
        const int64_t j = block * BLOCK, count = std::min(BLOCK, keys - j), n = up(count, 2),
                      at_keys = column * blocks + block;
        std::fill(dk_sum.begin(), dk_sum.end(), 0.0f);
        std::fill(dv_sum.begin(), dv_sum.end(), 0.0f);
        for (int64_t h = column % kh * group; h < (column % kh + 1) * group; ++h) {
          for (int64_t i = 0; i < tiles; ++i) {
            const int64_t start = i * ROWS, end = std::min(start + ROWS, length);
            if (call.first(start) >= j + count || call.last(end - 1) <= j) continue;
            const int64_t at_rows = (b * heads + h) * tiles + i, m = up(end - start, LANES);
            multiply(n, m, we, we, ROWS, ROWS, false, k_left.get() + at_keys * we * BLOCK,
                     q_turned.get() + at_rows * we * ROWS, tile.logits());
            multiply(n, m, wv, wv, ROWS, ROWS, false, v_left.get() + at_keys * wv * BLOCK,
                     g_turned.get() + at_rows * wv * ROWS, tile.gradients());
            tile.differentiate(b, h, i, tiles, m, j, n);
            multiply(n, ev, m, ROWS, ev, ev, true, tile.weights(), g_right.get() + at_rows * ev * ROWS, dv_sum.data());
            multiply(n, e, m, ROWS, e, e, true, tile.left(), q_right.get() + at_rows * e * ROWS, dk_sum.data());
            multiply(e, m, n, BLOCK, ROWS, ROWS, true, k_turned.get() + at_keys * e * BLOCK, tile.right(),
                     dq_turned.data() + part * plane + at_rows * e * ROWS);
          }
        }
        In *dk_rows = dk_to + (column * keys + j) * e, *dv_rows = dv_to + (column * keys + j) * ev;
        for (int64_t x = 0; x < count * e; ++x) dk_rows[x] = static_cast<In>(dk_sum[x]);
        for (int64_t x = 0; x < count * ev; ++x) dv_rows[x] = static_cast<In>(dv_sum[x]);
      }
    };
  });
  In* dq_to = dq.mutable_data_ptr<In>();
  at::parallel_for(0, call.batch * heads * length, 64, [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row) {
      const int64_t bh = row / length, i = row % length;
      const float* source = dq_turned.data() + ((bh * tiles + i / ROWS) * e) * ROWS + i % ROWS;
      for (int64_t x = 0; x < e; ++x) {
        float sum = 0.0f;
        for (int64_t part = 0; part < parts; ++part) sum += source[part * plane + x * ROWS];
        dq_to[row * e + x] = static_cast<In>(sum);
      }
    }
  });
}

}  // namespace sqrtdk

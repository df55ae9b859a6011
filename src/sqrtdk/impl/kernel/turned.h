// A tile of the backward pass, turned: logits and their gradients of one block of keys and one tile of queries.
#pragma once
#include "operands.h"

namespace sqrtdk {

// Of every query row, in tiles of ROWS; those beyond L see no key.
struct RowTerms {
  std::vector<float> scale, top, log_mass, constant, entropy;  // constant: -D + dlse - dH H; entropy: dH
  std::vector<int32_t> first, last;
};

inline RowTerms row_terms(const Call& call, const float* levels, const float* constant, const float* entropy) {
  const int64_t tiles = (call.length + ROWS - 1) / ROWS, all = call.batch * call.heads * tiles * ROWS;
  const int64_t plane = call.batch * call.heads * call.length;
  RowTerms terms;
  for (auto* of : {&terms.scale, &terms.top, &terms.log_mass, &terms.constant, &terms.entropy}) of->assign(all, 0.0f);
  terms.first.assign(all, 0), terms.last.assign(all, 0);
  for (int64_t bh = 0; bh < call.batch * call.heads; ++bh) {
    for (int64_t i = 0; i < call.length; ++i) {
      const int64_t to = bh * tiles * ROWS + i, from = bh * call.length + i;
      terms.scale[to] = call.factor_of(bh / call.heads, bh % call.heads, i);
      terms.top[to] = levels[from], terms.log_mass[to] = levels[plane + from], terms.constant[to] = constant[from];
      if (entropy) terms.entropy[to] = entropy[from];
      terms.first[to] = static_cast<int32_t>(call.first(i)), terms.last[to] = static_cast<int32_t>(call.last(i));
    }
  }
  return terms;
}

// Where the gradient of a bias is summed.
struct Sum {
  View<float> strides;
  float* to;
};

// What a thread works with: logits and their gradients of one block of keys (rows) and one tile of queries (columns).
template <typename T>
class TurnedTile {
 public:
  TurnedTile(const Call& call, const RowTerms& terms)
      : call_(call),
        terms_(terms),
        logits_(BLOCK * ROWS),
        gradients_(BLOCK * ROWS),
        kept_(call.dropout ? DRAWN * ROWS : 0),
        biases_(call.biases.empty() ? 0 : DRAWN * ROWS),
        times_(call.dropout ? call.dropout->factor : 1.0f) {
    if constexpr (PAIR<T> == 2)
      for (auto* of : {&weights_, &left_, &right_}) of->resize(BLOCK * ROWS);
  }

  float* logits() { return logits_.data(); }
  float* gradients() { return gradients_.data(); }
  T* weights() { return in_place_of(logits_, weights_); }
  T* left() { return in_place_of(gradients_, left_); }
  T* right() { return in_place_of(gradients_, right_); }

  std::vector<Sum> bias_gradients;  // what they are added to

  // Products and dP^T to weights and the gradient of the products; `n` keys from `j`, an even number, and `columns`
  // queries.
  void differentiate(int64_t b, int64_t h, int64_t tile, int64_t tiles, int64_t columns, int64_t j, int64_t n) {
    const int64_t base = ((b * call_.heads + h) * tiles + tile) * ROWS, start = tile * ROWS;
    const int64_t rows = std::min(ROWS, call_.length - start);
    const bool whole = rows == ROWS && j + n <= call_.keys && call_.plain() && call_.first(start + rows - 1) <= j &&
                       call_.last(start) >= j + n;
    for (int64_t c = 0; c < n; c += 2) {
      if (call_.dropout && c % DRAWN == 0) draw(b * call_.heads + h, start, columns, j + c);
      if (!biases_.empty() && c % DRAWN == 0)
        fetch_biases(b, h, start, rows, j + c, std::min(DRAWN, call_.keys - j - c));
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
      const int64_t done = c % DRAWN + 2;
      if (!bias_gradients.empty() && (done == DRAWN || c + 2 == n)) {
        const int64_t key = j + c + 2 - done;
        std::fill(biases_.begin() + done * ROWS, biases_.begin() + up(done, LANES) * ROWS, 0.0f);
        for (const Sum& to : bias_gradients) add_to_bias(to, b, h, start, rows, key, std::min(done, call_.keys - key));
      }
    }
  }

 private:
  // Which weights of the keys from `j` on dropout keeps.
  void draw(int64_t head, int64_t start, int64_t columns, int64_t j) {
    for (int64_t v = 0; v < columns; v += LANES) {
      for (int64_t l = 0; l < LANES; ++l)
        call_.dropout->draw(head, start + v, 1, j / WORDS + l, 0, LANES * ROWS, kept_.data() + l * ROWS + v);
    }
  }

  // Sixteen queries and one key: their weights after dropout, and the gradients of their products.
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
      const Lanes x = z - load(&terms_.top[at]) - load(&terms_.log_mass[at]);
      const Lanes share = kept(seen, power_of_two(at_least_floor(smaller(Lanes{}, x) * every(LOG2E))));
      Lanes outer = load(&gradients_[offset]);
      p = share;
      if (call_.dropout) {
        const Lanes keep = load(&kept_[offset % (DRAWN * ROWS)]) * every(times_);
        outer = outer * keep, p = share * keep;
      }
      const Lanes inner = share * (outer + load(&terms_.constant[at]) - load(&terms_.entropy[at]) * x);
      dz = kept(seen, inner * slope);
      return inner;
    };
    if (whole) return static_cast<void>(finish(All()));
    Mask seen = spans(&terms_.first[at], &terms_.last[at], static_cast<int32_t>(key));
    if (!biases_.empty()) z = z + load(&biases_[offset % (DRAWN * ROWS)]);
    if (call_.visible && count(seen)) {
      const View<bool>& visible = *call_.visible;
      seen = shown(visible.at(b, h, row) + key * visible.column, visible.row, between(0, 0, rows) & seen);
    }
    const Lanes inner = finish(seen);
    if (!bias_gradients.empty()) store(&biases_[offset % (DRAWN * ROWS)], kept(seen, inner));
  }

  // The sum of the biases of `n` keys, turned; its places are overwritten by those of its gradient.
  void fetch_biases(int64_t b, int64_t h, int64_t row, int64_t rows, int64_t key, int64_t n) {
    const auto fetch = [&](const Bias& bias, const auto& put) {
      read_bias(bias, b, h, row, rows, key, n, [&](int64_t v, int64_t c, float x) { put(biases_[c * ROWS + v], x); });
    };
    fetch(call_.biases[0], [](float& to, float x) { to = x; });
    for (size_t k = 1; k < call_.biases.size(); ++k) fetch(call_.biases[k], [](float& to, float x) { to += x; });
  }

  // Adds what the last `n` keys, from `key` on, give to the gradient of the bias. What a bias repeats over is summed
  // first.
  void add_to_bias(const Sum& to_add, int64_t b, int64_t h, int64_t row, int64_t rows, int64_t key, int64_t n) {
    const View<float>& of = to_add.strides;
    float* first = to_add.to + of.offset(b, h, row) + key * of.column;
    if (of.row == 0) {
      float all = 0.0f;
      for (int64_t c = 0; c < n; ++c) {
        Lanes column = {};
        for (int64_t v = 0; v < rows; v += LANES) column = column + load(&biases_[c * ROWS + v]);
        (of.column == 0 ? all : first[c]) += sum(column);
      }
      if (of.column == 0) *first += all;
      return;
    }
    for (int64_t v = 0; v < rows; ++v) {
      float* to = first + v * of.row;
      Lanes all = {};
      for (int64_t c = 0; c < n; c += LANES) {
        const Lanes found = gathered(&biases_[c * ROWS + v], ROWS);
        if (of.column == 0)
          all = all + found;
        else if (c + LANES <= n)
          store(to + c, load(to + c) + found);
        else
          for (int64_t k = c; k < n; ++k) to[k] += biases_[k * ROWS + v];
      }
      if (of.column == 0) *to += sum(all);
    }
  }

  const Call& call_;
  const RowTerms& terms_;
  std::vector<float> logits_, gradients_, kept_, biases_;
  const float times_;
  std::vector<T> weights_, left_, right_;
};

}  // namespace sqrtdk

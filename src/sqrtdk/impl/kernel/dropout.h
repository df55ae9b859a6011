// Dropout: whether a weight is kept is a function of the seed and its place, so the backward pass finds it again.
//
// Philox 4x32-10 makes four words of a counter and the seed (Salmon et al. 2011, "Parallel random numbers: as easy as
// 1, 2, 3"). Word w of the counter (row, 16 g + l, b H + h, 0) is that of key 64 g + 16 w + l of head h in sample b.
#pragma once
#include "lanes.h"

namespace sqrtdk {

constexpr int64_t WORDS = 4, DRAWN = WORDS * LANES;  // keys of a row that are drawn at once

struct Dropout {
  float rate, factor;  // the weights that are kept are multiplied by the factor
  uint64_t seed;

  Dropout(double rate, int64_t seed)
      : rate(static_cast<float>(rate)),
        factor(rate < 1.0 ? static_cast<float>(1.0 / (1.0 - rate)) : 0.0f),
        seed(static_cast<uint64_t>(seed)) {}

  // The counters (row + down l, column + along l, head, 0) of sixteen l; 1 for a word that keeps its key, else 0, goes
  // to to[w stride + l].
  void draw(int64_t head, int64_t row, int down, int64_t column, int along, int64_t stride, float* to) const {
    uint32_t words[WORDS][LANES], keys[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (uint32_t l = 0; l < LANES; ++l) {
      words[0][l] = static_cast<uint32_t>(row) + l * down, words[1][l] = static_cast<uint32_t>(column) + l * along;
      words[2][l] = static_cast<uint32_t>(head), words[3][l] = 0;
    }
    for (int round = 0; round < 10; ++round, keys[0] += 0x9E3779B9u, keys[1] += 0xBB67AE85u) {
      for (int64_t l = 0; l < LANES; ++l) {
        const uint64_t a = uint64_t{0xD2511F53u} * words[0][l], b = uint64_t{0xCD9E8D57u} * words[2][l];
        words[0][l] = static_cast<uint32_t>(b >> 32) ^ words[1][l] ^ keys[0];
        words[2][l] = static_cast<uint32_t>(a >> 32) ^ words[3][l] ^ keys[1];
        words[1][l] = static_cast<uint32_t>(b), words[3][l] = static_cast<uint32_t>(a);
      }
    }
    for (int64_t w = 0; w < WORDS; ++w) {
      for (int64_t l = 0; l < LANES; ++l)
        to[w * stride + l] = static_cast<float>(words[w][l] >> 8) * 0x1p-24f >= rate ? 1.0f : 0.0f;
    }
  }

  // Drops weights `from` ... `to` of a row of a block that begins at key j.
  template <typename T>
  void apply(int64_t head, int64_t row, int64_t j, int64_t from, int64_t to, T* weights) const {
    float keep[DRAWN];
    for (int64_t c = from / DRAWN * DRAWN; c < to; c += DRAWN) {
      draw(head, row, 0, (j + c) / WORDS, 1, LANES, keep);
      for (int64_t x = std::max(c, from); x < std::min(c + DRAWN, to); x += LANES)
        store(weights + x, load(weights + x) * load(keep + x - c));
    }
  }
};

}  // namespace sqrtdk

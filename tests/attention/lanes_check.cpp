// A program: sixteen numbers at once give what one at a time gives. Prints what differs and exits with 1.
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>

#include "masks.h"

using namespace sqrtdk;

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
int differing = 0, checks = 0;

void expect(bool holds, const char* what, int64_t at) {
  ++checks;
  if (holds) return;
  ++differing;
  std::printf("%s, number %ld\n", what, static_cast<long>(at));
}

bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

struct Numbers {
  float at[LANES];
  explicit Numbers(Lanes x) { store(at, x); }
};

void arithmetic(std::mt19937& draw) {
  std::normal_distribution<float> normal(0.0f, 30.0f);
  alignas(64) float memory[LANES + 1], other[LANES + 1];
  for (int64_t k = 0; k <= LANES; ++k) memory[k] = normal(draw), other[k] = normal(draw);
  memory[4] = NAN, other[7] = NAN, memory[9] = -0.0f, memory[11] = INF;
  const float *a = memory + 1, *b = other + 1;  // not where a register would begin
  const Lanes x = load(a), y = load(b);
  const Numbers sums(x + y), differences(x - y), products(x * y), quotients(x / y), most(larger(x, y)),
      least(smaller(x, y)), floored(at_least_floor(x)), minus(every(-0.0f));
  for (int64_t k = 0; k < LANES; ++k) {
    expect(same(sums.at[k], a[k] + b[k]), "sum", k);
    expect(same(differences.at[k], a[k] - b[k]), "difference", k);
    expect(same(products.at[k], a[k] * b[k]), "product", k);
    expect(same(quotients.at[k], a[k] / b[k]), "quotient", k);
    expect(same(most.at[k], a[k] > b[k] ? a[k] : b[k]), "larger", k);
    expect(same(least.at[k], a[k] < b[k] ? a[k] : b[k]), "smaller", k);
    expect(same(floored.at[k], a[k] < -159.0f ? -159.0f : a[k]), "floor", k);
    expect(same(minus.at[k], -0.0f), "one number for all", k);
  }
}

void reductions(std::mt19937& draw) {
  std::normal_distribution<float> normal(0.0f, 30.0f);
  float v[LANES], w[100], u[100];
  double whole = 0.0, size = 0.0;
  float high = -INF, low = INF;
  for (float& x : v)
    x = normal(draw), whole += x, size += std::fabs(x), high = std::max(high, x), low = std::min(low, x);
  expect(std::fabs(sum(load(v)) - whole) <= 16 * 6e-8 * size, "sum of sixteen", 0);
  expect(largest(load(v)) == high, "largest of sixteen", 0);
  expect(smallest(load(v)) == low, "smallest of sixteen", 0);
  for (int64_t n : {0, 1, 15, 16, 17, 31, 32, 33, 64, 80, 100}) {
    double exact = 0.0, sizes = 0.0;
    for (int64_t k = 0; k < n; ++k)
      w[k] = normal(draw), u[k] = normal(draw), exact += double(w[k]) * u[k], sizes += std::fabs(w[k] * u[k]);
    expect(std::fabs(dot(w, u, n) - exact) <= n * 6e-8 * sizes, "dot product", n);
  }
}

void functions() {
  float x[LANES];
  for (int64_t step = 0; step < 4000; ++step) {
    for (int64_t k = 0; k < LANES; ++k) x[k] = -159.0f * static_cast<float>(step * LANES + k) / (4000.0f * LANES);
    const Numbers powers(power_of_two(load(x)));
    for (int64_t k = 0; k < LANES; ++k) {
      const double exact = std::exp2(static_cast<double>(x[k]));
      // 9.2e-8 of the polynomial, four roundings; below 2^-126 numbers are 2^-149 apart
      expect(std::fabs(powers.at[k] - exact) <= 3e-7 * exact + 0x1p-149, "power of two", step * LANES + k);
    }
    for (int64_t k = 0; k < LANES; ++k) x[k] = 12.0f * static_cast<float>(step * LANES + k - 32000) / 32000.0f;
    const Numbers capped(tanh(load(x)));
    for (int64_t k = 0; k < LANES; ++k) {
      const double exact = std::tanh(static_cast<double>(x[k]));
      expect(std::fabs(capped.at[k] - exact) <= 5e-7 * std::fabs(exact), "tanh", step * LANES + k);
    }
  }
  const float ends[LANES] = {0.0f, -159.0f, NAN};
  const Numbers powers(power_of_two(load(ends)));
  const float small[LANES] = {1.0f, 0.7f, 1e-30f, 0x1p-126f, 0x1.8p-127f, 0x1p-149f, 0.0f};
  const Numbers raised(exponent_raised<50>(load(small)));
  for (int64_t k = 0; k < 4; ++k) expect(raised.at[k] == small[k] * 0x1p50f, "exponent", k);
  for (int64_t k = 4; k < LANES; ++k) expect(raised.at[k] >= 0.0f && raised.at[k] < 0x1p-76f, "small exponent", k);
  expect(powers.at[0] == 1.0f, "power of 0", 0);
  expect(powers.at[1] == 0.0f, "power of the floor", 1);
  expect(std::isnan(powers.at[2]), "power of NaN", 2);
  const float turned[LANES] = {INF, -INF, NAN};
  const Numbers capped(tanh(load(turned)));
  expect(capped.at[0] == 1.0f && capped.at[1] == -1.0f && std::isnan(capped.at[2]), "ends of tanh", 0);
}

void masks(std::mt19937& draw) {
  float a[LANES], b[LANES], far[LANES * 3];
  bool set[LANES], row[LANES * 2];
  int32_t first[LANES], last[LANES];
  for (int64_t k = 0; k < LANES; ++k) {
    a[k] = static_cast<float>(draw() % 3), b[k] = static_cast<float>(draw() % 3), set[k] = draw() % 2;
    first[k] = static_cast<int32_t>(draw() % 5), last[k] = static_cast<int32_t>(draw() % 9);
  }
  for (int64_t k = 0; k < LANES * 3; ++k) far[k] = static_cast<float>(draw() % 100);
  for (bool& seen : row) seen = draw() % 2;
  const Mask mask = mask_of(set), ties = equal(load(a), load(b)), around = spans(first, last, 3);
  const Mask middle = between(32, 35, 41), none = between(32, 0, 16), every_one = between(32, 0, 99);
  const Numbers chosen(where(mask, load(a), load(b))), zeroed(kept(mask, load(a))), apart(gathered(far, 3)),
      some(load(far, mask));
  const Mask of_row = shown(row, 1, all_lanes()), of_some = shown(row, 2, mask);
  int ones = 0;
  for (int64_t k = 0; k < LANES; ++k) {
    ones += set[k];
    expect(has(mask, k) == set[k], "mask", k);
    expect(has(ties, k) == (a[k] == b[k]), "equal", k);
    expect(has(mask & ties, k) == (set[k] && a[k] == b[k]), "both masks", k);
    expect(has(without(mask, ties), k) == (set[k] && a[k] != b[k]), "one mask without another", k);
    expect(has(without(All(), ties), k) == (a[k] != b[k]), "all without a mask", k);
    expect(has(around, k) == (first[k] <= 3 && 3 < last[k]), "rows that see a key", k);
    expect(has(middle, k) == (k >= 3 && k < 9), "keys of a band", k);
    expect(!has(none, k) && has(every_one, k), "no key and every key", k);
    expect(chosen.at[k] == (set[k] ? a[k] : b[k]), "choice", k);
    expect(zeroed.at[k] == (set[k] ? a[k] : 0.0f), "zeros elsewhere", k);
    expect(apart.at[k] == far[3 * k], "numbers apart", k);
    expect(some.at[k] == (set[k] ? far[k] : 0.0f), "some numbers side by side", k);
    expect(has(of_row, k) == row[k], "a row of a mask", k);
    expect(has(of_some, k) == (set[k] && row[2 * k]), "some of a row of a mask", k);
  }
  expect(count(mask) == ones && count(every_one) == LANES && count(none) == 0, "number of keys", ones);
}

}  // namespace

int main() {
  std::mt19937 draw(0);
  for (int round = 0; round < 200; ++round) arithmetic(draw), reductions(draw), masks(draw);
  functions();
  std::printf("%d numbers at once in registers of %d: %d checks, %d differ\n", int(LANES), WIDTH, checks, differing);
  return differing ? 1 : 0;
}

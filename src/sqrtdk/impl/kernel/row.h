// Statistics of a row: partial sums over its keys, their union, and what is returned of them.
#pragma once
#include <cmath>
#include <limits>

#include "operands.h"

namespace sqrtdk {

// Powers of small p underflow. Times 2^100 they do not before p = 1e-34 (squares) and 2e-23 (cubes), and 2^20 keys of
// p = 1 fit. ROOT is the square root of that factor.
constexpr uint32_t ROOT_EXPONENT = 50;
constexpr float ROOT = static_cast<float>(int64_t{1} << ROOT_EXPONENT);
constexpr int PLANES = 9;  // keys, max_logit, min_logit, rest, share2, share3, a, mean, m2: the fields of RowStats

// Statistics of a row over the keys so far. `rest`, `c2`, `c3` and `a` are sums over all keys but one of the maximum.
struct Row {
  float max = -INF, min = INF, rest = 0, c2 = 0, c3 = 0, a = 0;
  double n = 0, mean = 0, m2 = 0;
  bool bad = false;

  // The sums in terms of a larger maximum; the key of the old one joins the rest. Returns e^(old - new).
  float shift(float larger) {
    const float d = max - larger, f = std::exp(d);  // 0 where there was no maximum
    if (f != 0.0f) {
      a = f * (a + d * (1.0f + rest));
      rest = f * (1.0f + rest);
      const float square = (f * ROOT) * (f * ROOT);
      c2 = f * f * c2 + square;
      c3 = f * f * f * c3 + square * f;
    } else {
      a = rest = c2 = c3 = 0.0f;
    }
    max = larger;
    return f;
  }

  // Chan's rule.
  void add(double count, double centre, double squares) {
    if (!std::isfinite(centre)) return static_cast<void>(n += count);  // the minimum tells
    const double delta = centre - mean, whole = n + count;
    m2 += squares + delta * delta * n * count / whole;
    mean += delta * count / whole;
    n = whole;
  }
};

// Where the numbers of the rows go; entropy and planes are null where they are not wanted. The output is of the inputs'
// type or, if `wide`, float32. `levels`: a plane of maxima and one of log masses, whose sum is lse; of a mask of
// -3.4e38 the sum has lost the mass.
struct Results {
  void* output;
  bool wide;
  float *lse, *levels, *entropy, *planes;
  int64_t plane;  // rows of all heads
};

// The output row, divided by its mass, and its statistics; lse and entropy are those with the sink.
template <typename In>
void finish(const Call& call, int64_t h, const Row& row, const float* o, const Results& results, int64_t at) {
  float top = row.max, keep = 1.0f, mass = top == -INF ? 0.0f : 1.0f + row.rest, more = row.rest, spread = row.a;
  if (call.sinks) {
    const float sink = call.sinks[h];
    top = std::max(sink, row.max);
    keep = row.max == -INF ? 0.0f : std::exp(row.max - top);
    const float own = sink == -INF ? 0.0f : std::exp(sink - top);
    spread = (keep == 0.0f ? 0.0f : keep * (row.a + (row.max - top) * (1.0f + row.rest))) +
             (own == 0.0f ? 0.0f : own * (sink - top));
    more = top == sink ? keep * mass : row.rest + own;  // but for the largest
    mass = 1.0f + more;
  }
  const float share = mass == 0.0f ? (row.n > 0 ? NAN : 0.0f) : keep / mass;
  const float times = share * (call.dropout ? call.dropout->factor : 1.0f);
  const auto write = [&](auto* to) {
    for (int64_t e = 0; e < call.value_width; ++e)
      to[at * call.value_width + e] = static_cast<std::decay_t<decltype(*to)>>(row.bad ? NAN : o[e] * times);
  };
  if (results.wide)
    write(static_cast<float*>(results.output));
  else
    write(static_cast<In*>(results.output));
  const float log_mass = std::log1p(more);
  results.lse[at] = row.bad ? NAN : mass == 0.0f ? -INF : top + log_mass;
  results.levels[at] = row.bad ? NAN : top, results.levels[results.plane + at] = log_mass;
  if (!results.planes) return;
  results.entropy[at] = row.bad ? NAN : mass == 0.0f ? share : log_mass - spread / mass;
  const float root = row.rest * ROOT;
  const bool flat = row.rest == 0.0f, sunk = row.n > 0 && row.min == -INF;
  const float values[PLANES] = {static_cast<float>(row.n),
                                row.max,
                                row.min,
                                row.rest,
                                flat ? 0.0f : row.c2 / root / root,
                                flat ? 0.0f : row.c3 / root / root / row.rest,
                                row.a,
                                sunk ? -INF : static_cast<float>(row.mean),
                                sunk ? INF : static_cast<float>(row.m2)};
  for (int k = 0; k < PLANES; ++k) results.planes[k * results.plane + at] = k && row.bad ? NAN : values[k];
}

// The statistics and outputs of two sets of keys as those of their union.
inline void join(Row& row, float* o, Row other, const float* more, int64_t width) {
  if (other.n == 0) return;
  float keep = 1.0f, add = 1.0f;
  if (row.max < other.max)
    keep = row.max == -INF ? 0.0f : row.shift(other.max);
  else if (other.max != -INF)
    add = other.shift(row.max);
  if (keep == 0.0f) row.rest = row.c2 = row.c3 = row.a = 0.0f;
  row.max = std::max(row.max, other.max), row.min = std::min(row.min, other.min);
  row.rest += other.rest, row.c2 += other.c2, row.c3 += other.c3, row.a += other.a;
  row.bad |= other.bad;
  row.add(other.n, other.mean, other.m2);
  for (int64_t e = 0; e < width; ++e) o[e] = (keep == 0.0f ? 0.0f : keep * o[e]) + add * more[e];
}

}  // namespace sqrtdk

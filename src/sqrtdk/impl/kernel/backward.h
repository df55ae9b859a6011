// The backward pass.
#pragma once
#include "turned.h"

namespace sqrtdk {

// A bias that learns: (#B, #H, #L, #S), or a table of distances (#B, #H, 1, L + S - 1).
struct Learned {
  at::Tensor bias;
  bool distances;

  bool repeats_keys() const { return distances || bias.size(3) == 1; }
};

// How the work is divided among threads, so that no two units add to one number of the gradient of a bias. A column
// is the key heads that share a bias: one head in all samples, all heads of a sample, all of both, or one alone. Its
// heads are divided into groups.
struct Units {
  int64_t columns, members, groups, parts, column_step, member_step;

  Units(const Call& call, const std::vector<Learned>& biases) {
    const auto repeats = [&](int64_t dim) {
      return std::any_of(biases.begin(), biases.end(), [&](const Learned& of) { return of.bias.size(dim) == 1; });
    };
    const int64_t all = call.batch * call.key_heads, enough = 2 * at::get_num_threads();
    const int64_t blocks = (call.keys + BLOCK - 1) / BLOCK;
    columns = (repeats(0) ? 1 : call.batch) * (repeats(1) ? 1 : call.key_heads), members = all / columns;
    column_step = repeats(1) ? call.key_heads : 1, member_step = repeats(1) ? 1 : call.key_heads;
    parts = std::clamp<int64_t>((enough + columns - 1) / columns, 1, blocks);
    groups = std::clamp<int64_t>((enough + columns * parts - 1) / (columns * parts), 1, members);
  }

  int64_t count() const { return columns * groups * parts; }
};

// The gradient of a bias. Each group of heads has a plane of it for itself; of a bias that repeats over the keys, each
// part of them too. Planes are summed at the end.
class BiasGradient {
 public:
  BiasGradient(const Call& call, const Units& units, const Learned& of)
      : parts_(of.repeats_keys() ? units.parts : 1),
        type_(of.bias.scalar_type()),
        sizes_(of.bias.sizes().vec()),
        planes_(at::zeros({units.groups * parts_, of.bias.numel()}, of.bias.options().dtype(at::kFloat))),
        view_(call.bias_view<float>(planes_[0].view(sizes_), of.distances)),
        first_(view_.data - planes_.const_data_ptr<float>()) {}

  Sum sum(int64_t group, int64_t part) {
    const int64_t plane = group * parts_ + (parts_ > 1 ? part : 0);
    return {view_, planes_.mutable_data_ptr<float>() + plane * planes_.size(1) + first_};
  }
  at::Tensor whole() const { return (planes_.size(0) > 1 ? planes_.sum(0) : planes_[0]).view(sizes_).to(type_); }

 private:
  int64_t parts_;
  at::ScalarType type_;
  std::vector<int64_t> sizes_;
  at::Tensor planes_;
  View<float> view_;
  int64_t first_;  // where row 0 and key 0 lie in a plane
};

// Gradients of query, key and value, and of the biases that learn.
template <typename In, typename T>
void backward(const Call& call, const RowTerms& terms, const Units& units, const at::Tensor& query,
              const at::Tensor& key, const at::Tensor& value, const at::Tensor& gradient, at::Tensor& dq,
              at::Tensor& dk, at::Tensor& dv, std::vector<BiasGradient>& biases) {
  const View<In> q(query), k(key), v(value), g(gradient);
  const int64_t heads = call.heads, kh = call.key_heads, group = heads / kh, e = call.width, ev = call.value_width;
  const int64_t we = up(e, PAIR<T>), wv = up(ev, PAIR<T>), length = call.length, keys = call.keys;
  const int64_t tiles = (length + ROWS - 1) / ROWS, blocks = (keys + BLOCK - 1) / BLOCK;
  const auto of_rows = [&](const View<In>& x, int64_t width, const auto& pack) {
    return packed<T>(call.batch * heads, length, ROWS, up(width, PAIR<T>) * ROWS, [&](int64_t bh, int64_t i, T* to) {
      pack(x, bh / heads, bh % heads, i, length, ROWS, width, to);
    });
  };
  const auto of_keys = [&](const View<In>& x, int64_t width, const auto& pack) {
    return packed<T>(call.batch * kh, keys, BLOCK, up(width, PAIR<T>) * BLOCK,
                     [&](int64_t bh, int64_t j, T* to) { pack(x, bh / kh, bh % kh, j, keys, BLOCK, width, to); });
  };
  const auto turned = [](const auto&... given) { pack_turned(given...); };
  const auto right = [](const auto&... given) { pack_right(given...); };
  const auto left = [](const auto&... given) { pack_left(given...); };
  const auto left_turned = [](const auto&... given) { pack_turned<false>(given...); };
  const auto q_turned = of_rows(q, e, turned), g_turned = of_rows(g, ev, turned);
  const auto q_right = of_rows(q, e, right), g_right = of_rows(g, ev, right);
  const auto k_left = of_keys(k, e, left), v_left = of_keys(v, ev, left), k_turned = of_keys(k, e, left_turned);
  const int64_t parts = units.parts, plane = call.batch * heads * tiles * e * ROWS;
  std::vector<float> dq_turned(parts * plane, 0.0f);
  In *dk_to = dk.mutable_data_ptr<In>(), *dv_to = dv.mutable_data_ptr<In>();
  run_units(units.count(), [&]() {
    return [&, tile = TurnedTile<T>(call, terms), dk_sum = std::vector<float>(BLOCK * e),
            dv_sum = std::vector<float>(BLOCK * ev)](int64_t unit) mutable {
      const int64_t column = unit / parts / units.groups, first = unit / parts % units.groups, part = unit % parts;
      tile.bias_gradients.clear();
      for (BiasGradient& bias : biases) tile.bias_gradients.push_back(bias.sum(first, part));
      for (int64_t member = first; member < units.members; member += units.groups) {
        const int64_t shared = column * units.column_step + member * units.member_step, b = shared / kh;
        for (int64_t block = part; block < blocks; block += parts) {
          const int64_t j = block * BLOCK, count = std::min(BLOCK, keys - j),
                        at_keys = (shared * blocks + block) * BLOCK;
          std::fill(dk_sum.begin(), dk_sum.end(), 0.0f);
          std::fill(dv_sum.begin(), dv_sum.end(), 0.0f);
          for (int64_t h = shared % kh * group; h < (shared % kh + 1) * group; ++h) {
            for (int64_t i = 0; i < tiles; ++i) {
              const int64_t start = i * ROWS, end = std::min(start + ROWS, length);
              if (call.first(start) >= j + count || call.last(end - 1) <= j) continue;
              const auto [from, to] = call.shown(b, h, start, end - start, j, count);
              if (from == to) continue;
              const int64_t at_rows = (b * heads + h) * tiles + i, m = up(end - start, LANES), n = up(to - from, 2);
              multiply(n, m, we, we, ROWS, ROWS, false, k_left.get() + (at_keys + from) * we,
                       q_turned.get() + at_rows * we * ROWS, tile.logits());
              multiply(n, m, wv, wv, ROWS, ROWS, false, v_left.get() + (at_keys + from) * wv,
                       g_turned.get() + at_rows * wv * ROWS, tile.gradients());
              tile.differentiate(b, h, i, tiles, m, j + from, n);
              multiply(n, ev, m, ROWS, ev, ev, true, tile.weights(), g_right.get() + at_rows * wv * ROWS,
                       dv_sum.data() + from * ev);
              multiply(n, e, m, ROWS, e, e, true, tile.left(), q_right.get() + at_rows * we * ROWS,
                       dk_sum.data() + from * e);
              multiply(e, m, n, BLOCK, ROWS, ROWS, true, k_turned.get() + at_keys * we + from, tile.right(),
                       dq_turned.data() + part * plane + at_rows * e * ROWS);
            }
          }
          In *dk_rows = dk_to + (shared * keys + j) * e, *dv_rows = dv_to + (shared * keys + j) * ev;
          for (int64_t x = 0; x < count * e; ++x) dk_rows[x] = static_cast<In>(dk_sum[x]);
          for (int64_t x = 0; x < count * ev; ++x) dv_rows[x] = static_cast<In>(dv_sum[x]);
        }
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

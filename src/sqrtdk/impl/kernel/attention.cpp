// Attention with row statistics: a tile of logits is read twice while it lies in the L2 cache.
//
// Forward. One unit of work is a tile of query rows of one head. It runs over the keys that it sees in blocks:
//   logits = Q K^T           one matrix product, by torch's library; K was packed once per head
//   z = scale * logits       first reading: softcap, bias, mask; maximum, minimum and sum of a row
//   p = e^(z - m)            second reading: sums of p, p^2, p^3, p (z - m) and (z - mean)^2
//   O = O e^(old m - m) + p V
// The key that holds a row's maximum is left out of the sums (its p is 1): rows close to one-hot lose no digit.
//
// Backward. One unit is a run of key blocks of one key head. Logits are computed again, transposed, keys by queries:
//   P^T = e^(z - m - log l),  dP^T = V g^T,  dZ^T = P^T (dP^T - D + dlse - dH (log P + H)),  D = g . output
//   dV += P^T g,  dK += dZ^T Q,  dQ^T += K^T dZ^T
// with g, dlse and dH the gradients of the output, of lse and of the entropy H. The gradient of a bias is dZ without
// the scale and the slope of the softcap; that of a table of distances j - i is summed along the diagonals. With
// dropout of rate r, dP^T and the P^T of dV are 0 where a weight was dropped, and divided by 1 - r elsewhere.
//
// A unit is computed by one thread in a fixed order, so results do not depend on which thread takes it.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "backward.h"
#include "decode.h"
#include "forward.h"

namespace sqrtdk {
namespace {

using Maybe = std::optional<at::Tensor>;

Call call_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double factor, const Maybe& scale,
             double softcap, const Maybe& bias, const Maybe& distances, const Maybe& visible,
             std::optional<int64_t> above, std::optional<int64_t> below, double dropout, const Maybe& seed) {
  Call call;
  call.batch = query.size(0), call.heads = query.size(1), call.length = query.size(2), call.width = query.size(3);
  call.key_heads = key.size(1), call.value_heads = value.size(1), call.keys = key.size(2),
  call.value_width = value.size(3);
  call.factor = static_cast<float>(factor), call.softcap = static_cast<float>(softcap);
  if (scale) call.scale.emplace(*scale);
  if (bias) call.add_bias(*bias, false);
  if (distances) call.add_bias(*distances, true);
  if (visible) call.visible.emplace(*visible);
  if (seed) call.dropout.emplace(dropout, seed->item<int64_t>());
  call.above = above.value_or(INT64_MAX), call.below = below.value_or(INT64_MAX);
  return call;
}

// Calls with a number of the inputs' type, and one of the type that their products are computed in.
template <typename Run>
void with_types(const at::Tensor& inputs, const Run& run) {
  if (inputs.scalar_type() == at::kFloat)
    run(float(), float());
  else if (inputs.scalar_type() == at::kHalf)
    run(Half(), float());
  else if (!multiplies_narrow())
    run(BFloat16(), float());
  else
    run(BFloat16(), Narrow());
}

// query (B, H, L, E), key (B, Hk, S, E), value (B, Hv, S, Ev): output (B, H, L, Ev), lse and entropy (B, H, L), the
// planes of RowStats (9, B, H, L) and levels (2, B, H, L); entropy and planes are empty without statistics. `wide`:
// the output is float32.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double factor, const Maybe& scale,
    double softcap, const Maybe& bias, const Maybe& distances, const Maybe& visible, const Maybe& sinks,
    std::optional<int64_t> above, std::optional<int64_t> below, double dropout, const Maybe& seed, bool wide,
    bool statistics) {
  Call call = call_of(query, key, value, factor, scale, softcap, bias, distances, visible, above, below, dropout, seed);
  if (sinks) call.sinks = sinks->const_data_ptr<float>();
  const auto options = query.options().dtype(at::kFloat);
  at::Tensor out = at::empty({call.batch, call.heads, call.length, call.value_width}, wide ? options : query.options());
  at::Tensor lse = at::empty({call.batch, call.heads, call.length}, options);
  at::Tensor entropy = statistics ? at::empty_like(lse) : at::empty({0}, options);
  at::Tensor planes =
      statistics ? at::empty({PLANES, call.batch, call.heads, call.length}, options) : at::empty({0}, options);
  at::Tensor levels = at::empty({2, call.batch, call.heads, call.length}, options);
  const Results results = {out.mutable_data_ptr(),
                           wide,
                           lse.mutable_data_ptr<float>(),
                           levels.mutable_data_ptr<float>(),
                           statistics ? entropy.mutable_data_ptr<float>() : nullptr,
                           statistics ? planes.mutable_data_ptr<float>() : nullptr,
                           lse.numel()};
  if (out.numel() == 0 && lse.numel() == 0) return {out, lse, entropy, planes, levels};
  with_types(query, [&]<typename In, typename T>(In, T) {
    const bool few = call.length <= FEW && call.keys >= MANY && call.key_heads == call.value_heads &&
                     call.heads / call.key_heads * call.length <= ROWS;
    if (few)
      decode<In, T>(call, query, key, value, results);
    else
      forward<In, T>(call, query, key, value, results);
  });
  return {out, lse, entropy, planes, levels};
}

// Gradients of query, key and value, of the bias, (#B, #H, #L, #S), where it `learns`, and of the table of distances,
// (#B, #H, 1, L + S - 1), where that does, each of its tensor's type; levels (2, B, H, L) and constant and entropy (B,
// H, L) are contiguous, float32, as in RowTerms.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& levels, const at::Tensor& constant, const Maybe& entropy, double factor, const Maybe& scale,
    double softcap, const Maybe& bias, const Maybe& distances, const Maybe& visible, std::optional<int64_t> above,
    std::optional<int64_t> below, double dropout, const Maybe& seed, bool learns, bool distances_learn) {
  Call call = call_of(query, key, value, factor, scale, softcap, bias, distances, visible, above, below, dropout, seed);
  TORCH_CHECK(call.key_heads == call.value_heads, "key and value have the same number of heads in the backward pass");
  const at::Tensor none = at::empty({0}, levels.options());
  if (!call.batch || !call.heads || !call.key_heads || !call.length || !call.keys) {
    return {at::zeros(query.sizes(), query.options()), at::zeros(key.sizes(), key.options()),
            at::zeros(value.sizes(), value.options()), learns ? at::zeros(bias->sizes(), bias->options()) : none,
            distances_learn ? at::zeros(distances->sizes(), distances->options()) : none};
  }
  const RowTerms terms = row_terms(call, levels.const_data_ptr<float>(), constant.const_data_ptr<float>(),
                                   entropy ? entropy->const_data_ptr<float>() : nullptr);
  std::vector<Learned> learned;
  if (learns) learned.push_back({*bias, false});
  if (distances_learn) learned.push_back({*distances, true});
  const Units units(call, learned);
  std::vector<BiasGradient> biases;
  for (const Learned& of : learned) biases.emplace_back(call, units, of);
  at::Tensor dq = at::empty(query.sizes(), query.options()), dk = at::empty(key.sizes(), key.options()),
             dv = at::empty(value.sizes(), value.options());
  with_types(query, [&]<typename In, typename T>(In, T) {
    backward<In, T>(call, terms, units, query, key, value, gradient, dq, dk, dv, biases);
  });
  return {dq, dk, dv, learns ? biases.front().whole() : none, distances_learn ? biases.back().whole() : none};
}

// 1 where dropout keeps a weight, else 0, (B, H, L, S).
at::Tensor attention_kept(const at::Tensor& seed, double rate, at::IntArrayRef sizes) {
  TORCH_CHECK(sizes.size() == 4, "the sizes are B, H, L, S");
  const Dropout dropout(rate, seed.item<int64_t>());
  const int64_t rows = sizes[2], keys = sizes[3], padded = up(keys, LANES);
  at::Tensor found = at::ones({sizes[0], sizes[1], rows, padded}, at::kFloat);
  float* to = found.mutable_data_ptr<float>();
  at::parallel_for(0, padded ? found.numel() / padded : 0, 64, [&](int64_t from, int64_t end) {
    for (int64_t row = from; row < end; ++row) dropout.apply(row / rows, row % rows, 0, 0, padded, to + row * padded);
  });
  return found.narrow(3, 0, keys).contiguous();
}

}  // namespace
}  // namespace sqrtdk

TORCH_LIBRARY(sqrtdk_cpu, m) {
  m.def(
      "forward(Tensor query, Tensor key, Tensor value, float factor, Tensor? scale, float softcap, Tensor? bias, "
      "Tensor? distances, Tensor? visible, Tensor? sinks, int? above, int? below, float dropout_p, Tensor? seed, "
      "bool wide, bool statistics) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor levels, Tensor constant, "
      "Tensor? entropy, float factor, Tensor? scale, float softcap, Tensor? bias, "
      "Tensor? distances, Tensor? visible, int? above, int? below, float dropout_p, Tensor? seed, "
      "bool learns, bool distances_learn) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("kept(Tensor seed, float dropout_p, int[] sizes) -> Tensor");
}

TORCH_LIBRARY_IMPL(sqrtdk_cpu, CPU, m) {
  m.impl("forward", &sqrtdk::attention_forward);
  m.impl("backward", &sqrtdk::attention_backward);
  m.impl("kept", &sqrtdk::attention_kept);
}

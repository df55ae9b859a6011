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
//   P^T = e^(z - lse),  dP^T = V g^T,  dZ^T = P^T (dP^T - D + dlse - dH (log P + H)),  D = g . output
//   dV += P^T g,  dK += dZ^T Q,  dQ^T += K^T dZ^T
// with g, dlse and dH the gradients of the output, of lse and of the entropy H.
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
             double softcap, const Maybe& bias, const Maybe& visible, std::optional<int64_t> above,
             std::optional<int64_t> below) {
  Call call;
  call.batch = query.size(0), call.heads = query.size(1), call.length = query.size(2), call.width = query.size(3);
  call.key_heads = key.size(1), call.value_heads = value.size(1), call.keys = key.size(2),
  call.value_width = value.size(3);
  call.factor = static_cast<float>(factor), call.softcap = static_cast<float>(softcap);
  if (scale) call.scale.emplace(*scale);
  if (bias) call.bias.emplace(*bias);
  if (visible) call.visible.emplace(*visible);
  call.above = above.value_or(INT64_MAX), call.below = below.value_or(INT64_MAX);
  return call;
}

// query (B, H, L, E), key (B, Hk, S, E), value (B, Hv, S, Ev): output (B, H, L, Ev), lse and entropy (B, H, L), and the
// planes of RowStats (9, B, H, L); entropy and planes are empty without statistics.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double factor, const Maybe& scale,
    double softcap, const Maybe& bias, const Maybe& visible, const Maybe& sinks, std::optional<int64_t> above,
    std::optional<int64_t> below, bool statistics) {
  Call call = call_of(query, key, value, factor, scale, softcap, bias, visible, above, below);
  if (sinks) call.sinks = sinks->const_data_ptr<float>();
  const auto options = query.options().dtype(at::kFloat);
  at::Tensor out = at::empty({call.batch, call.heads, call.length, call.value_width}, query.options());
  at::Tensor lse = at::empty({call.batch, call.heads, call.length}, options);
  at::Tensor entropy = statistics ? at::empty_like(lse) : at::empty({0}, options);
  at::Tensor planes =
      statistics ? at::empty({PLANES, call.batch, call.heads, call.length}, options) : at::empty({0}, options);
  const Results results = {lse.mutable_data_ptr<float>(), statistics ? entropy.mutable_data_ptr<float>() : nullptr,
                           statistics ? planes.mutable_data_ptr<float>() : nullptr, lse.numel()};
  if (out.numel() == 0 && lse.numel() == 0) return {out, lse, entropy, planes};
  const auto run = [&]<typename In, typename T>(In* to, T) {
    const bool few = call.length <= FEW && call.keys >= MANY && call.key_heads == call.value_heads &&
                     call.heads / call.key_heads * call.length <= ROWS;
    if (few)
      decode<In, T>(call, query, key, value, to, results);
    else
      forward<In, T>(call, query, key, value, to, results);
  };
  if (query.scalar_type() == at::kFloat)
    run(out.mutable_data_ptr<float>(), float());
  else if (query.scalar_type() == at::kHalf)
    run(out.mutable_data_ptr<Half>(), float());
  else if (multiplies_narrow())
    run(out.mutable_data_ptr<BFloat16>(), Narrow());
  else
    run(out.mutable_data_ptr<BFloat16>(), float());
  return {out, lse, entropy, planes};
}

// Gradients of query, key and value; lse, constant and entropy are (B, H, L), contiguous, float32, as in RowTerms.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward(const at::Tensor& gradient, const at::Tensor& query,
                                                                  const at::Tensor& key, const at::Tensor& value,
                                                                  const at::Tensor& lse, const at::Tensor& constant,
                                                                  const Maybe& entropy, double factor,
                                                                  const Maybe& scale, double softcap, const Maybe& bias,
                                                                  const Maybe& visible, std::optional<int64_t> above,
                                                                  std::optional<int64_t> below) {
  const Call call = call_of(query, key, value, factor, scale, softcap, bias, visible, above, below);
  TORCH_CHECK(call.key_heads == call.value_heads, "key and value have the same number of heads in the backward pass");
  if (!call.batch || !call.heads || !call.key_heads || !call.length || !call.keys) {
    return {at::zeros(query.sizes(), query.options()), at::zeros(key.sizes(), key.options()),
            at::zeros(value.sizes(), value.options())};
  }
  const RowTerms terms = row_terms(call, lse.const_data_ptr<float>(), constant.const_data_ptr<float>(),
                                   entropy ? entropy->const_data_ptr<float>() : nullptr);
  at::Tensor dq = at::empty(query.sizes(), query.options()), dk = at::empty(key.sizes(), key.options()),
             dv = at::empty(value.sizes(), value.options());
  if (query.scalar_type() == at::kFloat)
    backward<float, float>(call, terms, query, key, value, gradient, dq, dk, dv);
  else if (query.scalar_type() == at::kHalf)
    backward<Half, float>(call, terms, query, key, value, gradient, dq, dk, dv);
  else if (!multiplies_narrow())
    backward<BFloat16, float>(call, terms, query, key, value, gradient, dq, dk, dv);
  else
    backward<BFloat16, Narrow>(call, terms, query, key, value, gradient, dq, dk, dv);
  return {dq, dk, dv};
}

}  // namespace
}  // namespace sqrtdk

TORCH_LIBRARY(sqrtdk_cpu, m) {
  m.def(
      "forward(Tensor query, Tensor key, Tensor value, float factor, Tensor? scale, float softcap, Tensor? bias, "
      "Tensor? visible, Tensor? sinks, int? above, int? below, bool statistics) -> (Tensor, Tensor, Tensor, "
      "Tensor)");
  m.def(
      "backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor lse, Tensor constant, "
      "Tensor? entropy, float factor, Tensor? scale, float softcap, Tensor? bias, Tensor? visible, int? above, "
      "int? below) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(sqrtdk_cpu, CPU, m) {
  m.impl("forward", &sqrtdk::attention_forward);
  m.impl("backward", &sqrtdk::attention_backward);
}

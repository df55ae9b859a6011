// Sixteen float32 at once: exponential, tanh, and how rows of them are stored as operands of matrix products.
#pragma once
#include <c10/util/BFloat16.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace sqrtdk {

using at::BFloat16;

constexpr int64_t LANES = 16;

// x or, where it is less, a number whose exponential is 0 in float32; NaN comes through as the second operand.
inline __m512 at_least_floor(__m512 x) { return _mm512_max_ps(_mm512_set1_ps(-110.0f), x); }

// e^x for x in [-110, 0] or NaN: 2^n 2^r with r in [-1/2, 1/2]; 2^r = 1 + r P(r) to 9.2e-8, 1 at r = 0.
inline __m512 exp_ps(__m512 x) {
  const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
  const __m512 n = _mm512_roundscale_ps(t, 8), r = _mm512_sub_ps(t, n);
  __m512 p = _mm512_set1_ps(1.3264714444278524e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.671508966173106e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550733740241504e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022242141879252e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931469776247586e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// tanh: an odd polynomial near 0, where (1 - e) / (1 + e) would cancel.
inline __m512 tanh_ps(__m512 x) {
  const __m512 size = _mm512_abs_ps(x), z = _mm512_mul_ps(x, x), one = _mm512_set1_ps(1.0f);
  __m512 p = _mm512_set1_ps(-5.70498872745e-3f);
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(2.06390887954e-2f));
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-5.37397155531e-2f));
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(1.33314422036e-1f));
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-3.33332819422e-1f));
  const __m512 small = _mm512_fmadd_ps(_mm512_mul_ps(p, z), x, x);
  const __m512 e = exp_ps(at_least_floor(_mm512_mul_ps(size, _mm512_set1_ps(-2.0f))));
  const __m512 large = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
  const __mmask16 near = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.625f), _CMP_LT_OQ);
  return _mm512_mask_blend_ps(near, _mm512_or_ps(large, sign), small);
}

inline void store(float* at, __m512 x) { _mm512_storeu_ps(at, x); }
#ifdef __AVX512BF16__
inline void store(BFloat16* at, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), (__m256i)_mm512_cvtneps_pbh(x));
}

// Two rows as the right side of a product: element by element, in pairs.
inline void store_rows(BFloat16* at, __m512 first, __m512 second) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
  const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second)), 16);
  _mm512_storeu_si512(at, _mm512_or_si512(low, high));
}
#endif

// 0, stride, 2 stride, ...: fifteen strides fit 32 bits.
inline __m512i multiples(int64_t stride) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(stride)));
}

// Numbers that lie `stride` apart; 0 where `there` is not set.
inline __m512 gathered(const float* first, int64_t stride, __mmask16 there) {
  if (stride >= 0 && stride <= INT32_MAX / LANES) {
    return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), there, multiples(stride), first, 4);
  }
  alignas(64) float found[LANES] = {};
  for (int64_t k = 0; k < LANES; ++k) {
    if (there >> k & 1) found[k] = first[k * stride];
  }
  return _mm512_load_ps(found);
}

// Sum of a[e] b[e].
inline float dot(const float* a, const float* b, int64_t n) {
  __m512 even = _mm512_setzero_ps(), odd = even;
  int64_t e = 0;
  for (; e + 2 * LANES <= n; e += 2 * LANES) {
    even = _mm512_fmadd_ps(_mm512_loadu_ps(a + e), _mm512_loadu_ps(b + e), even);
    odd = _mm512_fmadd_ps(_mm512_loadu_ps(a + e + LANES), _mm512_loadu_ps(b + e + LANES), odd);
  }
  for (; e < n; e += LANES) {
    const __mmask16 there = static_cast<__mmask16>((1u << std::min(n - e, LANES)) - 1u);
    even = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(there, a + e), _mm512_maskz_loadu_ps(there, b + e), even);
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
}
#ifdef __AVX512BF16__
inline float dot(const BFloat16* a, const BFloat16* b, int64_t n) {
  __m512 sum = _mm512_setzero_ps();
  int64_t e = 0;
  for (; e + 2 * LANES <= n; e += 2 * LANES) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a + e), (__m512bh)_mm512_loadu_si512(b + e));
  }
  if (e < n) {
    const __mmask32 there = (1u << (n - e)) - 1u;
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(there, a + e),
                           (__m512bh)_mm512_maskz_loadu_epi16(there, b + e));
  }
  return _mm512_reduce_add_ps(sum);
}
#endif

// Which of sixteen keys from `column` lie in begin ... end - 1.
inline __mmask16 between(int64_t column, int64_t begin, int64_t end) {
  const int64_t from = std::max<int64_t>(begin - column, 0), to = std::min<int64_t>(end - column, LANES);
  return from >= to ? 0 : static_cast<__mmask16>(((1u << to) - 1u) & ~((1u << from) - 1u));
}

// Which of these keys a row of a mask shows; they are `column` apart.
inline __mmask16 shown(const bool* visible, int64_t column, __mmask16 keys) {
  if (column == 1) {
    const __m128i found = _mm_maskz_loadu_epi8(keys, visible);
    return _mm_test_epi8_mask(found, found);
  }
  for (int64_t k = 0; k < LANES; ++k) {
    if ((keys >> k & 1) && !visible[k * column]) keys &= static_cast<__mmask16>(~(1u << k));
  }
  return keys;
}

}  // namespace sqrtdk

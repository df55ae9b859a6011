// Sixteen float32 at once, in as many registers as the CPU needs for them: arithmetic, exponential and tanh.
//
// The compiler's own vectors serve every CPU: one of 512 bits with AVX-512, two of 256 with AVX, four of 128 elsewhere.
// x86 intrinsics stand only where a CPU has one instruction for what takes several otherwise.
#pragma once
#include <c10/util/BFloat16.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define INLINE __attribute__((always_inline))  // what runs in the innermost loops

namespace sqrtdk {

using at::BFloat16;

constexpr int64_t LANES = 16;
#if defined(__AVX512F__)
constexpr int WIDTH = 16;  // of a register
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int PARTS = LANES / WIDTH;

typedef float Part __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));  // sums of them may overflow
typedef Part Anywhere __attribute__((aligned(4), may_alias));    // a register's worth of memory

struct Lanes {
  Part part[PARTS];
};

// make(0), make(1), ... as parts: written out, since only what has constant indices stays in registers.
template <typename Sixteen, typename Make, size_t... K>
INLINE inline Sixteen written_out(const Make& make, std::index_sequence<K...>) {
  return {{make(std::integral_constant<int, K>())...}};
}
template <typename Make>
INLINE inline Lanes lanes_of(const Make& make) {
  return written_out<Lanes>(make, std::make_index_sequence<PARTS>());
}

// A function of registers, applied to each.
template <typename Function, typename... Args>
INLINE inline Lanes each(const Function& function, const Args&... args) {
  return lanes_of([&](auto k) INLINE { return function(args.part[k]...); });
}

inline Lanes every(float x) {
  return lanes_of([&](auto) INLINE { return x - Part{}; });  // x + 0 would lose the sign of -0
}
inline Lanes load(const float* from) {
  return lanes_of([&](auto k) INLINE -> Part { return *reinterpret_cast<const Anywhere*>(from + k * WIDTH); });
}
inline void store(float* to, Lanes x) {
  lanes_of([&](auto k) INLINE -> Part { return *reinterpret_cast<Anywhere*>(to + k * WIDTH) = x.part[k]; });
}

inline Lanes operator+(Lanes a, Lanes b) {
  return each([](Part x, Part y) { return x + y; }, a, b);
}
inline Lanes operator-(Lanes a, Lanes b) {
  return each([](Part x, Part y) { return x - y; }, a, b);
}
inline Lanes operator*(Lanes a, Lanes b) {
  return each([](Part x, Part y) { return x * y; }, a, b);
}
inline Lanes operator/(Lanes a, Lanes b) {
  return each([](Part x, Part y) { return x / y; }, a, b);
}
// The second operand where one is NaN, as x86 has it.
inline Part larger_of(Part a, Part b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
inline Part smaller_of(Part a, Part b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
inline Lanes larger(Lanes a, Lanes b) { return each(larger_of, a, b); }
inline Lanes smaller(Lanes a, Lanes b) { return each(smaller_of, a, b); }

// The register with the lanes k and k ^ BY in each other's place.
template <int BY>
inline Part swapped(Part x) {
  Bits from;
  for (int k = 0; k < WIDTH; ++k) from[k] = k ^ BY;
  return __builtin_shuffle(x, from);
}

// Of all sixteen.
template <typename Fold>
INLINE inline float folded(Lanes x, const Fold& fold) {
  Part all = x.part[0];
  for (int k = 1; k < PARTS; ++k) all = fold(all, x.part[k]);
  if constexpr (WIDTH > 8) all = fold(all, swapped<8>(all));
  if constexpr (WIDTH > 4) all = fold(all, swapped<4>(all));
  all = fold(all, swapped<2>(all));
  return fold(all, swapped<1>(all))[0];
}
inline float sum(Lanes x) {
  return folded(x, [](Part a, Part b) { return a + b; });
}
inline float largest(Lanes x) { return folded(x, larger_of); }
inline float smallest(Lanes x) { return folded(x, smaller_of); }

// 2^n p for whole n in [-159, 0]: in two steps, as 2^n alone may be below the smallest normal number.
inline Part times_power(Part p, Part n) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  const Bits whole = __builtin_convertvector(n, Bits), half = whole >> 1;
  return p * (Part)((half + 127) << 23) * (Part)((whole - half + 127) << 23);
#endif
}

inline Part rounded(Part x) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(x, 8);
#elif defined(__AVX__)
  return _mm256_round_ps(x, 8);
#else
  const float shifter = 0x1.8p23f;  // for |x| < 2^22
  return (x + shifter) - shifter;
#endif
}

constexpr float LOG2E = 1.44269504088896341f, LN2 = 0.693147180559945309f;

// x or, where it is less, a number of which the power of two is 0 in float32; NaN comes through as the second operand.
inline Lanes at_least_floor(Lanes x) { return larger(every(-159.0f), x); }

// 2^x for x in [-159, 0] or NaN: 2^n 2^r with r in [-1/2, 1/2]; 2^r = 1 + r P(r) to 9.2e-8, 1 at r = 0.
inline Lanes power_of_two(Lanes x) {
  return each(
      [](Part x) {
        const Part n = rounded(x), r = x - n;
        Part p = r * 1.3264714444278524e-3f + 9.671508966173106e-3f;
        p = p * r + 5.550733740241504e-2f;
        p = p * r + 2.4022242141879252e-1f;
        p = p * r + 6.931469776247586e-1f;
        return times_power(p * r + 1.0f, n);
      },
      x);
}

// 2^BY x for a normal number x, by an integer sum: the units that multiply are busy with all else. 0 and numbers below
// the normal ones become less than 2^(BY - 126).
template <uint32_t BY>
inline Lanes exponent_raised(Lanes x) {
  return each([](Part x) { return (Part)((Words)x + (BY << 23)); }, x);
}

// tanh: an odd polynomial near 0, where (1 - e) / (1 + e) would cancel.
inline Lanes tanh(Lanes x) {
  const Lanes size = each([](Part x) { return (Part)((Bits)x & 0x7fffffff); }, x);
  const Lanes e = power_of_two(at_least_floor(size * every(-2.0f * LOG2E)));
  return each(
      [](Part x, Part size, Part e) {
        const Part z = x * x;
        Part p = z * -5.70498872745e-3f + 2.06390887954e-2f;
        p = p * z - 5.37397155531e-2f;
        p = p * z + 1.33314422036e-1f;
        p = p * z - 3.33332819422e-1f;
        const Part large = (1.0f - e) / (1.0f + e);
        const Bits sign = (Bits)x & INT32_MIN;
        return size < 0.625f ? p * z * x + x : (Part)((Bits)large | sign);
      },
      x, size, e);
}

// Numbers that lie `stride` apart.
inline Lanes gathered(const float* first, int64_t stride) {
  float found[LANES];
  for (int64_t k = 0; k < LANES; ++k) found[k] = first[k * stride];
  return load(found);
}

// Sum of a[e] b[e].
inline float dot(const float* a, const float* b, int64_t n) {
  Lanes even = {}, odd = {};
  int64_t e = 0;
  for (; e + 2 * LANES <= n; e += 2 * LANES) {
    even = load(a + e) * load(b + e) + even;
    odd = load(a + e + LANES) * load(b + e + LANES) + odd;
  }
  float rest = 0.0f;
  for (; e + LANES <= n; e += LANES) even = load(a + e) * load(b + e) + even;
  for (; e < n; ++e) rest += a[e] * b[e];
  return sum(even + odd) + rest;
}

#ifdef __AVX512BF16__
inline void store(BFloat16* to, Lanes x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x.part[0]));
}

inline Lanes load(const BFloat16* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return {(Part)_mm512_slli_epi32(wide, 16)};
}

// Two rows as the right side of a product: element by element, in pairs.
inline void store_rows(BFloat16* to, Lanes first, Lanes second) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first.part[0]));
  const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second.part[0])), 16);
  _mm512_storeu_si512(to, _mm512_or_si512(low, high));
}

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

}  // namespace sqrtdk

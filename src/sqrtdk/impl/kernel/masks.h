// Which of sixteen numbers count: one bit each with AVX-512, elsewhere a register of ones and zeros.
#pragma once
#include "lanes.h"

namespace sqrtdk {

struct All {};  // all sixteen, known when compiled

#if defined(__AVX512F__)
struct Mask {
  __mmask16 bits;
};
inline Lanes where(Mask mask, Lanes a, Lanes b) { return {_mm512_mask_blend_ps(mask.bits, b.part[0], a.part[0])}; }
inline Lanes kept(Mask mask, Lanes x) { return {_mm512_maskz_mov_ps(mask.bits, x.part[0])}; }
inline Mask equal(Lanes a, Lanes b) { return {_mm512_cmp_ps_mask(a.part[0], b.part[0], _CMP_EQ_OQ)}; }
inline Mask operator&(Mask a, Mask b) { return {static_cast<__mmask16>(a.bits & b.bits)}; }
inline Mask without(Mask a, Mask b) { return {static_cast<__mmask16>(a.bits & ~b.bits)}; }
inline int count(Mask mask) { return __builtin_popcount(mask.bits); }
inline bool has(Mask mask, int64_t lane) { return mask.bits >> lane & 1; }
inline Mask mask_of(const bool* set) {
  const __m128i found = _mm_loadu_si128(reinterpret_cast<const __m128i*>(set));
  return {_mm_test_epi8_mask(found, found)};
}
// from <= lane < to
inline Mask lanes_between(int from, int to) {
  return {from >= to ? __mmask16(0) : static_cast<__mmask16>(((1u << to) - 1u) & ~((1u << from) - 1u))};
}
// first[lane] <= at < last[lane]
inline Mask spans(const int32_t* first, const int32_t* last, int32_t at) {
  const __m512i j = _mm512_set1_epi32(at);
  return {static_cast<__mmask16>(_mm512_cmple_epi32_mask(_mm512_loadu_si512(first), j) &
                                 _mm512_cmplt_epi32_mask(j, _mm512_loadu_si512(last)))};
}
#else
struct Mask {
  Bits part[PARTS];
};
template <typename Make>
INLINE inline Mask mask_by(const Make& make) {
  return written_out<Mask>(make, std::make_index_sequence<PARTS>());
}
inline Bits bits_at(const int32_t* from, int k) {
  Bits found;
  std::memcpy(&found, from + k * WIDTH, sizeof found);
  return found;
}
inline Lanes where(Mask mask, Lanes a, Lanes b) {
  return lanes_of([&](auto k) INLINE { return mask.part[k] ? a.part[k] : b.part[k]; });
}
inline Lanes kept(Mask mask, Lanes x) {
  return lanes_of([&](auto k) INLINE { return (Part)((Bits)x.part[k] & mask.part[k]); });
}
inline Mask equal(Lanes a, Lanes b) {
  return mask_by([&](int k) INLINE -> Bits { return a.part[k] == b.part[k]; });
}
inline Mask operator&(Mask a, Mask b) {
  return mask_by([&](int k) INLINE { return a.part[k] & b.part[k]; });
}
inline Mask without(Mask a, Mask b) {
  return mask_by([&](int k) INLINE { return a.part[k] & ~b.part[k]; });
}
inline bool has(Mask mask, int64_t lane) { return mask.part[lane / WIDTH][lane % WIDTH] != 0; }
inline int count(Mask mask) {
  Bits all = mask.part[0];
  for (int k = 1; k < PARTS; ++k) all += mask.part[k];
  int found = 0;
  for (int k = 0; k < WIDTH; ++k) found -= all[k];
  return found;
}
inline Mask mask_of(const bool* set) {
  int32_t wide[LANES];
  for (int64_t k = 0; k < LANES; ++k) wide[k] = set[k];
  return mask_by([&](int k) { return bits_at(wide, k) != 0; });
}
alignas(64) constexpr int32_t COUNTING[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
inline Mask lanes_between(int from, int to) {
  return mask_by([&](int k) { return (bits_at(COUNTING, k) >= from) & (bits_at(COUNTING, k) < to); });
}
inline Mask spans(const int32_t* first, const int32_t* last, int32_t at) {
  return mask_by([&](int k) { return (bits_at(first, k) <= at) & (bits_at(last, k) > at); });
}
#endif

inline Lanes where(All, Lanes a, Lanes) { return a; }
inline Lanes kept(All, Lanes x) { return x; }
inline Mask all_lanes() { return lanes_between(0, LANES); }
inline Mask without(All, Mask b) { return without(all_lanes(), b); }
inline Mask operator&(All, Mask b) { return b; }

// Which of sixteen keys from `column` lie in begin ... end - 1.
inline Mask between(int64_t column, int64_t begin, int64_t end) {
  return lanes_between(static_cast<int>(std::clamp<int64_t>(begin - column, 0, LANES)),
                       static_cast<int>(std::clamp<int64_t>(end - column, 0, LANES)));
}

// Which of these keys a row of a mask shows; they are `column` apart.
inline Mask shown(const bool* visible, int64_t column, Mask keys) {
  if (column == 1 && count(keys) == LANES) return mask_of(visible);
  bool set[LANES];
  for (int64_t k = 0; k < LANES; ++k) set[k] = has(keys, k) && visible[k * column];
  return mask_of(set);
}

// Nothing is read where `there` is not set: 0.
inline Lanes load(const float* from, Mask there) {
  if (count(there) == LANES) return load(from);
  float found[LANES];
  for (int64_t k = 0; k < LANES; ++k) found[k] = has(there, k) ? from[k] : 0.0f;
  return load(found);
}

}  // namespace sqrtdk

/* One step of AdamW on a CPU in a single pass over memory; see adamw.py, whose `_update` gives the same bits.

   Compiled by kernel.py for one combination of formats: PARAMETER, GRADIENT and MOMENT are 0 (fp32), 1 (bf16) or
   2 (fp16), HOW is 0 (nearest), 1 (stochastic) or 2 (Kahan). Every operation on floats is a single IEEE one, so the
   compiler must not contract or reorder them. Comparisons are written so that loops become vector code. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

enum { FP32, BF16, FP16 };
enum { NEAREST, STOCHASTIC, KAHAN };

static inline float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static inline uint32_t as_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static const uint32_t SIGN = 0x80000000u, INFINITE = 0x7F800000u, FP16_NORMAL = 0x38800000u;
static const uint32_t LARGEST_BF16 = 0x7F7F0000u, LARGEST_FP16 = 0x477FE000u;
static const uint32_t BIAS = 0x38000000u; /* between the exponents of fp32 and fp16 */

/* ---- formats: 4 or 2 bytes in memory, fp32 in registers ---- */

#define STORED(format) STORED_(format)
#define STORED_(format) STORED_##format
#define STORED_0 float
#define STORED_1 uint16_t
#define STORED_2 uint16_t

static inline float of_bf16(uint32_t stored) { return as_float(stored << 16); }

static inline float of_fp16(uint32_t stored) {
  uint32_t magnitude = stored & 0x7FFF, sign = (stored & 0x8000) << 16;
  uint32_t normal = (magnitude << 13) + BIAS + (magnitude < 0x7C00 ? 0 : BIAS); /* inf and NaN keep the top exponent */
  uint32_t small = as_bits((float)(int32_t)magnitude * 0x1p-24f);
  return as_float((magnitude < 0x400 ? small : normal) | sign);
}

/* Round to nearest even, as torch stores fp32 in bf16. */
static inline uint16_t nearest_bf16(float x) {
  uint32_t bits = as_bits(x);
  uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return (uint16_t)((bits & ~SIGN) > INFINITE ? 0x7FC0 : rounded);
}

/* ---- rounding: rounding.py's `_round`; `random` has 31 random bits, of which bf16 takes the low 16 ---- */

static inline uint16_t to_bf16(float x, uint32_t random, int stochastic) {
  uint32_t bits = as_bits(x), magnitude = bits & ~SIGN;
  uint32_t noise = stochastic ? random & 0xFFFF : 0x7FFF + ((magnitude >> 16) & 1);
  noise = magnitude < LARGEST_BF16 ? noise : 0;
  return (uint16_t)((bits + noise) >> 16);
}

static inline uint32_t normal_of(uint32_t magnitude, uint32_t random, int stochastic) {
  return (magnitude + (stochastic ? random & 0x1FFF : 0xFFF + ((magnitude >> 13) & 1))) & ~0x1FFFu;
}

/* For values from fp16's smallest normal number up to its largest. */
static inline uint16_t plain_to_fp16(float x, uint32_t random, int stochastic) {
  uint32_t bits = as_bits(x), normal = normal_of(bits & ~SIGN, random, stochastic);
  return (uint16_t)((normal - BIAS) >> 13 | (bits & SIGN) >> 16);
}

static inline uint16_t to_fp16(float x, uint32_t random, int stochastic) {
  uint32_t bits = as_bits(x), magnitude = bits & ~SIGN;
  uint32_t normal = magnitude < LARGEST_FP16 ? normal_of(magnitude, random, stochastic) : LARGEST_FP16;
  /* Subnormal: the fraction of x * 2^24 decides. The minimum keeps the conversion below in range. */
  float steps = as_float(magnitude < FP16_NORMAL ? magnitude : FP16_NORMAL) * 0x1p24f;
  int32_t whole;
  if (stochastic) {
    float down = floorf(steps);
    int32_t fraction = (int32_t)((steps - down) * 0x1p31f);
    whole = (int32_t)down + ((int32_t)random < fraction);
  } else {
    whole = (int32_t)rintf(steps);
  }
  uint32_t special = 0x7C00 | (magnitude > INFINITE ? 0x200 | ((magnitude >> 13) & 0x3FF) : 0);
  uint32_t result = magnitude < FP16_NORMAL ? (uint32_t)whole
                    : magnitude < INFINITE  ? (normal - BIAS) >> 13
                                            : special;
  return (uint16_t)(result | (bits & SIGN) >> 16);
}

/* rounding.py's `random_bits`: the last shift is arithmetic there, so the top bit is 0. */
static inline uint32_t random_bits(uint32_t counter, const int32_t *key) {
  uint32_t x = counter + (uint32_t)key[0];
  x = (x ^ x >> 16) * 0x21F0AAADu + (uint32_t)key[1];
  x = (x ^ x >> 15) * 0xD35A2D97u;
  return x ^ (uint32_t)((int32_t)x >> 16);
}

/* ---- the step ---- */

#define LOAD(pointer, i, format) LOAD_(pointer, i, format)
#define LOAD_(pointer, i, format) LOAD_##format(pointer, i)
#define LOAD_0(pointer, i) (pointer)[i]
#define LOAD_1(pointer, i) of_bf16((pointer)[i])
#define LOAD_2(pointer, i) wide_##pointer[i]

/* All of a block at once, for which processors have an instruction that compilers do not use by themselves. */
static inline void widen(float *restrict wide, const uint16_t *restrict stored, int length) {
  int i = 0;
#ifdef __F16C__
  for (; i + 8 <= length; i += 8)
    _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(stored + i))));
#endif
  for (; i < length; i++) wide[i] = of_fp16(stored[i]);
}

enum { BLOCK = 64 }; /* fp16: few blocks of so many weights have one that is subnormal */

/* A block of weights as fp16: as if all were normal there, and again where one was not. */
static inline void narrow(uint16_t *restrict stored, const float *restrict value, const uint32_t *restrict random,
                          int length) {
  uint32_t special = 0;
  int i = 0;
#ifdef __AVX512F__
  /* The instruction cuts off what the noise has not carried over. */
  enum { MODE = HOW == STOCHASTIC ? _MM_FROUND_TO_ZERO : _MM_FROUND_TO_NEAREST_INT };
  const __m512i magnitude = _mm512_set1_epi32((int)~SIGN), below = _mm512_set1_epi32(0x1FFF);
  const __m512i least = _mm512_set1_epi32((int)FP16_NORMAL);
  const __m512i range = _mm512_set1_epi32((int)(LARGEST_FP16 - FP16_NORMAL));
  for (; i + 16 <= length; i += 16) {
    __m512i bits = _mm512_loadu_si512(value + i), noise = _mm512_and_si512(_mm512_loadu_si512(random + i), below);
    special |= _mm512_cmpge_epu32_mask(_mm512_sub_epi32(_mm512_and_si512(bits, magnitude), least), range);
    if (HOW == STOCHASTIC) bits = _mm512_add_epi32(bits, noise);
    _mm256_storeu_si256((__m256i *)(stored + i), _mm512_cvtps_ph(_mm512_castsi512_ps(bits), MODE));
  }
#endif
  for (; i < length; i++) {
    special |= (as_bits(value[i]) & ~SIGN) - FP16_NORMAL >= LARGEST_FP16 - FP16_NORMAL;
    stored[i] = plain_to_fp16(value[i], random[i], HOW == STOCHASTIC);
  }
  if (special)
    for (i = 0; i < length; i++) stored[i] = to_fp16(value[i], random[i], HOW == STOCHASTIC);
}

typedef STORED(PARAMETER) parameter_t;
typedef STORED(GRADIENT) gradient_t;
typedef STORED(MOMENT) moment_t;

static inline void block(parameter_t *restrict parameter, const gradient_t *restrict gradient, moment_t *restrict first,
                         moment_t *restrict second, uint16_t *restrict compensation, const float *c,
                         const int32_t *words, uint32_t counter, int length) {
  float value[BLOCK];
  uint32_t random[BLOCK];
#if PARAMETER == 2
  float wide_parameter[BLOCK];
  widen(wide_parameter, parameter, length);
#endif
#if GRADIENT == 2
  float wide_gradient[BLOCK];
  widen(wide_gradient, gradient, length);
#endif
  for (int i = 0; i < length; i++) {
    float g = LOAD(gradient, i, GRADIENT) * c[0];
    if (c[8] != 0) g += LOAD(parameter, i, PARAMETER) * c[8];
    float m = LOAD(first, i, MOMENT) * c[1] + g * c[2];
    float v = LOAD(second, i, MOMENT) * c[3] + g * g * c[4];
    float square = v < 0x1p-126f ? 0x1p-126f : v;
    square = square > 0x1.fffffep127f ? 0x1.fffffep127f : square;
    float denominator = square * (1 / sqrtf(square)) + c[6];
    value[i] = LOAD(parameter, i, PARAMETER) * c[7] + m * c[5] / denominator;

    random[i] = random_bits((counter + (uint32_t)i) * 0x9E3779B1u, words);
#if MOMENT == 1
    uint32_t more = (random[i] + (uint32_t)words[2]) * 0x85EBCA6Bu;
    uint32_t high = (uint32_t)((int32_t)more >> 16);
    first[i] = to_bf16(m, high, 1);
    second[i] = to_bf16(v, more ^ high, 1);
#else
    first[i] = m;
    second[i] = v;
#endif
  }
#if PARAMETER == 0
  for (int i = 0; i < length; i++) parameter[i] = value[i];
#else
#if HOW == 2
  for (int i = 0; i < length; i++) value[i] += of_bf16(compensation[i]);
#endif
#if PARAMETER == 1
  for (int i = 0; i < length; i++) parameter[i] = to_bf16(value[i], random[i], HOW == STOCHASTIC);
#else
  narrow(parameter, value, random, length);
#endif
#if HOW == 2
#if PARAMETER == 2
  widen(wide_parameter, parameter, length);
#endif
  for (int i = 0; i < length; i++) compensation[i] = nearest_bf16(value[i] - LOAD(parameter, i, PARAMETER));
#endif
#endif
}

/* `coefficients`: as in adamw.py. `key`: three words; element i has the counter i times the stride. */
void step(parameter_t *restrict parameter, const gradient_t *restrict gradient, moment_t *restrict first,
          moment_t *restrict second, uint16_t *restrict compensation, const float *restrict coefficients,
          const int32_t *restrict key, int64_t length) {
  float c[9];
  int32_t words[3];
  memcpy(c, coefficients, sizeof c);
  memcpy(words, key, sizeof words);
  int64_t i = 0;
  for (; i + BLOCK <= length; i += BLOCK) /* of known length, which the compiler unrolls */
    block(parameter + i, gradient + i, first + i, second + i, HOW == KAHAN ? compensation + i : 0, c, words,
          (uint32_t)i, BLOCK);
  if (i < length)
    block(parameter + i, gradient + i, first + i, second + i, HOW == KAHAN ? compensation + i : 0, c, words,
          (uint32_t)i, (int)(length - i));
}

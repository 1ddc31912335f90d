/* The processor's widest float vector, through compiler vector extensions: no intrinsics of one architecture. */
#ifndef VECTOR_H
#define VECTOR_H
#include <stdint.h>
#include <string.h>
#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
static inline int thread_number(void) { return omp_get_thread_num(); }
#else
static inline int thread_number(void) { return 0; }
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* a * b + c, always fused where the processor can: contraction by the compiler would depend on the loop around it,
 * and with it the last bit of a result. */
static inline __attribute__((always_inline)) vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && LANES == 8
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline __attribute__((always_inline)) vec fill(float x) { return (vec){0} + x; }

/* where mask (all ones or zeros a lane): a, else b. */
static inline __attribute__((always_inline)) vec choose(ivec mask, vec a, vec b) {
    return (vec)((mask & (ivec)a) | (~mask & (ivec)b));
}

/* The sums of four vectors: halves are added until four lanes are left, then all four reductions share their shuffles.
 * The order of additions is the same for each of the four, and for a vector that is summed alone. */
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
#if defined(__AVX512F__) || (defined(__FMA__) && LANES == 8)
static inline __attribute__((always_inline)) __m256 fold(vec v) {
#if defined(__AVX512F__)
    __m512 w = (__m512)v;
    return _mm256_add_ps(_mm512_castps512_ps256(w), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(w), 1)));
#else
    return (__m256)v;
#endif
}

static inline __attribute__((always_inline)) four totals(vec a, vec b, vec c, vec d) {
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(fold(a), fold(b)), _mm256_hadd_ps(fold(c), fold(d)));
    return (four)_mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}
#else
static inline __attribute__((always_inline)) float one_total(vec v) {
    for (int i = LANES / 2; i > 0; i /= 2)
        for (int j = 0; j < i; j++) v[j] += v[j + i];
    return v[0];
}

static inline __attribute__((always_inline)) four totals(vec a, vec b, vec c, vec d) {
    return (four){one_total(a), one_total(b), one_total(c), one_total(d)};
}
#endif

static inline __attribute__((always_inline)) float total(vec v) { return totals(v, v, v, v)[0]; }

static inline vec tail(const float *from, int64_t count) {
    vec v = (vec){0};
    memcpy(&v, from, 4 * count);
    return v;
}
#endif

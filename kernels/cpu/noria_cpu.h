/* The CPU kernels of Noria: a plain C ABI, called through ctypes. Shapes and rules are in the .c files.
 *
 * One rule holds for all of them: the floating-point operations done for a token depend on that token's own row, its
 * position and its keys alone, and their order never depends on how many other tokens there are or on how the work is
 * cut over threads. So a token has the same bits alone and in any batch, read in one piece or in chunks, as part of a
 * prompt or as a decoded token. */
#ifndef NORIA_CPU_H
#define NORIA_CPU_H

#include <immintrin.h>
#include <stdint.h>

#define NORIA_API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum { PANEL = 16, PAGE = 16 };

INLINE __m256 half8(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

INLINE uint16_t to_half(float value) { return (uint16_t)_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(value), 0), 0); }

/* e^x for x <= 0 and -inf (0): 2^n * 2^f with a polynomial of degree 6 on |f| <= 1/2 * ln 2; error below 2 ulp. */
INLINE __m256 exp8(__m256 x) {
    const __m256 least = _mm256_set1_ps(-87.33654f);
    __m256 live = _mm256_cmp_ps(x, least, _CMP_GE_OQ);
    x = _mm256_max_ps(x, least);
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 f = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    f = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), f);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_fmadd_ps(_mm256_mul_ps(f, f), p, _mm256_add_ps(f, _mm256_set1_ps(1.0f)));
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(bits)), live);
}

INLINE float sum8(__m256 v) {
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

INLINE float max8(__m256 v) {
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

#endif

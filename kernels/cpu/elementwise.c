/* Norms and the gate of the feed-forward layer: one token at a time, each by one thread. */
#include "noria_cpu.h"

#include <math.h>

/* y = x / sqrt(mean(x^2) + eps) * weight for the rows of x [rows, width]; width is a multiple of 8. */
NORIA_API void noria_rms_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *y,
                              int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows >= 16)
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * width;
        float *to = y + r * width;
        __m256 squares = _mm256_setzero_ps();
        for (int64_t i = 0; i < width; i += 8) {
            __m256 v = _mm256_loadu_ps(from + i);
            squares = _mm256_fmadd_ps(v, v, squares);
        }
        const __m256 by = _mm256_set1_ps(1.0f / sqrtf(sum8(squares) / (float)width + eps));
        for (int64_t i = 0; i < width; i += 8)
            _mm256_storeu_ps(to + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(from + i), by), _mm256_loadu_ps(weight + i)));
    }
}

/* y [rows, width] = silu(gate) * up for gate_up [rows, 2 width] = gate beside up; width is a multiple of 8. */
NORIA_API void noria_silu_mul(const float *gate_up, int64_t rows, int64_t width, float *y, int threads) {
    const __m256 one = _mm256_set1_ps(1.0f), zero = _mm256_setzero_ps();
#pragma omp parallel for schedule(static) num_threads(threads) if (rows >= 8)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = gate_up + r * 2 * width, *up = gate + width;
        for (int64_t i = 0; i < width; i += 8) {
            __m256 g = _mm256_loadu_ps(gate + i);
            /* silu(g) = g / (1 + e^-g); with e^-|g| in [0, 1] nothing overflows. */
            __m256 small = exp8(_mm256_min_ps(g, _mm256_sub_ps(zero, g)));
            __m256 top = _mm256_blendv_ps(one, small, g);
            __m256 s = _mm256_mul_ps(g, _mm256_div_ps(top, _mm256_add_ps(one, small)));
            _mm256_storeu_ps(y + r * width + i, _mm256_mul_ps(s, _mm256_loadu_ps(up + i)));
        }
    }
}

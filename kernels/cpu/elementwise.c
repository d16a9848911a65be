/* Norms, the gate of the feed-forward layer, and the rounding of activations: one row of x is one piece of work. */
#include "noria_cpu.h"

#include <math.h>

static const Rounded NOT_ROUNDED = {NULL, NULL, NULL};

Rounded take_rounded(Program *program, int64_t rows, int64_t width) {
    Rounded rounded;
    rounded.q = take(program, rows * width * 2);
    rounded.scale = take(program, rows * (width / GROUP) * 4);
    rounded.sum = take(program, rows * (width / GROUP) * 4);
    return rounded;
}

/* Row `row` of the result from x [width]; width is a multiple of 32. Groups that hold no number, or infinity, get the
 * scale NaN, so that nothing finite comes of them. */
void round_row(const float *x, int64_t width, int64_t row, Rounded to) {
    int16_t *q = to.q + row * width;
    const int64_t groups = width / GROUP;
    const __m256i magnitude = _mm256_set1_epi32(INT32_MAX);
    for (int64_t g = 0; g < groups; g++, x += GROUP, q += GROUP) {
        __m256 v[4];
        __m256i top = _mm256_setzero_si256(); /* as integers the magnitudes are ordered too, and NaN is the largest */
        for (int i = 0; i < 4; i++) {
            v[i] = _mm256_loadu_ps(x + 8 * i);
            top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
        }
        __m128i most = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
        most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4E));
        most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xB1));
        const float largest = _mm_cvtss_f32(_mm_castsi128_ps(most));
        const int finite = _mm_cvtsi128_si32(most) < 0x7F800000, nothing = finite && largest < 1e-30f;
        const __m256 by = _mm256_set1_ps(!finite || nothing ? 0.0f : 32767.0f / largest);
        __m256i n[4];
        for (int i = 0; i < 4; i++) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], by));
        for (int i = 0; i < 4; i += 2) /* packing works within halves of a register */
            _mm256_storeu_si256((__m256i *)(q + 8 * i),
                                _mm256_permute4x64_epi64(_mm256_packs_epi32(n[i], n[i + 1]), 0xD8));
        __m256i sum = _mm256_add_epi32(_mm256_add_epi32(n[0], n[1]), _mm256_add_epi32(n[2], n[3]));
        __m128i part = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        part = _mm_add_epi32(part, _mm_shuffle_epi32(part, 0x4E));
        part = _mm_add_epi32(part, _mm_shuffle_epi32(part, 0xB1));
        const float scale = !finite ? NAN : nothing ? 0.0f : largest / 32767.0f;
        to.scale[row * groups + g] = scale;
        to.sum[row * groups + g] = scale * (float)_mm_cvtsi128_si32(part);
    }
}

typedef struct {
    const float *x, *weight;
    float *y;
    Rounded to;
    int64_t x_stride, width;
    float eps;
} RowJob;

static void round_task(const void *given, int64_t row, int worker) {
    const RowJob *job = given;
    (void)worker;
    round_row(job->x + row * job->x_stride, job->width, row, job->to);
}

static void norm_task(const void *given, int64_t row, int worker) {
    const RowJob *job = given;
    (void)worker;
    const float *x = job->x + row * job->width, *weight = job->weight;
    float *y = job->y + row * job->width;
    __m256 squares = _mm256_setzero_ps();
    for (int64_t i = 0; i < job->width; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        squares = _mm256_fmadd_ps(v, v, squares);
    }
    const __m256 by = _mm256_set1_ps(1.0f / sqrtf(sum8(squares) / (float)job->width + job->eps));
    for (int64_t i = 0; i < job->width; i += 8)
        _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), by), _mm256_loadu_ps(weight + i)));
    if (job->to.q) round_row(y, job->width, row, job->to);
}

/* 1 / (1 + e^-x); with e^-|x| in [0, 1] nothing overflows. */
INLINE __m256 sigmoid8(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f), zero = _mm256_setzero_ps();
    __m256 small = exp8(_mm256_min_ps(x, _mm256_sub_ps(zero, x)));
    __m256 top = _mm256_blendv_ps(one, small, x);
    return _mm256_div_ps(top, _mm256_add_ps(one, small));
}

/* gelu in its tanh form is g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3)). Past 20 the cube says nothing more. */
INLINE __m256 gelu_gate(__m256 g) {
    const __m256 most = _mm256_set1_ps(20.0f);
    __m256 h = _mm256_max_ps(_mm256_min_ps(g, most), _mm256_sub_ps(_mm256_setzero_ps(), most));
    __m256 cubic = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_mul_ps(h, h), h), _mm256_set1_ps(0.044715f), h);
    return sigmoid8(_mm256_mul_ps(cubic, _mm256_set1_ps(1.59576912f)));
}

INLINE void gate_row(const RowJob *job, int64_t row, const int gelu) {
    const float *gate = job->x + row * 2 * job->width, *up = gate + job->width;
    float *y = job->y + row * job->width;
    for (int64_t i = 0; i < job->width; i += 8) {
        __m256 g = _mm256_loadu_ps(gate + i);
        __m256 s = _mm256_mul_ps(g, gelu ? gelu_gate(g) : sigmoid8(g));
        _mm256_storeu_ps(y + i, _mm256_mul_ps(s, _mm256_loadu_ps(up + i)));
    }
    if (job->to.q) round_row(y, job->width, row, job->to);
}

static void silu_mul_task(const void *given, int64_t row, int worker) {
    (void)worker;
    gate_row(given, row, 0);
}

static void gelu_mul_task(const void *given, int64_t row, int worker) {
    (void)worker;
    gate_row(given, row, 1);
}

void add_rounding(Program *program, const float *x, int64_t x_stride, int64_t rows, int64_t width, Rounded to) {
    const RowJob job = {.x = x, .to = to, .x_stride = x_stride, .width = width};
    ADD_PHASE(program, round_task, job, rows);
}

void add_norm(Program *program, const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *y,
              Rounded to) {
    const RowJob job = {x, weight, y, to, width, width, eps};
    ADD_PHASE(program, norm_task, job, rows);
}

void add_silu_mul(Program *program, const float *gate_up, int64_t rows, int64_t width, float *y, Rounded to) {
    const RowJob job = {.x = gate_up, .y = y, .to = to, .width = width};
    ADD_PHASE(program, silu_mul_task, job, rows);
}

/* y = x / sqrt(mean(x^2) + eps) * weight for the rows of x [rows, width]; width is a multiple of 8. */
NORIA_API int64_t noria_rms_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *y,
                                 void *scratch, int threads) {
    Program program = {.memory = scratch};
    add_norm(&program, x, weight, eps, rows, width, y, NOT_ROUNDED);
    return run(&program, rows < 16 ? 1 : threads);
}

/* y [rows, width] = silu(gate) * up for gate_up [rows, 2 width] = gate beside up; width is a multiple of 8. */
NORIA_API int64_t noria_silu_mul(const float *gate_up, int64_t rows, int64_t width, float *y, void *scratch,
                                 int threads) {
    Program program = {.memory = scratch};
    add_silu_mul(&program, gate_up, rows, width, y, NOT_ROUNDED);
    return run(&program, rows < 8 ? 1 : threads);
}

/* The same with gelu in its tanh form. */
NORIA_API int64_t noria_gelu_mul(const float *gate_up, int64_t rows, int64_t width, float *y, void *scratch,
                                 int threads) {
    Program program = {.memory = scratch};
    const RowJob job = {.x = gate_up, .y = y, .width = width};
    ADD_PHASE(&program, gelu_mul_task, job, rows);
    return run(&program, rows < 8 ? 1 : threads);
}

/* y = x W^T: linear layers on packed weights, in float32 arithmetic whatever the weights are kept in.
 *
 * A weight [out, in] lies in panels of 16 outputs, padded with zeros at the end. Within a panel the inputs run on, so
 * that it is read once, front to back:
 *
 *   F32, F16      per input 16 values
 *   Q4, Q4_F32    per group of 32 inputs: 256 bytes of nibbles (byte 16 j + o: inputs 2 j low and 2 j + 1 high of
 *                 output o), 16 scales, 16 minima; w = scale * q + minimum. Scales are halves (Q4) or floats.
 *   Q8            per group of 32 inputs: 32 x 16 signed bytes, 16 half scales; w = scale * q
 *   Q8_16         per group of 16 inputs: 16 x 16 signed bytes, 16 float scales
 *
 * The sum over a group is taken in the order of its inputs and scaled once; groups are added in order. */
#include "noria_cpu.h"

#include <stdlib.h>
#include <string.h>

enum { F32, F16, Q4, Q8, Q4_F32, Q8_16 };
enum { MOST_ROWS = 6, MOST_PANELS = 2, BYTES_IN_CACHE = 192 << 10, ROWS_TO_UNPACK = 24 };

INLINE int group_of(const int kind) { return kind == Q8_16 ? 16 : 32; }
INLINE int has_min(const int kind) { return kind == Q4 || kind == Q4_F32; }
INLINE int is_grouped(const int kind) { return kind >= Q4; }

/* Bytes of one group of a panel (F32, F16: of one input). */
INLINE int64_t group_bytes(const int kind) {
    switch (kind) {
    case F32: return PANEL * 4;
    case F16: return PANEL * 2;
    case Q4: return 16 * PANEL + 2 * PANEL * 2;
    case Q4_F32: return 16 * PANEL + 2 * PANEL * 4;
    case Q8: return 32 * PANEL + PANEL * 2;
    default: return 16 * PANEL + PANEL * 4;
    }
}

INLINE int64_t panel_bytes(const int kind, int64_t in) {
    return is_grouped(kind) ? in / group_of(kind) * group_bytes(kind) : in * group_bytes(kind);
}

NORIA_API int64_t noria_packed_bytes(int kind, int64_t out, int64_t in) {
    return (out + PANEL - 1) / PANEL * panel_bytes(kind, in);
}

INLINE void scales(const int kind, const uint8_t *w, __m256 scale[2], __m256 minimum[2]) {
    const int values = kind == Q4 || kind == Q4_F32 ? 16 * PANEL : group_of(kind) * PANEL;
    for (int h = 0; h < 2; h++) {
        if (kind == Q4 || kind == Q8) {
            scale[h] = half8(w + values + 16 * h);
            if (kind == Q4) minimum[h] = half8(w + values + 32 + 16 * h);
        } else {
            scale[h] = _mm256_loadu_ps((const float *)(w + values) + 8 * h);
            if (kind == Q4_F32) minimum[h] = _mm256_loadu_ps((const float *)(w + values) + 16 + 8 * h);
        }
    }
}

/* The products of R rows with P panels over all inputs, into total[r][p][half]. x: rows `x_stride` apart; sums[r][g]:
 * the sum of row r over group g, for kinds with minima. `plain`: the integers of one panel as floats, or NULL; they
 * pay where many rows pass by the same panel, and change no bit. */
INLINE void tile(const int kind, const int R, const int P, const uint8_t *w, int64_t panel, int64_t in, const float *x,
                 int64_t x_stride, const float *sums, int64_t num_groups, const float *plain,
                 __m256 total[MOST_ROWS][MOST_PANELS][2]) {
    __m256 acc[MOST_ROWS][MOST_PANELS][2];
    if (!is_grouped(kind)) {
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) acc[r][p][0] = acc[r][p][1] = _mm256_setzero_ps();
        for (int64_t k = 0; k < in; k++)
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                __m256 w0, w1;
                if (kind == F32) {
                    w0 = _mm256_loadu_ps((const float *)(w + p * panel) + PANEL * k);
                    w1 = _mm256_loadu_ps((const float *)(w + p * panel) + PANEL * k + 8);
                } else {
                    w0 = half8((const uint16_t *)(w + p * panel) + PANEL * k);
                    w1 = half8((const uint16_t *)(w + p * panel) + PANEL * k + 8);
                }
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    __m256 value = _mm256_broadcast_ss(x + r * x_stride + k);
                    acc[r][p][0] = _mm256_fmadd_ps(w0, value, acc[r][p][0]);
                    acc[r][p][1] = _mm256_fmadd_ps(w1, value, acc[r][p][1]);
                }
            }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int h = 0; h < 2; h++) total[r][p][h] = acc[r][p][h];
        return;
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) total[r][p][0] = total[r][p][1] = _mm256_setzero_ps();
    const int group = group_of(kind);
    const __m256i nibble = _mm256_set1_epi32(15);
    for (int64_t g = 0; g < num_groups; g++, w += group_bytes(kind), x += group) {
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) acc[r][p][0] = acc[r][p][1] = _mm256_setzero_ps();
        if (plain) {
            for (int k = 0; k < group; k++, plain += PANEL) {
                __m256 w0 = _mm256_load_ps(plain), w1 = _mm256_load_ps(plain + 8);
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    __m256 value = _mm256_broadcast_ss(x + r * x_stride + k);
                    acc[r][0][0] = _mm256_fmadd_ps(w0, value, acc[r][0][0]);
                    acc[r][0][1] = _mm256_fmadd_ps(w1, value, acc[r][0][1]);
                }
            }
        } else if (has_min(kind)) {
            for (int k = 0; k < group; k += 2)
#pragma GCC unroll 4
                for (int p = 0; p < P; p++) {
                    const uint8_t *at = w + p * panel + 8 * k;
                    __m256i low = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
                    __m256i high = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(at + 8)));
                    __m256 w0 = _mm256_cvtepi32_ps(_mm256_and_si256(low, nibble));
                    __m256 w1 = _mm256_cvtepi32_ps(_mm256_and_si256(high, nibble));
#pragma GCC unroll 6
                    for (int r = 0; r < R; r++) {
                        __m256 value = _mm256_broadcast_ss(x + r * x_stride + k);
                        acc[r][p][0] = _mm256_fmadd_ps(w0, value, acc[r][p][0]);
                        acc[r][p][1] = _mm256_fmadd_ps(w1, value, acc[r][p][1]);
                    }
                    /* Loaded once more: kept, they would push two sums out of the registers. */
                    asm("" : "+r"(at));
                    low = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
                    high = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(at + 8)));
                    w0 = _mm256_cvtepi32_ps(_mm256_srli_epi32(low, 4));
                    w1 = _mm256_cvtepi32_ps(_mm256_srli_epi32(high, 4));
#pragma GCC unroll 6
                    for (int r = 0; r < R; r++) {
                        __m256 value = _mm256_broadcast_ss(x + r * x_stride + k + 1);
                        acc[r][p][0] = _mm256_fmadd_ps(w0, value, acc[r][p][0]);
                        acc[r][p][1] = _mm256_fmadd_ps(w1, value, acc[r][p][1]);
                    }
                }
        } else {
            for (int k = 0; k < group; k++)
#pragma GCC unroll 4
                for (int p = 0; p < P; p++) {
                    const uint8_t *at = w + p * panel + PANEL * k;
                    __m256 w0 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
                    __m256 w1 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at + 8))));
#pragma GCC unroll 6
                    for (int r = 0; r < R; r++) {
                        __m256 value = _mm256_broadcast_ss(x + r * x_stride + k);
                        acc[r][p][0] = _mm256_fmadd_ps(w0, value, acc[r][p][0]);
                        acc[r][p][1] = _mm256_fmadd_ps(w1, value, acc[r][p][1]);
                    }
                }
        }
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            __m256 scale[2], minimum[2];
            scales(kind, w + p * panel, scale, minimum);
            _mm_prefetch((const char *)(w + p * panel + 4 * group_bytes(kind)), _MM_HINT_T0);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                __m256 sum = has_min(kind) ? _mm256_broadcast_ss(sums + r * num_groups + g) : _mm256_setzero_ps();
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++) {
                    total[r][p][h] = _mm256_fmadd_ps(scale[h], acc[r][p][h], total[r][p][h]);
                    if (has_min(kind)) total[r][p][h] = _mm256_fmadd_ps(minimum[h], sum, total[r][p][h]);
                }
            }
        }
    }
}

typedef struct {
    const uint8_t *data;
    const float *bias;   /* [out] or NULL */
    const float *x;      /* [rows, in], rows x_stride apart */
    float *y;            /* [rows, out], rows y_stride apart */
    const float *sums;   /* [rows, in / group] */
    int64_t out, in, x_stride, y_stride, panel, num_groups;
    int add;             /* y += x W^T + bias instead of y = */
} Product;

INLINE void store(const Product *job, const int R, const int P, int64_t row, int64_t first,
                  __m256 total[MOST_ROWS][MOST_PANELS][2]) {
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++)
            for (int h = 0; h < 2; h++) {
                int64_t o = (first + p) * PANEL + 8 * h, left = job->out - o;
                if (left <= 0) continue;
                float *y = job->y + (row + r) * job->y_stride + o;
                const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(left > 8 ? 8 : (int)left),
                                                        _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
                __m256 value = total[r][p][h];
                if (job->bias) value = _mm256_add_ps(value, _mm256_maskload_ps(job->bias + o, mask));
                if (job->add) value = _mm256_add_ps(value, _mm256_maskload_ps(y, mask));
                _mm256_maskstore_ps(y, mask, value);
            }
}

INLINE void block(const Product *job, const int kind, const int R, const int P, int64_t row, int64_t first,
                  const float *plain) {
    __m256 total[MOST_ROWS][MOST_PANELS][2];
    tile(kind, R, P, job->data + first * job->panel, job->panel, job->in, job->x + row * job->x_stride, job->x_stride,
         job->sums ? job->sums + row * job->num_groups : NULL, job->num_groups, plain, total);
    store(job, R, P, row, first, total);
}

/* The integers of a panel as floats: [in, 16]. */
INLINE void unpack(const Product *job, const int kind, int64_t index, float *plain) {
    const uint8_t *w = job->data + index * job->panel;
    const int group = group_of(kind);
    for (int64_t g = 0; g < job->num_groups; g++, w += group_bytes(kind))
        for (int k = 0; k < group; k++, plain += PANEL)
            for (int h = 0; h < 2; h++) {
                const uint8_t *at = w + 8 * h + (has_min(kind) ? 8 * (k & ~1) : PANEL * k);
                const __m128i bytes = _mm_loadl_epi64((const __m128i *)at);
                __m256i q = _mm256_cvtepi8_epi32(bytes);
                if (has_min(kind))
                    q = _mm256_and_si256(_mm256_srli_epi32(_mm256_cvtepu8_epi32(bytes), k & 1 ? 4 : 0),
                                         _mm256_set1_epi32(15));
                _mm256_store_ps(plain + 8 * h, _mm256_cvtepi32_ps(q));
            }
}

INLINE void blocks(const Product *job, const int kind, int rows, int64_t row, int64_t index, const float *plain) {
    switch (rows) {
    case 1: block(job, kind, 1, 1, row, index, plain); break;
    case 2: block(job, kind, 2, 1, row, index, plain); break;
    case 3: block(job, kind, 3, 1, row, index, plain); break;
    case 4: block(job, kind, 4, 1, row, index, plain); break;
    case 5: block(job, kind, 5, 1, row, index, plain); break;
    default: block(job, kind, 6, 1, row, index, plain); break;
    }
}

/* How many of `left` rows to take at once: six, but no lonely one at the end. */
INLINE int rows_at_once(int64_t left) {
    if (left <= MOST_ROWS) return (int)left;
    return left <= 8 ? 4 : left <= 10 ? 5 : MOST_ROWS;
}

/* All rows from `row` to `end` times one or two panels. Few rows take two panels at once, so that enough sums are
 * under way to hide the latency of an addition; the order within a sum is the same. */
INLINE void strip(const Product *job, const int kind, int64_t row, int64_t end, int64_t first, int num_panels,
                  float *plain) {
    if (num_panels == 2 && end - row <= 3) {
        if (end - row == 1) block(job, kind, 1, 2, row, first, NULL);
        if (end - row == 2) block(job, kind, 2, 2, row, first, NULL);
        if (end - row == 3) block(job, kind, 3, 2, row, first, NULL);
        return;
    }
    for (int p = 0; p < num_panels; p++) {
        if (plain) unpack(job, kind, first + p, plain);
        for (int64_t at = row; at < end;) {
            const int rows = rows_at_once(end - at);
            if (plain)
                blocks(job, kind, rows, at, first + p, plain);
            else
                blocks(job, kind, rows, at, first + p, NULL);
            at += rows;
        }
    }
}

#define STRIP(KIND)                                                                                                    \
    static __attribute__((noinline)) void strip_##KIND(const Product *job, int64_t row, int64_t end, int64_t first,    \
                                                       int num_panels, float *plain) {                                 \
        strip(job, KIND, row, end, first, num_panels, is_grouped(KIND) ? plain : NULL);                                \
    }
STRIP(F32) STRIP(F16) STRIP(Q4) STRIP(Q8) STRIP(Q4_F32) STRIP(Q8_16)

static void (*const STRIPS[])(const Product *, int64_t, int64_t, int64_t, int, float *) = {
    strip_F32, strip_F16, strip_Q4, strip_Q8, strip_Q4_F32, strip_Q8_16};

/* y [rows, out] = x [rows, in] times the transpose of the packed weight, plus bias; plus y where `add`. `scratch` holds
 * rows * in / 32 floats for kinds with minima. */
NORIA_API void noria_linear(int kind, const void *data, const float *bias, int64_t out, int64_t in, const float *x,
                            int64_t x_stride, int64_t rows, float *y, int64_t y_stride, int add, float *scratch,
                            int threads) {
    const int group = group_of(kind);
    const Product job = {data, bias,     x,        y, has_min(kind) ? scratch : NULL, out, in, x_stride,
                         y_stride, panel_bytes(kind, in), is_grouped(kind) ? in / group : 0, add};
    const int64_t num_panels = (out + PANEL - 1) / PANEL, units = (num_panels + 1) / 2;
    /* Rows are taken in parts that stay in the second-level cache while all panels pass by. */
    const int64_t fit = BYTES_IN_CACHE / (4 * in) / MOST_ROWS * MOST_ROWS, rows_in_part = fit > MOST_ROWS ? fit : MOST_ROWS;
    const int64_t parts = (rows + rows_in_part - 1) / rows_in_part, tasks = parts * units;
#pragma omp parallel num_threads(threads)
    {
        if (job.sums) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++)
                for (int64_t g = 0; g < job.num_groups; g++) {
                    const float *at = x + r * x_stride + 32 * g;
                    __m256 a = _mm256_add_ps(_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8));
                    __m256 b = _mm256_add_ps(_mm256_loadu_ps(at + 16), _mm256_loadu_ps(at + 24));
                    scratch[r * job.num_groups + g] = sum8(_mm256_add_ps(a, b));
                }
        }
        float *plain = NULL;
        if (is_grouped(kind) && rows >= ROWS_TO_UNPACK) plain = aligned_alloc(64, (size_t)in * PANEL * 4);
#pragma omp for schedule(guided, 1) nowait
        for (int64_t t = 0; t < tasks; t++) {
            int64_t part = t / units, first = t % units * 2;
            int64_t row = part * rows_in_part, end = row + rows_in_part < rows ? row + rows_in_part : rows;
            STRIPS[kind](&job, row, end, first, first + 1 < num_panels ? 2 : 1, plain);
        }
        free(plain);
    }
}

/* --- packing ----------------------------------------------------------------------------------------------------- */

/* Rows [first, first + rows) of a float32 weight into their places; `kind` is F32 or F16. `first` is a multiple of 16
 * or the rows before it are there already; `packed` was zeroed. */
NORIA_API void noria_pack_floats(int kind, const float *weight, int64_t first, int64_t rows, int64_t in, void *packed) {
    for (int64_t r = 0; r < rows; r++) {
        int64_t o = first + r;
        uint8_t *panel = (uint8_t *)packed + o / PANEL * panel_bytes(kind, in);
        for (int64_t k = 0; k < in; k++) {
            float value = weight[r * in + k];
            if (kind == F32)
                ((float *)panel)[k * PANEL + o % PANEL] = value;
            else
                ((uint16_t *)panel)[k * PANEL + o % PANEL] = to_half(value);
        }
    }
}

/* Quantised values as they come out of a file's blocks: q [rows, in] unsigned nibbles or signed bytes, scale and
 * minimum [rows, in / group] as floats. For kinds with half scales these must be halves to begin with: nothing is
 * rounded here. */
NORIA_API void noria_pack_groups(int kind, const uint8_t *q, const float *scale, const float *minimum, int64_t first,
                                 int64_t rows, int64_t in, void *packed) {
    const int group = group_of(kind);
    const int64_t num_groups = in / group, values = has_min(kind) ? 16 * PANEL : group * PANEL;
    for (int64_t r = 0; r < rows; r++) {
        int64_t o = (first + r) % PANEL;
        uint8_t *at = (uint8_t *)packed + (first + r) / PANEL * panel_bytes(kind, in);
        for (int64_t g = 0; g < num_groups; g++, at += group_bytes(kind)) {
            const uint8_t *from = q + r * in + g * group;
            if (has_min(kind))
                for (int k = 0; k < group; k += 2) at[8 * k + o] = (uint8_t)(from[k] | from[k + 1] << 4);
            else
                for (int k = 0; k < group; k++) at[PANEL * k + o] = from[k];
            if (kind == Q4 || kind == Q8) {
                ((uint16_t *)(at + values))[o] = to_half(scale[r * num_groups + g]);
                if (kind == Q4) ((uint16_t *)(at + values))[PANEL + o] = to_half(minimum[r * num_groups + g]);
            } else {
                ((float *)(at + values))[o] = scale[r * num_groups + g];
                if (kind == Q4_F32) ((float *)(at + values))[PANEL + o] = minimum[r * num_groups + g];
            }
        }
    }
}

/* Rows of the weight as floats: y [count, in] = weight[ids]. The embedding table is the head's own weight. */
NORIA_API void noria_rows(int kind, const void *data, int64_t in, const int64_t *ids, int64_t count, float *y) {
    const int group = is_grouped(kind) ? group_of(kind) : 1;
    const int64_t values = has_min(kind) ? 16 * PANEL : group * PANEL;
    for (int64_t t = 0; t < count; t++, y += in) {
        int64_t o = ids[t] % PANEL;
        const uint8_t *at = (const uint8_t *)data + ids[t] / PANEL * panel_bytes(kind, in);
        for (int64_t g = 0; g < in / group; g++, at += group_bytes(kind)) {
            float scale = 1.0f, minimum = 0.0f;
            if (kind == Q4 || kind == Q8) {
                scale = _cvtsh_ss(((const uint16_t *)(at + values))[o]);
                if (kind == Q4) minimum = _cvtsh_ss(((const uint16_t *)(at + values))[PANEL + o]);
            } else if (is_grouped(kind)) {
                scale = ((const float *)(at + values))[o];
                if (kind == Q4_F32) minimum = ((const float *)(at + values))[PANEL + o];
            }
            for (int k = 0; k < group; k++) {
                float q = kind == F32   ? ((const float *)at)[o]
                          : kind == F16 ? _cvtsh_ss(((const uint16_t *)at)[o])
                          : has_min(kind) ? (float)(at[8 * (k & ~1) + o] >> (k & 1 ? 4 : 0) & 15)
                                          : (float)((const int8_t *)at)[PANEL * k + o];
                y[g * group + k] = is_grouped(kind) ? scale * q + minimum : q;
            }
        }
    }
}

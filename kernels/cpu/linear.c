/* y = x W^T: linear layers on packed weights (packed.h).
 *
 * Weights of floats, halves and bfloats: float32 arithmetic, products added in the order of the inputs.
 *
 * Weights of integers: x is rounded to 16 bits in groups of 32 channels, each with a scale of its own, so that two
 * products are one instruction, and the sum over a group is exact whatever its order; it is scaled in float32, and
 * groups are added in order. The rounding is of the order of 1e-5 of a group's largest channel. */
#include "packed.h"

enum { MOST_ROWS = 6, BYTES_IN_CACHE = 192 << 10, PIECES_PER_THREAD = 8, GROUPS_AHEAD = 8 };

typedef struct {
    const uint8_t *data;
    const float *bias; /* [out] or NULL */
    const float *x;    /* [rows, in], rows x_stride apart: for floats and halves */
    Rounded rounded;   /* the same for integers */
    float *y;          /* [rows, out], rows y_stride apart */
    int64_t kind, out, in, x_stride, rows, y_stride, rows_in_part, pieces_in_part;
    int add; /* y += x W^T + bias instead of y = */
} Product;

typedef __m256 Sums[MOST_ROWS][2]; /* of rows, of the panel's outputs 0 .. 7 and 8 .. 15 */

INLINE __m256 load_floats(const int kind, const uint8_t *w) {
    return kind == F32 ? _mm256_loadu_ps((const float *)w) : kind == F16 ? half8(w) : bfloat8(w);
}

INLINE void multiply_floats(const Product *job, const int kind, const int R, const uint8_t *w, int64_t row, Sums sums) {
    const float *x = job->x + row * job->x_stride;
    const int64_t x_stride = job->x_stride;
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < job->in; k++, w += group_bytes(kind)) {
        const __m256 w0 = load_floats(kind, w), w1 = load_floats(kind, w + group_bytes(kind) / 2);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const __m256 value = _mm256_broadcast_ss(x + r * x_stride + k);
            sums[r][0] = _mm256_fmadd_ps(w0, value, sums[r][0]);
            sums[r][1] = _mm256_fmadd_ps(w1, value, sums[r][1]);
        }
    }
}

INLINE void load_scales(const int kind, const uint8_t *w, __m256 scale[2], __m256 minimum[2]) {
    const uint8_t *at = w + integer_bytes(kind);
    for (int h = 0; h < 2; h++) {
        if (kind == Q4 || kind == Q8) {
            scale[h] = half8(at + 16 * h);
            if (kind == Q4) minimum[h] = half8(at + 32 + 16 * h);
        } else {
            scale[h] = _mm256_loadu_ps((const float *)at + 8 * h);
            if (kind == Q4_F32) minimum[h] = _mm256_loadu_ps((const float *)at + 16 + 8 * h);
        }
    }
}

/* Two inputs of a row, times those of 8 + 8 outputs, onto two sums. In assembler because the twelve sums of six rows,
 * two registers of weights and two of these fill all sixteen registers: left to itself the compiler loads early and
 * keeps sums in memory. */
INLINE void add_pairs(__m256i *sum0, __m256i *sum1, __m256i w0, __m256i w1, const int16_t *x) {
    __m256i pair, product;
    __asm__("vpbroadcastd %[x], %[pair]\n\t"
            "vpmaddwd %[pair], %[w0], %[product]\n\t"
            "vpaddd %[product], %[sum0], %[sum0]\n\t"
            "vpmaddwd %[pair], %[w1], %[pair]\n\t"
            "vpaddd %[pair], %[sum1], %[sum1]"
            : [sum0] "+x"(*sum0), [sum1] "+x"(*sum1), [pair] "=&x"(pair), [product] "=&x"(product)
            : [w0] "x"(w0), [w1] "x"(w1), [x] "m"(*(const int32_t *)x));
}

INLINE void multiply_integers(const Product *job, const int kind, const int R, const uint8_t *w, int64_t row, Sums sums) {
    const int64_t in = job->in, x_groups = in / GROUP, num_groups = in / group_of(kind);
    const int16_t *x = job->rounded.q + row * in;
    const float *x_scale = job->rounded.scale + row * x_groups, *x_sum = job->rounded.sum + row * x_groups;
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < num_groups; g++, w += group_bytes(kind), x += group_of(kind)) {
        __m256i acc[MOST_ROWS][2];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
        for (int64_t line = 0; line < group_bytes(kind); line += 64)
            _mm_prefetch((const char *)(w + GROUPS_AHEAD * group_bytes(kind) + line), _MM_HINT_T0);
#pragma GCC unroll 2
        for (int k = 0; k < group_of(kind); k += 2) {
            __m256i w0, w1;
            if (has_min(kind)) {
                /* Low nibbles keep the high ones above them: 16 times those are taken off the sum of the group. */
                w0 = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(w + 8 * k)));
                w1 = _mm256_srli_epi16(w0, 4);
            } else {
                w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + 16 * k)));
                w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + 16 * k + 16)));
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) add_pairs(&acc[r][0], &acc[r][1], w0, w1, x + r * in + k);
        }
        __m256 scale[2], minimum[2];
        load_scales(kind, w, scale, minimum);
        const int64_t x_group = kind == Q8_16 ? g / 2 : g;
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            if (has_min(kind)) acc[r][0] = _mm256_sub_epi32(acc[r][0], _mm256_slli_epi32(acc[r][1], 4));
            const __m256 by = _mm256_broadcast_ss(x_scale + r * x_groups + x_group);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][h]), by);
                sums[r][h] = _mm256_fmadd_ps(scale[h], product, sums[r][h]);
                if (has_min(kind))
                    sums[r][h] = _mm256_fmadd_ps(minimum[h], _mm256_broadcast_ss(x_sum + r * x_groups + g), sums[r][h]);
            }
        }
    }
}

INLINE void store(const Product *job, const int R, int64_t row, int64_t panel, Sums sums) {
    for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++) {
            const int64_t o = panel * PANEL + 8 * h, left = job->out - o;
            if (left <= 0) continue;
            float *y = job->y + (row + r) * job->y_stride + o;
            __m256 value = sums[r][h];
            if (left >= 8) { /* apart from the rest: masked stores are slow on some machines */
                if (job->bias) value = _mm256_add_ps(value, _mm256_loadu_ps(job->bias + o));
                if (job->add) value = _mm256_add_ps(value, _mm256_loadu_ps(y));
                _mm256_storeu_ps(y, value);
                continue;
            }
            const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)left), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
            if (job->bias) value = _mm256_add_ps(value, _mm256_maskload_ps(job->bias + o, mask));
            if (job->add) value = _mm256_add_ps(value, _mm256_maskload_ps(y, mask));
            _mm256_maskstore_ps(y, mask, value);
        }
}

/* R rows times one panel. */
INLINE void block(const Product *job, const int kind, const int R, int64_t row, int64_t panel) {
    Sums sums;
    const uint8_t *w = job->data + panel * panel_bytes(kind, job->in);
    if (is_grouped(kind))
        multiply_integers(job, kind, R, w, row, sums);
    else
        multiply_floats(job, kind, R, w, row, sums);
    store(job, R, row, panel, sums);
}

/* How many of `left` rows to take at once: six, but no lonely one at the end. */
INLINE int rows_at_once(int64_t left) {
    if (left <= MOST_ROWS) return (int)left;
    return left <= 8 ? 4 : left <= 10 ? 5 : MOST_ROWS;
}

/* Rows [row, end) times panels [first, last). */
INLINE void blocks(const Product *job, const int kind, int64_t row, int64_t end, int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; panel++)
        for (int64_t at = row; at < end;) {
            const int rows = rows_at_once(end - at);
            switch (rows) {
            case 1: block(job, kind, 1, at, panel); break;
            case 2: block(job, kind, 2, at, panel); break;
            case 3: block(job, kind, 3, at, panel); break;
            case 4: block(job, kind, 4, at, panel); break;
            case 5: block(job, kind, 5, at, panel); break;
            default: block(job, kind, 6, at, panel); break;
            }
            at += rows;
        }
}

#define BLOCKS(KIND)                                                                                                   \
    static __attribute__((noinline)) void blocks_##KIND(const Product *job, int64_t row, int64_t end, int64_t first,   \
                                                        int64_t last) {                                                \
        blocks(job, KIND, row, end, first, last);                                                                      \
    }
BLOCKS(F32) BLOCKS(F16) BLOCKS(BF16) BLOCKS(Q4) BLOCKS(Q8) BLOCKS(Q4_F32) BLOCKS(Q8_16)

static void (*const BLOCKS_OF[])(const Product *, int64_t, int64_t, int64_t, int64_t) = {
    blocks_F32, blocks_F16, blocks_BF16, blocks_Q4, blocks_Q8, blocks_Q4_F32, blocks_Q8_16};

INLINE int64_t panels_of(int64_t out) { return (out + PANEL - 1) / PANEL; }

static void product_task(const void *given, int64_t index, int worker) {
    const Product *job = given;
    (void)worker;
    const int64_t panels = panels_of(job->out), pieces = job->pieces_in_part, piece = index % pieces;
    const int64_t row = index / pieces * job->rows_in_part, end = row + job->rows_in_part;
    BLOCKS_OF[job->kind](job, row, end < job->rows ? end : job->rows, piece * panels / pieces,
                         (piece + 1) * panels / pieces);
}

int takes_rounded(const Linear *linear) {
    for (int64_t s = 0; s < linear->num_segments; s++)
        if (is_grouped((int)linear->segments[s].kind)) return 1;
    return 0;
}

void add_product(Program *program, const Linear *linear, const float *x, int64_t x_stride, Rounded rounded, int64_t rows,
                 float *y, int64_t y_stride, int add, int threads) {
    /* Rows are taken in parts that stay in the second-level cache while all panels pass by. */
    for (int64_t s = 0; s < linear->num_segments; s++) {
        const Segment *segment = &linear->segments[s];
        const int64_t row_bytes = linear->in * (is_grouped((int)segment->kind) ? 2 : 4);
        const int64_t fit = BYTES_IN_CACHE / row_bytes / MOST_ROWS * MOST_ROWS;
        const int64_t rows_in_part = fit > MOST_ROWS ? fit : MOST_ROWS, parts = (rows + rows_in_part - 1) / rows_in_part;
        const int64_t panels = panels_of(segment->out), most = (int64_t)threads * PIECES_PER_THREAD;
        const int64_t pieces = panels < most ? panels : most;
        const Product job = {segment->data, segment->bias, x, rounded, y, segment->kind, segment->out, linear->in,
                             x_stride, rows, y_stride, rows_in_part, pieces, add};
        ADD_PHASE(program, product_task, job, parts * pieces);
        y += segment->out;
    }
}

/* y [rows, out] = x [rows, in] times the transpose of the packed weight, plus bias; plus y where `add`. */
NORIA_API int64_t noria_linear(const Linear *linear, const float *x, int64_t x_stride, int64_t rows, float *y,
                               int64_t y_stride, int add, void *scratch, int threads) {
    Program program = {.memory = scratch};
    Rounded rounded = {NULL, NULL, NULL};
    if (takes_rounded(linear)) {
        rounded = take_rounded(&program, rows, linear->in);
        add_rounding(&program, x, x_stride, rows, linear->in, rounded);
    }
    add_product(&program, linear, x, x_stride, rounded, rows, y, y_stride, add, threads);
    return run(&program, threads);
}

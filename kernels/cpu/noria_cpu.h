/* The CPU kernels of Noria: a plain C ABI, called through ctypes. Shapes and rules are in the .c files.
 *
 * One rule holds for all of them: the operations done for a token depend on that token's own row, its position and its
 * keys alone, and the order of its floating-point operations never depends on how many other tokens there are or on
 * how the work is cut over threads. So a token has the same bits alone and in any batch, read in one piece or in
 * chunks, as part of a prompt or as a decoded token. */
#ifndef NORIA_CPU_H
#define NORIA_CPU_H

#include <immintrin.h>
#include <stdint.h>

#define NORIA_API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum { PANEL = 16, PAGE = 16, GROUP = 32 };

/* --- work over threads: program.c -------------------------------------------------------------------------------- */

/* One piece of a phase's work, done by thread `worker` (0, 1, ...). */
typedef void Task(const void *job, int64_t index, int worker);

enum { JOB_BYTES = 256 };

/* Pieces 0 .. count - 1 of one kind of work, in any order. A phase begins when all of the one before are done. */
typedef struct Phase {
    Task *task;
    struct Phase *following;
    int64_t count;
    int64_t next;    /* the piece to be taken next */
    int32_t done;    /* pieces */
    int32_t asleep;  /* threads that wait for the rest */
    unsigned char job[JOB_BYTES] __attribute__((aligned(64)));
} __attribute__((aligned(64))) Phase;

/* Phases one after the other, with the memory that they work in. With `memory` NULL nothing is stored and `used` tells
 * how much would have been: so a program is built twice, once to be measured. */
typedef struct {
    char *memory;
    int64_t used;
    Phase *first, *last;
} Program;

void *take(Program *program, int64_t bytes); /* 64-byte aligned */
void append(Program *program, Task *task, const void *job, int64_t job_bytes, int64_t count);
#define ADD_PHASE(program, task, job, count)                                                                           \
    do {                                                                                                               \
        _Static_assert(sizeof(job) <= JOB_BYTES, "a job must fit into its phase");                                     \
        append(program, task, &(job), sizeof(job), count);                                                             \
    } while (0)
int64_t run(Program *program, int threads); /* returns `used`; does nothing more where `memory` is NULL */

/* --- what the operations are given: mirrored in structs.py -------------------------------------------------------- */

/* Outputs of a linear layer that share a kind of weight; see linear.c. */
typedef struct {
    const uint8_t *data;
    const float *bias; /* [out] or NULL */
    int64_t kind, out;
} Segment;

typedef struct {
    const Segment *segments;
    int64_t num_segments, in, out;
} Linear;

typedef struct {
    const float *attention_norm, *ffn_norm; /* [hidden] */
    Linear qkv, output, gate_up, down;
} Layer;

/* What an adapter adds to what a linear gives: up(down(x)). NULL where it is not on that linear. */
typedef struct {
    const Linear *down, *up;
} LowRank;

enum { QKV, OUTPUT, GATE_UP, DOWN, NUM_LINEARS };

/* The tokens of a step from `start` on that one adapter serves. */
typedef struct {
    const LowRank *pairs; /* [layers, NUM_LINEARS] */
    int64_t start, rows;
} Adapted;

/* The rows of a step: R rows, T tokens. */
typedef struct {
    const int32_t *query_start; /* [R + 1] */
    const int32_t *kv_lens;     /* [R] */
    const int32_t *block_table; /* [R, table_width]: pages */
    const int32_t *tasks;       /* [num_tasks, 3]: row, first query, end; the longest first */
    const int64_t *positions;   /* [T] */
    const int64_t *slots;       /* [T]: page * 16 + place */
    const float *cos_sin;       /* [positions, D]: cosines, then sines, of a position's angles */
    int64_t table_width, num_tasks, num_tokens, longest;
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t half;   /* whether the pools hold halves */
    int64_t window; /* a query sees the last so many keys; 0: all */
    double scale;   /* of the scores */
    double softcap; /* scores become softcap * tanh(s / softcap); 0: they stay */
} Batch;

/* A layer's pools: keys [pages, Hk, D, 16], values [pages, Hk, 16, D]. */
typedef struct {
    void *keys, *values;
} Pools;

/* --- operations as phases ---------------------------------------------------------------------------------------- */

/* Rows of activations rounded to 16 bits in groups of 32 channels: x = scale * q. sum: of a group's rounded values. */
typedef struct {
    int16_t *q;           /* [rows, width] */
    float *scale, *sum;   /* [rows, width / 32] */
} Rounded;

int takes_rounded(const Linear *linear);
Rounded take_rounded(Program *program, int64_t rows, int64_t width);
void add_rounding(Program *program, const float *x, int64_t x_stride, int64_t rows, int64_t width, Rounded to);
/* y [rows, out] = x W^T + bias, added to what y holds where `add`. `rounded` is x, for segments that take it so. */
void add_product(Program *program, const Linear *linear, const float *x, int64_t x_stride, Rounded rounded, int64_t rows,
                 float *y, int64_t y_stride, int add, int threads);
/* These two also round what they write where `to.q` is not NULL. */
void add_norm(Program *program, const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *y,
              Rounded to);
void add_silu_mul(Program *program, const float *gate_up, int64_t rows, int64_t width, float *y, Rounded to);
void add_rope(Program *program, const Batch *batch, Pools pools, float *qkv);
void add_attention(Program *program, const Batch *batch, Pools pools, const float *q, int64_t q_stride, float *out,
                   float *scores);
/* Bytes of scores that the threads need together. */
int64_t score_bytes(const Batch *batch, int threads);

void round_row(const float *x, int64_t width, int64_t row, Rounded to);

/* --- arithmetic -------------------------------------------------------------------------------------------------- */

INLINE __m256 half8(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

/* The upper half of a float. */
INLINE __m256 bfloat8(const void *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

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

/* tanh x = (1 - e) / (1 + e) with e = e^(-2 |x|), and the sign of x: nothing overflows. */
INLINE __m256 tanh8(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0f));
    const __m256 e = exp8(_mm256_mul_ps(_mm256_or_ps(x, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(2.0f)));
    return _mm256_or_ps(_mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e)), sign);
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

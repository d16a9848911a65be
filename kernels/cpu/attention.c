/* Causal attention of ragged rows over a paged KV cache of floats or halves, and the writing of that cache.
 *
 * A layer's pools: keys [pages, Hk, D, 16] (transposed inside a page of 16 tokens, so that the scores of 16 keys need
 * no sums across lanes), values [pages, Hk, 16, D]. D is a multiple of 8.
 *
 * A query's result is defined by its own keys alone: scores are summed over the head's channels in order; their
 * maximum is taken; the weights are summed in eight lanes by position modulo 8; values are added in the order of their
 * positions. Decoded tokens and tokens of a prompt go through the same code, so they agree bit for bit. */
#include "noria_cpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TILE = 6 };

typedef struct {
    const float *q;                 /* [T, Hq, D], tokens q_stride apart */
    const void *keys, *values;      /* the layer's pools */
    const int32_t *query_start;     /* [R + 1] */
    const int32_t *kv_lens;         /* [R] */
    const int32_t *block_table;     /* [R, table_width]: pages */
    float *out;                     /* [T, Hq, D] */
    int64_t q_stride, table_width;
    int num_heads, num_kv_heads, head_dim, half;
    float scale;
} Attention;

INLINE __m256 load(const int half, const void *pool, int64_t index) {
    return half ? half8((const uint16_t *)pool + index) : _mm256_loadu_ps((const float *)pool + index);
}

/* N queries of one KV head, row i at q[i], seeing the first limit[i] keys (ascending). scores: N x padded floats. */
INLINE void attend(const Attention *job, const int half, const int N, const float *const *q, const int32_t *limit, float *const *out,
                   const int32_t *table, int kv_head, float *scores, int64_t padded) {
    const int dim = job->head_dim;
    const int64_t page_values = (int64_t)job->num_kv_heads * dim * PAGE, head = (int64_t)kv_head * dim * PAGE;
    const int32_t longest = limit[N - 1];
    const int32_t pages = (longest + PAGE - 1) / PAGE;
    const __m256 scale = _mm256_set1_ps(job->scale), least = _mm256_set1_ps(-INFINITY);
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 most[TILE];
    for (int i = 0; i < N; i++) most[i] = least;

    for (int32_t page = 0; page < pages; page++) {
        int64_t k = table[page] * page_values + head;
        const int64_t width = half ? 2 : 4, following = page + 1 < pages ? table[page + 1] * page_values + head : k;
        const char *next = (const char *)job->keys + following * width;
        __m256 acc[TILE][2];
#pragma GCC unroll 6
        for (int i = 0; i < N; i++) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
        for (int d = 0; d < dim; d++, k += PAGE) {
            if (!half || d % 2 == 0) _mm_prefetch(next + (int64_t)d * PAGE * width, _MM_HINT_T0);
            __m256 k0 = load(half, job->keys, k), k1 = load(half, job->keys, k + 8);
#pragma GCC unroll 6
            for (int i = 0; i < N; i++) {
                __m256 value = _mm256_broadcast_ss(q[i] + d);
                acc[i][0] = _mm256_fmadd_ps(k0, value, acc[i][0]);
                acc[i][1] = _mm256_fmadd_ps(k1, value, acc[i][1]);
            }
        }
        for (int i = 0; i < N; i++)
            for (int h = 0; h < 2; h++) {
                /* Slots past the limit may hold anything: blend, never multiply. */
                __m256i seen = _mm256_cmpgt_epi32(_mm256_set1_epi32(limit[i] - page * PAGE - 8 * h), lanes);
                __m256 s = _mm256_blendv_ps(least, _mm256_mul_ps(acc[i][h], scale), _mm256_castsi256_ps(seen));
                _mm256_storeu_ps(scores + i * padded + page * PAGE + 8 * h, s);
                most[i] = _mm256_max_ps(most[i], s);
            }
    }
    float inverse[TILE];
    for (int i = 0; i < N; i++) {
        const __m256 top = _mm256_set1_ps(max8(most[i]));
        __m256 sum = _mm256_setzero_ps();
        for (int32_t j = 0; j < pages * PAGE; j += 8) {
            __m256 weight = exp8(_mm256_sub_ps(_mm256_loadu_ps(scores + i * padded + j), top));
            _mm256_storeu_ps(scores + i * padded + j, weight);
            sum = _mm256_add_ps(sum, weight);
        }
        inverse[i] = 1.0f / sum8(sum);
    }
    for (int d = 0; d < dim; d += 16) {
        const int wide = dim - d >= 16;
        __m256 acc[TILE][2];
#pragma GCC unroll 6
        for (int i = 0; i < N; i++) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
        int32_t j = 0;
        /* All queries see these keys; the few keys at the end, that some do not, are added one query at a time. */
        for (; j < limit[0]; j++) {
            const int64_t v = table[j / PAGE] * page_values + head + (int64_t)(j % PAGE) * dim + d;
            __m256 v0 = load(half, job->values, v);
            __m256 v1 = wide ? load(half, job->values, v + 8) : _mm256_setzero_ps();
#pragma GCC unroll 6
            for (int i = 0; i < N; i++) {
                __m256 weight = _mm256_broadcast_ss(scores + i * padded + j);
                acc[i][0] = _mm256_fmadd_ps(v0, weight, acc[i][0]);
                acc[i][1] = _mm256_fmadd_ps(v1, weight, acc[i][1]);
            }
        }
        for (; j < longest; j++) {
            const int64_t v = table[j / PAGE] * page_values + head + (int64_t)(j % PAGE) * dim + d;
            __m256 v0 = load(half, job->values, v);
            __m256 v1 = wide ? load(half, job->values, v + 8) : _mm256_setzero_ps();
#pragma GCC unroll 6
            for (int i = 0; i < N; i++)
                if (j < limit[i]) {
                    __m256 weight = _mm256_broadcast_ss(scores + i * padded + j);
                    acc[i][0] = _mm256_fmadd_ps(v0, weight, acc[i][0]);
                    acc[i][1] = _mm256_fmadd_ps(v1, weight, acc[i][1]);
                }
        }
        for (int i = 0; i < N; i++) {
            const __m256 by = _mm256_set1_ps(inverse[i]);
            _mm256_storeu_ps(out[i] + d, _mm256_mul_ps(acc[i][0], by));
            if (wide) _mm256_storeu_ps(out[i] + d + 8, _mm256_mul_ps(acc[i][1], by));
        }
    }
}

#define ATTEND(NAME, HALF)                                                                                             \
    static __attribute__((noinline)) void NAME(const Attention *job, int n, const float *const *q,                     \
                                               const int32_t *limit, float *const *out, const int32_t *table,          \
                                               int kv_head, float *scores, int64_t padded) {                           \
        switch (n) {                                                                                                   \
        case 1: attend(job, HALF, 1, q, limit, out, table, kv_head, scores, padded); break;                            \
        case 2: attend(job, HALF, 2, q, limit, out, table, kv_head, scores, padded); break;                            \
        case 3: attend(job, HALF, 3, q, limit, out, table, kv_head, scores, padded); break;                            \
        case 4: attend(job, HALF, 4, q, limit, out, table, kv_head, scores, padded); break;                            \
        case 5: attend(job, HALF, 5, q, limit, out, table, kv_head, scores, padded); break;                            \
        default: attend(job, HALF, 6, q, limit, out, table, kv_head, scores, padded); break;                           \
        }                                                                                                              \
    }
ATTEND(attend_floats, 0)
ATTEND(attend_halves, 1)

/* Queries [first, end) of a row, all heads that share `kv_head`, six (query, head) pairs at a time. */
static void attend_queries(const Attention *job, int row, int first, int end, int kv_head, float *scores,
                           int64_t padded) {
    const int group = job->num_heads / job->num_kv_heads;
    const int start = job->query_start[row], computed = job->kv_lens[row] - (job->query_start[row + 1] - start);
    const int pairs = (end - first) * group;
    for (int begin = 0; begin < pairs; begin += TILE) {
        const float *q[TILE];
        float *out[TILE];
        int32_t limit[TILE];
        const int n = pairs - begin < TILE ? pairs - begin : TILE;
        for (int i = 0; i < n; i++) {
            const int query = first + (begin + i) / group, h = kv_head * group + (begin + i) % group;
            q[i] = job->q + (start + query) * job->q_stride + (int64_t)h * job->head_dim;
            out[i] = job->out + ((int64_t)(start + query) * job->num_heads + h) * job->head_dim;
            limit[i] = computed + query + 1;
        }
        const int32_t *table = job->block_table + row * job->table_width;
        (job->half ? attend_halves : attend_floats)(job, n, q, limit, out, table, kv_head, scores, padded);
    }
}

/* Attention of T tokens in R rows. tasks [num_tasks, 3]: (row, first query, end), the longest first. `longest` is the
 * largest kv_len. Returns 0, or 1 where there is no memory for the scores. */
NORIA_API int noria_attention(const float *q, int64_t q_stride, const void *keys, const void *values, int half,
                              const int32_t *query_start, const int32_t *kv_lens, const int32_t *block_table,
                              int64_t table_width, const int32_t *tasks, int64_t num_tasks, int num_heads,
                              int num_kv_heads, int head_dim, float scale, int64_t longest, float *out, int threads) {
    const Attention job = {q, keys, values, query_start, kv_lens, block_table, out, q_stride, table_width,
                           num_heads, num_kv_heads, head_dim, half, scale};
    const int64_t padded = (longest + PAGE - 1) / PAGE * PAGE, all = num_tasks * num_kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *scores = aligned_alloc(64, (size_t)(TILE * padded * 4 + 63) / 64 * 64);
        if (!scores) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t t = 0; t < all; t++) {
            const int32_t *task = tasks + t / num_kv_heads * 3;
            if (scores) attend_queries(&job, task[0], task[1], task[2], (int)(t % num_kv_heads), scores, padded);
        }
        free(scores);
    }
    return failed;
}

/* Rotate queries and keys of T tokens by their positions' angles and store keys and values at their slots.
 *
 * qkv [T, Hq + 2 Hk, D]; the queries are rotated in place. Pairs of channels are (i, i + rotary / 2); channels beyond
 * `rotary` stay. cos_sin [positions, rotary]: cosines, then sines. slots [T]: page * 16 + place. */
NORIA_API void noria_rope_write_kv(float *qkv, const float *cos_sin, const int64_t *positions, const int64_t *slots,
                                   int64_t num_tokens, int num_heads, int num_kv_heads, int head_dim, int rotary,
                                   void *keys, void *values, int half_kv, int threads) {
    const int half = rotary / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (num_tokens >= 8)
    for (int64_t t = 0; t < num_tokens; t++) {
        float *token = qkv + t * (num_heads + 2 * num_kv_heads) * head_dim;
        const float *c = cos_sin + positions[t] * rotary, *s = c + half;
        for (int h = 0; h < num_heads + num_kv_heads; h++) {
            float *x = token + (int64_t)h * head_dim;
            for (int i = 0; i < half; i++) {
                const float a = x[i], b = x[i + half];
                x[i] = a * c[i] - b * s[i];
                x[i + half] = b * c[i] + a * s[i];
            }
        }
        const int64_t page = slots[t] / PAGE, place = slots[t] % PAGE;
        for (int h = 0; h < num_kv_heads; h++) {
            const float *k = token + (int64_t)(num_heads + h) * head_dim, *v = k + (int64_t)num_kv_heads * head_dim;
            const int64_t to_keys = (page * num_kv_heads + h) * head_dim * PAGE + place;
            const int64_t to_values = ((page * num_kv_heads + h) * PAGE + place) * head_dim;
            for (int d = 0; d < head_dim; d++) {
                if (half_kv) {
                    ((uint16_t *)keys)[to_keys + (int64_t)d * PAGE] = to_half(k[d]);
                    ((uint16_t *)values)[to_values + d] = to_half(v[d]);
                } else {
                    ((float *)keys)[to_keys + (int64_t)d * PAGE] = k[d];
                    ((float *)values)[to_values + d] = v[d];
                }
            }
        }
    }
}

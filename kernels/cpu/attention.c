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

enum { TILE = 6 };

typedef struct {
    Batch batch;
    const float *q; /* [T, Hq, D], tokens q_stride apart */
    Pools pools;
    float *out;    /* [T, Hq, D] */
    float *scores; /* for each thread [6, keys of the longest row] */
    int64_t q_stride, padded;
} Attention;

INLINE __m256 load(const int half, const void *pool, int64_t index) {
    return half ? half8((const uint16_t *)pool + index) : _mm256_loadu_ps((const float *)pool + index);
}

/* The first key that a query sees which sees none past `limit`. */
INLINE int32_t first_key(const Attention *job, int32_t limit) {
    const int64_t window = job->batch.window;
    return window && limit > window ? limit - (int32_t)window : 0;
}

/* Where the values of a row's keys are, and their weights. */
typedef struct {
    const Attention *job;
    const int32_t *table;
    const float *scores;
    int64_t page_values, head, padded;
    int half;
} Values;

/* Add the weighted values of keys [from, to), channels d to d + 16, to the sums of those queries that see them. */
INLINE void add_values(const Values *values, const int all, const int N, int d, int32_t from, int32_t to,
                       const int32_t *limit, __m256 acc[TILE][2]) {
    const Attention *job = values->job;
    const int dim = (int)job->batch.head_dim, wide = dim - d >= 16, half = values->half;
    for (int32_t j = from; j < to; j++) {
        const int64_t v = values->table[j / PAGE] * values->page_values + values->head + (int64_t)(j % PAGE) * dim + d;
        __m256 v0 = load(half, job->pools.values, v);
        __m256 v1 = wide ? load(half, job->pools.values, v + 8) : _mm256_setzero_ps();
#pragma GCC unroll 6
        for (int i = 0; i < N; i++)
            if (all || (j < limit[i] && j >= first_key(job, limit[i]))) {
                __m256 weight = _mm256_broadcast_ss(values->scores + i * values->padded + j);
                acc[i][0] = _mm256_fmadd_ps(v0, weight, acc[i][0]);
                acc[i][1] = _mm256_fmadd_ps(v1, weight, acc[i][1]);
            }
    }
}

/* N queries of one KV head, row i at q[i], seeing the first limit[i] keys (ascending), of them the last `window` where
 * that is not 0. `plain`: there is no window and no soft cap. scores: N x padded floats. */
INLINE void attend(const Attention *job, const int half, const int plain, const int N, const float *const *q,
                   const int32_t *limit, float *const *out, const int32_t *table, int kv_head, float *scores,
                   int64_t padded) {
    const int dim = (int)job->batch.head_dim;
    const int64_t page_values = job->batch.num_kv_heads * dim * PAGE, head = (int64_t)kv_head * dim * PAGE;
    const int32_t longest = limit[N - 1];
    const int32_t pages = (longest + PAGE - 1) / PAGE, first = plain ? 0 : first_key(job, limit[0]);
    const int32_t first_page = first / PAGE;
    const __m256 scale = _mm256_set1_ps((float)job->batch.scale), least = _mm256_set1_ps(-INFINITY);
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const float cap = (float)job->batch.softcap;
    const __m256 by_cap = _mm256_set1_ps(cap > 0 ? 1.0f / cap : 0.0f);
    __m256 most[TILE];
    for (int i = 0; i < N; i++) most[i] = least;

    for (int32_t page = first_page; page < pages; page++) {
        int64_t k = table[page] * page_values + head;
        const int64_t width = half ? 2 : 4, following = page + 1 < pages ? table[page + 1] * page_values + head : k;
        const char *next = (const char *)job->pools.keys + following * width;
        __m256 acc[TILE][2];
#pragma GCC unroll 6
        for (int i = 0; i < N; i++) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
        for (int d = 0; d < dim; d++, k += PAGE) {
            if (!half || d % 2 == 0) _mm_prefetch(next + (int64_t)d * PAGE * width, _MM_HINT_T0);
            __m256 k0 = load(half, job->pools.keys, k), k1 = load(half, job->pools.keys, k + 8);
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
                __m256 s = _mm256_mul_ps(acc[i][h], scale);
                if (!plain) {
                    const int32_t before = first_key(job, limit[i]) - page * PAGE - 8 * h;
                    seen = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(before), lanes), seen);
                    if (cap > 0) s = _mm256_mul_ps(tanh8(_mm256_mul_ps(s, by_cap)), _mm256_set1_ps(cap));
                }
                s = _mm256_blendv_ps(least, s, _mm256_castsi256_ps(seen));
                _mm256_storeu_ps(scores + i * padded + page * PAGE + 8 * h, s);
                most[i] = _mm256_max_ps(most[i], s);
            }
    }
    const Values values = {job, table, scores, page_values, head, padded, half};
    float inverse[TILE];
    for (int i = 0; i < N; i++) {
        const __m256 top = _mm256_set1_ps(max8(most[i]));
        __m256 sum = _mm256_setzero_ps();
        for (int32_t j = first_page * PAGE; j < pages * PAGE; j += 8) {
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
        /* All queries see most keys; the few at both ends, that some do not, are added one query at a time. */
        const int32_t end = limit[0], begin = plain ? 0 : first_key(job, longest) < end ? first_key(job, longest) : end;
        if (!plain) add_values(&values, 0, N, d, first, begin, limit, acc);
        add_values(&values, 1, N, d, begin, end, limit, acc);
        add_values(&values, 0, N, d, end, longest, limit, acc);
        for (int i = 0; i < N; i++) {
            const __m256 by = _mm256_set1_ps(inverse[i]);
            _mm256_storeu_ps(out[i] + d, _mm256_mul_ps(acc[i][0], by));
            if (wide) _mm256_storeu_ps(out[i] + d + 8, _mm256_mul_ps(acc[i][1], by));
        }
    }
}

#define ATTEND(NAME, HALF, PLAIN)                                                                                      \
    static __attribute__((noinline)) void NAME(const Attention *job, int n, const float *const *q,                     \
                                               const int32_t *limit, float *const *out, const int32_t *table,          \
                                               int kv_head, float *scores, int64_t padded) {                           \
        switch (n) {                                                                                                   \
        case 1: attend(job, HALF, PLAIN, 1, q, limit, out, table, kv_head, scores, padded); break;                     \
        case 2: attend(job, HALF, PLAIN, 2, q, limit, out, table, kv_head, scores, padded); break;                     \
        case 3: attend(job, HALF, PLAIN, 3, q, limit, out, table, kv_head, scores, padded); break;                     \
        case 4: attend(job, HALF, PLAIN, 4, q, limit, out, table, kv_head, scores, padded); break;                     \
        case 5: attend(job, HALF, PLAIN, 5, q, limit, out, table, kv_head, scores, padded); break;                     \
        default: attend(job, HALF, PLAIN, 6, q, limit, out, table, kv_head, scores, padded); break;                    \
        }                                                                                                              \
    }
ATTEND(attend_floats, 0, 1)
ATTEND(attend_halves, 1, 1)
ATTEND(attend_floats_capped, 0, 0)
ATTEND(attend_halves_capped, 1, 0)

typedef void Attend(const Attention *job, int n, const float *const *q, const int32_t *limit, float *const *out,
                    const int32_t *table, int kv_head, float *scores, int64_t padded);

/* Queries [first, end) of a row, all heads that share `kv_head`, six (query, head) pairs at a time. */
static void attend_queries(const Attention *job, int row, int first, int end, int kv_head, float *scores) {
    const Batch *batch = &job->batch;
    const int num_heads = (int)batch->num_heads, group = num_heads / (int)batch->num_kv_heads;
    const int start = batch->query_start[row], computed = batch->kv_lens[row] - (batch->query_start[row + 1] - start);
    const int pairs = (end - first) * group, plain = !batch->window && !(batch->softcap > 0);
    Attend *attend_some = plain ? (batch->half ? attend_halves : attend_floats)
                                : (batch->half ? attend_halves_capped : attend_floats_capped);
    for (int begin = 0; begin < pairs; begin += TILE) {
        const float *q[TILE];
        float *out[TILE];
        int32_t limit[TILE];
        const int n = pairs - begin < TILE ? pairs - begin : TILE;
        for (int i = 0; i < n; i++) {
            const int query = first + (begin + i) / group, h = kv_head * group + (begin + i) % group;
            q[i] = job->q + (start + query) * job->q_stride + h * batch->head_dim;
            out[i] = job->out + ((int64_t)(start + query) * num_heads + h) * batch->head_dim;
            limit[i] = computed + query + 1;
        }
        const int32_t *table = batch->block_table + row * batch->table_width;
        attend_some(job, n, q, limit, out, table, kv_head, scores, job->padded);
    }
}

static void attention_task(const void *given, int64_t index, int worker) {
    const Attention *job = given;
    const int32_t *task = job->batch.tasks + index / job->batch.num_kv_heads * 3;
    attend_queries(job, task[0], task[1], task[2], (int)(index % job->batch.num_kv_heads),
                   job->scores + worker * TILE * job->padded);
}

INLINE int64_t padded_keys(const Batch *batch) { return (batch->longest + PAGE - 1) / PAGE * PAGE; }

int64_t score_bytes(const Batch *batch, int threads) { return threads * TILE * padded_keys(batch) * 4; }

void add_attention(Program *program, const Batch *batch, Pools pools, const float *q, int64_t q_stride, float *out,
                   float *scores) {
    const Attention job = {*batch, q, pools, out, scores, q_stride, padded_keys(batch)};
    ADD_PHASE(program, attention_task, job, batch->num_tasks * batch->num_kv_heads);
}

/* Attention of T tokens in R rows. */
NORIA_API int64_t noria_attention(const Batch *batch, const Pools *pools, const float *q, int64_t q_stride, float *out,
                                  void *scratch, int threads) {
    Program program = {.memory = scratch};
    float *scores = take(&program, score_bytes(batch, threads));
    add_attention(&program, batch, *pools, q, q_stride, out, scores);
    return run(&program, threads);
}

/* Rotary positions, and the writing of the KV cache: one token is one piece of work.
 *
 * Pairs of channels are (i, i + D / 2). A layer's pools: keys [pages, Hk, D, 16], values [pages, Hk, 16, D]. */
#include "noria_cpu.h"

typedef struct {
    Batch batch;
    Pools pools;
    float *qkv; /* [T, Hq + 2 Hk, D] */
} Rope;

static void rotate(float *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

static void rope_task(const void *given, int64_t t, int worker) {
    const Rope *job = given;
    const Batch *batch = &job->batch;
    (void)worker;
    const int64_t num_heads = batch->num_heads, num_kv_heads = batch->num_kv_heads, dim = batch->head_dim;
    float *token = job->qkv + t * (num_heads + 2 * num_kv_heads) * dim;
    const float *cos = batch->cos_sin + batch->positions[t] * dim;
    for (int64_t h = 0; h < num_heads + num_kv_heads; h++) rotate(token + h * dim, cos, cos + dim / 2, dim / 2);
    const int64_t page = batch->slots[t] / PAGE, place = batch->slots[t] % PAGE;
    for (int64_t h = 0; h < num_kv_heads; h++) {
        const float *k = token + (num_heads + h) * dim, *v = k + num_kv_heads * dim;
        const int64_t to_keys = (page * num_kv_heads + h) * dim * PAGE + place;
        const int64_t to_values = ((page * num_kv_heads + h) * PAGE + place) * dim;
        for (int64_t d = 0; d < dim; d++) {
            if (batch->half) {
                ((uint16_t *)job->pools.keys)[to_keys + d * PAGE] = to_half(k[d]);
                ((uint16_t *)job->pools.values)[to_values + d] = to_half(v[d]);
            } else {
                ((float *)job->pools.keys)[to_keys + d * PAGE] = k[d];
                ((float *)job->pools.values)[to_values + d] = v[d];
            }
        }
    }
}

void add_rope(Program *program, const Batch *batch, Pools pools, float *qkv) {
    const Rope job = {*batch, pools, qkv};
    ADD_PHASE(program, rope_task, job, batch->num_tokens);
}

/* Rotate queries and keys of qkv [T, Hq + 2 Hk, D] in place and store keys and values at their slots. */
NORIA_API int64_t noria_rope_write_kv(const Batch *batch, const Pools *pools, float *qkv, void *scratch, int threads) {
    Program program = {.memory = scratch};
    add_rope(&program, batch, *pools, qkv);
    return run(&program, batch->num_tokens < 8 ? 1 : threads);
}

/* The whole stack of a decoder's layers as one program: the same phases as the single operations, in one run of the
 * threads. */
#include "noria_cpu.h"

typedef struct {
    float *normed, *qkv, *attended, *gate_up, *gated; /* what float weights take; rows of T tokens */
    Rounded hidden, heads, ffn;                       /* the same rounded */
    float *scores;
} Buffers;

static const Rounded NOT_ROUNDED = {0};

/* Layers of T tokens x [T, hidden], which become the last layer's output. `scratch` NULL: the bytes of scratch that are
 * needed are returned, and nothing is done. */
NORIA_API int64_t noria_layers(const Layer *layers, const Pools *pools, int64_t num_layers, const Batch *batch,
                               double eps, float *x, void *scratch, int threads) {
    Program program = {.memory = scratch};
    const int64_t rows = batch->num_tokens, hidden = layers->qkv.in, heads = layers->output.in, ffn = layers->down.in;
    const int64_t all_heads = layers->qkv.out;
    Buffers buffers;
    buffers.normed = take(&program, rows * hidden * 4);
    buffers.qkv = take(&program, rows * all_heads * 4);
    buffers.attended = take(&program, rows * heads * 4);
    buffers.gate_up = take(&program, rows * 2 * ffn * 4);
    buffers.gated = take(&program, rows * ffn * 4);
    buffers.hidden = take_rounded(&program, rows, hidden);
    buffers.heads = take_rounded(&program, rows, heads);
    buffers.ffn = take_rounded(&program, rows, ffn);
    buffers.scores = take(&program, score_bytes(batch, threads));
    for (int64_t l = 0; l < num_layers; l++) {
        const Layer *layer = &layers[l];
        add_norm(&program, x, layer->attention_norm, (float)eps, rows, hidden, buffers.normed,
                 takes_rounded(&layer->qkv) ? buffers.hidden : NOT_ROUNDED);
        add_product(&program, &layer->qkv, buffers.normed, hidden, buffers.hidden, rows, buffers.qkv, all_heads, 0,
                    threads);
        add_rope(&program, batch, pools[l], buffers.qkv);
        add_attention(&program, batch, pools[l], buffers.qkv, all_heads, buffers.attended, buffers.scores);
        if (takes_rounded(&layer->output))
            add_rounding(&program, buffers.attended, heads, rows, heads, buffers.heads);
        add_product(&program, &layer->output, buffers.attended, heads, buffers.heads, rows, x, hidden, 1, threads);
        add_norm(&program, x, layer->ffn_norm, (float)eps, rows, hidden, buffers.normed,
                 takes_rounded(&layer->gate_up) ? buffers.hidden : NOT_ROUNDED);
        add_product(&program, &layer->gate_up, buffers.normed, hidden, buffers.hidden, rows, buffers.gate_up, 2 * ffn, 0,
                    threads);
        add_silu_mul(&program, buffers.gate_up, rows, ffn, buffers.gated,
                     takes_rounded(&layer->down) ? buffers.ffn : NOT_ROUNDED);
        add_product(&program, &layer->down, buffers.gated, ffn, buffers.ffn, rows, x, hidden, 1, threads);
    }
    return run(&program, threads);
}

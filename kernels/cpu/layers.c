/* The whole stack of a decoder's layers as one program: the same phases as the single operations, in one run of the
 * threads. */
#include "noria_cpu.h"

typedef struct {
    float *normed, *qkv, *attended, *gate_up, *gated; /* what float weights take; rows of T tokens */
    Rounded hidden, heads, ffn;                       /* the same rounded */
    float *scores;
} Buffers;

static const Rounded NOT_ROUNDED = {0};

typedef struct {
    const Adapted *groups;
    int64_t num;
    float *inner; /* [rows, r] of one group at a time */
} Adapters;

static int64_t inner_bytes(const Adapted *groups, int64_t num, int64_t num_layers) {
    int64_t most = 0;
    for (int64_t g = 0; g < num; g++)
        for (int64_t p = 0; p < num_layers * NUM_LINEARS; p++) {
            const Linear *down = groups[g].pairs[p].down;
            if (down && down->out * groups[g].rows > most) most = down->out * groups[g].rows;
        }
    return most * 4;
}

/* What the adapters add to y, the outputs of a linear, where they have a pair at this place: in a rounding of its own, so
 * that a token's bits are its own. */
static void add_adapters(Program *program, const Adapters *adapters, int64_t place, const float *x, int64_t width, float *y,
                         int64_t y_width, int threads) {
    for (int64_t g = 0; g < adapters->num; g++) {
        const Adapted *group = &adapters->groups[g];
        const LowRank *pair = &group->pairs[place];
        if (!pair->down) continue;
        add_product(program, pair->down, x + group->start * width, width, NOT_ROUNDED, group->rows, adapters->inner,
                    pair->down->out, 0, threads);
        add_product(program, pair->up, adapters->inner, pair->down->out, NOT_ROUNDED, group->rows,
                    y + group->start * y_width, y_width, 1, threads);
    }
}

/* Layers of T tokens x [T, hidden], which become the last layer's output. `scratch` NULL: the bytes of scratch that are
 * needed are returned, and nothing is done. */
NORIA_API int64_t noria_layers(const Layer *layers, const Pools *pools, int64_t num_layers, const Batch *batch,
                               double eps, const Adapted *adapted, int64_t num_adapted, float *x, void *scratch,
                               int threads) {
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
    const Adapters adapters = {adapted, num_adapted, take(&program, inner_bytes(adapted, num_adapted, num_layers))};
    for (int64_t l = 0; l < num_layers; l++) {
        const Layer *layer = &layers[l];
        const int64_t at = l * NUM_LINEARS;
        add_norm(&program, x, layer->attention_norm, (float)eps, rows, hidden, buffers.normed,
                 takes_rounded(&layer->qkv) ? buffers.hidden : NOT_ROUNDED);
        add_product(&program, &layer->qkv, buffers.normed, hidden, buffers.hidden, rows, buffers.qkv, all_heads, 0,
                    threads);
        add_adapters(&program, &adapters, at + QKV, buffers.normed, hidden, buffers.qkv, all_heads, threads);
        add_rope(&program, batch, pools[l], buffers.qkv);
        add_attention(&program, batch, pools[l], buffers.qkv, all_heads, buffers.attended, buffers.scores);
        if (takes_rounded(&layer->output))
            add_rounding(&program, buffers.attended, heads, rows, heads, buffers.heads);
        add_product(&program, &layer->output, buffers.attended, heads, buffers.heads, rows, x, hidden, 1, threads);
        add_adapters(&program, &adapters, at + OUTPUT, buffers.attended, heads, x, hidden, threads);
        add_norm(&program, x, layer->ffn_norm, (float)eps, rows, hidden, buffers.normed,
                 takes_rounded(&layer->gate_up) ? buffers.hidden : NOT_ROUNDED);
        add_product(&program, &layer->gate_up, buffers.normed, hidden, buffers.hidden, rows, buffers.gate_up, 2 * ffn, 0,
                    threads);
        add_adapters(&program, &adapters, at + GATE_UP, buffers.normed, hidden, buffers.gate_up, 2 * ffn, threads);
        add_silu_mul(&program, buffers.gate_up, rows, ffn, buffers.gated,
                     takes_rounded(&layer->down) ? buffers.ffn : NOT_ROUNDED);
        add_product(&program, &layer->down, buffers.gated, ffn, buffers.ffn, rows, x, hidden, 1, threads);
        add_adapters(&program, &adapters, at + DOWN, buffers.gated, ffn, x, hidden, threads);
    }
    return run(&program, threads);
}

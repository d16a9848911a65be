/* Weights into packed.h's layout, and rows of it back as floats. */
#include "packed.h"
#include <string.h>

NORIA_API int64_t noria_packed_bytes(int kind, int64_t out, int64_t in) {
    return (out + PANEL - 1) / PANEL * panel_bytes(kind, in);
}

INLINE uint16_t upper_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

INLINE float from_upper_half(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rows [first, first + rows) of a float32 weight into their places; `kind` is F32, F16 or BF16, which must hold them: nothing is
 * rounded here but to halves. `packed` was zeroed. */
NORIA_API void noria_pack_floats(int kind, const float *weight, int64_t first, int64_t rows, int64_t in, void *packed) {
    for (int64_t r = 0; r < rows; r++) {
        int64_t o = first + r;
        uint8_t *panel = (uint8_t *)packed + o / PANEL * panel_bytes(kind, in);
        for (int64_t k = 0; k < in; k++) {
            float value = weight[r * in + k];
            if (kind == F32)
                ((float *)panel)[k * PANEL + o % PANEL] = value;
            else
                ((uint16_t *)panel)[k * PANEL + o % PANEL] = kind == F16 ? to_half(value) : upper_half(value);
        }
    }
}

/* Where output o's input k of a group stands: the byte, and for nibbles whether it is the high one. */
INLINE int64_t place(const int kind, int64_t k, int64_t o, int *high) {
    *high = has_min(kind) && o >= 8;
    return has_min(kind) ? k / 2 * 16 + o % 8 * 2 + k % 2 : k / 2 * 32 + o * 2 + k % 2;
}

/* Quantised values as they come out of a file's blocks: q [rows, in] unsigned nibbles or signed bytes, scale and
 * minimum [rows, in / group] as floats. For kinds with half scales these must be halves to begin with: nothing is
 * rounded here. `packed` was zeroed. */
NORIA_API void noria_pack_groups(int kind, const uint8_t *q, const float *scale, const float *minimum, int64_t first,
                                 int64_t rows, int64_t in, void *packed) {
    const int group = group_of(kind);
    const int64_t num_groups = in / group, values = integer_bytes(kind);
    for (int64_t r = 0; r < rows; r++) {
        int64_t o = (first + r) % PANEL;
        uint8_t *at = (uint8_t *)packed + (first + r) / PANEL * panel_bytes(kind, in);
        for (int64_t g = 0; g < num_groups; g++, at += group_bytes(kind)) {
            const uint8_t *from = q + r * in + g * group;
            for (int k = 0; k < group; k++) {
                int high;
                uint8_t *byte = at + place(kind, k, o, &high);
                *byte |= (uint8_t)(high ? from[k] << 4 : from[k]);
            }
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
    const int64_t values = integer_bytes(kind);
    for (int64_t t = 0; t < count; t++, y += in) {
        int64_t o = ids[t] % PANEL;
        const uint8_t *at = (const uint8_t *)data + ids[t] / PANEL * panel_bytes(kind, in);
        for (int64_t g = 0; g < in / group; g++, at += group_bytes(kind)) {
            if (!is_grouped(kind)) {
                const uint16_t half = ((const uint16_t *)at)[o];
                y[g] = kind == F32 ? ((const float *)at)[o] : kind == F16 ? _cvtsh_ss(half) : from_upper_half(half);
                continue;
            }
            const int halves = kind == Q4 || kind == Q8;
            const float *floats = (const float *)(at + values);
            const uint16_t *half = (const uint16_t *)(at + values);
            const float scale = halves ? _cvtsh_ss(half[o]) : floats[o];
            const float minimum = !has_min(kind) ? 0.0f : halves ? _cvtsh_ss(half[PANEL + o]) : floats[PANEL + o];
            for (int k = 0; k < group; k++) {
                int high;
                const uint8_t byte = at[place(kind, k, o, &high)];
                const float q = has_min(kind) ? (float)(high ? byte >> 4 : byte & 15) : (float)(int8_t)byte;
                y[g * group + k] = scale * q + minimum;
            }
        }
    }
}

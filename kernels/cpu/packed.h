/* How weights lie in memory. A weight [out, in] lies in panels of 16 outputs, padded with zeros at the end. Within a
 * panel the inputs run on, so that it is read once, front to back:
 *
 *   F32, F16, BF16   per input 16 values
 *   Q4, Q4_F32    per group of 32 inputs: 256 bytes of nibbles, 16 scales, 16 minima; w = scale * q + minimum. The 16
 *                 bytes of inputs k and k + 1: byte 2 o + i has input k + i of output o low and of output o + 8 high.
 *                 Scales are halves (Q4) or floats.
 *   Q8            per group of 32 inputs: 512 signed bytes, 16 half scales; w = scale * q. The 32 bytes of inputs k and
 *                 k + 1: byte 2 o + i has input k + i of output o.
 *   Q8_16         the same per group of 16 inputs, with float scales */
#ifndef NORIA_PACKED_H
#define NORIA_PACKED_H

#include "noria_cpu.h"

enum { F32, F16, BF16, Q4, Q8, Q4_F32, Q8_16 }; /* as in packing.py */

INLINE int group_of(const int kind) { return kind == Q8_16 ? 16 : GROUP; }
INLINE int has_min(const int kind) { return kind == Q4 || kind == Q4_F32; }
INLINE int is_grouped(const int kind) { return kind >= Q4; }

/* Bytes of the integers of a group of a panel; scales follow. */
INLINE int64_t integer_bytes(const int kind) { return has_min(kind) ? 16 * PANEL : group_of(kind) * PANEL; }

/* Bytes of one group of a panel (F32, F16, BF16: of one input). */
INLINE int64_t group_bytes(const int kind) {
    switch (kind) {
    case F32: return PANEL * 4;
    case F16:
    case BF16: return PANEL * 2;
    case Q4: return integer_bytes(kind) + 2 * PANEL * 2;
    case Q4_F32: return integer_bytes(kind) + 2 * PANEL * 4;
    case Q8: return integer_bytes(kind) + PANEL * 2;
    default: return integer_bytes(kind) + PANEL * 4;
    }
}

INLINE int64_t panel_bytes(const int kind, int64_t in) {
    return is_grouped(kind) ? in / group_of(kind) * group_bytes(kind) : in * group_bytes(kind);
}

#endif

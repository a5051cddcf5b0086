/* int4's rounding, for pack.c. SPDX-License-Identifier: Apache-2.0 */
#ifndef KESTREL_ROUND_INT4_H
#define KESTREL_ROUND_INT4_H

#include "kernels.h"

enum { FEEDBACK = KESTREL_FEEDBACK };

/* Eight rows: w [kp][PANEL], overwritten; importance [kp] and feedback [kp / FEEDBACK, rounded up][FEEDBACK][FEEDBACK], or NULL
 * for weights that all count alike and no feedback. Writes scales f16 [kp / GROUP][PANEL] and values [kp][PANEL] in [-8, 7]. */
void kestrel_round_int4(float *w, int64_t kp, const float *importance, const float *feedback, uint16_t *scales, int8_t *values);

#endif

/* What the step needs of sample.c. SPDX-License-Identifier: Apache-2.0 */
#ifndef KESTREL_SAMPLE_H
#define KESTREL_SAMPLE_H

#include "kestrel.h"
#include <stdbool.h>

int32_t kestrel_argmax(const float *logits, int32_t n); /* lowest id on a tie */
/* The `count` best of n, logit descending, id ascending; count <= n. */
void kestrel_candidates(const float *logits, int32_t n, int32_t count, int32_t *ids, float *values);

#endif

/* What the step needs of sample.c. SPDX-License-Identifier: Apache-2.0 */
#ifndef KESTREL_SAMPLE_H
#define KESTREL_SAMPLE_H

#include "kestrel.h"
#include <stdbool.h>

int32_t kestrel_argmax(const float *logits, int32_t n); /* lowest id on a tie; -1 when the row holds NaN or +Inf */
/* Ids of the `count` best of n, logit descending, id ascending; count <= n. */
void kestrel_best(const float *logits, int32_t n, int32_t count, int32_t *ids);
/* The `count` best of n, logit descending, id ascending; count <= n. */
void kestrel_candidates(const float *logits, int32_t n, int32_t count, int32_t *ids, float *values);
/* penalties.c: does `s` ask for another row than the model's own? */
bool kestrel_changes_logits(const kestrel_sampling *s);
/* row [n] = logits after penalties, bias and exclusions, as kestrel_sampling states them. */
int32_t kestrel_change_logits(const float *logits, int32_t n, const kestrel_sampling *s, float *row);

#endif

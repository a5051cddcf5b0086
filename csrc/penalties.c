/* What a request changes of a row of logits before a token is chosen from it. SPDX-License-Identifier: Apache-2.0
 *
 * Each element has its own chain of operations in double, so no order between ids matters; it is rounded to float after the penalties
 * and again after the bias. What overflows a float becomes the largest one: NaN and +Inf never arise from finite logits.
 */
#include "sample.h"
#include <float.h>
#include <math.h>
#include <string.h>

bool kestrel_changes_logits(const kestrel_sampling *s) { return s->n_seen || s->n_bias || s->n_excluded; }

static bool ids_ok(const int32_t *ids, int32_t count, int32_t n)
{
    if (count < 0 || (count && !ids)) return false;
    for (int32_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= n) return false;
    return true;
}

static bool within(double x, double most) { return x >= -most && x <= most; }

static float rounded(double x)
{
    if (x > FLT_MAX) return FLT_MAX;
    if (x < -FLT_MAX && x != -INFINITY) return -FLT_MAX;
    return (float)x;
}

int32_t kestrel_change_logits(const float *logits, int32_t n, const kestrel_sampling *s, float *row)
{
    if (!(s->repetition_penalty > 0.0 && s->repetition_penalty <= 1e6) || !within(s->presence_penalty, 1e6) || !within(s->frequency_penalty, 1e6) ||
        !ids_ok(s->seen_ids, s->n_seen, n) || !ids_ok(s->bias_ids, s->n_bias, n) || !ids_ok(s->excluded_ids, s->n_excluded, n) ||
        (s->n_seen && !s->seen_counts) || (s->n_bias && !s->bias))
        return KESTREL_E_ARGUMENT;
    for (int32_t i = 0; i < s->n_bias; i++)
        if (!within(s->bias[i], 1e6)) return KESTREL_E_ARGUMENT;
    memcpy(row, logits, (size_t)n * sizeof *row);
    for (int32_t i = 0; i < s->n_seen; i++) {
        const double x = row[s->seen_ids[i]], count = s->seen_counts[i];
        const double repeated = x > 0.0 ? x / s->repetition_penalty : x * s->repetition_penalty;
        row[s->seen_ids[i]] = rounded(count > 0.0 ? repeated - (s->presence_penalty + count * s->frequency_penalty) : repeated);
    }
    for (int32_t i = 0; i < s->n_bias; i++) row[s->bias_ids[i]] = rounded(row[s->bias_ids[i]] + s->bias[i]);
    for (int32_t i = 0; i < s->n_excluded; i++) row[s->excluded_ids[i]] = -INFINITY;
    return KESTREL_OK;
}

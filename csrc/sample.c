/* Everything after the logits that touches floats: argmax, candidates, softmax, draws, comparisons. SPDX-License-Identifier: Apache-2.0
 *
 * Order everywhere: logit descending, id ascending. Sums over a whole row run over ids ascending, in double.
 */
#include "sample.h"
#include "exp.h"
#include <math.h>

/* Larger key = better: logits order-preserved as integers (-0 = +0), then the lower id. */
static inline uint64_t rank_key(float logit, uint32_t id)
{
    uint32_t u = kestrel_f32_bits(logit == 0.0f ? 0.0f : logit);
    u = u & 0x80000000u ? ~u : u | 0x80000000u;
    return (uint64_t)u << 32 | (0xffffffffu - id);
}
static inline uint32_t key_id(uint64_t key) { return 0xffffffffu - (uint32_t)key; }

enum { LANES = 32 }; /* elements of a row taken together, so that compilers vectorise */

/* No NaN or +Inf in [0, n)? -Inf is a legal "never". */
static bool row_ok(const float *logits, int32_t n)
{
    uint32_t bad = 0;
    for (int32_t i = 0; i < n; i++) bad |= !(logits[i] <= 3.402823466e38f);
    return !bad;
}

int32_t kestrel_argmax(const float *logits, int32_t n)
{
    float lane[LANES], best = logits[0];
    uint32_t bad[LANES] = {0}, any = 0; /* as in row_ok, in the same walk: a row comes from the other cores' caches */
    int32_t i = 0;
    for (int32_t j = 0; j < LANES; j++) lane[j] = best;
    for (; i + LANES <= n; i += LANES)
        for (int32_t j = 0; j < LANES; j++) {
            lane[j] = logits[i + j] > lane[j] ? logits[i + j] : lane[j];
            bad[j] |= !(logits[i + j] <= 3.402823466e38f);
        }
    for (int32_t j = 0; j < LANES; j++) {
        best = lane[j] > best ? lane[j] : best;
        any |= bad[j];
    }
    for (; i < n; i++) {
        best = logits[i] > best ? logits[i] : best;
        any |= !(logits[i] <= 3.402823466e38f);
    }
    if (any) return -1;
    for (i = 0; i + LANES <= n; i += LANES) {
        uint32_t found = 0;
        for (int32_t j = 0; j < LANES; j++) found |= logits[i + j] == best;
        if (found) break;
    }
    for (; i < n; i++)
        if (logits[i] == best) return i;
    return 0;
}

/* sum exp((logits[i] - max) * scale), ids ascending. The exponentials are taken a block at a time: only the sum needs the order. */
static double sum_exp(const float *logits, int32_t n, double max, double scale)
{
    double sum = 0.0, w[LANES];
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int32_t j = 0; j < LANES; j++) w[j] = kestrel_exp(((double)logits[i + j] - max) * scale);
        for (int32_t j = 0; j < LANES; j++) sum += w[j];
    }
    for (; i < n; i++) sum += kestrel_exp(((double)logits[i] - max) * scale);
    return sum;
}

static bool any_above(const float *logits, float bound)
{
    uint32_t above = 0;
    for (int32_t j = 0; j < LANES; j++) above |= logits[j] > bound;
    return above;
}

void kestrel_best(const float *logits, int32_t n, int32_t count, int32_t *ids)
{
    int32_t have = 0;
    float worst = 0.0f; /* of a full list */
    for (int32_t i = 0; i < n && count; i++) {
        while (have == count && i + LANES <= n && !any_above(logits + i, worst)) i += LANES;
        if (i == n) break;
        if (have == count && !(logits[i] > worst)) continue; /* equal: the lower id is already in */
        int32_t at = have < count ? have++ : count - 1;
        for (; at > 0 && logits[i] > logits[ids[at - 1]]; at--) ids[at] = ids[at - 1];
        ids[at] = i;
        worst = logits[ids[have - 1]];
    }
}

void kestrel_candidates(const float *logits, int32_t n, int32_t count, int32_t *ids, float *values)
{
    kestrel_best(logits, n, count, ids);
    for (int32_t i = 0; i < count; i++) values[i] = logits[ids[i]];
}

static void sift_down(uint64_t *heap, int64_t n, int64_t i)
{
    const uint64_t key = heap[i];
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && heap[child + 1] > heap[child]) child++;
        if (heap[child] <= key) break;
        heap[i] = heap[child];
    }
    heap[i] = key;
}

static uint64_t pop(uint64_t *heap, int64_t *n)
{
    const uint64_t top = heap[0];
    heap[0] = heap[--*n];
    sift_down(heap, *n, 0);
    return top;
}

/* Philox-4x32-10 (Salmon et al. 2011): counter = position, key = seed. Two words make a double in [0, 1). */
static double uniform(uint64_t seed, uint64_t position)
{
    uint32_t c[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0}, k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        const uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k[1], (uint32_t)a};
        memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    return (double)(((uint64_t)c[0] << 32 | c[1]) >> 11) * 0x1p-53;
}

/* temperature, then top-k, top-p (of what top-k left), min-p (relative to the best): each keeps a prefix of the ranking. */
int32_t kestrel_sample(const float *logits, int32_t sampled, const kestrel_sampling *s, int64_t position, uint64_t *work, float *row, int32_t *token)
{
    if (!logits || !s || !token || sampled < 1 || position < 0) return KESTREL_E_ARGUMENT;
    const bool changes = kestrel_changes_logits(s);
    if (changes && !row) return KESTREL_E_ARGUMENT;
    if (!(s->temperature >= 0.0 && s->temperature <= 1e6) || !(s->top_p > 0.0 && s->top_p <= 1.0) || !(s->min_p >= 0.0 && s->min_p <= 1.0) ||
        s->top_k < 0 || (s->temperature > 0.0 && !work))
        return KESTREL_E_ARGUMENT;
    if (changes) {
        if (!row_ok(logits, sampled)) return KESTREL_E_NOT_FINITE;
        const int32_t status = kestrel_change_logits(logits, sampled, s, row);
        if (status) return status;
        logits = row;
    }
    const int32_t best = kestrel_argmax(logits, sampled);
    if (best < 0) return KESTREL_E_NOT_FINITE;
    if (s->temperature == 0.0 || s->top_k == 1 || logits[best] == -INFINITY) {
        *token = best;
        return logits[best] == -INFINITY ? KESTREL_E_NOT_FINITE : KESTREL_OK;
    }
    const double max = logits[best], scale = 1.0 / s->temperature;
    const int64_t limit = s->top_k && s->top_k < sampled ? s->top_k : sampled;
#define WEIGHT(id) kestrel_exp(((double)logits[id] - max) * scale) /* the best weighs 1 */
    double total = limit == sampled ? sum_exp(logits, sampled, max, scale) : 0.0;
    int64_t n = sampled;
    for (int32_t i = 0; i < sampled; i++) work[i] = rank_key(logits[i], (uint32_t)i);
    for (int64_t i = n / 2 - 1; i >= 0; i--) sift_down(work, n, i);
    /* Ranked ids move to the end of the array as they leave the heap: rank r lies at work[sampled - 1 - r]. */
    int64_t ranked = 0;
#define RANKED(r) key_id(work[sampled - 1 - (r)])
#define RANK_NEXT() do { const uint64_t top_ = pop(work, &n); work[n] = top_; ranked++; } while (0)
    if (limit < sampled) {
        while (ranked < limit) RANK_NEXT();
        for (int64_t r = 0; r < limit; r++) total += WEIGHT(RANKED(r));
    }
    double mass = total;
    int64_t keep = limit;
    if (s->top_p < 1.0 || s->min_p > 0.0) {
        mass = 0.0;
        for (keep = 0; keep < limit; keep++) {
            if (keep == ranked) RANK_NEXT();
            const double w = WEIGHT(RANKED(keep));
            if (keep && (w < s->min_p || mass >= s->top_p * total)) break;
            mass += w;
        }
    }
    double left = uniform(s->seed, (uint64_t)position) * mass;
    int64_t r = 0;
    for (;; r++) {
        if (r == ranked) RANK_NEXT();
        left -= WEIGHT(RANKED(r));
        if (left < 0.0 || r + 1 == keep) break;
    }
    *token = (int32_t)RANKED(r);
    return KESTREL_OK;
}

int32_t kestrel_logsumexp(const float *logits, int32_t n, double *value)
{
    if (!logits || n < 1 || !value) return KESTREL_E_ARGUMENT;
    const int32_t best = kestrel_argmax(logits, n);
    if (best < 0) return KESTREL_E_NOT_FINITE;
    const double max = logits[best];
    *value = max + kestrel_log(sum_exp(logits, n, max, 1.0));
    return KESTREL_OK;
}

int32_t kestrel_logprobs(const float *logits, int32_t sampled, int32_t token, int32_t count, double *logprob, int32_t *ids, double *logprobs)
{
    double z;
    if (!logits || !logprob || token < 0 || token >= sampled || count < 0 || count > sampled || (count && (!ids || !logprobs))) return KESTREL_E_ARGUMENT;
    const int32_t status = kestrel_logsumexp(logits, sampled, &z);
    if (status) return status;
    *logprob = logits[token] - z;
    kestrel_best(logits, sampled, count, ids);
    for (int32_t i = 0; i < count; i++) logprobs[i] = logits[ids[i]] - z;
    return KESTREL_OK;
}

int32_t kestrel_compare(const float *reference, const float *logits, int32_t n, int32_t label, kestrel_comparison *out)
{
    double z, z_reference;
    if (!out || label < 0 || label >= n) return KESTREL_E_ARGUMENT;
    int32_t status = kestrel_logsumexp(reference, n, &z_reference);
    if (!status) status = kestrel_logsumexp(logits, n, &z);
    if (status) return status;
    double kl = 0.0;
    for (int32_t i = 0; i < n; i++) {
        const double log_p = reference[i] - z_reference;
        kl += kestrel_exp(log_p) * (log_p - (logits[i] - z));
    }
    *out = (kestrel_comparison){.kl = kl, .nll = z - logits[label], .nll_reference = z_reference - reference[label],
                                .argmax_equal = kestrel_argmax(reference, n) == kestrel_argmax(logits, n)};
    return KESTREL_OK;
}

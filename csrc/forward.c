/* One step for m rows: embedding -> layers -> final norm -> logits or candidates of the rows that ask. SPDX-License-Identifier: Apache-2.0
 *
 * The step is a row of phases; kestrel_pool_run shares out a phase's tasks and returns when all are done. Tasks write disjoint
 * outputs and a row's operations never depend on its neighbours, so neither the threads nor the rows of a pass show in the bits.
 * Nothing is allocated. All K and V of a pass are stored (rounded to the cache's type) before any row attends.
 */
#include "exp.h"
#include "sample.h"
#include "step.h"
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <stdatomic.h>

enum {
    TASK_BYTES = 16384, /* of a matmul's weights: about a microsecond's reading, so that all threads end together; 32 KB: 1.03 of the time */
    MOST_TASKS = 65000
};

static int32_t row_tasks(const step *s, int32_t rows) { return (rows + s->row_block - 1) / s->row_block; }

static void report_bad_row(kestrel_model *model, int32_t row)
{
    int seen = atomic_load_explicit(&model->bad_row, memory_order_relaxed);
    while (row < seen && !atomic_compare_exchange_weak_explicit(&model->bad_row, &seen, row, memory_order_relaxed, memory_order_relaxed)) {}
}

#define FOR_ROWS(s, task, count) \
    for (int32_t i = (task) * (s)->row_block, end_ = i + (s)->row_block < (count) ? i + (s)->row_block : (count); i < end_; i++)

/* --- phases ---------------------------------------------------------------------------------------------------- */

static void embed_task(void *arg, int32_t task, int32_t thread)
{
    step *s = arg;
    kestrel_model *m = s->model;
    const kestrel_config *c = &m->config;
    const int64_t half = c->head_dim / 2;
    (void)thread;
    FOR_ROWS(s, task, s->m) {
        float *x = m->x + (int64_t)i * c->hidden_size;
        kestrel_unpack_row(&c->embedding, s->rows[i].token, x);
        if (c->embedding_scale)
            for (int32_t j = 0; j < c->hidden_size; j++) x[j] *= c->embedding_scale[j];
        for (int32_t r = 0; r < c->n_ropes; r++)
            for (int64_t j = 0; j < half; j++) {
                const int64_t at = ((int64_t)r * m->max_rows + i) * half + j;
                double sine, cosine;
                kestrel_sincos((double)((float)s->rows[i].position * c->rope_inv_freq[r * half + j]), &sine, &cosine); /* the angle in f32, as trained */
                m->cosine[at] = (float)cosine;
                m->sine[at] = (float)sine;
            }
        m->hi[i] = s->rows[i].position;
    }
}

/* Quantises rows [first, last) of src for the integer weight that reads them next. */
static void quantize(step *s, int32_t first, int32_t last)
{
    if (s->weight->type != KESTREL_F32 && last > first)
        s->model->kernels.quantize_rows(s->src, s->src_stride, s->weight->k, first, last - first, &s->model->lhs);
}

static void norm_task(void *arg, int32_t task, int32_t thread)
{
    step *s = arg;
    kestrel_model *m = s->model;
    const int64_t h = m->config.hidden_size;
    (void)thread;
    int32_t first = -1, last = 0;
    FOR_ROWS(s, task, s->dst_rows) {
        const int64_t row = s->pick ? s->pick[i] : i;
        float *delta = s->delta ? s->delta + row * h : NULL;
        if (delta && s->post_gain && !m->kernels.norm(delta, NULL, s->post_gain, h, m->config.rms_norm_eps, delta)) report_bad_row(m, (int32_t)row);
        if (!m->kernels.norm(m->x + row * h, delta, s->gain, h, m->config.rms_norm_eps, m->normed + i * h))
            report_bad_row(m, (int32_t)row);
        if (first < 0) first = i;
        last = i + 1;
    }
    quantize(s, first, last);
}

static void quantize_task(void *arg, int32_t task, int32_t thread)
{
    step *s = arg;
    (void)thread;
    const int32_t first = task * s->row_block, last = first + s->row_block < s->dst_rows ? first + s->row_block : s->dst_rows;
    quantize(s, first, last);
}

static void activation_task(void *arg, int32_t task, int32_t thread)
{
    step *s = arg;
    kestrel_model *m = s->model;
    const int64_t n = m->config.intermediate_size;
    (void)thread;
    FOR_ROWS(s, task, s->m) {
        float *gate = m->gate_up + i * 2 * n;
        if (m->config.hidden_act == KESTREL_SILU) m->kernels.silu_multiply(gate, gate + n, n, gate);
        else m->kernels.gelu_multiply(gate, gate + n, n, gate);
    }
    quantize_task(arg, task, thread);
}

/* Panels of one task of the weight's matmul. */
static int32_t task_panels(const kestrel_weight *w)
{
    const int64_t panels = round_up(w->n, PANEL) / PANEL, bytes = panel_bytes(w->type, w->k), least = panels / MOST_TASKS + 1;
    return (int32_t)(bytes * least < TASK_BYTES ? TASK_BYTES / bytes : least);
}

static int32_t matmul_tasks(const kestrel_weight *w)
{
    const int64_t each = (int64_t)task_panels(w) * PANEL;
    return (int32_t)((w->n + each - 1) / each);
}

/* Panels [begin, end) of the weight for all rows. */
static void matmul_panels(const step *s, int64_t begin, int64_t end, float *dst, int64_t dst_stride)
{
    const kestrel_weight *w = s->weight;
    const uint8_t *data = (const uint8_t *)w->data + begin * panel_bytes(w->type, w->k);
    if (w->type == KESTREL_INT8)
        s->model->kernels.matmul_int8(data, end - begin, &s->model->lhs, s->dst_rows, dst, dst_stride);
    else if (w->type == KESTREL_INT4)
        s->model->kernels.matmul_int4(data, end - begin, &s->model->lhs, s->dst_rows, dst, dst_stride);
    else
        s->model->kernels.matmul_f32(data, end - begin, w->k, s->src, s->src_stride, s->dst_rows, dst, dst_stride);
}

static bool all_finite(const float *x, int64_t n)
{
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t magnitude = kestrel_f32_bits(x[i]) & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
    }
    return most < 0x7f800000u;
}

static void matmul_task(void *arg, int32_t task, int32_t thread)
{
    step *s = arg;
    const kestrel_weight *w = s->weight;
    const int64_t panels = round_up(w->n, PANEL) / PANEL, each = task_panels(w);
    const int64_t begin = task * each, end = begin + each < panels ? begin + each : panels;
    const bool hangs_over = end * PANEL > w->n;
    (void)thread;
    if (end - hangs_over > begin) matmul_panels(s, begin, end - hangs_over, s->dst + begin * PANEL, s->dst_stride);
    if (hangs_over) {
        /* The last panel's columns past n must not be written. Only one task has that panel, so one buffer serves. */
        float *tail = s->model->tail;
        matmul_panels(s, end - 1, end, tail, PANEL);
        const int64_t column = (end - 1) * PANEL;
        for (int32_t i = 0; i < s->dst_rows; i++) memcpy(s->dst + i * s->dst_stride + column, tail + i * PANEL, (size_t)(w->n - column) * sizeof *tail);
    }
    if (!w->bias && !s->finite) return;
    const int64_t first = begin * PANEL, count = (hangs_over ? w->n : end * PANEL) - first;
    for (int32_t i = 0; i < s->dst_rows; i++) {
        float *row = s->dst + i * s->dst_stride + first;
        for (int64_t j = 0; w->bias && j < count; j++) row[j] += w->bias[first + j];
        if (s->finite && !all_finite(row, count)) report_bad_row(s->model, s->finite[i]);
    }
}

static void norm_heads(kestrel_model *m, float *x, int32_t heads, const float *gain, int32_t row)
{
    const int64_t d = m->config.head_dim;
    for (int32_t head = 0; gain && head < heads; head++)
        if (!m->kernels.norm(x + head * d, NULL, gain, d, m->config.rms_norm_eps, x + head * d)) report_bad_row(m, row);
}

static void rope_task(void *arg, int32_t task, int32_t thread)
{
    step *s = arg;
    kestrel_model *m = s->model;
    const kestrel_config *c = &m->config;
    const kestrel_layer *l = &c->layers[s->layer];
    const int64_t d = c->head_dim, half = d / 2, nq = c->n_heads * d, nk = c->n_kv_heads * d;
    (void)thread;
    FOR_ROWS(s, task, s->m) {
        float *q = m->qkv + (int64_t)i * m->qkv_columns, *k = q + nq, *v = k + nk;
        const int64_t table = ((int64_t)l->rope * m->max_rows + i) * half;
        const int32_t position = s->rows[i].position;
        m->lo[i] = l->window && position >= l->window ? position - l->window + 1 : 0;
        norm_heads(m, q, c->n_heads, l->q_norm, i);
        norm_heads(m, k, c->n_kv_heads, l->k_norm, i);
        m->kernels.rope(q, c->n_heads + c->n_kv_heads, d, m->cosine + table, m->sine + table);
        for (int64_t j = 0; j < nq; j++) q[j] *= c->query_scale;
        for (int32_t head = 0; head < c->n_kv_heads; head++)
            kestrel_kv_store(s->rows[i].kv, s->layer, head, position, k + head * d, v + head * d);
    }
}

/* --- the step ------------------------------------------------------------------------------------------------------ */

/* dst = src @ weight^T over `rows` rows; int8 and int4: the lhs has been filled by the phase before. */
static void matmul(step *s, int32_t rows, float *dst, int64_t dst_stride)
{
    s->dst = dst;
    s->dst_stride = dst_stride;
    s->dst_rows = rows;
    kestrel_run(s, matmul_task, matmul_tasks(s->weight));
}

/* The weight of the next matmul, which workers may begin to fetch, and what it reads. */
static void set_input(step *s, const kestrel_weight *weight, const float *src, int64_t stride)
{
    s->weight = weight;
    s->src = src;
    s->src_stride = stride;
    s->model->lhs.kp = padded_k(weight->k);
    kestrel_pool_ahead(s->model->pool, weight->data, task_panels(weight) * panel_bytes(weight->type, weight->k), matmul_tasks(weight));
}

/* m->normed = norm of x + delta (x keeps the sum); delta, what the block before made, is normed itself first if it has a post_gain. */
static void norm(step *s, const float *gain, float *delta, const float *post_gain, const int32_t *pick, int32_t rows)
{
    s->gain = gain;
    s->delta = delta;
    s->post_gain = post_gain;
    s->pick = pick;
    s->dst_rows = rows;
    kestrel_run(s, norm_task, row_tasks(s, rows));
}

static bool cancelled(int32_t fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return fd >= 0 && poll(&p, 1, 0) > 0 && (p.revents & POLLIN);
}

static int32_t not_finite(step *s, int32_t layer)
{
    const int row = atomic_load_explicit(&s->model->bad_row, memory_order_relaxed);
    if (row == INT_MAX) return KESTREL_OK;
    if (s->out) {
        s->out->error_layer = layer;
        s->out->error_row = row;
    }
    return KESTREL_E_NOT_FINITE;
}

static int32_t layers(step *s, int32_t cancel_fd)
{
    kestrel_model *m = s->model;
    const kestrel_config *c = &m->config;
    const int64_t h = c->hidden_size, nd = (int64_t)c->n_heads * c->head_dim, n = c->intermediate_size;
    kestrel_run(s, embed_task, row_tasks(s, s->m));
    kestrel_cut_tiles(s);
    for (s->layer = 0; s->layer < c->n_layers; s->layer++) {
        const kestrel_layer *l = &c->layers[s->layer];
        if (cancelled(cancel_fd)) return KESTREL_E_CANCELLED;

        set_input(s, &l->qkv, m->normed, h);
        norm(s, l->attention_norm, s->layer ? m->delta : NULL, s->layer ? l[-1].mlp_post_norm : NULL, NULL, s->m);
        kestrel_observe_maxima(s, s->m);
        kestrel_observe_moments(s, s->m);
        /* what this norm met was made by the layer below */
        if (s->layer && not_finite(s, s->layer - 1)) return KESTREL_E_NOT_FINITE;
        matmul(s, s->m, m->qkv, m->qkv_columns);
        kestrel_run(s, rope_task, row_tasks(s, s->m));
        kestrel_attend(s);

        set_input(s, &l->o, m->attended, nd);
        kestrel_observe_moments(s, s->m);
        if (l->o.type != KESTREL_F32) kestrel_run(s, quantize_task, row_tasks(s, s->m));
        matmul(s, s->m, m->delta, h);

        set_input(s, &l->gate_up, m->normed, h);
        norm(s, l->mlp_norm, m->delta, l->attention_post_norm, NULL, s->m);
        kestrel_observe_maxima(s, s->m);
        kestrel_observe_moments(s, s->m);
        matmul(s, s->m, m->gate_up, 2 * n);

        set_input(s, &l->down, m->gate_up, 2 * n);
        kestrel_run(s, activation_task, row_tasks(s, s->m));
        kestrel_observe_maxima(s, s->m);
        kestrel_observe_moments(s, s->m);
        matmul(s, s->m, m->delta, h);

        const int32_t status = not_finite(s, s->layer);
        if (status) return status;
    }
    return KESTREL_OK;
}

/* Final norm and head over the picked rows, one matmul; logits land in dst. */
static int32_t head(step *s, const int32_t *pick, int32_t rows, float *dst)
{
    kestrel_model *m = s->model;
    const kestrel_config *c = &m->config;
    set_input(s, &c->head, m->normed, c->hidden_size);
    norm(s, c->final_norm, m->delta, c->layers[c->n_layers - 1].mlp_post_norm, pick, rows);
    if (not_finite(s, c->n_layers - 1)) return KESTREL_E_NOT_FINITE;
    if (s->maxima) {
        float *maxima = s->maxima; /* the head's, however many batches of rows */
        kestrel_observe_maxima(s, rows);
        s->maxima = maxima;
        return KESTREL_OK;
    }
    s->finite = pick;
    matmul(s, rows, dst, c->vocab_size);
    s->finite = NULL;
    return not_finite(s, c->n_layers);
}

static int32_t outputs(step *s)
{
    kestrel_model *m = s->model;
    const kestrel_config *c = &m->config;
    kestrel_output *out = s->out;
    /* First the rows whose logits go out, into place; then those of which only candidates are wanted, in batches. */
    int32_t logits = 0, n = 0;
    for (int32_t i = 0; i < s->m; i++)
        if (s->rows[i].want & KESTREL_WANT_LOGITS) m->wanted[logits++] = i;
    n = logits;
    for (int32_t i = 0; i < s->m; i++)
        if (s->rows[i].want == KESTREL_WANT_CANDIDATES) m->wanted[n++] = i;
    for (int32_t begin = 0; begin < n;) {
        const bool direct = begin < logits;
        const int32_t left = (direct ? logits : n) - begin, count = direct || left < HEAD_BATCH ? left : HEAD_BATCH;
        float *dst = direct ? out->logits : m->head_logits;
        const int32_t status = head(s, m->wanted + begin, count, dst);
        if (status) return status;
        for (int32_t j = 0; j < count; j++) {
            const int32_t row = m->wanted[begin + j];
            if (!(s->rows[row].want & KESTREL_WANT_CANDIDATES)) continue;
            int64_t at = 0; /* place among the rows that want candidates */
            for (int32_t i = 0; i < row; i++) at += (s->rows[i].want & KESTREL_WANT_CANDIDATES) != 0;
            kestrel_candidates(dst + (int64_t)j * c->vocab_size, c->sampled_vocab, out->n_candidates, out->candidate_ids + at * out->n_candidates,
                               out->candidate_logits + at * out->n_candidates);
        }
        begin += count;
    }
    return KESTREL_OK;
}

static int32_t check(const kestrel_model *m, const kestrel_row *rows, int32_t count, const kestrel_output *out)
{
    if (!m || !rows || count < 1) return KESTREL_E_ARGUMENT;
    if (count > m->max_rows) return KESTREL_E_CAPACITY;
    for (int32_t i = 0, of_kv = 0; i < count; i++) {
        const kestrel_row *r = &rows[i];
        const kestrel_kv *kv = r->kv;
        if (!kv || r->token < 0 || r->token >= m->config.vocab_size || (r->want & ~3)) return KESTREL_E_ARGUMENT;
        if (kv->n_layers != m->config.n_layers || kv->n_kv_heads != m->config.n_kv_heads || kv->head_dim != m->config.head_dim) return KESTREL_E_ARGUMENT;
        if ((r->want & KESTREL_WANT_LOGITS) && (!out || !out->logits)) return KESTREL_E_ARGUMENT;
        if ((r->want & KESTREL_WANT_CANDIDATES) && (!out || !out->candidate_ids || !out->candidate_logits || out->n_candidates < 1 ||
                                                    out->n_candidates > m->config.sampled_vocab))
            return KESTREL_E_ARGUMENT;
        of_kv = i && rows[i - 1].kv == kv ? of_kv + 1 : 1;
        if (r->position != kv->length + of_kv - 1) return KESTREL_E_POSITION;
        if (of_kv == 1)
            for (int32_t j = 0; j < i; j++)
                if (rows[j].kv == kv) return KESTREL_E_POSITION; /* rows of one kv are consecutive */
        if (of_kv > kv->max_rows || r->position >= kv->capacity) return KESTREL_E_CAPACITY;
    }
    return KESTREL_OK;
}

int32_t kestrel_step(kestrel_model *model, const kestrel_row *rows, int32_t m, kestrel_output *out, int32_t cancel_fd)
{
    int32_t status = check(model, rows, m, out);
    if (status) return status;
    const uint64_t mode = kestrel_float_mode_enter();
    const int32_t threads = m <= KESTREL_FEW_ROWS ? model->threads : model->prefill_threads;
    step s = {.model = model, .rows = rows, .m = m, .threads = threads, .out = out, .maxima = out ? out->input_maxima : NULL,
              .moments = out ? out->input_moments : NULL, .row_block = m > 16 * threads ? 8 : 2};
    kestrel_pool_use(model->pool, threads);
    atomic_store_explicit(&model->bad_row, INT_MAX, memory_order_relaxed);
    status = layers(&s, cancel_fd);
    if (!status) status = outputs(&s);
    if (!status)
        for (int32_t i = 0; i < m; i++)
            if (i + 1 == m || rows[i + 1].kv != rows[i].kv) rows[i].kv->length = rows[i].position + 1;
    kestrel_float_mode_leave(mode);
    return status;
}

/* Making and freeing a model: checks its description, chooses kernels, lays out the scratch. SPDX-License-Identifier: Apache-2.0 */
#include "model.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool weight_ok(const kestrel_weight *w, int64_t n, int64_t k)
{
    return w->data && w->n == n && w->k == k && (w->type == KESTREL_F32 || w->type == KESTREL_INT8 || w->type == KESTREL_INT4) && (uintptr_t)w->data % 64 == 0;
}

static bool config_ok(const kestrel_config *c)
{
    const int32_t limit = 1 << 24;
    if (c->vocab_size < 1 || c->vocab_size > limit || c->sampled_vocab < 1 || c->sampled_vocab > c->vocab_size) return false;
    if (c->hidden_size < 1 || c->hidden_size > limit || c->intermediate_size < 1 || c->intermediate_size > limit) return false;
    if (c->n_layers < 1 || c->n_layers > 4096 || c->n_kv_heads < 1 || c->n_heads < c->n_kv_heads || c->n_heads > 4096) return false;
    if (c->n_heads % c->n_kv_heads || c->head_dim < 8 || c->head_dim > 512 || c->head_dim % 8) return false;
    if (!(c->rms_norm_eps > 0.0f) || !(c->query_scale > 0.0f) || !c->rope_inv_freq || !c->final_norm || !c->layers) return false;
    if (c->n_ropes < 1 || c->n_ropes > 8 || (c->hidden_act != KESTREL_SILU && c->hidden_act != KESTREL_GELU_TANH)) return false;
    const int64_t d = c->head_dim, h = c->hidden_size;
    if (!weight_ok(&c->embedding, c->vocab_size, h) || !weight_ok(&c->head, c->vocab_size, h)) return false;
    for (int32_t i = 0; i < c->n_layers; i++) {
        const kestrel_layer *l = &c->layers[i];
        if (!l->attention_norm || !l->mlp_norm || l->window < 0 || l->rope < 0 || l->rope >= c->n_ropes || !weight_ok(&l->qkv, (c->n_heads + 2 * c->n_kv_heads) * d, h) ||
            !weight_ok(&l->o, h, c->n_heads * d) || !weight_ok(&l->gate_up, 2 * (int64_t)c->intermediate_size, h) ||
            !weight_ok(&l->down, h, c->intermediate_size))
            return false;
    }
    return true;
}

/* Hands out the pieces of the scratch, 64-byte aligned; with base NULL it only adds up. */
static void *take(uint8_t *base, int64_t *offset, int64_t count, int64_t bytes)
{
    uint8_t *at = base ? base + *offset : NULL;
    *offset += round_up(count * bytes, 64);
    return at;
}

static int32_t most_threads(const kestrel_model *m) { return m->threads > m->prefill_threads ? m->threads : m->prefill_threads; }

static int64_t lay_out(kestrel_model *m, uint8_t *base)
{
    const kestrel_config *c = &m->config;
    const int64_t rows = m->max_rows, h = c->hidden_size, d = c->head_dim, state = STATE_HEAD + d;
    int64_t kp = padded_k(h), used = 0;
    if (padded_k(c->n_heads * d) > kp) kp = padded_k(c->n_heads * d);
    if (padded_k(c->intermediate_size) > kp) kp = padded_k(c->intermediate_size);
    m->x = take(base, &used, rows * h, 4);
    m->delta = take(base, &used, rows * h, 4);
    m->normed = take(base, &used, rows * h, 4);
    m->qkv = take(base, &used, rows * m->qkv_columns, 4);
    m->attended = take(base, &used, rows * c->n_heads * d, 4);
    m->gate_up = take(base, &used, rows * 2 * c->intermediate_size, 4);
    m->cosine = take(base, &used, c->n_ropes * rows * d / 2, 4);
    m->sine = take(base, &used, c->n_ropes * rows * d / 2, 4);
    m->head_logits = take(base, &used, HEAD_BATCH * (int64_t)c->vocab_size, 4);
    m->lo = take(base, &used, rows, 4);
    m->hi = take(base, &used, rows, 4);
    m->wanted = take(base, &used, rows, 4);
    m->tiles = take(base, &used, rows * c->n_kv_heads, sizeof(kestrel_tile));
    const int64_t threads = most_threads(m);
    m->states = take(base, &used, threads * m->tile_queries * state, 4);
    m->work = take(base, &used, threads * m->tile_queries * SPAN, 4);
    m->partials = take(base, &used, WAVE_TILES * threads * WAVE * m->tile_queries * state, 4);
    m->wave_states = take(base, &used, WAVE_TILES * threads * m->tile_queries * state, 4);
    m->tail = take(base, &used, rows * PANEL, 4);
    m->lhs.values = take(base, &used, round_up(rows, 8) * kp, 1);
    m->lhs.scales = take(base, &used, round_up(rows, 8) * kp / GROUP, 4);
    m->lhs.sums = take(base, &used, round_up(rows, 8) * kp / GROUP, 4);
    return used;
}

int32_t kestrel_model_create(const kestrel_config *config, const char *isa, int32_t threads, int32_t prefill_threads, int32_t max_rows, kestrel_model **out)
{
    if (!config || !out || threads < 1 || threads > 256 || prefill_threads < 1 || prefill_threads > 256 || max_rows < 1 || max_rows > 1 << 16 || !config_ok(config)) return KESTREL_E_ARGUMENT;
    kestrel_kernels kernels;
    const int status = kestrel_kernels_select(isa, &kernels);
    if (status) return status;
    kestrel_model *m = calloc(1, sizeof *m);
    if (!m) return KESTREL_E_MEMORY;
    const size_t layers_bytes = (size_t)config->n_layers * sizeof *config->layers, rope_bytes = (size_t)config->n_ropes * config->head_dim / 2 * sizeof(float);
    kestrel_layer *layers = malloc(layers_bytes);
    float *rope = malloc(rope_bytes);
    m->config = *config;
    m->config.layers = layers;
    m->config.rope_inv_freq = rope;
    m->kernels = kernels;
    m->threads = threads;
    m->prefill_threads = prefill_threads;
    m->max_rows = max_rows;
    m->qkv_columns = (config->n_heads + 2 * config->n_kv_heads) * config->head_dim;
    const int32_t group = config->n_heads / config->n_kv_heads;
    m->tile_queries = group > QUERY_TILE ? group : QUERY_TILE;
    m->scratch_bytes = lay_out(m, NULL);
    m->scratch = aligned_alloc(64, (size_t)m->scratch_bytes);
    m->pool = kestrel_pool_create(most_threads(m));
    if (!layers || !rope || !m->scratch || !m->pool) {
        kestrel_model_free(m);
        return KESTREL_E_MEMORY;
    }
    memcpy(layers, config->layers, layers_bytes);
    memcpy(rope, config->rope_inv_freq, rope_bytes);
    lay_out(m, m->scratch);
    *out = m;
    return KESTREL_OK;
}

void kestrel_model_free(kestrel_model *m)
{
    if (!m) return;
    kestrel_pool_free(m->pool);
    free(m->scratch);
    free((void *)m->config.layers);
    free((void *)m->config.rope_inv_freq);
    free(m);
}

int64_t kestrel_model_scratch_bytes(const kestrel_model *m) { return m ? m->scratch_bytes : -1; }

int32_t kestrel_abi(void) { return KESTREL_ABI; }
int32_t kestrel_numerics_version(void) { return KESTREL_NUMERICS_VERSION; }

const char *kestrel_status_text(int32_t status)
{
    switch (status) {
    case KESTREL_OK: return "ok";
    case KESTREL_E_ARGUMENT: return "argument outside its range";
    case KESTREL_E_MEMORY: return "out of memory";
    case KESTREL_E_ISA: return "instruction set unknown or not available on this CPU";
    case KESTREL_E_POSITION: return "row position is not the next one of its cache";
    case KESTREL_E_CAPACITY: return "more rows than the cache or the model was made for";
    case KESTREL_E_NOT_FINITE: return "NaN or Inf met";
    case KESTREL_E_CANCELLED: return "cancelled";
    case KESTREL_E_REWIND: return "rewind outside the cache's range";
    default: return "unknown status";
    }
}

#define SIZE(type) (int64_t)sizeof(type)
#define AT(type, field) (int64_t)offsetof(type, field)
int32_t kestrel_layout(int64_t *values, int32_t n)
{
    const int64_t all[] = {
        SIZE(kestrel_weight), AT(kestrel_weight, type), AT(kestrel_weight, reserved), AT(kestrel_weight, n), AT(kestrel_weight, k), AT(kestrel_weight, data),
        AT(kestrel_weight, bias),
        SIZE(kestrel_layer), AT(kestrel_layer, attention_norm), AT(kestrel_layer, q_norm), AT(kestrel_layer, k_norm), AT(kestrel_layer, attention_post_norm),
        AT(kestrel_layer, mlp_norm), AT(kestrel_layer, mlp_post_norm), AT(kestrel_layer, window), AT(kestrel_layer, rope), AT(kestrel_layer, qkv), AT(kestrel_layer, o),
        AT(kestrel_layer, gate_up), AT(kestrel_layer, down),
        SIZE(kestrel_config), AT(kestrel_config, vocab_size), AT(kestrel_config, sampled_vocab), AT(kestrel_config, hidden_size),
        AT(kestrel_config, intermediate_size), AT(kestrel_config, n_layers), AT(kestrel_config, n_heads), AT(kestrel_config, n_kv_heads),
        AT(kestrel_config, head_dim), AT(kestrel_config, hidden_act), AT(kestrel_config, n_ropes), AT(kestrel_config, rms_norm_eps), AT(kestrel_config, query_scale), AT(kestrel_config, rope_inv_freq),
        AT(kestrel_config, final_norm), AT(kestrel_config, embedding_scale), AT(kestrel_config, embedding), AT(kestrel_config, head), AT(kestrel_config, layers),
        SIZE(kestrel_row), AT(kestrel_row, kv), AT(kestrel_row, position), AT(kestrel_row, token), AT(kestrel_row, want), AT(kestrel_row, reserved),
        SIZE(kestrel_output), AT(kestrel_output, logits), AT(kestrel_output, candidate_ids), AT(kestrel_output, candidate_logits),
        AT(kestrel_output, n_candidates), AT(kestrel_output, error_layer), AT(kestrel_output, error_row), AT(kestrel_output, reserved),
        AT(kestrel_output, input_maxima), AT(kestrel_output, input_moments),
        SIZE(kestrel_sampling), AT(kestrel_sampling, temperature), AT(kestrel_sampling, top_p), AT(kestrel_sampling, min_p),
        AT(kestrel_sampling, repetition_penalty), AT(kestrel_sampling, presence_penalty), AT(kestrel_sampling, frequency_penalty), AT(kestrel_sampling, seed),
        AT(kestrel_sampling, seen_ids), AT(kestrel_sampling, seen_counts), AT(kestrel_sampling, bias_ids), AT(kestrel_sampling, bias),
        AT(kestrel_sampling, excluded_ids), AT(kestrel_sampling, top_k), AT(kestrel_sampling, n_seen), AT(kestrel_sampling, n_bias), AT(kestrel_sampling, n_excluded),
        SIZE(kestrel_comparison), AT(kestrel_comparison, kl), AT(kestrel_comparison, nll), AT(kestrel_comparison, nll_reference),
        AT(kestrel_comparison, argmax_equal), AT(kestrel_comparison, reserved),
    };
    const int32_t count = (int32_t)(sizeof all / sizeof *all);
    for (int32_t i = 0; values && i < n && i < count; i++) values[i] = all[i];
    return count;
}

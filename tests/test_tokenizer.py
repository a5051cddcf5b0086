"""tokenizer.py and vocabulary.py: ids equal to the outside reference, streams equal to one-shot decoding."""
from __future__ import annotations

import gzip
import hashlib
import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kestrel.errors import KestrelError
from kestrel.tokenizer import Tokenizer, build_from_gguf

DATA = Path(__file__).resolve().parent / "data"
TEXT = (DATA / "mixed.txt").read_bytes().decode("utf-8")
REFERENCE = json.loads((DATA / "smollm2_ids.json").read_text(encoding="utf-8"))
CUTS = json.loads((DATA / "vocabulary_ids.json").read_text(encoding="utf-8"))
FIELDS = json.loads(gzip.decompress((DATA / "smollm2_vocabulary.json.gz").read_bytes()))
JSON_BYTES, CONFIG = build_from_gguf(FIELDS)
SMOLLM2 = Tokenizer.from_bytes(JSON_BYTES, CONFIG)
IM_END = 2


def sentencepiece_json(decoder=None, prepend="always"):
    """A small SentencePiece-style BPE, as a Llama 2 tokenizer.json is: word marks, byte tokens, `<s>` put in front."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list("▁.,!<>/|_0123456789")
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + letters
    merges = []
    for word in ("▁the", "▁a", "▁and", "ing", "hello", "▁hello", "▁▁"):
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append([word[:end - 1], word[end - 1]])
    added = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": True} for i, t in enumerate(tokens[:3])]
    return json.dumps({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": None,
        "post_processor": {"type": "TemplateProcessing",
                           "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                           "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                           "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": decoder or {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": 0.5, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges},
    }, ensure_ascii=False).encode("utf-8")


LLAMA2 = Tokenizer.from_bytes(sentencepiece_json(), {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})


def test_the_reference_belongs_to_this_text():
    assert REFERENCE["provenance"]["mixed.txt sha256"] == hashlib.sha256(TEXT.encode("utf-8")).hexdigest()
    assert len(REFERENCE["ids"]) > 600 and REFERENCE["ids"] != REFERENCE["ids_special"]


def test_gguf_vocabulary_gives_the_reference_ids():
    assert SMOLLM2.encode(TEXT) == REFERENCE["ids"]
    assert SMOLLM2.encode(TEXT, special=True) == REFERENCE["ids_special"]
    assert SMOLLM2.encode(TEXT) == REFERENCE["ids"]  # the switch goes back
    assert SMOLLM2.size == 49152 and SMOLLM2.adds_bos is False
    assert (SMOLLM2.bos_token, SMOLLM2.eos_token, SMOLLM2.bos_token_id) == ("<|im_start|>", "<|im_end|>", 1)


def test_vocabulary_file_is_the_real_one(real_gguf):
    from kestrel.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(str(real_gguf))
    assert checkpoint.tokenizer_json == JSON_BYTES and checkpoint.tokenizer_config == CONFIG


def test_without_the_digit_splitter_the_ids_differ():
    wrong = Tokenizer.from_bytes(*build_from_gguf({**FIELDS, "tokenizer.ggml.pre": "gpt-2"}))
    assert wrong.encode(TEXT) != REFERENCE["ids"]


def test_digits_are_split_one_by_one():
    assert [SMOLLM2.token_bytes(i) for i in SMOLLM2.encode("x2026 07")] == [b"x", b"2", b"0", b"2", b"6", b" ", b"0", b"7"]


def test_each_pre_cuts_digits_its_own_way():
    alphabet = [t for t in FIELDS["tokenizer.ggml.tokens"] if len(t) == 1]
    fields = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": alphabet + ["12", "123", "1234", "45", "456", "hello", "<|x|>"],
        "tokenizer.ggml.token_type": [1] * (len(alphabet) + 6) + [3], "tokenizer.ggml.bos_token_id": len(alphabet) + 6,
        "tokenizer.ggml.merges": ["1 2", "12 3", "123 4", "4 5", "45 6"]}

    def tokens(pre, text):
        t = Tokenizer.from_bytes(*build_from_gguf({**fields, "tokenizer.ggml.pre": pre}))
        return [t.token_bytes(i).decode() for i in t.encode(text)], t.adds_bos

    assert tokens("gpt-2", "1234567") == (["1234", "5", "6", "7"], False)
    assert tokens("smollm", "1234567") == (["1", "2", "3", "4", "5", "6", "7"], False)
    assert tokens("llama-bpe", "1234567") == (["123", "456", "7"], True)
    assert tokens("gpt-2", "hello")[0] == ["h", "e", "l", "l", "o"]  # no merge makes it
    assert tokens("llama-bpe", "hello")[0] == ["hello"]  # but Llama 3 looks the whole piece up first
    assert tokens("llama-bpe", "<|x|>")[0] == ["<", "|", "x", "|", ">"]


def with_cut_merges(fields):
    """The vocabulary that vocabulary_ids.json was made with: some merges more, before all others."""
    tokens, more = fields["tokenizer.ggml.tokens"], [m.replace(" ", "") for m in CUTS["cut_merges"]]
    more = [t for t in more if t not in set(tokens)]
    return {**fields, "tokenizer.ggml.tokens": tokens + more, "tokenizer.ggml.token_type": fields["tokenizer.ggml.token_type"] + [1] * len(more),
            "tokenizer.ggml.merges": CUTS["cut_merges"] + [m for m in fields["tokenizer.ggml.merges"] if m not in set(CUTS["cut_merges"])]}


@pytest.mark.parametrize("pre", sorted({i: pre for pre, i in reversed(list(CUTS["byte_level"].items()))}.values()))
def test_each_pre_gives_llama_cpps_ids(pre):
    """One name of each cut (names of one cut share its table entry: the next test)."""
    t = Tokenizer.from_bytes(*build_from_gguf({**with_cut_merges(FIELDS), "tokenizer.ggml.pre": pre}))
    expected = CUTS["cuts"][CUTS["byte_level"][pre]]
    assert t.encode(TEXT + CUTS["cut_text"]) == expected["plain"] and t.encode(TEXT + CUTS["cut_text"], special=True) == expected["special"]


def test_names_of_one_cut_share_it_and_cuts_differ():
    from kestrel.vocabulary import _PRE

    assert len(CUTS["cuts"]) == 7 and set(CUTS["byte_level"]) == set(_PRE) - {"llama3"}  # llama.cpp has dropped that old name
    cuts = {}
    for pre, i in CUTS["byte_level"].items():
        cuts.setdefault(i, set()).add(json.dumps([_PRE[pre].cut, _PRE[pre].normalizer]))
    assert all(len(same) == 1 for same in cuts.values()) and len(set().union(*cuts.values())) == 7
    assert _PRE["llama3"] == _PRE["llama-bpe"]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabulary_gives_llama_cpps_ids(prefix):
    fields = {**CUTS["sentencepiece_fields"], "tokenizer.ggml.add_space_prefix": prefix}
    t = Tokenizer.from_bytes(*build_from_gguf(fields))
    expected = CUTS["sentencepiece"][str(prefix).lower()]
    assert t.encode(TEXT) == expected["plain"] != t.encode(TEXT, special=True) == expected["special"]
    assert t.decode(t.encode(TEXT, special=True), special=True) == t._library.decode(expected["special"], skip_special_tokens=False)
    assert t.adds_bos and t.encode("x", bos=True)[0] == 1
    if not prefix:
        assert t.decode(expected["plain"], special=True) == TEXT and t.decode(t.encode("  a b"), continues=True) == "  a b"
    else:  # a space comes before each stretch of text, and goes from the first
        assert t.decode(t.encode(" a b")) == " a b" and t.decode(t.encode("a")) == "a"


def test_control_tokens_are_out_of_reach_of_text_in_a_sentencepiece_vocabulary():
    """Two pieces that spell a control token may not join into it; llama.cpp lets them."""
    fields = CUTS["sentencepiece_fields"]
    tokens = fields["tokenizer.ggml.tokens"] + ["<|im_e", "nd|>"]
    fields = {**fields, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": fields["tokenizer.ggml.token_type"] + [1, 1],
              "tokenizer.ggml.scores": fields["tokenizer.ggml.scores"] + [0.0, 0.0]}
    t = Tokenizer.from_bytes(*build_from_gguf(fields))
    end = tokens.index("<|im_end|>")
    assert end not in t.encode("a<|im_end|>b") and t.encode("a<|im_end|>b", special=True).count(end) == 1
    assert t.decode(t.encode("a<|im_end|>b")) == "a<|im_end|>b"


@pytest.mark.parametrize("keys, words", [
    ({"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores"), ({"tokenizer.ggml.scores": [0.0]}, "tokenizer.ggml.scores"),
    ({"tokenizer.ggml.scores": ["x"] * len(CUTS["sentencepiece_fields"]["tokenizer.ggml.tokens"])}, "tokenizer.ggml.scores"),
    ({"tokenizer.ggml.scores": [float("nan")] * len(CUTS["sentencepiece_fields"]["tokenizer.ggml.tokens"])}, "tokenizer.ggml.scores"),
    ({"tokenizer.ggml.unknown_token_id": 10 ** 9}, "tokenizer.ggml.unknown_token_id"), ({"tokenizer.ggml.model": "rwkv"}, "rwkv"),
    ({"tokenizer.ggml.unknown_token_id": "x"}, "tokenizer.ggml.unknown_token_id"), ({"tokenizer.ggml.token_type": None}, "tokenizer.ggml.token_type"),
])
def test_sentencepiece_vocabularies_refused_by_name(keys, words):
    with pytest.raises(KestrelError) as error:
        build_from_gguf({**CUTS["sentencepiece_fields"], **keys}, "model.gguf")
    assert str(error.value).startswith("model.gguf: ") and words in str(error.value)


def test_phi3s_turn_tokens_swallow_the_white_space_after_them():
    fields = {**CUTS["sentencepiece_fields"], "general.architecture": "phi3"}
    t = Tokenizer.from_bytes(*build_from_gguf(fields))
    end = fields["tokenizer.ggml.tokens"].index("<|im_end|>")
    assert t.encode("<|im_end|>\n<|im_end|>\n", special=True) == [end, end] and t.split_special("<|im_end|>\n") == [("<|im_end|>", end)]


@pytest.mark.native_only
def test_real_gemma_gives_llama_cpps_ids(gemma_gguf):
    """262,144 SentencePiece tokens, a control token for each turn, HTML tags and runs of white space as user-defined ones."""
    from kestrel.container import read_gguf_header

    t = Tokenizer.from_bytes(*build_from_gguf(read_gguf_header(str(gemma_gguf))[0]))
    gemma = CUTS["gemma"]
    for kind in ("plain", "special"):
        assert t.encode(gemma["text"], special=kind == "special") == gemma["own"][kind]
    # llama.cpp takes Gemma's HTML tag </s> for an end token and keeps it out of plain text; Gemma's vocabulary calls it user-defined
    assert t.encode(TEXT) == gemma["mixed"]["special"] == t.encode(TEXT, special=True)
    assert (t.bos_token_id, t.adds_bos, t.size) == (2, True, 262144) and t.decode(t.encode(TEXT)) == TEXT


@pytest.mark.parametrize("keys, words", [
    ({"tokenizer.ggml.pre": "deepseek-coder"}, "deepseek-coder"),
    ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre"),
    ({"tokenizer.ggml.pre": ["smollm"]}, "tokenizer.ggml.pre"),
    ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model"),
    ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "'a' occurs twice"),
    ({"tokenizer.ggml.merges": ["Ġ t", "zq zq"]}, "zq zq"),
    ({"tokenizer.ggml.merges": ["nospace"]}, "nospace"),
    ({"tokenizer.ggml.merges": [1]}, "tokenizer.ggml.merges"),
    ({"tokenizer.ggml.token_type": [1, 2]}, "tokenizer.ggml.token_type"),
])
def test_vocabularies_refused_by_name(keys, words):
    with pytest.raises(KestrelError) as error:
        build_from_gguf({**FIELDS, **keys}, "model.gguf")
    assert str(error.value).startswith("model.gguf: ") and words in str(error.value)


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"\xff\xfe", b"null", JSON_BYTES[:100000], b'{"model": {"type": "BPE"}}',
                                 b'{"decoder": {"type": "Fuse"}, "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}'])
def test_not_a_tokenizer(raw):
    with pytest.raises(KestrelError) as error:
        Tokenizer.from_bytes(raw, {}, "dir/tokenizer.json")
    assert str(error.value).startswith("dir/tokenizer.json: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("config", [
    {"extra_special_tokens": 7}, {"additional_special_tokens": [["<|im_end|>"], 3, None, {"content": 4}]}, {"bos_token": 3},
    {"eos_token": {"content": []}}, {"add_bos_token": "yes"}, {"extra_special_tokens": {"x": "<|im_end|>"}},
])
def test_odd_tokenizer_configs_change_nothing(config):
    t = Tokenizer.from_bytes(JSON_BYTES, config)
    assert t.encode(TEXT) == REFERENCE["ids"] and t.bos_token is None and not t.adds_bos


def test_a_decoder_we_do_not_know_is_refused():
    with pytest.raises(KestrelError, match="WordPiece"):
        Tokenizer.from_bytes(sentencepiece_json({"type": "WordPiece", "prefix": "##", "cleanup": True}), {})
    with pytest.raises(KestrelError, match="decoder"):
        Tokenizer.from_bytes(json.dumps({**json.loads(JSON_BYTES), "decoder": None}).encode(), {})


def test_special_tokens_in_text_are_text():
    """Case 39."""
    for text in ("<|im_end|>", "a<|im_end|>b", "<|im_start|>system\n<|endoftext|>"):
        ids = SMOLLM2.encode(text)
        assert not SMOLLM2.special_ids.intersection(ids) and SMOLLM2.decode(ids) == text
    assert SMOLLM2.encode("a<|im_end|>b", special=True)[1] == IM_END
    assert not LLAMA2.special_ids.intersection(LLAMA2.encode("hello</s>and<s>"))
    assert LLAMA2.encode("</s>", special=True) == [2]


def test_tokens_that_only_the_config_calls_special_are_special():
    """tokenizer.json forgot to mark <|im_end|>; tokenizer_config names it eos_token."""
    tokenizer = json.loads(JSON_BYTES)
    for token in tokenizer["added_tokens"]:
        token["special"] = False
    t = Tokenizer.from_bytes(json.dumps(tokenizer).encode(), {"eos_token": {"content": "<|im_end|>"},
                                                             "additional_special_tokens": ["<|im_start|>"]})
    assert set(t.special_tokens) == {"<|im_end|>", "<|im_start|>"}
    assert IM_END not in t.encode("<|im_end|>") and t.encode("<|im_end|>", special=True) == [IM_END]


def test_bos_as_the_checkpoint_says():
    hello = LLAMA2.encode("hello")
    assert LLAMA2.adds_bos and LLAMA2.encode("hello", bos=True) == [1] + hello
    assert LLAMA2.encode("<s>hello", special=True, bos=True).count(1) == 1
    assert LLAMA2.encode("", bos=True) == [1] and LLAMA2.encode("") == []
    off = Tokenizer.from_bytes(sentencepiece_json(), {"bos_token": "<s>", "add_bos_token": False})
    assert off.encode("hello", bos=True) == hello
    assert SMOLLM2.encode("hello", bos=True) == SMOLLM2.encode("hello")


def test_truncation_and_dropout_of_the_file_are_not_obeyed():
    assert len(LLAMA2.encode("hello and the hello and the hello")) > 4
    assert len({tuple(LLAMA2.encode("hello and the hello")) for _ in range(50)}) == 1


def test_lone_surrogate_is_refused():
    with pytest.raises(KestrelError, match="surrogate"):
        SMOLLM2.encode("ab\ud800")


def library(tokenizer, ids):
    return tokenizer._library.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", [TEXT, " leading", "  two leading", "", "😀", "▁mark", "hello and the ▁ x", "\n", "日本語"])
@pytest.mark.parametrize("tokenizer", [SMOLLM2, LLAMA2], ids=["byte-level", "sentencepiece"])
def test_round_trip_and_equal_to_the_library(tokenizer, text):
    """Case 40, leading spaces included."""
    ids = tokenizer.encode(text)
    if tokenizer is SMOLLM2:
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, special=True) == library(tokenizer, ids)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_decoder_equals_the_library(scheme):
    t = Tokenizer.from_bytes(sentencepiece_json({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}), {})
    for text in ("hello and the", "  hello", "a b"):
        ids = t.encode(text)
        assert t.decode(ids, special=True) == library(t, ids)


def test_a_continuation_keeps_its_leading_space():
    ids = LLAMA2.encode("hello and")
    assert LLAMA2.decode(ids) == "hello and"
    assert LLAMA2.decode(ids[:1]) + LLAMA2.decode(ids[1:], continues=True) == "hello and"


def test_special_tokens_are_shown_only_on_request():
    ids = SMOLLM2.encode("<|im_start|>user\nhi<|im_end|>", special=True)
    assert SMOLLM2.decode(ids) == "user\nhi"
    assert SMOLLM2.decode(ids, special=True) == "<|im_start|>user\nhi<|im_end|>"


def stream(tokenizer, ids, **how):
    decoder = tokenizer.stream(**how)
    return [decoder.push(i) for i in ids] + [decoder.flush()]


@pytest.mark.parametrize("tokenizer", [SMOLLM2, LLAMA2], ids=["byte-level", "sentencepiece"])
def test_no_replacement_character_inside_a_split_character(tokenizer):
    text = "😀👨‍👩‍👧‍👦 日本語 é 한국어"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text.replace(" ", ""))  # characters really are split over tokens
    pieces = stream(tokenizer, ids)
    assert "�" not in "".join(pieces) and "" in pieces[:-1] and "".join(pieces) == text


def test_a_character_cut_off_at_the_end_is_one_replacement():
    ids = SMOLLM2.encode("ab日")
    cut = [i for i in ids if SMOLLM2.token_bytes(i)][:-1]
    *pieces, last = stream(SMOLLM2, cut)
    assert "�" not in "".join(pieces) and last == "�"
    assert SMOLLM2.decode(cut) == "".join(pieces) + last


# SmolLM2's vocabulary has no token for some bytes (they never occurred in its corpus); its tokenizer drops them.
BYTES = {SMOLLM2.token_bytes(i) for i in range(SMOLLM2.size)}
NO_TOKEN = [b for b in range(256) if bytes([b]) not in BYTES]


def test_bytes_without_a_token_are_few_and_dropped():
    valid = [b for b in NO_TOKEN if b not in (0xC0, 0xC1) and b < 0xF5]  # the others never occur in UTF-8
    assert valid == [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2]
    # the ids are the reference tokenizer.json's for this text
    assert SMOLLM2.encode("a\U00040000b") == [81, 218, 218, 218, 82]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(text):
    text = "".join(c for c in text if not set(c.encode("utf-8")).intersection(NO_TOKEN))
    assert SMOLLM2.decode(SMOLLM2.encode(text)) == text
    assert "".join(stream(LLAMA2, LLAMA2.encode(text))) == LLAMA2.decode(LLAMA2.encode(text))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=40), st.booleans())
def test_any_ids_stream_to_the_one_shot_text(ids, special):
    # The one-shot text stated without the stream: all bytes at once, and the library's own answer.
    shown = [i for i in ids if special or i not in SMOLLM2.special_ids]
    whole = b"".join(SMOLLM2.token_bytes(i) for i in shown).decode("utf-8", "replace")
    assert "".join(stream(SMOLLM2, ids, special=special)) == whole == SMOLLM2.decode(ids, special=special)
    assert whole == library(SMOLLM2, shown)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, LLAMA2.size - 1), max_size=40))
def test_any_sentencepiece_ids_stream_to_the_one_shot_text(ids):
    """Case 40: see test_any_ids_stream_to_the_one_shot_text."""
    shown = [i for i in ids if i not in LLAMA2.special_ids]
    whole = b"".join(LLAMA2.token_bytes(i) for i in shown).decode("utf-8", "replace")
    assert "".join(stream(LLAMA2, ids)) == (whole[1:] if whole.startswith(" ") else whole)


def test_padding_ids_are_nothing():
    assert SMOLLM2.token_bytes(SMOLLM2.size) == b"" and SMOLLM2.decode([SMOLLM2.size + 5]) == ""


def test_a_token_costs_the_same_at_the_end_of_a_long_stream():
    ids = SMOLLM2.encode(TEXT) * 60  # about 44,000 tokens
    decoder = SMOLLM2.stream()
    for i in ids[:2000]:
        decoder.push(i)

    def seconds(part):
        start = time.process_time()
        for i in part:
            decoder.push(i)
        return time.process_time() - start

    early, _, late = seconds(ids[2000:12000]), seconds(ids[12000:32000]), seconds(ids[32000:42000])
    assert late < 3 * early + 0.01  # a decoder that went over its history would be 4 to 5 times slower by then

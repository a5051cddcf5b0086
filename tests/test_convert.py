# SPDX-License-Identifier: Apache-2.0
"""Conversion: the same bytes on every machine (case 22), the fold included, and what it may not leave behind."""
from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest

from kestrel.config import ModelConfig
from kestrel.convert import convert
from kestrel.errors import KestrelError
from kestrel.pack import PackedModel

# sha256 of the int8 file that `kestrel convert tests/golden/NAME OUT` writes, with the built-in calibration text: on x86 and on aarch64
DIGESTS = {
    "tiny-tied": "970873dd2b6813e401d6fb9159df54af93a98493d44018ccacce04488aa7d538",
    "tiny-untied": "55b7a703f18f6198af34304f21b9d7f826f75b1edcd39007c6b92b15752084a1",
}
# Those with room for a long context, calibrated with a short text (the emulated cores are slow).
TEXT = "Fold me: a text of some hundred tokens, longer than any window of these models. " * 4
OTHER_DIGESTS = {
    "tiny-llama3": "7e313bee812af4b1b4a8dbc809a4d45afbd15827035a758566f8e91e85191428",
    "tiny-yarn": "c5bfff0825116c2011a34e3eb54304f21ce171435345fdc5520ebed697483d53",
    "tiny-biased": "b85b4ebb81b2f4bc78b642363335f3b15db7c798dbcb1583854d1bad0e8dc3fb",
    "tiny-mistral": "fd714272d8f8282b7a9898c738152c355ba4f1cd03f1c0b5480fcdf339e4cb65",
    "tiny-qwen2": "567ae82c0858c3b741bd91d6af348d9653ffd53ca24d13557de688b62c73383d",
    "tiny-qwen3": "7c3d774020586208ce630cf177fdfd4b1460ec00ba474139630cefe6cbe65f7a",
    "tiny-gemma3": "18e0070a65c3864b53129c63b594fb06a5c4a4b5d7c92328f38b2de04839be31",
    "tiny-phi3": "50178d51ad1b9af0621204ab57653b03a41c4ed5b33572241f9a39df7fda312b",
}


@pytest.mark.parametrize("name", [*sorted(DIGESTS), *sorted(OTHER_DIGESTS)])
def test_the_file_is_the_same_on_every_machine(root, tmp_path, name):
    out = tmp_path / "model.kestrel"
    convert(str(root / "tests" / "golden" / name), str(out), calibrate=TEXT if name in OTHER_DIGESTS else None)
    assert hashlib.sha256(out.read_bytes()).hexdigest() == {**DIGESTS, **OTHER_DIGESTS}[name]
    assert [p.name for p in tmp_path.iterdir()] == ["model.kestrel"]  # the uncalibrated model in between is gone


def test_calibration_shows_in_the_file_and_can_be_left_out(root, tmp_path):
    source = str(root / "tests" / "golden" / "tiny-tied")
    kinds = {"built-in": None, "other": "Some other text, to calibrate with. " * 8, "off": ""}
    for name, text in kinds.items():
        convert(source, str(tmp_path / name), calibrate=text)
    files = {name: PackedModel(str(tmp_path / name)) for name in kinds}
    assert files["off"].calibration == "off" and not files["off"].has("embedding_scale")
    assert files["built-in"].has("embedding_scale") and files["built-in"].calibration != files["other"].calibration
    assert len({(tmp_path / name).read_bytes() for name in kinds}) == 3


def test_a_calibration_text_that_is_no_text_is_refused(root, tmp_path):
    folder = root / "tests" / "golden" / "tiny-tied"
    out = tmp_path / "model.kestrel"
    with pytest.raises(KestrelError, match="not valid Unicode"):
        convert(str(folder), str(out), calibrate="\ud800")
    assert list(tmp_path.iterdir()) == []


_MEASURED = """
import sys
from kestrel.convert import convert
convert(sys.argv[1], sys.argv[2], "int8", calibrate="A short text is enough to run the model for its ranges.")
with open("/proc/self/status") as status:   # ru_maxrss would begin with what the parent had at the fork
    print(next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")))
"""


@pytest.mark.native_only
def test_a_bf16_file_converts_in_half_its_size_and_300_mb(root, tmp_path):
    """Case 26, measured: 264 MB of BF16, most of it in two tensors; read whole, either alone takes 200 MB as float32."""
    golden = root / "tests" / "golden" / "tiny-untied"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((golden / name).read_bytes())
    config = {"model_type": "llama", "vocab_size": 49152, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 8,
              "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, t in ModelConfig.from_hf(config).tensors().items():
        size = 2 * int(np.prod(t.shape))
        header[name] = {"dtype": "BF16", "shape": list(t.shape), "data_offsets": [at, at + size]}
        at += size
    bits = np.random.default_rng(5).integers(0, 1 << 16, 1 << 20).astype("<u2")
    block = (bits & 0x807F | 0x3C80).tobytes()  # 2^-6 <= |x| < 2^-5
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, at, len(block)):
            file.write(block[:at - begin])
    done = subprocess.run([sys.executable, "-c", _MEASURED, str(tmp_path), str(tmp_path / "out.kestrel")], stdout=subprocess.PIPE, universal_newlines=True,
                          cwd=str(root), check=True)
    assert at > 250 << 20
    assert 220e6 < at / 2 + 300e6
    assert int(done.stdout) < 220e6  # 107 MB here; one of the large tensors as float32 beside it would not fit

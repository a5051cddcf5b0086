# SPDX-License-Identifier: Apache-2.0
"""Conversion: the same bytes on every machine (case 22), the fold included, and what it may not leave behind."""
from __future__ import annotations

import hashlib

import pytest

from kestrel.convert import convert
from kestrel.errors import KestrelError
from kestrel.pack import PackedModel

# sha256 of the int8 file that `kestrel convert tests/golden/NAME OUT` writes, with the built-in calibration text: on x86 and on aarch64
DIGESTS = {
    "tiny-tied": "970873dd2b6813e401d6fb9159df54af93a98493d44018ccacce04488aa7d538",
    "tiny-untied": "55b7a703f18f6198af34304f21b9d7f826f75b1edcd39007c6b92b15752084a1",
    "tiny-llama3": "c52b3b7c4516cea481851e122bba818581c751f3be2439b14a94ceb273fa0922",
    "tiny-biased": "8c70a8724b7405906b7f30fb6f59da374c90bd322adfa999b172816ea5baa343",
    "tiny-mistral": "7307421972390c9f62fe034fe24ceb6667b6b1c72a30d3b8dd3bd65387863c34",
    "tiny-qwen2": "cb19ecb30bc22ee04e9907fbc750dcd993b069c0a16105fa46eac4a445c1828f",
    "tiny-qwen3": "ee1f439263b875dc51b2efc4bf9a0d43b7cd5edb8afdcd6bea25971a2204b36b",
    "tiny-gemma3": "7a23d8b3a84367995b69f3e59b877b28b37cdc137a525b2beca0b92adbfc3598",
    "tiny-phi3": "44fcbe2bc108883f3daf4d03f0d8df3e14a217c96eb0893d0788fb54c788013d",
}


@pytest.mark.parametrize("name", sorted(DIGESTS))
def test_the_file_is_the_same_on_every_machine(root, tmp_path, name):
    out = tmp_path / "model.kestrel"
    convert(str(root / "tests" / "golden" / name), str(out))
    assert hashlib.sha256(out.read_bytes()).hexdigest() == DIGESTS[name]
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

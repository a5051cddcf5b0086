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
    assert files["off"].calibration == "off" and not files["off"].folded_head
    assert files["built-in"].folded_head and files["built-in"].calibration != files["other"].calibration
    assert len({(tmp_path / name).read_bytes() for name in kinds}) == 3


def test_a_calibration_text_that_is_no_text_is_refused(root, tmp_path):
    folder = root / "tests" / "golden" / "tiny-tied"
    out = tmp_path / "model.kestrel"
    with pytest.raises(KestrelError, match="not valid Unicode"):
        convert(str(folder), str(out), calibrate="\ud800")
    assert list(tmp_path.iterdir()) == []

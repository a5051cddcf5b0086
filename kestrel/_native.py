# SPDX-License-Identifier: Apache-2.0
"""The one door to libkestrel.so: loads it, and checks what cffi does not (dtype, shape, contiguity, writability).

The library is opened by cffi in ABI mode. What makes that safe: compiler and cffi read the same block of kestrel.h, the ABI
number is compared here, and a test compares every sizeof and offsetof.
"""
from __future__ import annotations

import os
import platform
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .errors import KestrelError

try:
    from ._kestrel_cffi import ffi
except ImportError:
    raise ImportError("kestrel is not built here: `pip install .`, or `python3 csrc/build.py` in a source tree") from None

_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libkestrel.so")
_ABI = 7


def _check_cpu() -> None:
    """x86: the whole library is built for x86-64-v3, so ask before its first instruction, not after."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line.split(":", 1)[1].split() for line in file if line.startswith("flags")), None)
    except OSError:
        return
    missing = [f for f in ("avx2", "fma", "f16c", "bmi2") if flags is not None and f not in flags]
    if missing:
        raise KestrelError(f"this CPU lacks {', '.join(missing)}; on x86 kestrel needs x86-64-v3 (2013 and later)")


def _load() -> Any:
    _check_cpu()
    try:
        library = ffi.dlopen(_LIBRARY)
    except OSError as error:
        raise KestrelError(f"{_LIBRARY}: {error}") from None
    if library.kestrel_abi() != _ABI:
        raise KestrelError(f"{_LIBRARY}: ABI {library.kestrel_abi()}, expected {_ABI}: build and package do not belong together")
    return library


lib = _load()

F32, INT8, F16, INT4 = lib.KESTREL_F32, lib.KESTREL_INT8, lib.KESTREL_F16, lib.KESTREL_INT4
PANEL, GROUP, FEEDBACK = lib.KESTREL_PANEL, lib.KESTREL_GROUP, lib.KESTREL_FEEDBACK
NUMERICS_VERSION, FORMAT_VERSION = lib.KESTREL_NUMERICS_VERSION, lib.KESTREL_FORMAT_VERSION
WANT_NONE, WANT_LOGITS, WANT_CANDIDATES = lib.KESTREL_WANT_NONE, lib.KESTREL_WANT_LOGITS, lib.KESTREL_WANT_CANDIDATES
E_CANCELLED, E_NOT_FINITE = lib.KESTREL_E_CANCELLED, lib.KESTREL_E_NOT_FINITE

HIDDEN_ACTS = {"silu": lib.KESTREL_SILU, "gelu_pytorch_tanh": lib.KESTREL_GELU_TANH}
TYPES = {"f32": F32, "int8": INT8, "f16": F16, "int4": INT4}


def status_text(status: int) -> str:
    """The library's own words for a status code."""
    return ffi.string(lib.kestrel_status_text(status)).decode()


def check(status: int, what: str) -> None:
    """Raises KestrelError naming `what` unless the status is KESTREL_OK."""
    if status:
        raise KestrelError(f"{what}: {status_text(status)}")


def isa_names() -> List[str]:
    """Instruction sets that this build has and this CPU can run, oldest first; "portable" is always the first."""
    names = []
    while True:
        name = lib.kestrel_isa_name(len(names))
        if name == ffi.NULL:
            return names
        names.append(ffi.string(name).decode())


def choose_isa(isa: Optional[str]) -> str:
    """The instruction set to run: `isa`, else $KESTREL_ISA, else the best here. KestrelError when it can't be had."""
    here = isa_names()
    wanted = isa or os.environ.get("KESTREL_ISA") or here[-1]
    if wanted not in here:
        raise KestrelError(f"instruction set {wanted!r}: not available on this CPU; available: {', '.join(here)}")
    return wanted


def variants(isa: str) -> Dict[str, str]:
    """{op: name of the kernel variant that runs under `isa`}."""
    table: Dict[str, str] = {}
    while True:
        op = lib.kestrel_op_name(len(table))
        if op == ffi.NULL:
            return table
        table[ffi.string(op).decode()] = ffi.string(lib.kestrel_variant_name(isa.encode(), op)).decode()


def self_test(isa: str) -> Dict[str, str]:
    """{op: digest, 16 hexadecimal digits} of what each op gives under `isa` for inputs made from a counter."""
    digests = {}
    for op in variants(isa):
        out = ffi.new("uint64_t *")
        check(lib.kestrel_self_test(isa.encode(), op.encode(), out), f"self-test of {op}")
        digests[op] = f"{out[0]:016x}"
    return digests


def layout() -> List[int]:
    """sizeof and offsetof of every public struct as the C compiler sees them."""
    count = lib.kestrel_layout(ffi.NULL, 0)
    values = ffi.new("int64_t[]", count)
    lib.kestrel_layout(values, count)
    return list(values)


def array(value: Any, dtype: str, shape: Tuple[int, ...], name: str, writable: bool = False) -> Any:
    """`value` (a numpy array or a buffer) as a cffi pointer; raises ValueError naming what differs. -1 in shape matches any size.

    The pointer keeps `value` alive.
    """
    import numpy as np

    if not isinstance(value, np.ndarray):
        value = np.asarray(value)
    fits = value.ndim == len(shape) and all(want in (-1, have) for want, have in zip(shape, value.shape))
    if value.dtype != np.dtype(dtype) or not fits:
        raise ValueError(f"{name}: expected {np.dtype(dtype)} {list(shape)}, found {value.dtype} {list(value.shape)}")
    if not value.flags.c_contiguous or (writable and not value.flags.writeable):
        raise ValueError(f"{name}: expected a C-contiguous{' writable' if writable else ''} array")
    return ffi.from_buffer({"float32": "float[]", "uint8": "uint8_t[]", "int32": "int32_t[]"}[str(value.dtype)], value, require_writable=writable)


def packed_bytes(weight_type: str, n: int, k: int) -> int:
    """Bytes of a packed matrix of n rows and k columns; a multiple of 64."""
    size = lib.kestrel_packed_bytes(TYPES[weight_type], n, k)
    if size < 0:
        raise ValueError(f"no packed {weight_type} matrix of {n} x {k}")
    return size


def pack(weight_type: str, n: int, row0: int, rows: Any, dst: Any, importance: Any = None, feedback: Any = None) -> None:
    """Packs rows [row0, row0 + len(rows)) of a matrix with n rows. rows: float32 [r, k]; dst: uint8, the whole packed matrix.

    int4: importance float32 [k, padded to GROUP] and feedback float32 [blocks, FEEDBACK, FEEDBACK] as in kestrel.h, or None.
    """
    k = rows.shape[1]
    kp = -(-k // GROUP) * GROUP
    columns = ffi.NULL if importance is None else array(importance, "float32", (kp,), "importance")
    factors = ffi.NULL if feedback is None else array(feedback, "float32", (-(-kp // FEEDBACK), FEEDBACK, FEEDBACK), "feedback")
    check(lib.kestrel_pack(TYPES[weight_type], n, k, row0, rows.shape[0], array(rows, "float32", (-1, -1), "rows"), columns, factors,
                           array(dst, "uint8", (packed_bytes(weight_type, n, k),), "dst", writable=True)), "pack")


def feedback(moments: Any) -> Any:
    """float32 [blocks, FEEDBACK, FEEDBACK]: where int4's rounding errors go, of moments float32 of the same shape (kestrel_feedback)."""
    import numpy as np

    shape = (moments.shape[0], FEEDBACK, FEEDBACK)
    out = np.empty(shape, np.float32)
    read, written = array(moments, "float32", shape, "moments"), array(out, "float32", shape, "factors", writable=True)
    for block in range(shape[0]):
        check(lib.kestrel_feedback(FEEDBACK, read + block * FEEDBACK ** 2, written + block * FEEDBACK ** 2), "feedback")
    return out


def unpack_row(weight: Any, row: int) -> Any:
    """float32 [k]: row `row` of a kestrel_weight as the kernels compute with it."""
    import numpy as np

    out = np.empty(weight.k, np.float32)
    check(lib.kestrel_unpack_row(ffi.addressof(weight), row, array(out, "float32", (-1,), "out", writable=True)), f"row {row}")
    return out


def rope_inv_freq(theta: float, head_dim: int) -> Any:
    """float32 [head_dim / 2]: theta^(-2i / head_dim), the same bits on every machine."""
    import numpy as np

    out = np.empty(head_dim // 2, np.float32)
    check(lib.kestrel_rope_inv_freq(theta, head_dim, array(out, "float32", (-1,), "out", writable=True)), f"rope_theta {theta!r}, head_dim {head_dim}")
    return out


def ln(x: float) -> float:
    """Natural logarithm of a normal number above 0, the same bits on every machine."""
    if not 2.3e-308 < x < 1.8e308:
        raise ValueError(f"ln of {x!r}")
    return lib.kestrel_ln(x)


def compare(reference: Any, logits: Any, label: int) -> Tuple[float, float, float, bool]:
    """(KL(reference || logits) in nats, -log q[label], -log p[label], argmax equal) of two float32 rows of logits."""
    out = ffi.new("kestrel_comparison *")
    n = reference.shape[0]
    check(lib.kestrel_compare(array(reference, "float32", (n,), "reference"), array(logits, "float32", (n,), "logits"), n, label, out), "compare")
    return out.kl, out.nll, out.nll_reference, bool(out.argmax_equal)


def logsumexp(logits: Any) -> float:
    """log sum exp of one float32 row, in double, ids ascending."""
    out = ffi.new("double *")
    check(lib.kestrel_logsumexp(array(logits, "float32", (-1,), "logits"), logits.shape[0], out), "logsumexp")
    return out[0]


if sys.byteorder != "little":
    raise ImportError("kestrel needs a little-endian machine")

# SPDX-License-Identifier: Apache-2.0
"""A model from the Hugging Face hub, by `huggingface_hub` (the extra `hub`): only the files that a conversion reads, into the hub's own cache.

A broken connection is taken up again where it stopped, a run that failed keeps the files that were whole; what the cache holds is not fetched again, and serves
without a network. The library's settings hold:
HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""
from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any, Callable, List, NamedTuple, Optional

from .errors import KestrelError

_TEXT = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class _Remote(NamedTuple):
    """A repository: `branch` as the user said it, the `commit` that this was when asked, its `files`. Both are None when only the cache can say."""

    repo: str
    branch: Optional[str]
    commit: Optional[str] = None
    files: Optional[List[str]] = None

    def has(self, name: str) -> bool:
        if self.files is not None:
            return name in self.files
        return isinstance(_hub().try_to_load_from_cache(self.repo, name, revision=self.branch), str)

    def fetch(self, name: str) -> str:
        """The path of a file in the cache, downloaded first if need be."""
        return _hub().hf_hub_download(self.repo, name, revision=self.commit or self.branch, local_files_only=self.files is None)


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils  # the package loads its modules by import only
    except ImportError:
        raise KestrelError("pull: takes the package huggingface_hub (pip install 'kestrel[hub]')") from None
    return huggingface_hub


def pull(repo: str, revision: Optional[str] = None, file: Optional[str] = None, offline: bool = False, note: Callable[[str], None] = lambda text: None) -> str:
    """Downloads `repo` (OWNER/NAME) and returns what `convert` takes: the folder of a checkpoint, or the path of a GGUF file.

    file: the GGUF file to take, of a repository that holds several. offline: from the cache alone; so too, with a note, when the hub can't be
    reached and the cache holds all. KestrelError: no such repository, revision or file, no access, no network, a full disk.
    """
    hub = _hub()
    hub.utils.logging.set_verbosity(logging.CRITICAL)  # it tries again by itself; what fails in the end is our one line
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    try:
        if offline or hub.constants.HF_HUB_OFFLINE:
            return _pull(_Remote(repo, revision), file)
        try:
            found = hub.HfApi().model_info(repo, revision=revision)
        except (hub.errors.HfHubHTTPError, hub.errors.HFValidationError):
            raise
        except Exception as unreachable:
            try:
                path = _pull(_Remote(repo, revision), file)
            except (KestrelError, OSError):
                raise unreachable
            note(f"{repo}: the hub can't be reached ({_line(unreachable)}); this is what the cache holds")
            return path
        return _pull(_Remote(repo, revision, found.sha, [s.rfilename for s in found.siblings or ()]), file)
    except (KestrelError, MemoryError):
        raise
    except hub.errors.GatedRepoError:
        raise KestrelError(f"{repo}: access must be asked for on the hub; then set HF_TOKEN") from None
    except hub.errors.RevisionNotFoundError:
        raise KestrelError(f"{repo}: no revision {revision!r}") from None
    except hub.errors.RepositoryNotFoundError:
        raise KestrelError(f"{repo}: no such repository on the hub (or a private one: set HF_TOKEN)") from None
    except hub.errors.LocalEntryNotFoundError:
        raise KestrelError(f"{repo}: not in the cache, and the hub can't be reached or is not asked (offline)") from None
    except Exception as error:  # of any of the libraries beneath: HTTP, TLS, sockets, the disk
        raise KestrelError(f"{repo}: {_line(error)}") from None


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _pull(remote: _Remote, file: Optional[str]) -> str:
    first, *others = _wanted(remote, file)
    path = remote.fetch(first)
    for name in others:
        remote.fetch(name)
    if remote.commit is not None:
        remote._replace(commit=None).fetch(first)  # the cache learns which commit the branch is, and can say so without a network
    return path if first.endswith(".gguf") else os.path.dirname(path)


def _wanted(remote: _Remote, file: Optional[str]) -> List[str]:
    """Names of the files that a conversion reads; the first is the GGUF file or config.json."""
    ggufs = [name for name in remote.files or () if name.endswith(".gguf")]
    if file is not None:
        if not file.endswith(".gguf") or not remote.has(file):
            raise KestrelError(f"{remote.repo}: no GGUF file {file}" + (f"; it has {', '.join(ggufs[:8])}" if ggufs else ""))
        return [file]
    if remote.has("config.json") and (remote.has(_SINGLE) or remote.has(_INDEX)):
        return [name for name in _TEXT if remote.has(name)] + ([_SINGLE] if remote.has(_SINGLE) else [_INDEX, *_shards(remote)])
    if len(ggufs) == 1:
        return ggufs
    what = f"several GGUF files, of which --file takes one: {', '.join(ggufs[:8])}" if ggufs else "no config.json with model.safetensors, and no GGUF file"
    raise KestrelError(f"{remote.repo}: {'' if remote.files is not None else 'the cache holds '}{what}")


def _shards(remote: _Remote) -> List[str]:
    """The files that the index places tensors in; a repository may hold others, of the same weights in another form."""
    path = remote.fetch(_INDEX)
    try:
        with open(path, encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise KestrelError(f"{path}: weight_map: expected an object of file names") from None
    for name in names:
        if os.path.basename(name) != name or not remote.has(name):
            raise KestrelError(f"{remote.repo}: shard {str(name)[:80]} is missing")
    return names

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Three prompts, each answered with speculation off and on: speed, passes, what was accepted, and whether the bytes agree.

    python board/demo.py MODEL [--max-tokens 256] [--threads N] [--draft auto] [--show]

Drives the command line of the installed package (`kestrel generate --json`), as a user would. Exits 1 when any pair of
answers differs, 2 when the program fails.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

CODE = '''\
def word_counts(path):
    counts = {}
    with open(path) as lines:
        for line in lines:
            for word in line.split():
                counts[word] = counts.get(word, 0) + 1
    return counts


def most_common(path, n):
    counts = word_counts(path)
    pairs = sorted(counts.items(), key=lambda pair: pair[1], reverse=True)
    return pairs[:n]


def main():
    for word, count in most_common("book.txt", 10):
        print(word, count)
'''

PASSAGE = '''\
The common kestrel is a small falcon found across Europe, Asia and Africa. It is easily recognised by the way it hunts:
it hovers ten to twenty metres above open ground, its head held still against the wind while wings and tail correct for
every gust, until it sees a vole in the grass below. Kestrels see ultraviolet light, and it was long believed that they
follow the urine trails of voles by it, though later experiments cast doubt on that. They do not build nests. They lay
four or five eggs on a ledge, in a hollow tree or in the old nest of a crow, and in towns they use church towers and
window boxes. Their numbers fell in the twentieth century, when pesticides thinned the shells of their eggs and meadows
were turned into fields, and they have recovered only in part since. A pair needs about one square kilometre of rough
grassland, and in good vole years it can raise all of its young.
'''

PROMPTS = (
    ("rewrite code", "Rewrite this Python program and change only one thing: rename the function `most_common` to `top_words`. "
                     "Give the whole program.\n\n```python\n" + CODE + "```"),
    ("summarise a passage", "Summarise the following passage in a few sentences, using its own words where you can.\n\n" + PASSAGE),
    ("a story", "Write a short story about an old lighthouse keeper who finds a message in a bottle."),
)


def generate(model: str, prompt: str, draft: str, max_tokens: int, threads: int) -> Dict[str, Any]:
    """The JSON object of one run of `kestrel generate`."""
    # the installed program: "python -m kestrel" here would take the source tree, which demo.sh doesn't build in
    program = str(Path(sys.executable).with_name("kestrel"))
    cmd = [program, "generate", model, "--chat", "--prompt", prompt, "--max-tokens", str(max_tokens),
           "--draft", draft, "--json"] + (["--threads", str(threads)] if threads else [])
    done = subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    if done.returncode:
        print(f"demo: kestrel generate --draft {draft} exited {done.returncode}: {done.stderr.strip()}", file=sys.stderr)
        sys.exit(2)
    return json.loads(done.stdout)


def histogram(run: Dict[str, Any]) -> str:
    """Rounds by how many draft tokens they accepted, as ``0:31 1:4 4:50``."""
    counts = run["accepted_histogram"]
    pairs = counts.items() if isinstance(counts, dict) else enumerate(counts)
    return " ".join(f"{n}:{c}" for n, c in pairs if c) or "-"


def row(name: str, run: Dict[str, Any]) -> List[str]:
    per_forward = run["completion_tokens"] / run["forwards"] if run["forwards"] else 0.0
    return [name, f"{run['tokens_per_second']:.1f}", str(run["forwards"]), str(run["proposed"]), str(run["accepted"]),
            f"{per_forward:.2f}", histogram(run)]


def table(rows: List[List[str]]) -> str:
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "\n".join("  " + "  ".join(cell.ljust(w) if i in (0, len(widths) - 1) else cell.rjust(w)
                                      for i, (cell, w) in enumerate(zip(r, widths))).rstrip() for r in rows)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--max-tokens", type=int, default=256)
    ap.add_argument("--threads", type=int, default=0, help="default: the program's own choice")
    ap.add_argument("--draft", default="auto")
    ap.add_argument("--show", action="store_true", help="print the answers in full")
    a = ap.parse_args()
    different = 0
    for title, prompt in PROMPTS:
        off = generate(a.model, prompt, "off", a.max_tokens, a.threads)
        on = generate(a.model, prompt, a.draft, a.max_tokens, a.threads)
        same = off["token_ids"] == on["token_ids"] and off["text"] == on["text"] and off["sha256"] == on["sha256"]
        different += not same
        print(f"\n{title}: {off['prompt_tokens']} prompt tokens, {off['completion_tokens']} answered ({off['finish_reason']}), "
              f"{off['isa']}, {off['threads']} threads")
        print(table([["draft", "tokens/s", "forwards", "proposed", "accepted", "tokens/forward", "rounds by accepted"],
                     row("off", off), row(a.draft, on)]))
        speed = on["tokens_per_second"] / off["tokens_per_second"] if off["tokens_per_second"] else 0.0
        print(f"  identical: {'yes' if same else 'no'}   speed on/off: {speed:.2f}   sha256 {off['sha256'][:16]}"
              + ("" if same else f" against {on['sha256'][:16]}"))
        answer = off["text"].strip()
        print("  | " + (answer if a.show or len(answer) <= 160 else answer[:160] + " ...").replace("\n", "\n  | "))
        sys.stdout.flush()
    print(f"\n{len(PROMPTS)} prompts, {len(PROMPTS) - different} identical with speculation off and on")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The rows of `kestrel bench` for people: Markdown, one self-contained HTML page with SVG pictures, and two runs side by side."""
from __future__ import annotations

import html
import json
from typing import Any, Dict, List, Optional, Sequence, Tuple

from . import bench, boundary
from .errors import KestrelError

MEASURED = ("bandwidth", "prefill", "decode", "verify")
_COLOURS = ("#2a6fbb", "#d1702a", "#3a9a5b", "#8a5bb5", "#b53a56", "#5b6770")
_KEY = ("kind", "threads", "depth", "of", "width", "tokens", "cache", "phase", "workload")
_LEAST = 0.02  # a change below is none, however small the spread
_FEWEST = 4  # samples a side: of fewer the ranges of two equal runs lie apart too often


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] + ["---:"] * (len(head) - 1), *rows))


def read_rows(path: str) -> List[Dict[str, Any]]:
    """Rows from a file of JSON lines (`kestrel bench --json`). KestrelError: it is none."""
    try:
        with open(path, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
    except OSError as error:
        raise KestrelError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise KestrelError(f"{path}: expected lines of JSON from `kestrel bench --json`: {error}") from None
    if not rows or not all(isinstance(row, dict) and isinstance(row.get("kind"), str) for row in rows):
        raise KestrelError(f"{path}: expected lines of JSON from `kestrel bench --json`, found others")
    return rows


def spoiled(rows: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Rows that throttling or swapping spoiled."""
    return [row for row in rows if row.get("marks")]


def name_of(row: Dict[str, Any]) -> str:
    """What a row measured, in a few words."""
    words = [str(row["kind"])]
    words += [f"{key} {row[key]}" if key in ("depth", "width", "tokens") else str(row[key]) for key in ("of", "cache", "phase", "workload", "depth", "width", "tokens")
              if row.get(key) is not None and not (key == "tokens" and row["kind"] == "speculation")]
    if row.get("threads") is not None and row["kind"] != "choice":
        words.append(_threads(row["threads"]))
    return ", ".join(words)


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _mebibytes(value: Optional[int]) -> str:
    return "-" if value is None else f"{value >> 20}"


def _board(rows: Sequence[Dict[str, Any]]) -> List[str]:
    """Lines about the machine, from the telemetry rows."""
    at = {row["when"]: row for row in rows if row["kind"] == "telemetry"}
    if "before" not in at:
        return []
    before, during = at["before"], at.get("during", {})
    after = at.get("after", before)
    lines = [f"{before['board'] or 'unknown board'}: {before['machine']}, kernel {before['kernel']}, pages of {before['page_bytes'] >> 10} KiB"]
    where = before.get("storage")
    lines.append(f"memory {_mebibytes(before['memory']['total'])} MiB, available {_mebibytes(before['memory']['available'])} before and "
                 f"{_mebibytes(after['memory']['available'])} after; swap {_mebibytes(before['memory']['swap_total'])} MiB; "
                 f"model on {where['kind'] + ' (' + where['device'] + ')' if where else 'storage of an unknown kind'}")
    for cluster in before["clusters"]:
        seen = during.get("mhz", {}).get(cluster["name"])
        lines.append(f"CPUs {cluster['cpus']}: governor {cluster['governor']}, "
                     + (f"{seen[0]} to {seen[1]}" if seen else "?") + f" of {cluster['max_mhz']} MHz seen")
    clock = before.get("memory_clock")
    if clock:
        lines.append(f"memory clock ({clock['name']}): governor {clock['governor']}, {clock['mhz']} of {clock['max_mhz']} MHz")
    for zone, degrees in before["temperatures"].items():
        hot = during.get("temperatures", {}).get(zone, degrees)
        lines.append(f"{zone}: {degrees:.1f} C before, {hot:.1f} at most, {after['temperatures'].get(zone, degrees):.1f} after")
    held = list(dict.fromkeys([*before["throttling"]["now"], *during.get("throttled", []), *after["throttling"]["now"]]))
    lines.append("throttling: " + (", ".join(held) if held else "none seen"))
    return lines


def _sections(rows: Sequence[Dict[str, Any]]) -> List[Tuple[str, str]]:
    """(title, Markdown) of each part there are rows for."""
    of = lambda *kinds: [row for row in rows if row["kind"] in kinds]  # noqa: E731
    parts = []
    board = _board(rows)
    if board:
        parts.append(("Board", "\n".join(f"- {line}" for line in board)))
    if of("start"):
        parts.append(("From process start to first token", table(["page cache", "seconds", "samples"], [
            [row["cache"], f"{row['median']:.2f} ({row['fastest']:.2f}..{row['slowest']:.2f})", str(len(row["samples"]))] for row in of("start")])))
    if of("choice"):
        counts = list(of("choice")[0]["by_threads"])
        chosen = {row["phase"]: row["threads"] for row in of("choice")}
        parts.append(("Thread counts, tokens/s", table(["phase"] + counts + ["chosen"], [
            [row["phase"]] + [f"{row['by_threads'][t]:.1f}" for t in counts] + [str(row["threads"])] for row in of("choice")])
            + f"\n\nFastest here: `--threads {chosen.get('decode')} --prefill-threads {chosen.get('prefill')}`"))
    if of(*MEASURED):
        parts.append(("Speed", bench.markdown(of(*MEASURED))))
    if of("speculation"):
        hashes = "\n".join(f"- {row['workload']}: sha256 of the answers' ids {row['sha256']}" for row in of("speculation") if "sha256" in row)
        parts.append(("Speculation", boundary.markdown(of("speculation")) + ("\n\n" + hashes if hashes else "")))
    bad = spoiled(rows)
    if bad:
        parts.append(("Spoiled", "\n".join(f"- {name_of(row)}: {'; '.join(row['marks'])}" for row in bad)))
    return parts


def markdown(rows: Sequence[Dict[str, Any]]) -> str:
    """All rows as sections with tables."""
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in _sections(rows))


# --- two runs side by side ---------------------------------------------------------------------------------------------------------

def compare(before: Sequence[Dict[str, Any]], after: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """A dictionary for each row that both runs have: name, before, after (medians), ratio (above 1: better), verdict.

    Beyond noise ("better", "worse"): each median lies outside the other's range of samples, and the ratio 2 % off; with fewer
    than 4 samples on a side that is "too few samples". Else "within noise".
    """
    def measured(rows: Sequence[Dict[str, Any]]) -> Dict[Tuple[Any, ...], Dict[str, Any]]:
        return {tuple(row.get(key) for key in _KEY): row for row in rows if "median" in row}

    old, new = measured(before), measured(after)
    found = []
    for key, a in old.items():
        b = new.get(key)
        if b is None:
            continue
        ratio = a["median"] / b["median"] if a["unit"] == "s" else b["median"] / a["median"]
        inside = lambda value, row: min(row["samples"]) <= value <= max(row["samples"])  # noqa: E731
        noise = inside(a["median"], b) or inside(b["median"], a) or abs(ratio - 1) < _LEAST
        few = min(len(a["samples"]), len(b["samples"])) < _FEWEST
        found.append({"name": name_of(a), "unit": a["unit"], "before": a["median"], "after": b["median"], "ratio": ratio,
                      "verdict": "within noise" if noise else "too few samples" if few else "better" if ratio > 1 else "worse", "marks": [*a.get("marks", []), *b.get("marks", [])]})
    return found


def comparison(found: Sequence[Dict[str, Any]]) -> str:
    """The result of `compare` as a table."""
    def shown(value: float, unit: str) -> str:
        return f"{value * 1e3:.2f} ms" if unit == "s" else f"{value:.1f} {unit}"

    return table(["row", "before", "after", "ratio", "verdict"], [
        [row["name"], shown(row["before"], row["unit"]), shown(row["after"], row["unit"]), f"{row['ratio']:.3f}",
         ("**" + row["verdict"] + "**" if row["verdict"] in ("better", "worse") else row["verdict"]) + (" (spoiled)" if row["marks"] else "")] for row in found])


# --- one page ------------------------------------------------------------------------------------------------------------------------

_STYLE = ("body{font:15px/1.45 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em;"
          "border-bottom:1px solid #ddd}table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}td,th{padding:.25em .7em;border-bottom:1px solid #e5e5e5;text-align:right}"
          "td:first-child,th:first-child{text-align:left}.bad{color:#b00020}svg{max-width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:#333}")
_WIDTH, _LEFT, _RIGHT = 720, 190, 500  # of a picture; of its bars


def _bars(title: str, unit: str, rows: Sequence[Tuple[str, Dict[str, Any]]]) -> str:
    """Horizontal bars of medians, a line from slowest to fastest, the figure at the end."""
    most = max(max(row["samples"]) for _, row in rows) * 1.02
    scale = lambda value: _LEFT + (_RIGHT - _LEFT) * value / most  # noqa: E731
    parts = [f'<svg role="img" viewBox="0 0 {_WIDTH} {34 + 24 * len(rows)}" width="{_WIDTH}"><title>{html.escape(title)}</title>'
             f'<text x="0" y="16" font-weight="bold">{html.escape(title)}, {html.escape(unit)}</text>']
    groups = list(dict.fromkeys(row.get("threads") for _, row in rows))
    for i, (label, row) in enumerate(rows):
        y = 28 + 24 * i
        colour = _COLOURS[groups.index(row.get("threads")) % len(_COLOURS)]
        low, high = scale(min(row["samples"])), scale(max(row["samples"]))
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{html.escape(label)}</text>'
                     f'<rect x="{_LEFT}" y="{y}" width="{scale(row["median"]) - _LEFT:.1f}" height="17" fill="{colour}" fill-opacity="{0.35 if row.get("marks") else 0.8}"/>'
                     f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 8.5}" y2="{y + 8.5}" stroke="#222" stroke-width="1.5"/>'
                     f'<text x="{max(high, scale(row["median"])) + 6:.1f}" y="{y + 13}">{row["median"]:.1f}'
                     + (f' ({100 * row["bandwidth_fraction"]:.0f} % of bandwidth)' if "bandwidth_fraction" in row else "") + (" spoiled" if row.get("marks") else "") + "</text>")
    return "".join(parts) + "</svg>"


def _curves(rows: Sequence[Dict[str, Any]]) -> str:
    """c(w) / c(1) over the rows of a verify pass, a line for each thread count and depth; dashed: w, what plain passes would cost."""
    lines: Dict[Tuple[int, int], List[Tuple[int, float]]] = {}
    for row in rows:
        lines.setdefault((row["threads"], row["depth"]), []).append((row["width"], row["ratio"]))
    widest = max(width for points in lines.values() for width, _ in points)
    if widest < 2:
        return ""
    most = max(ratio for points in lines.values() for _, ratio in points) * 1.1
    top, bottom, left = 30, 300, 50
    x = lambda width: left + (490 - left) * (width - 1) / (widest - 1)  # noqa: E731
    y = lambda ratio: bottom - (bottom - top) * min(ratio, most) / most  # noqa: E731
    parts = [f'<svg role="img" viewBox="0 0 {_WIDTH} 340" width="{_WIDTH}"><title>Cost of a verify pass</title>'
             f'<text x="0" y="16" font-weight="bold">Cost of a verify pass of w rows, c(w) / c(1)</text>'
             f'<path d="M{left} {top}V{bottom}H{x(widest):.1f}" fill="none" stroke="#888"/>'
             f'<path d="M{x(1):.1f} {y(1):.1f}L{x(min(most, widest)):.1f} {y(min(most, widest)):.1f}" stroke="#888" stroke-dasharray="4 4"/>']
    for width in sorted({width for points in lines.values() for width, _ in points}):
        parts.append(f'<text x="{x(width):.1f}" y="{bottom + 17}" text-anchor="middle">{width}</text>')
    step = max(1, int(most / 6))
    for ratio in range(0, int(most) + 1, step):
        parts.append(f'<text x="{left - 8}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio}</text><path d="M{left} {y(ratio):.1f}H{x(widest):.1f}" stroke="#eee"/>')
    parts.append(f'<text x="{(left + x(widest)) / 2:.1f}" y="{bottom + 35}" text-anchor="middle">rows w</text>')
    for i, ((threads, depth), points) in enumerate(sorted(lines.items())):
        colour = _COLOURS[i % len(_COLOURS)]
        path = "L".join(f"{x(width):.1f} {y(ratio):.1f}" for width, ratio in sorted(points))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
                     + "".join(f'<circle cx="{x(width):.1f}" cy="{y(ratio):.1f}" r="3" fill="{colour}"/>' for width, ratio in points)
                     + f'<rect x="{x(widest) + 24:.1f}" y="{top + 20 * i}" width="12" height="12" fill="{colour}"/>'
                     f'<text x="{x(widest) + 42:.1f}" y="{top + 11 + 20 * i}">{_threads(threads)}, depth {depth}</text>')
    parts.append(f'<text x="{x(widest) + 24:.1f}" y="{top + 16 + 20 * len(lines)}">dashed: w plain passes</text>')
    return "".join(parts) + "</svg>"


def _as_html(text: str) -> str:
    """The Markdown of our own sections: tables, lists, paragraphs."""
    parts = []
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if lines and lines[0].startswith("|"):
            cells = [[html.escape(cell.strip()) for cell in line.strip("|").split("|")] for line in lines]
            parts.append("<table><tr>" + "".join(f"<th>{c}</th>" for c in cells[0]) + "</tr>"
                         + "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in cells[2:]) + "</table>")
        elif lines and lines[0].startswith("- "):
            parts.append("<ul>" + "".join(f"<li>{html.escape(line[2:])}</li>" for line in lines) + "</ul>")
        elif lines:
            parts.append(f"<p>{html.escape(block)}</p>")
    return "".join(parts)


def page(rows: Sequence[Dict[str, Any]]) -> str:
    """One HTML page without script or outside parts: the pictures, then every table of `markdown`."""
    of = lambda kind: [row for row in rows if row["kind"] == kind]  # noqa: E731
    model = next((row["model"] for row in rows if "model" in row), "kestrel bench")
    pictures = []
    for kind, title in (("decode", "Decode"), ("prefill", "Prefill")):
        if of(kind):
            pictures.append(_bars(title, "tokens/s", [(f"{_threads(row['threads'])}, depth {row['depth']}", row) for row in of(kind)]))
    if of("bandwidth"):
        pictures.append(_bars("Reading memory", "GB/s", [(f"{_threads(row['threads'])}, {row['of']}", row) for row in of("bandwidth")]))
    if of("verify"):
        pictures.append(_curves(of("verify")))
    bad = f'<p class="bad">{len(spoiled(rows))} rows were spoiled by throttling or swapping.</p>' if spoiled(rows) else ""
    body = "".join(f"<p>{picture}</p>" for picture in pictures if picture)
    body += "".join(f"<h2>{html.escape(title)}</h2>{_as_html(text)}" for title, text in _sections(rows))
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(model)}</title>'
            f"<style>{_STYLE}</style></head><body><h1>kestrel bench: {html.escape(model)}</h1>{bad}{body}</body></html>\n")

"""One HTML page for any number of verdicts: a curve per dimension over time, the pictures at the worst points, the
numbers.

The page stands alone (no script, nothing fetched) and reads in light and dark. Verdicts of one set of measures only.
"""

import base64
import html
from collections.abc import Sequence

import cv2
import numpy as np
from numpy.typing import NDArray

from engine.lvbench.dataset import Skipped
from engine.lvbench.judge import Verdict, worst_part
from engine.lvbench.measures import DIMENSIONS, Dimension
from engine.lvbench.pixels import Pixels

MEANING: dict[Dimension, str] = {
    "clarity": "how sharp the picture is",
    "motion": "how smoothly things move",
    "aesthetic": "colour and contrast",
    "background": "is it still the same place",
    "subject": "is it still the same thing",
}
CHART_WIDTH, CHART_HEIGHT = 220, 112
LEFT, RIGHT, TOP, BOTTOM = 30, 6, 10, 22


class SetsMixed(ValueError):
    """Verdicts of different sets of measures were put into one table."""


def render(verdicts: Sequence[Verdict], skipped: Sequence[Skipped] = ()) -> str:
    """The page as text. Raises `SetsMixed`."""
    methods = {verdict.method for verdict in verdicts}
    if len(methods) > 1:
        raise SetsMixed(f"expected verdicts of one method, got {sorted(str(method) for method in methods)}")
    body = [_header(verdicts)]
    if len(verdicts) > 1:
        body.append(_overview(verdicts))
    body += [_section(verdict) for verdict in verdicts]
    if skipped:
        rows = "".join(f"<li><b>{_text(s.video)}</b>: {_text(s.reason)}</li>" for s in skipped)
        body.append(f"<section><h2>Left out</h2><ul>{rows}</ul></section>")
    body.append(FOOTER)
    return PAGE.format(style=STYLE, body="\n".join(body))


def _header(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return "<header><h1>LV-Bench</h1><p>No video could be judged.</p></header>"
    method = verdicts[0].method
    return (
        f"<header><h1>LV-Bench</h1><p>Does a long video drift away from its first part? "
        f"<b>{_text(method.measures)}</b> measures, {method.parts} parts, {method.weights} weights.</p></header>"
    )


def _overview(verdicts: Sequence[Verdict]) -> str:
    head = "".join(f"<th>{name}</th>" for name in DIMENSIONS)
    rows = []
    for verdict in verdicts:
        cells = "".join(f"<td>{_percent(verdict, name)}</td>" for name in DIMENSIONS)
        rows.append(f"<tr><th scope=row>{_text(verdict.facts.path)}</th>{cells}</tr>")
    return (
        f"<section><h2>All videos</h2><p>Mean drift; lower is better.</p><div class=scroll><table>"
        f"<thead><tr><th>video</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _section(verdict: Verdict) -> str:
    facts = verdict.facts
    notes = "".join(f"<li>{_text(note)}</li>" for note in verdict.notes)
    return (
        f"<section><h2>{_text(facts.path)}</h2>"
        f"<p>{facts.width} × {facts.height}, {facts.frames} frames, {facts.duration_s:.1f} s</p>"
        f"{f'<ul class=notes>{notes}</ul>' if notes else ''}"
        f"<div class=cards>{''.join(_card(verdict, name) for name in DIMENSIONS)}</div>{_numbers(verdict)}</section>"
    )


def _card(verdict: Verdict, name: Dimension) -> str:
    curve = verdict.scores.curves[name]
    worst = worst_part(curve)
    part_s = verdict.facts.duration_s / len(curve)
    return (
        f"<article><h3>{name.capitalize()} <b>{_percent(verdict, name)}</b></h3><p>{MEANING[name]}</p>"
        f"{chart(curve, part_s)}<div class=pair>"
        f"<figure>{_picture(verdict.pictures[0])}<figcaption>part 1</figcaption></figure>"
        f"<figure>{_picture(verdict.pictures[worst])}<figcaption>furthest: part {worst + 1}, "
        f"{worst * part_s:.0f}–{(worst + 1) * part_s:.0f} s</figcaption></figure></div></article>"
    )


def chart(curve: NDArray[np.float64], part_s: float) -> str:
    """An SVG of a quality (N,) over time; the dashed line is the first part's, the area between is what counts as
    drift.
    """
    low, high = _axis(curve)
    xs = LEFT + (np.arange(len(curve)) + 0.5) / len(curve) * (CHART_WIDTH - LEFT - RIGHT)
    ys = TOP + (high - curve) / (high - low) * (CHART_HEIGHT - TOP - BOTTOM)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    area = f"{xs[0]:.1f},{ys[0]:.1f} {line} {xs[-1]:.1f},{ys[0]:.1f}"
    worst = worst_part(curve)
    base, end = CHART_HEIGHT - BOTTOM, CHART_WIDTH - RIGHT
    return (
        f'<svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role="img" aria-label="quality over time">'
        f'<path class=axis d="M{LEFT} {TOP}V{base}H{end}"/>'
        f'<text x="{LEFT - 4}" y="{TOP + 4}" class=left>{high:.2f}</text>'
        f'<text x="{LEFT - 4}" y="{base}" class=left>{low:.2f}</text>'
        f'<text x="{LEFT}" y="{CHART_HEIGHT - 6}">0 s</text>'
        f'<text x="{end}" y="{CHART_HEIGHT - 6}" class=left>{part_s * len(curve):.0f} s</text>'
        f'<polygon class=drift points="{area}"/><path class=first d="M{xs[0]:.1f} {ys[0]:.1f}H{xs[-1]:.1f}"/>'
        f'<polyline class=curve points="{line}"/><circle cx="{xs[worst]:.1f}" cy="{ys[worst]:.1f}" r="4"/></svg>'
    )


def _axis(curve: NDArray[np.float64]) -> tuple[float, float]:
    """Limits that show at least a tenth of the first part's quality, so that noise does not look like drift."""
    reach = max(0.6 * float(np.ptp(curve)), 0.05 * abs(float(curve[0])), 1e-3)
    middle = 0.5 * float(curve.max() + curve.min())
    return middle - reach, middle + reach


def _numbers(verdict: Verdict) -> str:
    rows = []
    for name in DIMENSIONS:
        curve, found = verdict.scores.curves[name], verdict.drifts[name]
        raw, mean = (f"{found.raw:.3f}", f"{found.mean:.4f}") if found else ("–", "–")
        parts = " ".join(f"{value:.3f}" for value in curve)
        rows.append(f"<tr><th scope=row>{name}</th><td>{raw}</td><td>{mean}</td><td class=series>{parts}</td></tr>")
    vbench = "".join(
        f"<tr><th scope=row>{_text(name.replace('_', ' '))}</th><td>{value:.4f}</td></tr>"
        for name, value in verdict.scores.vbench.items()
    )
    return (
        f"<div class=tables><div class=scroll><table><thead><tr><th>drift</th><th>sum</th><th>mean</th>"
        f"<th class=series>quality of parts 1–{len(verdict.pictures)}</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f"<div class=scroll><table><thead><tr><th>whole video</th><th>0–1</th></tr></thead>"
        f"<tbody>{vbench}</tbody></table></div></div>"
    )


def _percent(verdict: Verdict, name: Dimension) -> str:
    found = verdict.drifts[name]
    return f"{100 * found.mean:.1f} %" if found else "–"


def _picture(picture: Pixels) -> str:
    done, data = cv2.imencode(".jpg", cv2.cvtColor(picture, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 85])
    assert done  # a small uint8 picture always encodes
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(data.tobytes()).decode()}">'


def _text(value: object) -> str:
    return html.escape(str(value))


FOOTER = """<footer><p>Drift is Σ w<sub>i</sub> |m<sub>i</sub> − m<sub>1</sub>| / m<sub>1</sub> over the parts i = 2…N:
how far the quality m of each part lies from that of the first. <i>Sum</i> is the published form; <i>mean</i>, shown in
per cent above, divides by the weights and can be compared between different N. Dashed: the first part. Numbers of the
classic and of the published measures are different things and never stand in one table.</p></footer>"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>LV-Bench</title><style>{style}</style></head><body><main>
{body}
</main></body></html>
"""

STYLE = """
:root { color-scheme: light dark; --paper: #fbfaf8; --ink: #1d1f23; --soft: #6b6f78; --rule: #dcd9d3; --card: #fff;
  --drift: #d9480f; }
@media (prefers-color-scheme: dark) { :root { --paper: #15171b; --ink: #e9e7e2; --soft: #979ba5; --rule: #32363e;
  --card: #1d2026; --drift: #ff8a4c; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px; }
h1 { margin: 0; font-size: 26px; } h2 { margin: 36px 0 0; font-size: 18px; overflow-wrap: anywhere; }
h3 { display: flex; justify-content: space-between; margin: 0; font-size: 15px; } h3 b { color: var(--drift); }
p { margin: 2px 0 10px; color: var(--soft); } .notes { color: var(--soft); padding-left: 18px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: 14px; }
article { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 14px; }
svg { display: block; width: 100%; } svg text { font-size: 10px; fill: var(--soft); } svg .left { text-anchor: end; }
svg path { fill: none; stroke: var(--rule); } svg .first { stroke: var(--soft); stroke-dasharray: 3 3; }
.curve { fill: none; stroke: var(--drift); stroke-width: 2; stroke-linejoin: round; }
.drift { fill: var(--drift); opacity: .16; } circle { fill: var(--drift); }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 8px; margin-top: 8px; } figure { margin: 0; }
img { display: block; width: 100%; border-radius: 5px; } figcaption { font-size: 12px; color: var(--soft); }
.tables { display: flex; flex-wrap: wrap; gap: 14px 40px; margin-top: 16px; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px 3px 0; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, .series, th.series { text-align: left; } th { font-weight: 600; }
.series { color: var(--soft); font-size: 13px; }
footer { margin-top: 40px; font-size: 13px; }
"""

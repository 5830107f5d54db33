"""The HTML page around a report: one file, its own CSS, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

TIMES = "\N{MULTIPLICATION SIGN}"

CSS = """
:root { color-scheme: light dark; --bg:#fff; --fg:#1c2127; --dim:#5f6b7a; --line:#dfe3e8;
  --card:#f6f7f9; --eager:#8a94a3; --stock:#2f74d0; --rtc:#d9622b; --ok:#1d7f4e; --bad:#c22f2f;
  --warn:#9a6700; }
@media (prefers-color-scheme: dark) { :root { --bg:#14171b; --fg:#e4e7eb; --dim:#98a3b1;
  --line:#2d333b; --card:#1c2026; --eager:#98a3b1; --stock:#6aa6f5; --rtc:#f08a53; --ok:#4cc38a;
  --bad:#f2716b; --warn:#e3b341; } }
* { box-sizing:border-box }
body { margin:0 auto; max-width:1020px; padding:28px 24px 60px; background:var(--bg);
  color:var(--fg); font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",
  sans-serif }
h1 { font-size:26px; margin:0 0 2px } h2 { font-size:18px; margin:38px 0 6px }
p { margin:6px 0 } .dim,small { color:var(--dim) } code,.mono { font:13px/1.45 ui-monospace,
  "SFMono-Regular",Menlo,"DejaVu Sans Mono",monospace; overflow-wrap:anywhere }
.badge { display:inline-block; padding:1px 10px; border-radius:11px; font-size:14px;
  font-weight:600; color:var(--bg); vertical-align:3px; margin-left:8px }
.badge.ok { background:var(--ok) } .badge.bad { background:var(--bad) }
.badge.warn { background:var(--warn) }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(175px,1fr)); gap:12px;
  margin:18px 0 }
.tile { background:var(--card); border-radius:8px; padding:12px 14px }
.tile b { display:block; font-size:21px; line-height:1.4; white-space:nowrap }
.tile span { color:var(--dim); font-size:13px }
.box { border-left:4px solid var(--warn); background:var(--card); padding:8px 14px; margin:12px 0;
  border-radius:0 6px 6px 0 } .box.bad { border-color:var(--bad) } .box pre { margin:0;
  white-space:pre-wrap; font-size:13px }
table { border-collapse:collapse; min-width:min(560px,100%); margin:8px 0; font-size:14px }
th { text-align:left; color:var(--dim); font-weight:500; font-size:13px }
th,td { padding:5px 28px 5px 0; border-bottom:1px solid var(--line); vertical-align:top }
td .name,td .short { white-space:nowrap }
td.num,th.num { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap }
.wide { overflow-x:auto }
.s-applied { color:var(--ok) } .s-refused,.s-partly { color:var(--warn) } .s-off,.s-nothing {
  color:var(--dim) } .s-passed { color:var(--ok) } .s-failed { color:var(--bad); font-weight:600 }
.reason { margin:2px 0 0; font-size:13px } .reason .mono { color:var(--dim); font-size:12px }
details { margin:6px 0 } summary { cursor:pointer; color:var(--dim) }
svg { width:100%; height:auto; display:block; margin:4px 0 } svg text { fill:var(--fg);
  font-size:14px; font-family:inherit } svg .tick,svg .note { fill:var(--dim); font-size:13px }
svg .label { fill:var(--dim) } svg .value { font-size:14px }
svg .grid { stroke:var(--line); stroke-width:1 } svg .axis { stroke:var(--dim); stroke-width:1 }
svg .reset { stroke:var(--dim); stroke-width:1.2; stroke-dasharray:4 4 }
svg .whisker { stroke:var(--fg); stroke-width:1.4; opacity:.75 } svg .dot { fill-opacity:.8 }
svg .dot.at { fill-opacity:1; stroke:var(--bg); stroke-width:1.5 }
.c-eager { fill:var(--eager); background:var(--eager) } .c-stock { fill:var(--stock);
  background:var(--stock) } .c-rtc { fill:var(--rtc); background:var(--rtc) }
.c-before { fill:var(--eager); background:var(--eager) } .c-after { fill:var(--rtc);
  background:var(--rtc) } .c-part { fill:var(--rtc); fill-opacity:.5; background:var(--rtc) }
.legend { list-style:none; display:flex; gap:20px; padding:0; margin:6px 0; font-size:14px;
  flex-wrap:wrap }
.legend i { display:inline-block; width:12px; height:12px; border-radius:3px; margin-right:7px;
  vertical-align:-1px }
"""


def page(title: str, body: Iterable[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body>\n"
        + "\n".join(x for x in body if x)
        + "\n</body></html>\n"
    )


def section(title: str, *parts: str, lead: str = "") -> str:
    """A heading, a sentence, and the parts; empty where all parts are."""
    inside = "".join(parts)
    if not inside:
        return ""
    text = f'<p class="dim">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{text}{inside}</section>"


class Raw(str):
    """Text that is HTML already."""


def cell(value: object) -> str:
    return value if isinstance(value, Raw) else escape(str(value))


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[int] = ()
) -> str:
    """``right``: indices of columns of numbers."""

    def line(tag: str, cells: Sequence[object]) -> str:
        parts = []
        for i, c in enumerate(cells):
            css = ' class="num"' if i in right else ""
            parts.append(f"<{tag}{css}>{cell(c)}</{tag}>")
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(line("td", r) for r in rows)
    head = line("th", columns)
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def tile(value: str, caption: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(caption)}</span></div>'


def box(text: str, css: str = "") -> str:
    return f'<div class="box {css}"><pre>{escape(text)}</pre></div>'


def details(summary: str, inside: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"

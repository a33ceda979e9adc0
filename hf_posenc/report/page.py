"""A self-contained web page, for wide and narrow, light and dark screens."""

from __future__ import annotations

import re
from html import escape

#: Dark figures have the same dark colours.
STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1a1a1a; --line: #d7dade; --soft: #f4f5f7; --quiet: #57606a; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181e; --text: #dde2e8; --line: #343c47; --soft: #1e242c; --quiet: #9aa4b0; }
}
* { box-sizing: border-box; }
body { max-width: 54rem; margin: 0 auto; padding: 1rem 1.1rem 3rem; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; }
h2 { font-size: 1.3rem; margin-top: 2.8rem; border-top: 1px solid var(--line); padding-top: .9rem; }
h3 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.seen { background: var(--soft); border-left: 4px solid #0072b2; padding: .3rem 1.1rem; border-radius: 0 6px 6px 0; }
.note, table + p, figcaption { color: var(--quiet); font-size: .9rem; }
.table, pre { overflow-x: auto; }
pre { background: var(--soft); padding: .8rem; font-size: .82rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
thead { background: var(--soft); }
th, td { padding: .35rem .7rem; text-align: right; vertical-align: bottom; border-bottom: 1px solid var(--line); }
th { min-width: 5rem; max-width: 9rem; font-weight: 600; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--page); }
thead th:first-child { background: var(--soft); }
p code, li code { border: 1px solid var(--line); border-radius: 4px; padding: 0 .25em; font-size: .9em; }
figure { margin: 0; }
img { display: block; max-width: 100%; height: auto; }
summary { cursor: pointer; font-weight: 600; margin-top: 1rem; }
"""


def marked_up(text: str) -> str:
    """Returns text as HTML, with Markdown's `code` and **strong** converted to tags."""
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", re.sub("`(.+?)`", r"<code>\1</code>", escape(text)))


def web_page(title: str, body: str) -> str:
    """Returns a complete page with the HTML `body`, in the style of all reports."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""

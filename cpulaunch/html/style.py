"""The style sheet and the script of every page: no network, light and dark, a phone's width and A4."""

STYLE = """
:root { color-scheme: light dark; --page: light-dark(#fff, #12181f); --text: light-dark(#1f2933, #e4e7eb);
  --muted: light-dark(#52606d, #a3b0bd); --line: light-dark(#cbd2d9, #3e4c59); --panel: light-dark(#f4f6f8, #1b232c);
  --node: light-dark(#e6ebf0, #232e39); --l3: light-dark(#d5dde5, #2d3a47); --bar: light-dark(#7b93ac, #6b859f);
  --accent: light-dark(#0b62b8, #6cb2f7); --good: light-dark(#14713d, #63c98e); --bad: light-dark(#b3261e, #ff8f86);
  --efficiency: light-dark(#dff1e4, #173a26);
  --s0: light-dark(#5b6b7b, #a9b8c6); --s1: light-dark(#0b62b8, #6cb2f7); --s2: light-dark(#c2500a, #ff9d5c);
  --s3: light-dark(#0a7d5e, #4fcfa6); --s4: light-dark(#8a3c91, #dd93e4); --s5: light-dark(#7a6200, #dcbf4b) }
:root[data-scheme=light] { color-scheme: light } :root[data-scheme=dark] { color-scheme: dark }
* { box-sizing: border-box }
body { margin: 0; overflow-wrap: anywhere }
body { background: var(--page); color: var(--text); font: 16px/1.5 ui-sans-serif, system-ui, sans-serif }
header, main, footer { max-width: 1180px; margin: 0 auto; padding: 0 16px }
header { display: flex; gap: 16px; justify-content: space-between; align-items: center; padding-top: 12px }
footer { color: var(--muted); font-size: 14px; padding-bottom: 32px }
h1 { font-size: 15px; font-weight: 600; margin: 0; color: var(--muted); overflow: hidden; min-width: 0;
  display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2 }
h2 { font-size: 20px; margin: 40px 0 8px; padding-top: 12px; border-top: 1px solid var(--line) }
.verdict { font-size: clamp(22px, 4vw, 32px); line-height: 1.25; font-weight: 650; margin: 16px 0 8px;
  overflow-wrap: anywhere } .verdict.good { color: var(--good) } .verdict.bad { color: var(--bad) }
.lead { margin: 0 0 6px; color: var(--muted); overflow-wrap: anywhere }
.note { color: var(--muted); font-size: 14px }
button { font: inherit; font-size: 14px; color: var(--text); background: var(--panel); border: 1px solid var(--line);
  border-radius: 6px; padding: 6px 12px; min-height: 36px; white-space: nowrap; cursor: pointer }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px }
.tiles { margin: 18px 0; display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  padding: 0; list-style: none }
.tiles li { background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 14px; min-width: 0 } .tiles b { display: block; font-size: 22px; overflow-wrap: anywhere }
.tiles span { color: var(--muted); font-size: 14px; overflow-wrap: anywhere }
.scroll { overflow-x: auto; margin: 8px 0 } table { border-collapse: collapse; width: 100%; font-size: 14px }
caption, figcaption { text-align: left; color: var(--muted); font-size: 14px; padding: 4px 0 }
th, td { text-align: left; vertical-align: top; padding: 6px 16px 6px 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; min-width: 5.5em } th { overflow-wrap: break-word } td:last-child { min-width: 160px }
td:first-child { min-width: 170px } .number { text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap } th.number, td.number, td.number:first-child { min-width: 0 }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere }
figure { margin: 8px 0 } .bars { list-style: none; margin: 0; padding: 0 }
.bars li { display: grid; grid-template-columns: minmax(90px, 22%) 1fr minmax(110px, 24%); gap: 12px;
  align-items: center; padding: 4px 0 } .bars .label { overflow-wrap: anywhere; font-size: 14px }
.track { position: relative; height: 18px; background: var(--panel); border-radius: 3px }
.fill { position: absolute; inset: 0 auto 0 0; background: var(--bar); border-radius: 3px }
.fill.best { background: var(--accent) } .interval { position: absolute; top: 8px; height: 2px; min-width: 2px;
  background: var(--text) } .interval::before, .interval::after { content: ""; position: absolute; top: -5px;
  height: 12px; width: 2px; background: inherit } .interval::before { left: 0 } .interval::after { right: 0 }
.track .reference { position: absolute; inset: -4px auto -4px 0; border-left: 1px dashed var(--muted) }
.plot { display: grid; grid-template-columns: auto minmax(0, 1fr); grid-template-rows: 240px auto; gap: 4px 8px }
.plot svg { width: 100%; height: 100%; display: block; overflow: visible }
.ticks { position: relative; color: var(--muted); font-size: 12px; font-variant-numeric: tabular-nums; line-height: 1 }
.ticks i { visibility: hidden; font-style: normal } .ticks span { position: absolute; white-space: nowrap }
.ticks.up span { right: 0; transform: translateY(50%) } .ticks.across { grid-column: 2 }
.ticks.across span { top: 0; transform: translateX(-50%) }
.axis { margin: 0; text-align: center; color: var(--muted); font-size: 12px }
.points { margin: 8px 0 28px } .points line { stroke-width: 1.5 } .points .grid { stroke: var(--line); stroke-width: 1 }
.points .reference { stroke: var(--muted); stroke-dasharray: 4 3; stroke-width: 1 }
.points .joined { stroke-opacity: .5 } .points .trend { stroke-dasharray: 6 4 } .points .band { fill: var(--s1);
  fill-opacity: .16 } .points .lost { fill: var(--bad); text-anchor: middle; dominant-baseline: central;
  font: 700 16px ui-sans-serif, system-ui, sans-serif }
.dot { stroke-width: 1.5 } .dot.square { transform: translate(-3.5px, -3.5px) } .dot.diamond { transform-box: fill-box;
  transform-origin: 0 0; transform: rotate(45deg) translate(-3.5px, -3.5px) }
.s0 { stroke: var(--s0); fill: var(--s0) } .s1 { stroke: var(--s1); fill: var(--s1) }
.s2 { stroke: var(--s2); fill: var(--s2) } .s3 { stroke: var(--s3); fill: var(--s3) }
.s4 { stroke: var(--s4); fill: var(--s4) } .s5 { stroke: var(--s5); fill: var(--s5) } .dot.marked { fill: var(--page) }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; list-style: none; margin: 0 0 12px; padding: 0;
  font-size: 14px } .legend li { display: flex; gap: 6px; align-items: center; min-width: 0 }
.swatch { width: 22px; height: 14px; flex: none; overflow: visible } span.swatch.band { background: var(--s1);
  opacity: .25 } h3 { font-size: 16px; margin: 24px 0 4px }
.value { font-variant-numeric: tabular-nums; font-size: 14px; overflow-wrap: anywhere }
details { margin: 8px 0 } summary { cursor: pointer; padding: 6px 0; font-weight: 600 }
.machine { max-width: none; display: block } .machine text { font: 12px ui-sans-serif, system-ui, sans-serif;
  fill: var(--text) } .machine .page { fill: var(--page) } .machine .heading { font-size: 17px; font-weight: 600 }
.machine .note, .machine .title { fill: var(--muted) } .machine .socket { fill: var(--panel); stroke: var(--line) }
.machine .node { fill: var(--node); stroke: var(--line) } .machine .l3 { fill: var(--l3) }
.machine .core { fill: var(--page); stroke: var(--muted) } .machine .efficiency { fill: var(--efficiency) }
.machine .outside { fill: none; stroke-dasharray: 3 2 } .machine .cell { font: 11px ui-monospace, monospace;
  text-anchor: middle } .machine .strong { font-weight: 600 }
@media (max-width: 640px) { .bars li { grid-template-columns: minmax(0, 1fr) minmax(0, auto); gap: 2px 12px }
  .bars .track { grid-column: 1 / -1; grid-row: 2 }
  table, tbody, tr, caption { display: block } thead { display: none }
  tr { border-bottom: 1px solid var(--line); padding: 6px 0 }
  td, td.number, td:first-child, td:last-child { display: grid;
  grid-template-columns: 7em minmax(0, 1fr); gap: 8px; min-width: 0; border: 0; padding: 2px 0; text-align: left;
  white-space: normal } td::before { content: attr(data-title); color: var(--muted) } td > * { min-width: 0 } }
@media print { @page { size: A4; margin: 14mm } :root, :root[data-scheme] { color-scheme: light }
  body { font-size: 11pt } button { display: none } table { font-size: 9pt } table code { font-size: 8pt }
  th.number { white-space: normal } th, td { min-width: 5.8em; padding: 3px 8px 3px 0 }
  td:first-child, td:last-child { min-width: 6em }
  .scroll { overflow: visible } .machine { max-width: 100%; height: auto } * { print-color-adjust: exact }
  tr, li, figure { break-inside: avoid }
  h2, h3, summary { break-after: avoid } }
"""

SCRIPT = """
const root = document.documentElement, button = document.getElementById("scheme");
const dark = matchMedia("(prefers-color-scheme: dark)");
const current = () => root.dataset.scheme || (dark.matches ? "dark" : "light");
const label = () => { const other = current() === "dark" ? "light" : "dark"; button.textContent = "Use " + other +
  " colours"; };
button.hidden = false; label(); dark.addEventListener("change", label);
button.addEventListener("click", () => { root.dataset.scheme = current() === "dark" ? "light" : "dark"; label(); });
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(each => { each.open = true; }));
"""
"""The button changes the colours; before a page is printed, everything that is folded opens."""

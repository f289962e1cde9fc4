"""How pages look. System fonts only: nothing is fetched."""

CSS = """
:root { --ink: #1c2126; --soft: #5a646e; --rule: #d9dee3; --ground: #ffffff; --band: #f5f7f9; --mark: #b3541e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7eb; --soft: #9aa5b0; --rule: #353c44; --ground: #15191d; --band: #1d2227; --mark: #e39b6b; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--rule); }
p { max-width: 44rem; margin: .6rem 0; overflow-wrap: anywhere; }
.lead { font-size: 1.1rem; }
.note { border-left: 3px solid var(--mark); padding: .1rem 0 .1rem .8rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; max-width: calc(100vw - 2.5rem); }
th, td { padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .2rem 1.4rem; margin: 1rem 0; }
dl div { display: flex; justify-content: space-between; gap: 1rem; border-bottom: 1px solid var(--rule); }
dt { color: var(--soft); }
dd { margin: 0; text-align: right; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
figure { margin: 1.4rem 0; padding: .8rem; background: var(--band); border-radius: 6px; }
figure svg { display: block; width: 100%; max-width: 46rem; height: auto; margin: 0 auto; color: var(--soft); }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .5rem; }
@media print {
  :root { --ink: #000; --soft: #444; --rule: #bbb; --ground: #fff; --band: #fff; }
  main { max-width: none; padding: 0; }
  body { font-size: 10pt; }
  .scroll { overflow: visible; }
  table { font-size: 8pt; }
  figure, tr, dl div { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""

"""The page of the conditioning report: a Jinja template that loads nothing from anywhere."""

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #57606a; --page: #ffffff; --card: #f6f8fa; --line: #d0d7de; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #a3acb8; --page: #14171c; --card: #1c2128; --line: #3a4250; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem clamp(0.75rem, 3vw, 2rem) 3rem; max-width: 72rem; color: var(--ink);
  background: var(--page); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid var(--line); padding-bottom: 0.25rem; }
p, li { max-width: 48rem; }
code { font-family: ui-monospace, SFMono-Regular, Consolas, monospace; font-size: 0.9em; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; background: var(--card); }
.scroll img { display: block; width: 100%; min-width: 36rem; height: auto; padding: 0.5rem; }
figcaption, caption { color: var(--soft); font-size: 0.9rem; text-align: left; padding: 0.4rem 0.1rem; }
caption { padding: 0.5rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 0.92rem; }
th, td { padding: 0.3rem 0.5rem; border-top: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; } th[scope=row], th.left { text-align: left; }
th.state { text-align: center; } tbody th { font-weight: 400; }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; padding: 0; list-style: none; }
a { color: inherit; }
"""

PAGE = """
{%- macro picture(figure) -%}
<figure>
<div class="scroll" tabindex="0" role="group" aria-label="Figure: {{ figure.alt }}"><picture>
<source media="(prefers-color-scheme: dark)" srcset="{{ figure.dark }}">
<img src="{{ figure.light }}" alt="{{ figure.alt }}"></picture></div>
<figcaption>{{ figure.caption }}</figcaption>
</figure>
{%- endmacro -%}
{%- macro grid(table) -%}
<div class="scroll" tabindex="0" role="group" aria-label="Table: {{ table.caption }}"><table>
<caption>{{ table.caption }}</caption>
<thead>
{%- if table.groups %}
<tr>{% for text, span in table.groups %}<th class="state" colspan="{{ span }}">{{ text }}</th>{% endfor %}</tr>
{%- endif %}
<tr>{% for text in table.header %}<th scope="col"{% if loop.first %} class="left"{% endif %}>{{ text }}</th>
{%- endfor %}</tr>
</thead>
<tbody>
{%- for row in table.rows %}
<tr><th scope="row">{{ row[0] }}</th>{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</tbody></table></div>
{%- endmacro -%}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<header>
<h1>{{ title }}</h1>
<dl>{% for name, value in facts %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
<nav aria-label="Sections"><ul>
{%- for section in sections %}<li><a href="#{{ section.anchor }}">{{ section.title }}</a></li>{% endfor -%}
</ul></nav>
</header>
<main>
{%- for section in sections %}
<section id="{{ section.anchor }}">
<h2>{{ section.title }}</h2>
{%- for text in section.paragraphs %}
<p>{{ text }}</p>
{%- endfor %}
{%- for figure in section.figures %}
{{ picture(figure) }}
{%- endfor %}
{%- for table in section.tables %}
{%- if table.rows | length > 12 %}
<details><summary>Table: {{ table.caption }}</summary>{{ grid(table) }}</details>
{%- else %}
{{ grid(table) }}
{%- endif %}
{%- endfor %}
</section>
{%- endfor %}
</main>
</body>
</html>
"""

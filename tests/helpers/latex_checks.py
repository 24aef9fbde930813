"""What LaTeX would stumble over, looked for without LaTeX."""

from __future__ import annotations

import re

ESCAPED = re.compile(r"\\[&%$#_{}]")


def columns_of(specification: str) -> int:
    """How many columns a tabular has, by an independent way: whatever stands in braces is an
    argument."""
    while "{" in specification:
        specification = re.sub(r"[>@!]?\{[^{}]*\}", "", specification)
    assert re.fullmatch("[lcrp]+", specification), specification
    return len(specification)


def check_latex(text: str) -> list[int]:
    """Assert that environments and braces close, signs are escaped and rows fit; return the columns
    of each tabular."""
    assert text.isascii(), sorted(set(re.findall(r"[^\x00-\x7f]", text)))
    body = "\n".join(line for line in text.splitlines() if not line.startswith("% \\usepackage"))
    body = body.replace("{%\n", "{\n")
    plain = ESCAPED.sub("", body.replace("\\\\", "\n"))
    assert plain.count("{") == plain.count("}")
    assert "%" not in plain
    assert "#" not in plain
    assert plain.count("$") % 2 == 0
    outside = re.sub(r"\\label\{[^}]*\}", "", re.sub(r"\$[^$]*\$", "", plain))
    assert not re.search(r"[_^<>|]", re.sub(r">\{\\raggedright\\arraybackslash\}", "", outside)), (
        outside
    )
    open_now: list[str] = []
    for word, name in re.findall(r"\\(begin|end)\{(\w+)\}", body):
        if word == "begin":
            open_now.append(name)
        else:
            assert open_now.pop() == name
    assert not open_now
    labels = re.findall(r"\\label\{(.*?)\}", body)
    assert (
        len(set(labels)) == len(labels) == body.count("\\caption{") == body.count("\\begin{table}")
    )
    found = []
    for part in body.split("\\begin{tabular}")[1:]:
        first, rest = part.split("\n", 1)
        found.append(columns_of(first[1:-1]))
        rows = ESCAPED.sub("", rest.split("\\end{tabular}")[0])
        for row in re.sub(r"\\(top|mid|bottom)rule", "", rows).split("\\\\")[:-1]:
            spans = [int(number) - 1 for number in re.findall(r"\\multicolumn\{(\d+)\}", row)]
            assert row.count("&") + 1 + sum(spans) == found[-1], row
            assert not row.lstrip().startswith(("[", "*")), "an argument of the line before"
    return found

"""Markdown tables, and generated parts of a page between two marks."""

from collections.abc import Sequence


def markdown_table(lines: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Make a table from a heading and rows; the first `num_left` columns are aligned left, the others right."""
    head, *body = lines
    rule = ["---" if column < num_left else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body)) + "\n"


def put_between(page: str, new: str, start: str, end: str) -> str:
    """Replace the part of a page between two marks; a page without marks gets them at its end."""
    head, mark, rest = page.partition(start)
    _, _, tail = rest.partition(end)
    return f"{head}{start}\n{new}{end}{tail}" if mark else f"{page}\n{start}\n{new}{end}\n"

"""Files, classes and functions stay small enough to be read at once; what outgrows that is two things."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE, CLASS, FUNCTION = 400, 250, 60  # lines at most


def test_nothing_outgrows_what_can_be_read_at_once() -> None:
    found = []
    for path in (path for folder in ("engine", "server", "tests") for path in (ROOT / folder).rglob("*.py")):
        text, name = path.read_text(), path.relative_to(ROOT)
        sizes = [(str(name), text.count("\n"), FILE)]
        for node in ast.walk(ast.parse(text)) if name.parts[0] != "tests" else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                sizes.append((f"{name}: {node.name}", lines, CLASS if isinstance(node, ast.ClassDef) else FUNCTION))
        found += [f"{what} has {lines} lines, at most {most}" for what, lines, most in sizes if lines > most]
    assert not found, found

"""What the documentation shows is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def examples() -> list[tuple[str, str]]:
    """(page, code) of every Python example that imports something and so stands by itself."""
    found = []
    for page in sorted(ROOT.glob("docs/*.md")):
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
            if re.match(r"\s*(import|from) ", code):
                found.append((page.name, code))
    return found


@pytest.mark.parametrize(("page", "code"), examples(), ids=[page for page, _ in examples()])
def test_examples_run_and_print_what_they_say(page: str, code: str) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{page}: {done.stderr}"
    said = [line.split(":")[0].strip() for line in re.findall(r"^print\(.*?\)\s+# (.*)$", code, re.M)]
    assert [line.split(":")[0].strip() for line in done.stdout.splitlines()][: len(said)] == said


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"

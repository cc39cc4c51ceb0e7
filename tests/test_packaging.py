"""What is built holds what is here."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_is_listed() -> None:
    found = {
        ".".join(p.parent.relative_to(ROOT).parts) for top in ("engine", "server") for p in (ROOT / top).rglob("*.py")
    }
    assert set(SETUP["packages"]) == found | {"server.web"}


def test_files_that_are_not_python_are_in_the_package_data() -> None:
    for package, patterns in SETUP["package-data"].items():
        folder = ROOT / SETUP["package-dir"].get(package, package.replace(".", "/"))
        for pattern in patterns:
            assert [*folder.glob(pattern)], f"{package}: nothing fits {pattern}"
    kinds = {f"*{p.suffix}" for p in (ROOT / "web").iterdir() if p.is_file()}
    assert kinds <= set(SETUP["package-data"]["server.web"])


def test_the_shipped_weights_stay_small() -> None:
    weights = [*(ROOT / "engine/models/tiny/weights").iterdir()]
    assert sum(p.stat().st_size for p in weights) <= 25_000_000

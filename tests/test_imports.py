"""Who may import whom, read from the sources; and what a server has loaded once it is up."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    ("engine.protocol", "engine.config"),
    ("engine.profiler", "engine.noise", "engine.clock", "engine.encoder"),
    ("engine.models",),  # the contract itself: engine/models/__init__.py
    ("engine.kvcache.policy", "engine.kvcache.quant", "engine.kvcache.pool", "engine.kvcache.tiers"),
    ("engine.layers",),
    ("engine.kvcache",),
    ("engine.signals", "engine.world"),
    ("engine.samplers", "engine.staggered"),
    ("engine.generator",),
    ("engine.decoder",),
    ("engine.playout", "engine.scheduler", "engine.link"),
    ("engine.loop",),
)
"""From below to above: a module imports from its own row or below it."""


def imports(path: Path) -> set[str]:
    """Modules a file imports at run time, by full name."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if _is_module(node.module, alias.name)}
    return found


def _is_module(package: str, name: str) -> bool:
    base = ROOT.joinpath(*package.split("."), name)
    return base.with_suffix(".py").exists() or base.is_dir()


def modules(package: str) -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def layer(module: str) -> int | None:
    """The row of a module, by its longest name; None for those beside the path."""
    if module.startswith("engine.models."):
        return None
    fits = [(len(name), i) for i, row in enumerate(LAYERS) for name in row if f"{module}.".startswith(f"{name}.")]
    return max(fits)[1] if fits else None


def test_the_server_takes_nothing_of_the_engine_but_the_protocol() -> None:
    taken = {
        (name, used)
        for name, path in modules("server").items()
        for used in imports(path)
        if used.split(".")[0] == "engine" and used not in ("engine", "engine.protocol")
    }
    assert not taken


def test_the_engine_takes_nothing_of_the_server() -> None:
    assert not [
        name for name, path in modules("engine").items() if any(u.split(".")[0] == "server" for u in imports(path))
    ]


def test_models_know_no_world_no_generator_and_no_rank() -> None:
    above = ("engine.parallel", "engine.world", "engine.generator", "engine.samplers", "engine.loop")
    for name, path in modules("engine/models").items():
        taken = [u for u in imports(path) if u.startswith(above)]
        assert not taken, f"{name} imports {taken}"


def test_imports_go_downward() -> None:
    for name, path in modules("engine").items():
        own = layer(name)
        if own is None:
            continue
        for used in imports(path):
            other = layer(used)
            assert other is None or other <= own, f"{name} imports {used}, which stands above it"


@pytest.mark.parametrize("module", ["engine.protocol", "engine.config", "engine.scheduler", "engine.kvcache.policy"])
def test_what_needs_no_torch_loads_none(module: str) -> None:
    assert "torch" not in loaded_by(f"import {module}")


def test_a_server_that_is_up_has_loaded_no_torch() -> None:
    assert "torch" not in loaded_by("import server.app, server.serve, server.cli")


def loaded_by(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}

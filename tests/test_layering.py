"""Who may import whom.  The rules are in docs/ARCHITECTURE.md; this reads the source and never runs it.

Rooms on one line are at the same height.  A module imports from lower lines and from its own room; a module without
a room is an error, so that a new one gets its place on purpose.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KERNEL_FOLDERS = ("triton_kernels", "pallas_kernels")
KERNEL_LOADER = "dflash_jax.ops.kernel_packages"

ROOMS: list[list[set[str]]] = [
    [{"errors", "places"}],
    [{"axes", "config"}, {"demo", "presets"}, {"structured"}],
    [{"ops"}, {"params", "sharding", "cache"}],
    [{"layers"}],
    [{"models"}, {"sampling", "acceptance", "state"}],
    [{"weights"}],
    [{"steps", "drafters"}],
    [{"engine"}],
    [{"train"}],
    [{"text", "llm", "logprobs", "server"}],
    [{"generate", "options"}, {"benchmark"}, {"aot"}, {"serve"}],
]
# Plain Python: tested in microseconds, with no device in sight.
WITHOUT_JAX = (
    "dflash_jax.text", "dflash_jax.engine.request", "dflash_jax.engine.pages", "dflash_jax.engine.prefix_cache",
    "dflash_jax.engine.scheduler", "dflash_jax.engine.protocol", "dflash_jax.engine.loop", "dflash_jax.engine.metrics",
    "dflash_jax.engine.turn", "dflash_jax.engine.interrupts", "dflash_jax.errors", "dflash_jax.places",
    "dflash_jax.structured", "dflash_jax.presets", "dflash_jax.demo",
)  # fmt: skip


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, root: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name, relative?) of everything `path` imports: at any depth, and by a literal name."""
    package = module_name(path, root).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}" if stem else alias.name, node.level > 0
        elif isinstance(node, ast.Call) and _callee(node) in ("import_module", "__import__", "find_spec"):
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value, False


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def room_of(module: str) -> tuple[int, int] | None:
    """(height, room) of a dotted name below `dflash_jax`; None when it has no room.

    What `python -m` runs of a package is a command line: it may import all, and nothing may import it.
    """
    if module.endswith(".__main__"):
        return len(ROOMS), -1
    top = module.split(".")[1] if "." in module else ""
    for height, rooms in enumerate(ROOMS):
        for index, room in enumerate(rooms):
            if top in room:
                return height, index
    return None


def check_library(root: Path) -> list[str]:
    """Problems of `root/dflash_jax`, one line each.  The package's own `__init__` is the door and sees everything."""
    problems = []
    for path in sorted((root / "dflash_jax").rglob("*.py")):
        module = module_name(path, root)
        if module == "dflash_jax":
            continue
        if room_of(module) is None:
            problems.append(f"{module} has no room")
            continue
        for line, name, _ in imports(path, root):
            problem = _library_problem(module, name)
            if problem:
                problems.append(f"{module}:{line} {problem}")
    return problems


def _library_problem(module: str, name: str) -> str | None:
    if any(_within(name, folder) or _within(name, f"dflash_jax_{folder}") for folder in KERNEL_FOLDERS):
        return f"imports the kernel package {name}"
    if _within(name, KERNEL_LOADER) and not _within(module, "dflash_jax.ops"):
        return "loads kernel packages: only dflash_jax.ops may"
    if not _within(name, "dflash_jax"):
        return None
    mine, theirs = room_of(module), room_of(name)
    if theirs is None and mine is not None and mine[0] == len(ROOMS) - 1:
        return None  # a command line may go through the door, as users do
    if mine is None or theirs is None:
        return f"imports {name}, which has no room"
    return None if mine == theirs or theirs[0] < mine[0] else f"imports {name} from a room that is not below"


def check_kernels(root: Path) -> list[str]:
    """Kernel packages import nothing of dflash_jax, not each other, and nothing relative beyond their own folder."""
    problems = []
    for folder in KERNEL_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            for line, name, relative in imports(path, root):
                ours = [p for p in ("dflash_jax", *KERNEL_FOLDERS) if _within(name, p)]
                ours += [name] if name.startswith("dflash_jax_") else []
                if ours and not (relative and _within(name, folder)):
                    problems.append(f"{module_name(path, root)}:{line} imports {name}")
    return problems


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_the_library_keeps_its_layers():
    assert check_library(ROOT) == []


def test_the_kernel_packages_stand_alone():
    assert check_kernels(ROOT) == []


def test_plain_python_modules_do_not_load_jax():
    """Run, not read: a package's `__init__` counts too."""
    script = "import sys\n" + "".join(f"import {name}\n" for name in WITHOUT_JAX)
    script += "print(sorted({m.partition('.')[0] for m in sys.modules} & {'jax', 'jaxlib', 'flax', 'orbax', 'torch'}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


GOOD = {
    "dflash_jax/__init__.py": "from dflash_jax.llm import LLM\n",
    "dflash_jax/errors.py": "",
    "dflash_jax/config/__init__.py": "from dflash_jax.config.rope import X\nfrom dflash_jax.errors import UserError\n",
    "dflash_jax/config/rope.py": "from ..errors import UserError\nX = 1\n",
    "dflash_jax/ops/__init__.py": "from dflash_jax.ops.kernel_packages import load_kernel_package\n",
    "dflash_jax/steps.py": "from dflash_jax import config, ops\nimport numpy\n",
    "dflash_jax/llm.py": "from dflash_jax.steps import a\nfrom dflash_jax.text import b\n",
    "dflash_jax/train/__main__.py": "from dflash_jax.text import b\nfrom dflash_jax.train.run import c\n",
    "dflash_jax/generate.py": "from dflash_jax import LLM\nfrom dflash_jax.demo import demo_target_path\n",
}


def test_a_clean_tree_passes(tmp_path):
    assert check_library(plant(tmp_path, GOOD)) == []


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("config/a.py", "from dflash_jax.steps import x", "imports dflash_jax.steps.x from a room that is not below"),
        ("config/a.py", "from dflash_jax import models", "imports dflash_jax.models from a room that is not below"),
        ("config/a.py", "from ..models import x", "imports dflash_jax.models.x from a room that is not below"),
        ("config/a.py", "from .. import models", "imports dflash_jax.models from a room that is not below"),
        ("config/a.py", "def f():\n    import dflash_jax.llm", "imports dflash_jax.llm from a room that is not below"),
        ("config/a.py", "import_module('dflash_jax.llm')", "imports dflash_jax.llm from a room that is not below"),
        ("ops/a.py", "from dflash_jax.params import x", "imports dflash_jax.params.x from a room that is not below"),
        ("engine/a.py", "import dflash_jax", "imports dflash_jax, which has no room"),
        ("engine/a.py", "from dflash_jax import LLM", "imports dflash_jax.LLM, which has no room"),
        ("train/a.py", "from dflash_jax.text import x", "imports dflash_jax.text.x from a room that is not below"),
        ("llm.py", "import dflash_jax.train.__main__", "imports dflash_jax.train.__main__ from a room that is not"),
        ("steps/a.py", "from dflash_jax.ops.kernel_packages import x", "loads kernel packages"),
        ("steps/a.py", "from dflash_jax.ops import kernel_packages", "loads kernel packages"),
        ("ops/a.py", "import triton_kernels.block_attention", "imports the kernel package"),
        ("steps/a.py", "from pallas_kernels import x", "imports the kernel package"),
        ("ops/a.py", "importlib.import_module('dflash_jax_triton_kernels')", "imports the kernel package"),
        ("novelty.py", "", "has no room"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, text, problem):
    root = plant(tmp_path, {**GOOD, f"dflash_jax/{file}": text + "\n"})
    found = check_library(root)
    assert len(found) == 1 and problem in found[0], found


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("from . import tiles\nfrom .tiles import x\nimport triton\nfrom jax import numpy\n", True),
        ("from .. import shared\n", True),
        ("from dflash_jax.axes import EMBED\n", False),
        ("import dflash_jax\n", False),
        ("import pallas_kernels.block_attention\n", False),
        ("from pallas_kernels import block_attention\n", False),
        ("from triton_kernels.block_attention import tiles\n", False),
        ("import dflash_jax_pallas_kernels\n", False),
    ],
)
def test_kernel_violations_are_found(tmp_path, text, clean):
    root = plant(tmp_path, {"triton_kernels/__init__.py": "", "triton_kernels/block_attention/__init__.py": text})
    assert (check_kernels(root) == []) is clean


def test_every_module_is_in_one_room_only():
    names = list(_flatten(ROOMS))
    assert len(names) == len(set(names))


def _flatten(rooms: list[list[set[str]]]) -> Iterable[str]:
    return (name for height in rooms for room in height for name in room)

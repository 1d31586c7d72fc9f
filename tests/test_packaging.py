"""What a wheel and an editable install expose, beside another package called `triton_kernels`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import dflash_jax
from dflash_jax import places
from dflash_jax.errors import UserError
from dflash_jax.ops import kernel_packages
from dflash_jax.ops.kernel_packages import kernel_names, load_kernel, load_kernel_package

ROOT = Path(__file__).resolve().parents[1]
# Runs where our package and a stranger's `triton_kernels` are both installed; `argv[1]` says which comes first.
BOTH = """
import json, sys
from dflash_jax.ops.kernel_packages import load_kernel_package
from dflash_jax.presets import list_presets
if sys.argv[1] == "theirs first":
    import triton_kernels
ours = [load_kernel_package(backend) for backend in ("triton", "pallas")]
import triton_kernels
import triton_kernels.matmul
import dflash_jax
print(json.dumps({
    "ours": {module.__name__: module.__file__ for module in ours},
    "theirs": triton_kernels.WHO + triton_kernels.matmul.WHO,
    "presets": len(list_presets()),
    "package": list(dflash_jax.__path__)[0],
}))
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def install(wheel: Path, target: Path) -> None:
    run("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile", f"--target={target}", str(wheel),
        cwd=target.parent)  # fmt: skip


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    return next(folder.glob("dflash_jax-*.whl"))


def test_the_wheel_owns_one_top_level_name(wheel):
    assert wheel.name == f"dflash_jax-{dflash_jax.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"dflash_jax"}
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]
    inside = {path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.json")}
    assert {f"dflash_jax/configs/{name}" for name in inside} <= set(names)
    for folder in ("triton_kernels", "pallas_kernels"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
        assert files and {f"dflash_jax/kernels/{name}" for name in files} <= set(names)
    assert "dflash_jax/ops/native/few_rows.cc" in names
    assert {"LICENSE", "NOTICE"} <= {name.rsplit("/", 1)[-1] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_a_wheel_beside_another_triton_kernels(wheel, tmp_path, order):
    target = tmp_path / "site"
    install(wheel, target)
    plant(target, {"triton_kernels/__init__.py": "WHO = 'their'", "triton_kernels/matmul.py": "WHO = ' kernels'"})
    found = json.loads(run("-c", BOTH, order, cwd=tmp_path, PYTHONPATH=str(target)))
    assert Path(found["package"]) == target / "dflash_jax"
    assert found["ours"] == {
        f"dflash_jax_{name}": str(target / "dflash_jax" / "kernels" / name / "__init__.py")
        for name in ("triton_kernels", "pallas_kernels")
    }
    assert found["theirs"] == "their kernels"
    assert found["presets"] == len(list((ROOT / "configs").rglob("*.json")))


@pytest.mark.slow
def test_an_editable_install_exposes_only_dflash_jax(tmp_path):
    build = f"import os, hatchling.build; print(hatchling.build.build_editable({str(tmp_path)!r}))"
    name = run("-c", build, cwd=ROOT).split()[-1]
    target = tmp_path / "site"
    install(tmp_path / name, target)
    assert not (target / "dflash_jax").exists()  # a copy there would hide the checkout
    plant(target, {"triton_kernels/__init__.py": "WHO = 'their'", "triton_kernels/matmul.py": "WHO = ' kernels'"})
    script = f"import site; site.addsitedir({str(target)!r})\n{BOTH}"
    found = json.loads(run("-c", script, "ours first", cwd=tmp_path))
    assert Path(found["package"]) == ROOT / "dflash_jax"
    assert found["ours"]["dflash_jax_triton_kernels"] == str(ROOT / "triton_kernels" / "__init__.py")
    assert found["theirs"] == "their kernels"
    script = f"import site; site.addsitedir({str(target)!r})\nimport dflash_jax, pallas_kernels"
    with pytest.raises(AssertionError, match="No module named 'pallas_kernels'"):
        run("-c", script, cwd=tmp_path)


@pytest.mark.parametrize("name", ["triton_kernels", "pallas_kernels"])
def test_our_folder_refuses_its_public_name(name):
    """With the checkout itself on sys.path our folder would shadow a package of that name, so it says so."""
    with pytest.raises(AssertionError, match=f"this '{name}' is a folder of the dflash_jax repository"):
        run("-c", f"import {name}", cwd=ROOT)


def test_loading_in_this_process_leaves_the_public_names_alone(monkeypatch):
    theirs = type(sys)("triton_kernels")
    monkeypatch.setitem(sys.modules, "triton_kernels", theirs)
    for backend in ("triton", "pallas"):
        assert load_kernel_package(backend).__name__ == f"dflash_jax_{backend}_kernels"
    assert sys.modules["triton_kernels"] is theirs
    assert "pallas_kernels" not in sys.modules


KERNELS = {
    "pyproject.toml": 'name = "dflash-jax"\n',
    "triton_kernels/__init__.py": "",
    "triton_kernels/tiles.py": "ROWS = 16\n",
    "triton_kernels/block_attention/__init__.py": "from .. import tiles\nfrom .inner import NAME\n",
    "triton_kernels/block_attention/inner.py": "NAME = __name__\n",
    "triton_kernels/foreign/__init__.py": "import no_such_gpu_package\n",
    "triton_kernels/broken/__init__.py": "from . import missing_part\n",
    "triton_kernels/mistaken/__init__.py": "from .absent import x\n",
    "triton_kernels/failing/__init__.py": "raise RuntimeError('no device')\n",
}


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Iterator[Path]:
    """A checkout of its own, with kernels that work and kernels that do not."""
    plant(tmp_path, KERNELS)
    monkeypatch.setattr(places, "PACKAGE", tmp_path / "dflash_jax")
    for name in [name for name in sys.modules if name.startswith("dflash_jax_triton_kernels")]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("dflash_jax_triton_kernels")]:
        del sys.modules[name]


def test_a_kernel_imports_its_neighbours_relatively(checkout):
    module = load_kernel("triton", "block_attention")
    assert module.__name__ == "dflash_jax_triton_kernels.block_attention"
    assert module.NAME == "dflash_jax_triton_kernels.block_attention.inner"
    assert module.tiles.ROWS == 16
    assert load_kernel("triton", "block_attention") is module
    assert load_kernel_package("triton") is sys.modules["dflash_jax_triton_kernels"]
    assert kernel_names("triton") == ("block_attention", "broken", "failing", "foreign", "mistaken")


def test_the_installed_place_comes_first(checkout):
    plant(checkout, {"dflash_jax/kernels/triton_kernels/__init__.py": "WHERE = 'installed'\n"})
    assert load_kernel_package("triton").WHERE == "installed"


def test_a_missing_kernel_names_those_that_exist(checkout):
    with pytest.raises(UserError, match=r"no triton kernel for 'attention' \(kernels: block_attention, broken"):
        load_kernel("triton", "attention")


def test_a_missing_package_names_the_extra(checkout):
    with pytest.raises(UserError, match=r"needs the package 'no_such_gpu_package': pip install 'dflash-jax\[cuda\]'"):
        load_kernel("triton", "foreign")


@pytest.mark.parametrize(
    ("op", "error"), [("broken", ImportError), ("mistaken", ModuleNotFoundError), ("failing", RuntimeError)]
)
def test_a_broken_kernel_is_not_taken_for_a_missing_package(checkout, op, error):
    with pytest.raises(error) as caught:
        load_kernel("triton", op)
    assert not isinstance(caught.value, UserError)


def test_a_package_that_fails_to_load_is_not_kept(checkout):
    plant(checkout, {"triton_kernels/__init__.py": "raise RuntimeError('half loaded')\n"})
    with pytest.raises(RuntimeError, match="half loaded"):
        load_kernel_package("triton")
    assert "dflash_jax_triton_kernels" not in sys.modules


def test_a_strangers_folder_beside_an_installation_is_not_taken(checkout):
    (checkout / "pyproject.toml").unlink()
    with pytest.raises(UserError, match="no triton kernels: dflash_jax/kernels/triton_kernels is missing"):
        load_kernel_package("triton")
    plant(checkout, {"pyproject.toml": '[project]\nname = "other"\n'})
    with pytest.raises(UserError, match="no triton kernels"):
        load_kernel_package("triton")


@pytest.mark.parametrize("call", [load_kernel_package, kernel_names, kernel_packages.private_name])
def test_an_unknown_backend_is_refused(call):
    with pytest.raises(UserError, match="no kernels for 'cuda' .known: triton, pallas"):
        call("cuda")

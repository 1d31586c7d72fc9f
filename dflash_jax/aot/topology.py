"""A TPU to compile for: its devices by libtpu, its memory and speed by `configs/machines`."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from dflash_jax.errors import UserError
from dflash_jax.presets import list_presets, load_preset
from dflash_jax.sharding import make_mesh

# libtpu asks the cloud's metadata server, and these variables, what machine it is on: it is on none.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # the lock is for the chips, and none is used
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Tpu:
    """Devices to compile for, and what one of them has."""

    name: str
    chip: str
    mesh: Mesh
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops_per_s: float

    @property
    def devices(self) -> int:
        return self.mesh.size


def chips() -> dict[str, dict[str, Any]]:
    """The presets of TPUs by name."""
    found = {name: load_preset(name) for name in list_presets("machines")}
    return {name: preset for name, preset in found.items() if preset["platform"] == "tpu"}


def check_libtpu() -> None:
    """UserError where the compiler is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("the TPU's compiler, libtpu, is not installed: pip install 'dflash-jax[aot]'")


def open_tpu(name: str, devices: int | None = None) -> Tpu:
    """The topology called `name`, for example `v6e:2x2`, or the first `devices` devices of it."""
    chip, preset = _chip(name)
    check_libtpu()
    every = _topology(name, preset["aot_topology"])
    count = len(every) if devices is None else devices
    if not 1 <= count <= len(every):
        raise UserError(f"devices {count} is not between 1 and the {len(every)} that {name} has")
    per_device = 1 / preset["devices_per_chip"]
    return Tpu(
        name, chip, make_mesh(every[:count]), int(preset["memory_bytes"] * per_device),
        preset["memory_bandwidth_bytes_per_s"] * per_device, preset["bf16_flops_per_s"] * per_device,
    )  # fmt: skip


def _chip(name: str) -> tuple[str, dict[str, Any]]:
    known = chips()
    for chip, preset in known.items():
        if name.partition(":")[0] in (chip, preset["aot_topology"].partition(":")[0]):
            return chip, preset
    examples = ", ".join(preset["aot_topology"] for preset in known.values())
    raise UserError(f"there is no TPU {name!r} (for example {examples})")


def _topology(name: str, usual: str) -> list[Any]:
    """The devices of a topology; the usual one where only a chip is named."""
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    kind, _, shape = name.partition(":")
    asked = f"{usual.partition(':')[0]}:{shape}" if shape else usual
    try:
        return list(topologies.get_topology_desc(asked, platform="tpu").devices)
    except Exception as error:  # noqa: BLE001  (libtpu has no type of its own for a shape that it does not know)
        raise UserError(f"libtpu knows no topology {asked!r}: {str(error).splitlines()[0]}") from error

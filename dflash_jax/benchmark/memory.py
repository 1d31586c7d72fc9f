"""The most memory that a contender used."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # see proc(5)
THE_PROCESS = "the process"


def reset_peak() -> bool:
    """Let the peak of this process's resident memory start from now; False where Linux does not let us."""
    try:
        RESET.write_text(RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def process_peak_bytes() -> int | None:
    """Peak resident memory of this process since `reset_peak`; None where it is not told."""
    if not STATUS.is_file():
        return None
    found = [line.split()[1] for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else None


def peak_bytes(device: Any, memory: Any) -> dict[str, Any]:
    """{"peak_memory_bytes": …, "peak_memory_of": what that is}.

    On CPU it is the process's; elsewhere the sum that the engine accounts for, since a device's own peak cannot be set
    back between contenders.
    """
    if device.platform == "cpu":
        return {"peak_memory_bytes": process_peak_bytes(), "peak_memory_of": THE_PROCESS}
    return {"peak_memory_bytes": sum(n or 0 for n in dataclasses.asdict(memory).values()),
            "peak_memory_of": "weights, pools and scratch"}  # fmt: skip

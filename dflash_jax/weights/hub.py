"""From what the user names (a folder, a file, a hub id) to a path on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_jax.errors import UserError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
_NOT_HUB = (".gguf", ".safetensors", ".json", ".bin")


def local_path(name: str | Path) -> Path:
    """`name` as an existing path, downloading it first when it is a hub id (`owner/name`)."""
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # ~ of a user that is not known here
        raise UserError(f"{name}: {error}") from error
    if path.exists():
        return path
    if not isinstance(name, str) or not _may_be_hub_id(name):
        raise UserError(f"{name}: no such file or folder, and not a hub id (owner/name)")
    return _download(name)


def _may_be_hub_id(name: str) -> bool:
    """`owner/name` whose owner is no folder here (then a misspelt path is likelier)."""
    return bool(_HUB_ID.fullmatch(name)) and not name.endswith(_NOT_HUB) and not Path(name.split("/")[0]).is_dir()


def _download(hub_id: str) -> Path:
    """The snapshot of a hub id: configuration, tokenizer and safetensors only; from the cache when offline."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(_WANTED)))
    except errors.GatedRepoError as error:
        raise UserError(f"{hub_id}: access to this model must be granted on the hub, then log in there") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{hub_id}: no such file or folder, and the hub has no such model (or it is private)"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise UserError(f"{hub_id}: not a local path, not in the hub cache, and the hub cannot be reached") from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise UserError(f"{hub_id}: downloading from the hub failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

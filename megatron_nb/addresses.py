"""`service:NAME` in place of an address: a server that runs beside this job, wherever that is (services.py keeps it alive).

The environment says which folder holds the addresses, one file NAME-K.json for replica K, and which start of the job they
must be of: an earlier start's servers are gone, its files may still lie there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER, START, TOKEN = "NB_SERVICES", "NB_SERVICES_START", "NB_SERVICES_TOKEN"
NAME = re.compile(r"[a-z][a-z0-9_]*")
ADDRESS = re.compile(rf"service:({NAME.pattern})(?:/(\d+))?")


def name_in(url: str) -> str | None:
    """NAME of `service:NAME` or `service:NAME/K`; None for another address."""
    found = ADDRESS.fullmatch(url)
    return found and found[1]


def is_address(url: str) -> bool:
    """Whether a client can be told this: http://HOST:PORT, https://HOST, service:NAME."""
    return url.startswith(("http://", "https://")) or name_in(url) is not None


def records(folder: Path, start: str | None = None) -> list[dict[str, Any]]:
    """What is written of every server in `folder`, by name and replica; of one start of the job, or of whichever was last."""
    found = []
    for path in folder.glob("*-*.json"):
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):  # it has gone meanwhile
            continue
        if start in (None, record["start"]):
            found.append(record)
    return sorted(found, key=lambda record: (record["name"], record["replica"]))


def replicas_of(name: str) -> dict[int, str]:
    """Replica -> address of a service of this job. ValueError when there is none."""
    if FOLDER not in os.environ:
        raise ValueError(f"service:{name} is a server that a job starts, and none was started here: see launch.services")
    folder = Path(os.environ[FOLDER])
    found = {record["replica"]: record["url"] for record in records(folder, os.environ[START]) if record["name"] == name}
    if not found:
        raise ValueError(f"service:{name}: {folder} tells of no such server: name it in launch.services")
    return found


def expanded(urls: Iterable[str]) -> list[str]:
    """With `service:NAME/K` for every replica K in place of `service:NAME`, where they are known already."""
    found = []
    for url in urls:
        name = name_in(url) if FOLDER in os.environ else None
        found += [f"service:{name}/{replica}" for replica in replicas_of(name)] if name else [url]
    return found


def url_of(url: str) -> str:
    """An address that HTTP knows. Of several replicas, where none is named, ranks take turns."""
    found = ADDRESS.fullmatch(url)
    if found is None:
        return url
    replicas = replicas_of(found[1])
    turn = sorted(replicas)[int(os.environ.get("RANK", "0")) % len(replicas)]
    return replicas[int(found[2]) if found[2] else turn]


def token_for(url: str, variable: str | None) -> str | None:
    """What to send as a bearer token: of the environment variable, or what the servers of this job ask for."""
    if variable:
        return os.environ[variable]
    return os.environ.get(TOKEN) if name_in(url) else None

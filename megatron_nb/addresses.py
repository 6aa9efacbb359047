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


def name_in(url: str) -> str | None:
    """NAME of `service:NAME`; None for another address."""
    name = url.removeprefix("service:")
    return name if url.startswith("service:") and NAME.fullmatch(name) else None


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


def urls_of(url: str) -> list[str]:
    """The addresses of all replicas of `service:NAME`; any other address as it is. ValueError when this job has no such one."""
    name = name_in(url)
    if name is None:
        return [url]
    if FOLDER not in os.environ:
        raise ValueError(f"{url} is a server that a job starts, and none was started here: see launch.services")
    folder = Path(os.environ[FOLDER])
    found = [record["url"] for record in records(folder, os.environ[START]) if record["name"] == name]
    if not found:
        raise ValueError(f"{url}: {folder} tells of no such server: name it in launch.services")
    return found


def expanded(urls: Iterable[str]) -> list[str]:
    """Every replica of every address, where they are known already."""
    return [one for url in urls for one in (urls_of(url) if FOLDER in os.environ else [url])]


def url_of(url: str) -> str:
    """One address: of several replicas, ranks take turns."""
    urls = urls_of(url)
    return urls[int(os.environ.get("RANK", "0")) % len(urls)]


def token_for(url: str, variable: str | None) -> str | None:
    """What to send as a bearer token: of the environment variable, or what the servers of this job ask for."""
    if variable:
        return os.environ[variable]
    return os.environ.get(TOKEN) if name_in(url) else None

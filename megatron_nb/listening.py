"""What every HTTP service of this project is told: where it listens, who may ask, when it gives up."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass
class ListenConfig:
    """A service beyond this machine asks for a token, unless it is told to do without."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    token_env: str | None = None  # the environment variable that holds the token
    token_file: str | None = None  # or the file; None of both: none is asked for
    without_token: bool = False  # listen beyond this machine without one
    queue: int = 256  # under way at once; more are refused
    deadline_s: float = 60.0  # of a request
    drain_s: float = 30.0  # after SIGTERM, for the requests under way to finish

    def __post_init__(self):
        for name in ("queue", "deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be more than 0")
        if not 0 <= self.port < 1 << 16 or self.drain_s < 0:
            raise ValueError(f"port={self.port} must be 0 to 65535 and drain_s={self.drain_s} at least 0")
        if self.token_env and self.token_file:
            raise ValueError(f"token_env={self.token_env!r} and token_file={self.token_file!r}: name one of them")
        if not (self.token_env or self.token_file or self.without_token or _is_loopback(self.host)):
            raise ValueError(
                f"host={self.host!r} can be reached by other machines and no token is asked for: name token_env or token_file, "
                "or say without_token to let everyone ask"
            )

    def token(self) -> bytes | None:
        """What clients must send; None: nothing. ValueError when it was to be read and is not there."""
        if not (self.token_env or self.token_file):
            return None
        found = os.environ.get(self.token_env, "") if self.token_env else Path(self.token_file).read_text()
        if not found.strip():
            raise ValueError(f"{self.token_env or self.token_file} holds no token: put one there")
        return found.strip().encode()


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"

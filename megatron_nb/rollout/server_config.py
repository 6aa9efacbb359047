"""What is set about servers, and what a request to one says."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_nb.addresses import is_address
from megatron_nb.rollout.engine import Request


@dataclass
class ServerConfig:
    """Which servers, and how they get weights."""

    urls: list[str] = field(default_factory=lambda: ["http://127.0.0.1:8000"])
    model: str = "policy"  # the name the servers were given (--served-model-name)
    transfer: Literal["files", "group"] = "group"  # of weights: a disk that both sides see, or a process group over TCP
    folder: Path | None = None  # for files: on that disk
    backend: Literal["gloo", "nccl"] = "gloo"  # of the process group
    host: str | None = None  # this host's address as the servers see it; None: found out
    bucket_mb: int = 512  # weights sent at once
    concurrency: int = 256  # requests under way at each server
    timeout_s: float = 600.0  # from one piece of an answer to the next; the first waits for a place on the server too
    update_timeout_s: float = 600.0  # of each step of a weight update, retries included
    retries: int = 5  # of a request that fails before its first token
    away_s: float = 900.0  # for which servers may be gone, all at once or at an update; one that returns gets the weights again
    verify: bool = True  # compare log-probs with the trainer's after each update (when the engine was given a probe)
    tolerance: float = 0.05  # of the mean absolute difference; fp32 on both sides reaches 1e-4

    def __post_init__(self):
        if not self.urls:
            raise ValueError("engine.server.urls is empty: name at least one server, such as http://host:8000")
        for url in self.urls:
            if not is_address(url):
                raise ValueError(f"engine.server.urls: {url!r} must start with http:// or https://, or be service:NAME")
        if self.transfer == "files" and self.folder is None:
            raise ValueError("engine.server.transfer=files needs engine.server.folder, which trainer and servers both see")
        for name in ("bucket_mb", "concurrency", "timeout_s", "update_timeout_s", "tolerance"):
            if getattr(self, name) <= 0:
                raise ValueError(f"engine.server.{name}={getattr(self, name)} must be positive")
        if self.away_s < 0:
            raise ValueError(f"engine.server.away_s={self.away_s} must not be negative")


def stream_of(request: Request) -> str:
    """What a request goes on with: its session, or "group/index" of an id "group/index/turn.part"."""
    return request.session or request.request_id.rpartition("/")[0] or request.request_id


def body_of(model: str, request: Request) -> dict[str, Any]:
    """Everything that decides the draw is said; nothing is left to the server's defaults."""
    sampling = request.sampling
    return {
        "model": model, "prompt": request.ids, "max_tokens": sampling.max_tokens, "temperature": sampling.temperature,
        "top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": 0.0, "repetition_penalty": 1.0, "seed": request.seed,
        "stop_token_ids": list(sampling.stop_ids), "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip

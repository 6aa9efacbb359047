"""What a vLLM server loads so that a trainer can give it weights: a transfer engine of its own, and two calls.

Runs in the server's environment (torch, vllm and the standard library), not in the trainer's:

    PYTHONPATH=<this repository> VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server ... \\
        --worker-extension-cls megatron_nb.rollout.vllm_worker.Extension \\
        --weight-transfer-config '{"backend": "megatron_nb"}' --logprobs-mode processed_logprobs --generation-config vllm

The server's routes /init_weight_transfer_engine, /start_weight_update, /update_weights and /finish_weight_update then take
tensors under Hugging Face names, from files or from a process group, through vLLM's layer-wise reload.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

from megatron_nb.rollout.weight_link import Link, checksum, flat_bytes, unflat

BACKEND = "megatron_nb"
UNFINISHED = -2  # instead of a version, from the first change of a weight to the last


@dataclass
class Join(WeightTransferInitInfo):
    """The trainer's process group; this server's workers are ranks first_rank, first_rank + 1, ..."""

    host: str
    port: int
    first_rank: int
    world: int
    backend: str
    timeout_s: float


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Tensors to come: the content of `file`, or the next broadcast, described by `tensors`: [name, dtype, shape]."""

    version: int
    tensors: list | None = None
    file: str | None = None


class Receiver(WeightTransferEngine):
    """Takes buckets of tensors; knows which version it holds and the checksum of what it was sent."""

    init_info_cls, update_info_cls = Join, Bucket

    def __init__(self, config, vllm_config, device, model):
        super().__init__(config, vllm_config, device, model)
        self.link: Link | None = None
        self.version, self.checksum, self.tensors = -1, 0, 0
        self.coming: int | None = None  # the version that is being received
        self.came: set[str] = set()  # names of tensors
        self.loaded: set[str] = set()  # names of parameters, of which one may take several tensors

    def init_transfer_engine(self, init_info: Join) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.link = Link.joined(
            init_info.host, init_info.port, rank, init_info.world, init_info.backend, init_info.timeout_s
        )  # fmt: skip

    def start_weight_update(self) -> None:
        self.version, self.coming, self.checksum, self.tensors = UNFINISHED, None, 0, 0
        self.came, self.loaded = set(), set()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Bucket) -> None:
        if update_info.file is not None:
            bucket = list(safetensors_weights_iterator([update_info.file], use_tqdm_on_load=False))
        else:
            if self.link is None:
                raise RuntimeError("no trainer has joined: call /init_weight_transfer_engine first")
            whole = torch.empty(flat_bytes(update_info.tensors), dtype=torch.uint8, device=self.link.device)
            self.link.broadcast(whole)
            bucket = unflat(whole, update_info.tensors)
        self.checksum += checksum(bucket)
        self.tensors += len(bucket)
        self.coming = update_info.version
        self.came |= {name for name, _ in bucket}
        self.loaded |= set(self.model.load_weights(bucket) or ())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        unloaded = {name for name, _ in self.model.named_parameters()} - self.loaded
        missing = sorted(unloaded | (self._needed() - self.came))
        if missing or self.coming is None:  # vLLM keeps what it had there, and says so in its log at most
            raise RuntimeError(f"{len(missing)} tensors were not among the weights that came, such as {missing[:3]}")
        self.version = self.coming

    def _needed(self) -> set[str]:
        """The tensors of the folder that the server was started with; none when it is not a folder of safetensors."""
        names: set[str] = set()
        for file in Path(self.model_config.model).glob("*.safetensors"):
            with open(file, "rb") as stream:  # 8 bytes: the length of the JSON header
                names |= set(json.loads(stream.read(int.from_bytes(stream.read(8), "little"))))
        tied = {"lm_head.weight"} if self.model_config.hf_config.tie_word_embeddings else set()
        return {name for name in names - tied if name != "__metadata__" and not name.endswith("rotary_emb.inv_freq")}

    def shutdown(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None


class Extension:
    """Calls of /collective_rpc, answered by every worker."""

    def nb_state(self) -> dict:
        """What this worker holds."""
        receiver = self.weight_transfer_engine
        return {
            "version": receiver.version,
            "checksum": receiver.checksum,
            "tensors": receiver.tensors,
            "logprobs_mode": str(self.vllm_config.model_config.logprobs_mode),
        }

    def nb_forget(self) -> dict:
        """End an update that a trainer left unfinished, so that the next can start. Its weights are not fit for use."""
        if self._weight_update_active:
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(self.weight_transfer_engine.model, self.weight_transfer_engine.model_config)
            self._weight_update_active = False
        return self.nb_state()


WeightTransferEngineFactory.register_engine(BACKEND, Receiver)

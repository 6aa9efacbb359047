"""How the native engine draws: one number per (seed, position) picks a token from the fp32 distribution.

The draw of a token depends on its logits, the request's seed and the token's position in the sequence; on nothing else of
the batch. A request that is continued with what it sampled so far as its prompt goes on as if it had never stopped.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from megatron_nb.rollout.engine import Completion, Request, Sampling, Stop
from megatron_nb.rollout.native_sessions import Ids

# isort: split
import torch.distributed as dist
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

CHUNK = 128  # every padded vocabulary is a multiple of it
PLAIN = torch._C.DisableTorchFunction  # no part of a step needs the CPU layer's function mode, which costs 3 us a call


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 48 bits for the token at `position` (of prompt and completion) of a request with `seed`."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2.0**48


def _truncate(weights: torch.Tensor, sampling: Sampling) -> None:
    """Set the weights [V] outside top_k, then outside the smallest set that holds top_p of the rest, to 0 in place."""
    ordered, index = weights.sort(descending=True, stable=True)
    if sampling.top_k:
        ordered[sampling.top_k :] = 0.0
    before = ordered.double().cumsum(0) - ordered
    if sampling.top_p < 1:
        ordered[before >= sampling.top_p * ordered.sum(dtype=torch.float64)] = 0.0
    weights[index] = ordered


def draw(
    logits: torch.Tensor, samplings: list[Sampling], uniforms: list[float], vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [n] and their log-probs [n] fp32 over the true vocabulary at each row's temperature.

    logits [n, V padded to a multiple of CHUNK] may be overwritten. Greedy rows are measured at temperature 1, truncated
    ones over the whole vocabulary.
    """
    n = len(samplings)
    z = logits[:n].float()
    z[:, vocab_size:] = -torch.inf
    temperatures = [s.temperature or 1.0 for s in samplings]
    if any(t != 1.0 for t in temperatures):
        z.div_(torch.tensor(temperatures, device=z.device)[:, None])
    highest, greedy = z.max(1, keepdim=True)
    weights = (z - highest).exp_()
    sums = weights.view(n, -1, CHUNK).sum(-1, dtype=torch.float64)  # [n, V / CHUNK]
    normaliser = sums.sum(1).log()
    for row, sampling in enumerate(samplings):
        if sampling.temperature and (sampling.top_k or sampling.top_p < 1):
            _truncate(weights[row], sampling)
            sums[row] = weights[row].view(-1, CHUNK).sum(-1, dtype=torch.float64)
    # inverse of the cumulative distribution: first the chunk, then the token in it. An empty token is never first above
    # the target, since the cumulative sum does not rise there
    cumulative = sums.cumsum(1)
    target = torch.tensor(uniforms, dtype=torch.float64, device=z.device)[:, None] * cumulative[:, -1:]
    chunk = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    inner = weights.view(n, -1, CHUNK).gather(1, chunk[..., None].expand(n, 1, CHUNK))[:, 0].double().cumsum(1)
    rest = target - (cumulative.gather(1, chunk) - sums.gather(1, chunk))
    rest = torch.minimum(rest, inner[:, -1:] * (1 - 2.0**-40))  # the two sums round differently
    token = chunk[:, 0] * CHUNK + torch.searchsorted(inner, rest, right=True).clamp_(max=CHUNK - 1)[:, 0]
    cold = torch.tensor([s.temperature == 0 for s in samplings], device=z.device)
    token = torch.where(cold, greedy[:, 0], token)
    logprob = (z.gather(1, token[:, None]) - highest)[:, 0].double() - normaliser
    return token, logprob.float()


@dataclass
class Stream:
    """One request while it runs. A session's request holds only those of its ids that are new to this engine."""

    request: Request
    start: int  # ids before the first sampled one
    ids_kept: Ids | None = None  # of the session so far, without `ids`; None: nothing will be kept
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # on the leader
    versions: list[int] = field(default_factory=list)
    stop: Stop | None = None

    def append(self, token: int, logprob: float, version: int) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        sampling = self.request.sampling
        if token in sampling.stop_ids:
            self.stop = Stop.EOS
        elif len(self.ids) == sampling.max_tokens:
            self.stop = Stop.LENGTH

    def completion(self) -> Completion:
        return Completion(self.ids, self.logprobs, self.versions, self.stop)


class _NoText:
    """Core wants a tokenizer for texts that nobody asks for."""

    eod = -1

    def detokenize(self, ids, **options) -> str:
        return ""


class Sampler(TextGenerationController):
    """Core's controller with our draw; the first rank of a replica draws, the others are told.

    streams: the running requests by core's number; `ended` collects those whose stop became known in a step.
    """

    def __init__(self, wrapped_model, vocab_size: int, group: dist.ProcessGroup):
        super().__init__(wrapped_model, _NoText())
        self.true_vocab_size, self.group = vocab_size, group
        self.streams: dict[int, Stream] = {}
        self.ended: list[Stream] = []
        self.version = -1

    def _dynamic_step_context_init(self, *args, **kwargs):
        with PLAIN():
            return super()._dynamic_step_context_init(*args, **kwargs)

    def _dynamic_step_forward_logits(self, *args):
        with PLAIN():
            super()._dynamic_step_forward_logits(*args)

    def _dynamic_step_context_bookkeeping(self):
        with PLAIN():
            return super()._dynamic_step_context_bookkeeping()

    def _dynamic_step_sample_logits(self):
        with PLAIN():
            self._sample()

    def _sample(self):
        context = self.inference_wrapped_model.inference_context
        numbers = context.request_ids[context.paused_request_count : context.total_request_count].tolist()
        streams = [self.streams[number] for number in numbers]
        logprobs = [0.0] * len(streams)
        tokens = self._sampled_tokens_cuda[: len(streams)]
        if self.group.rank() == 0:
            uniforms = [uniform(s.request.seed, s.start + len(s.ids)) for s in streams]
            samplings = [s.request.sampling for s in streams]
            drawn, measured = draw(self._all_logits_cuda[0], samplings, uniforms, self.true_vocab_size)
            logprobs = measured.tolist()
            tokens.copy_(drawn if bool(measured.isfinite().all()) else torch.full_like(drawn, -1))
        if self.group.size() > 1:
            dist.broadcast(tokens, group=self.group, group_src=0)
        found = tokens.tolist()
        if -1 in found:
            raise FloatingPointError(f"the engine's logits are not finite (weights of version {self.version})")
        for number, stream, token, logprob in zip(numbers, streams, found, logprobs):
            # the row of a prompt that is not wholly read yet says nothing; an aborted request takes no more
            if number != context.chunked_prefill_request_id and stream.stop is None:
                stream.append(token, logprob, self.version)
                if stream.stop is not None:
                    self.ended.append(stream)

    def _dynamic_step_log_probs_bookkeeping(self):
        return False, False  # the draw has measured them already

    def _apply_stop_word_finished_ids(self, active_request_ids, active_request_mask):
        for row, number in enumerate(active_request_ids.tolist()):
            if self.streams[number].stop is not None:
                active_request_mask[row] = 0

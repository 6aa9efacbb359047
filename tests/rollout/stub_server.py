"""A stand-in for a vLLM server: the routes that rollout/server.py uses, in threads of this process, over a tiny real Llama.

    with StubServer(hf_folder) as stub:                    # or StubServer(model=a transformers model)
        engine = ServerEngine(ServerConfig(urls=[stub.url], retries=1), topology)

What a test can do with it, at any time and from any thread:

    stub.token_delay = 0.01                  seconds that a token takes
    stub.hold(after=3); stub.wait_held(2)    streams stop before their 4th token; wait until two do; stub.release() lets go.
                                             `engine.load_weights(...)` meanwhile lands mid-request: they end with "abort"
    stub.fail("/pause", times=2, status=503, headers={"Retry-After": "1"})   the next two requests fail; `kind` may also be
                                             "nonsense" (200 and no JSON), "truncate" (half an answer), "hang", "die" (the
                                             connection is closed). after=2: only the third matching request and on
    stub.restart()                           as a server that came back: first weights, version -1
    stub.requests                            [(path, body)] in order;  stub.hung_up: streams whose client went away
    stub.version, stub.cache                 of the weights; answers by prefix (it survives updates unless it is reset)
    stub.chat = lambda body: "text"          what /v1/chat/completions answers

A draw depends on the request's seed, prompt and weights alone.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file

from megatron_nb.rollout.weight_link import Link, checksum, flat_bytes, unflat

LOOK_S = 0.002


class Fault(NamedTuple):
    kind: str
    status: int
    headers: dict
    text: str


class StubServer:
    """See the head of the file."""

    def __init__(self, folder=None, model=None, logprobs_mode="processed_logprobs", host="127.0.0.1", port=0):
        if model is None:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model, self.logprobs_mode = model.eval(), logprobs_mode
        self._first = deepcopy(model.state_dict())
        self.version, self.checksum, self.tensors, self.coming, self.updating = -1, 0, 0, None, False
        self.cache: dict[tuple[int, ...], torch.Tensor] = {}  # prefix -> logits of the next token
        self.token_delay = 0.0
        self.requests: list[tuple[str, Any]] = []
        self.headers: dict[str, str] = {}  # of the last request
        self.hung_up: list[dict] = []
        self.chat = lambda body: "fine"
        self.link: Link | None = None
        self.lock = threading.RLock()  # of the model and what belongs to it
        self.running = threading.Event()  # not paused
        self.running.set()
        self.epoch = 0  # of aborts: streams of an earlier one end
        self._held, self._hold_after = set(), float("inf")
        self._faults: dict[str, list[Fault | None]] = {}
        self._http = ThreadingHTTPServer((host, port), type("Handler", (_Handler,), {"stub": self}))
        self._http.daemon_threads = True
        self._connections: set[socket.socket] = set()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> StubServer:
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the port and every connection, as a killed server does."""
        self._http.shutdown(), self._http.server_close()
        for connection in list(self._connections):
            _close(connection)
        self.epoch += 1

    # ------------------------------------------------------------------ controls
    def hold(self, after: float) -> None:
        self._hold_after = after

    def release(self) -> None:
        self.hold(float("inf"))

    def wait_held(self, count: int, timeout: float = 20.0) -> None:
        end = time.monotonic() + timeout
        while len(self._held) < count:
            assert time.monotonic() < end, f"{len(self._held)} streams are held, {count} were waited for"
            time.sleep(LOOK_S)

    def fail(self, path: str, times: int = 1, kind: str = "status", status: int = 500, headers=None, text="", after=0) -> None:
        self._faults.setdefault(path, []).extend([None] * after + [Fault(kind, status, headers or {}, text)] * times)

    def restart(self) -> None:
        with self.lock:
            self.model.load_state_dict(self._first)
            self.version, self.updating, self.link = -1, False, None
            self.cache.clear()
            self.epoch += 1

    def count(self, path: str) -> int:
        return [asked for asked, _ in self.requests].count(path)

    def fault_of(self, path: str) -> Fault | None:
        return self._faults[path].pop(0) if self._faults.get(path) else None

    # ------------------------------------------------------------------ the model
    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """[V] fp32 of the token after `ids`; from the cache when that prefix was seen, whatever the weights were."""
        with self.lock:
            key = tuple(ids)
            if key not in self.cache:
                self.cache[key] = self.model(torch.tensor([ids])).logits[0, -1].float()
            return self.cache[key]

    def tokens(self, body: dict, gone=lambda: False):
        """(id, log-prob, finish_reason or None) one after the other; (None, None, "abort") when it is aborted."""
        ids, start = list(body["prompt"]), len(body["prompt"])
        while not self.running.wait(LOOK_S):
            if gone():
                return
        epoch = self.epoch
        generator = torch.Generator().manual_seed(body.get("seed") or 0)
        while True:
            while len(ids) - start >= self._hold_after and epoch == self.epoch and not gone():
                self._held.add(threading.get_ident())
                time.sleep(LOOK_S)
            self._held.discard(threading.get_ident())
            time.sleep(self.token_delay)
            with self.lock:  # no stream outlives its weights
                logits = self.logits(ids) if epoch == self.epoch else None
            if logits is None:
                yield None, None, "abort"
                return
            if gone():
                self.hung_up.append(body)
                return
            temperature = body.get("temperature", 1.0)
            logprobs = (logits / (temperature or 1.0)).log_softmax(0)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=generator) if temperature else logprobs.argmax())
            ids.append(token)
            stopped, full = token in body.get("stop_token_ids", ()), len(ids) - start == body["max_tokens"]
            yield token, float(logprobs[token]), "stop" if stopped else "length" if full else None
            if stopped or full:
                return

    # ------------------------------------------------------------------ what the routes do
    def pause(self, body, query):
        self.running.clear()
        if query.get("mode") != ["keep"]:
            self.epoch += 1
        return {"status": "paused"}

    def resume(self, body, query):
        assert not self.updating, "a server must not sample while its weights change"
        self.running.set()
        return {"status": "resumed"}

    def reset_prefix_cache(self, body, query):
        self.cache.clear()
        return {"success": True}

    def collective_rpc(self, body, query):
        if body["method"] == "nb_forget":
            self.updating = False
        return {"results": [{key: getattr(self, key) for key in ("version", "checksum", "tensors", "logprobs_mode")}]}

    def init_weight_transfer_engine(self, body, query):
        info = dict(body["init_info"])
        self.link = Link.joined(rank=info.pop("first_rank"), **info)
        return {}

    def start_weight_update(self, body, query):
        assert not self.running.is_set(), "weights change only while the server is paused"
        assert not self.updating, "an update is under way already"
        self.version, self.updating, self.checksum, self.tensors = -2, True, 0, 0
        return {}

    def update_weights(self, body, query):
        assert self.updating
        info = body["update_info"]
        if info.get("file"):
            bucket = list(load_file(info["file"]).items())
        else:
            whole = torch.empty(flat_bytes(info["tensors"]), dtype=torch.uint8)
            self.link.broadcast(whole)
            bucket = unflat(whole, info["tensors"])
        self.checksum += checksum(bucket)
        self.tensors += len(bucket)
        self.coming = info["version"]
        with self.lock:
            unknown = self.model.load_state_dict(dict(bucket), strict=False).unexpected_keys
        assert not unknown, f"tensors of another model: {unknown[:3]}"
        return {}

    def finish_weight_update(self, body, query):
        self.version, self.updating = self.coming, False
        return {}


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class _Handler(BaseHTTPRequestHandler):
    stub: StubServer
    protocol_version = "HTTP/1.1"
    ROUTES = {"pause", "resume", "reset_prefix_cache", "collective_rpc", "init_weight_transfer_engine", "start_weight_update",
              "update_weights", "finish_weight_update"}  # fmt: skip

    def setup(self):
        super().setup()
        self.stub._connections.add(self.connection)

    def finish(self):
        self.stub._connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._reply(200, {"status": "ok"})

    def do_POST(self):
        place = urlsplit(self.path)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        self.stub.requests.append((place.path, body))
        self.stub.headers = dict(self.headers)
        fault = self.stub.fault_of(place.path)
        try:
            if fault is not None:
                self._fail(fault)
            elif place.path == "/v1/completions":
                self._complete(body)
            elif place.path == "/v1/chat/completions":
                self._reply(200, {"choices": [{"message": {"role": "assistant", "content": self.stub.chat(body)}}]})
            elif place.path[1:] in self.ROUTES:
                self._reply(200, getattr(self.stub, place.path[1:])(body, parse_qs(place.query)))
            else:
                self._reply(404, {"error": f"no route {place.path}"})
        except (BrokenPipeError, ConnectionResetError, ValueError):  # the client went away, or the stub was stopped
            self.close_connection = True
        except Exception as error:
            self._reply(500, {"error": f"{type(error).__name__}: {error}"})

    def _fail(self, fault: Fault) -> None:
        if fault.kind == "hang":
            while not self._gone():
                time.sleep(LOOK_S)
        if fault.kind in ("hang", "die"):
            self.close_connection = True
            _close(self.connection)
        elif fault.kind == "truncate":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
        else:
            text = fault.text or ("<html>nonsense" if fault.kind == "nonsense" else "planned")
            self._reply(200 if fault.kind == "nonsense" else fault.status, text, fault.headers)

    def _reply(self, status: int, content: Any, headers=None) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(data), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def _gone(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(select.select([self.connection], [], [], 0)[0]) and self.connection.recv(1, socket.MSG_PEEK) == b""
        return True

    def _complete(self, body: dict) -> None:
        vocabulary = self.stub.model.config.vocab_size
        if not body["prompt"] or not all(0 <= token < vocabulary for token in body["prompt"]):
            self._reply(400, {"error": "the prompt holds ids outside the vocabulary"})
            return
        if not body.get("stream"):
            ids, logprobs, reasons = zip(*self.stub.tokens(body))
            self._reply(200, {"choices": [_choice(ids, logprobs, reasons[-1])]})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for token, logprob, reason in self.stub.tokens(body, self._gone):
            new = ([], []) if token is None else ([token], [logprob])
            self._chunk(json.dumps({"choices": [_choice(*new, reason)]}))
        self._chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _choice(ids, logprobs, reason) -> dict:
    return {"index": 0, "text": "", "token_ids": list(ids), "logprobs": {"token_logprobs": list(logprobs)},
            "finish_reason": reason}  # fmt: skip

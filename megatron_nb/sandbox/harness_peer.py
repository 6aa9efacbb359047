"""Calls between the sandbox of a test's code and that of the program: lines of JSON, data by value, other objects by reference.

Runs inside both. A reference (Remote) lets the test use what the program returned (iterators, instances of its classes) and
lets the program call functions that the test passed. The program is never sent the other side of a comparison: operators work
between two references, or not at all, so an `__eq__` that always agrees has nothing to agree to.
"""

from __future__ import annotations

import builtins
import operator
import os
import types

from megatron_nb.sandbox.harness_program import channel, end_after, find, load, write_all
from megatron_nb.sandbox.harness_wire import decode, encode, untag

OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor")
ASKED = {  # of the program's objects
    **{name: getattr(operator, name) for name in (*OPERATORS, "neg")},
    **dict(attr=getattr, set=setattr, item=operator.getitem, put=operator.setitem, drop=operator.delitem),
    **dict(iter=iter, next=next, len=len, bool=bool, str=str, repr=repr, isinstance=isinstance),
}
SHARED = ("call", "iter", "next")  # of what the test passed


class Unsendable(Exception):
    """A test's argument that can be sent neither as data nor as a function."""


class Ended(Exception):
    """The other side is gone."""


class Remote:
    """An object that stayed in the other sandbox."""

    __slots__ = ("_remote_id", "_remote_kind", "_remote_peer")  # names that no program uses: all others are the object's own

    def __init__(self, peer: Peer, number: int, kind: str) -> None:
        for name, value in (("_remote_id", number), ("_remote_kind", kind), ("_remote_peer", peer)):
            object.__setattr__(self, name, value)

    def __call__(self, *args, **kwargs):
        return self._remote_peer.ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(f"{self._remote_kind!r} object: {name} stays in the program's sandbox")
        return self._remote_peer.ask("attr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._remote_peer.ask("set", self, name, value)

    def __str__(self) -> str:
        return str(self._remote_peer.ask("str", self))

    def __repr__(self) -> str:
        return str(self._remote_peer.ask("repr", self))

    def __bool__(self) -> bool:
        return bool(self._remote_peer.ask("bool", self))

    def __hash__(self) -> int:
        return hash(self._remote_id)

    def __instancecheck__(self, one: object) -> bool:
        return type(one) is Remote and bool(self._remote_peer.ask("isinstance", one, self))


def _forwarded(name: str):
    def ask(self, *args):
        return self._remote_peer.ask(name, self, *args)

    return ask


def _operator(name: str):
    def apply(self, other):
        if type(other) is not Remote:
            return NotImplemented
        return self._remote_peer.ask(name, self, other)

    return apply


for _name in OPERATORS:
    setattr(Remote, f"__{_name.strip('_')}__", _operator(_name))
for _method, _name in {"iter": "iter", "next": "next", "len": "len", "neg": "neg"}.items():
    setattr(Remote, f"__{_method}__", _forwarded(_name))
for _method, _name in {"getitem": "item", "setitem": "put", "delitem": "drop"}.items():
    setattr(Remote, f"__{_method}__", _forwarded(_name))


class Peer:
    """One end. `module` is the program on its side; the test's side has none, and serves only what it passed."""

    def __init__(self, get: int, put: int, module: types.ModuleType | None = None) -> None:
        self.lines, self.put, self.module = os.fdopen(get, "rb"), put, module
        self.objects: list[object] = []  # sent by reference
        self.errors: dict[tuple[str, ...], type] = {}  # classes of exceptions, by the names of their ancestors
        self.raised: BaseException | None = None  # the last one that came from the other side
        self.uses = 0  # of the other side: all but names that turned out to be references
        self.keep_changes = False  # in the next call: lists and dicts that are passed take over what the function made of them

    def ask(self, what: str, on: object, *args, **kwargs) -> object:
        """The other side's answer; raises what it raised there."""
        kept = [i for i, one in enumerate(args) if type(one) in (list, dict, set)] if self.keep_changes else []
        self.keep_changes = False
        self.send({"ask": what, "on": on, "args": list(args), "kwargs": kwargs, "kept": kept})
        try:
            answer = self.serve()
            self.uses += what != "find" or type(answer["value"]) is not Remote
            for i, value in zip(kept, answer.get("kept", ())):
                args[i].clear()
                (args[i].extend if type(args[i]) is list else args[i].update)(value)
            if "raise" not in answer:
                return answer["value"]
            kind = self.error_class(answer["raise"])
            if issubclass(kind, StopIteration) and what != "next":
                kind = RuntimeError  # it would end a loop of the test as if all had been well, as in all(map(...))
            error = kind.__new__(kind, *answer["args"])
        except (Ended, MemoryError):
            raise
        except Exception as cause:
            error = RuntimeError(f"the program wrote into the judge's channel: {type(cause).__name__}: {cause}")
        self.raised = error
        raise error

    def changing(self, function: object) -> object:
        """The same, but what it changes of its arguments is taken over."""
        if type(function) is not Remote:
            return function

        def call(*args, **kwargs):
            self.keep_changes = True
            return function(*args, **kwargs)

        return call

    def serve(self) -> dict:
        """Answers what the other side asks until it answers; raises Ended at its end."""
        while line := self.lines.readline():
            message = decode(line, self.untag)
            if "ask" not in message:
                return message
            write_all(self.put, self.answer(message))
        raise Ended

    def answer(self, message: dict) -> str:
        what, on, args = message["ask"], message["on"], message["args"]
        try:
            if self.module is None and not (what in SHARED and any(on is one for one in self.objects)):
                raise TypeError(f"{what} is not for the program to ask")  # of a test: only of what it passed
            if what == "find":
                value = find(self.module, on)
            elif what == "call":
                value = on(*args, **message["kwargs"])
            else:
                value = ASKED[what](on, *args)
            return encode({"value": value, "kept": [args[i] for i in message["kept"]]}, self.refer)
        except (MemoryError, Ended):
            raise  # the limit speaks for itself
        except Exception as error:
            args = [one if type(one) in (str, int, float, bool) else str(one) for one in error.args]
            return encode({"value": None, "raise": self.ancestors(type(error)), "args": args})

    def send(self, message: dict) -> None:
        write_all(self.put, encode(message, self.refer))

    @staticmethod
    def ancestors(kind: type) -> list[str]:
        return [one.__name__ for one in kind.__mro__ if issubclass(one, BaseException)]

    def refer(self, value: object) -> dict:
        """An object that is no data, as a reference."""
        if type(value) is Remote:
            return {"!yours": value._remote_id}
        if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
            return {"!builtin": value.__name__}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"!error": self.ancestors(value)}
        if self.module is None and not callable(value) and not hasattr(type(value), "__next__"):
            raise Unsendable(f"an argument of type {type(value).__name__} cannot be sent to the program")
        self.objects.append(value)
        return {"!remote": [len(self.objects) - 1, type(value).__name__]}

    def untag(self, found: dict) -> object:
        if "!yours" in found:
            return self.objects[found["!yours"]]
        if "!remote" in found:
            return Remote(self, *found["!remote"])
        if "!builtin" in found:
            return {name: one for name, one in vars(builtins).items() if isinstance(one, type)}[found["!builtin"]]
        if "!error" in found:
            return self.error_class(found["!error"])
        if "!object" in found:
            raise ValueError("an object by its type's name alone")  # never sent between peers
        return untag(found)

    def error_class(self, names: list[str]) -> type:
        """A class of exceptions by the names of its ancestors, its own first: built in, or made to catch by."""
        known = getattr(builtins, names[0], None)
        if isinstance(known, type) and issubclass(known, BaseException):
            return known
        key = tuple(names)
        if key not in self.errors:
            self.errors[key] = type(names[0], (self.error_class(names[1:]) if names[1:] else Exception,), {})
        return self.errors[key]


def serve_program() -> None:
    """Reads {"program", "cpu_s"}; writes {"ready"} or {"refused"}; then answers calls until its stdin ends."""
    get, put = channel()
    peer = Peer(get, put)
    task = decode(peer.lines.readline())
    end_after(task["cpu_s"])
    module = load(task["program"])
    if isinstance(module, str):
        write_all(put, encode({"refused": module}))
        os._exit(0)
    peer.module = module
    write_all(put, encode({"ready": True}))
    try:
        peer.serve()
    except Ended:
        os._exit(0)

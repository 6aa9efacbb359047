"""A small stateful API for the tests: lamps that are switched, and a shop that sells bulbs."""

from __future__ import annotations


class Lamps:
    def _load_scenario(self, scenario, long_context=False):
        self.on = dict(scenario.get("on", {}))
        self.log = ["long"] if long_context else []
        self._uses = 0  # private: no part of the state

    def switch(self, room, on=True):
        self._uses += 1
        if room not in self.on:
            raise KeyError(f"no lamp in {room}")
        self.on[room] = on
        return {"room": room, "on": on}

    def lit(self):
        self._uses += 1
        return sorted(room for room, on in self.on.items() if on)

    def wait_for_ever(self):
        while True:
            pass


class Shop:
    def _load_scenario(self, scenario, long_context=False):
        self.stock = scenario.get("stock", 3)

    def buy(self, count):
        self.stock -= count
        return f"{count} bought"


DOCS = {
    "Lamps": [
        {"name": "switch", "description": "Switch a lamp.",
         "parameters": {"type": "dict", "properties": {"room": {"type": "string"}, "on": {"type": "boolean"}},
                        "required": ["room"]}},
        {"name": "lit", "description": "Rooms with light.", "parameters": {"type": "dict", "properties": {}, "required": []}},
    ],
    "Shop": [
        {"name": "buy", "description": "Buy bulbs.",
         "parameters": {"type": "dict", "properties": {"count": {"type": "integer"}}, "required": ["count"]}},
    ],
}  # fmt: skip
CLASSES = {name: f"tests.evals.lamp_world:{name}" for name in DOCS}
SCENARIO = {"Lamps": {"on": {"hall": False, "attic": True}}, "Shop": {"stock": 5}}

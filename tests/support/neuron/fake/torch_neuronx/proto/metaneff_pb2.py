"""The message MetaNeff, as far as the contract has it; its bytes are JSON here."""

from __future__ import annotations

import json
from typing import Any

_DATA_TYPES = ("UINT8", "INT8", "INT16", "INT32", "INT64", "UINT16", "FLOAT16", "BFLOAT16", "FLOAT")
_KINDS = ("USER_INPUT", "INPUT_STATE", "INPUT_WEIGHT")


class _Enum:
    def __init__(self, *names: str):
        self.names = names
        for number, name in enumerate(names):
            setattr(self, name, number)

    def name_of(self, number: int) -> str:
        return self.names[number]


class MetaTensor:
    DataType = _Enum(*_DATA_TYPES)
    Type = _Enum(*_KINDS)
    FIELDS = ("name", "shape", "data_type", "type", "checkpoint_key", "user_input_key")

    def __init__(self) -> None:
        vars(self).update(name=b"", shape=[], data_type=None, type=None, checkpoint_key=b"", user_input_key=b"")

    def __setattr__(self, field: str, value: Any) -> None:
        if field not in self.FIELDS:
            raise AttributeError(f"Protocol message MetaTensor has no {field!r} field")
        wanted = {"data_type": int, "type": int, "shape": type(None)}.get(field, bytes)
        if not isinstance(value, wanted):
            raise TypeError(f"MetaTensor.{field} takes {wanted.__name__}, got {value!r}")
        vars(self)[field] = value

    def plain(self) -> dict[str, Any]:
        found = vars(self)
        return {
            "name": found["name"].decode(),
            "shape": list(found["shape"]),
            "data_type": self.DataType.name_of(found["data_type"]),
            "type": None if found["type"] is None else self.Type.name_of(found["type"]),
            "key": (found["checkpoint_key"] or found["user_input_key"]).decode(),
        }


for _enum in (MetaTensor.DataType, MetaTensor.Type):
    for _number, _name in enumerate(_enum.names):
        setattr(MetaTensor, _name, _number)


class _Repeated:
    def __init__(self) -> None:
        self.tensors: list[MetaTensor] = []

    def add(self) -> MetaTensor:
        self.tensors.append(MetaTensor())
        return self.tensors[-1]


class MetaNeff:
    FIELDS = ("input_tensors", "output_tensors", "output_aliases_to")

    def __init__(self) -> None:
        self.input_tensors, self.output_tensors = _Repeated(), _Repeated()
        self.output_aliases_to: dict[int, int] = {}

    def SerializeToString(self) -> bytes:
        return json.dumps(
            {
                "inputs": [tensor.plain() for tensor in self.input_tensors.tensors],
                "outputs": [tensor.plain() for tensor in self.output_tensors.tensors],
                "aliases": {str(result): parameter for result, parameter in self.output_aliases_to.items()},
            }
        ).encode()

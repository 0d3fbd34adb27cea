"""The contract with torch_neuronx and neuronx-cc, as data, against what the package uses and what is installed."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

from nxd_infer.backends.neuron import compiler, cores, executable, lint, runtime, sdk

FILE = Path(__file__).parents[3] / "contracts" / "torch_neuronx_2_9.json"
_SCRIPT = {
    "bytes": "str",
    "list[dict[str, Tensor]]": "List[Dict[str, Tensor]]",
    "list[Tensor]": "List[Tensor]",
    "None": "NoneType",
}
"""Types as TorchScript writes them, in which the real classes tell their signatures."""


def contract() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def ours() -> dict[str, Any]:
    """The contract as the package's own code has it; only the words for a reader are the contract's."""
    words, group = contract(), {"degree": 4, "cores": 12}
    starts = [found[0] for found in cores.groups(range(group["cores"]), group["degree"])]
    return {
        "package": "torch_neuronx",
        "torch": sdk.TORCH,
        "sdk": sdk.SDK,
        "executed_on_hardware": False,
        "symbols": words["symbols"],
        "device": runtime.DEVICE,
        "environment": {name: words["environment"].get(name) for name in (cores.VISIBLE, cores.COUNT)},
        "command": {
            "compile": compiler.command("inf2", []),
            "version": [compiler.PROGRAM, compiler.VERSION],
            "oldest": list(compiler.OLDEST),
            "source": words["command"]["source"],
        },
        "limits": {
            "degrees": {name: list(degrees) for name, degrees in cores.DEGREES.items()},
            "cores_a_device": cores.CORES_A_DEVICE,
            "group": {**group, "starts": starts},
            "types": sorted(lint.TYPES - {"TUPLE", "TOKEN"}),
            "bits_of_int64": executable.LARGEST.bit_length() + 1,
            "compiler_errors": sorted(lint.RULES),
            "alias": lint.ALIAS,
            "source": words["limits"]["source"],
        },
    }


def installed_differences(contract: dict[str, Any]) -> list[str]:
    """Where what is installed as torch_neuronx has something else than ``contract``. It has been imported."""
    found = []
    for symbol in contract["symbols"]:
        there = _signature(symbol["name"])
        if there not in (symbol["signature"], as_script(symbol["signature"])):
            found.append(f"{symbol['name']}{symbol['signature']} is {there}")
    return found


def as_script(signature: str) -> str:
    """A signature in the words of TorchScript, which has no names: ``(str, str, int, int)``."""
    inside, _, returned = signature.removeprefix("(").rpartition(")")
    types = [entry.partition(": ")[2] for entry in _entries(inside) if ": " in entry]
    result = returned.removeprefix(" -> ")
    words = ", ".join(_SCRIPT.get(name, name) for name in types)
    return f"({words})" + (f" -> {_SCRIPT.get(result, result)}" if result else "")


def _entries(text: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in ")]")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [entry.strip() for entry in found]


def _signature(name: str) -> str:
    import torch

    if name == "torch_neuronx":
        return "(import)"
    if name == "torch_neuronx.BucketModelConfig":
        return str(inspect.signature(importlib.import_module("torch_neuronx").BucketModelConfig))
    if name == "torch.device":
        return f"({torch.zeros(1, device='privateuseone:0').device.type}:<rank>)"
    if name == "torch.ops.neuron._parallel_load":
        (argument,) = torch.ops.neuron._parallel_load.default._schema.arguments
        returned = torch.ops.neuron._parallel_load.default._schema.returns[0].type
        return f"({argument.type}) -> {returned}"
    if name.startswith("torch.classes.neuron."):
        return of_class(name)
    return _of_message(name)


def of_class(name: str) -> str:
    """The signature of ``torch.classes.<library>.<class>``'s constructor, or of its method, if one follows."""
    import torch

    library, kind, *method = name.removeprefix("torch.classes.").split(".")
    found: Any = getattr(getattr(torch.classes, library), kind)
    if inspect.isclass(found):  # Python: the stand-in
        text = str(inspect.signature(getattr(found, *method) if method else found, eval_str=False))
        return text.replace("'", "")
    owner, (wanted,) = f"__torch__.torch.classes.{library}.{kind}", method or ["__init__"]
    for schema in torch._C._jit_get_custom_class_schemas():  # TorchScript's: the class itself has no names of methods
        itself, *given = [str(argument.type) for argument in schema.arguments]
        if (itself, schema.name) == (owner, wanted):
            returned = f" -> {schema.returns[0].type}" if method else ""
            return f"({', '.join(given)}){returned}"
    return "not there"


def _of_message(name: str) -> str:
    module = importlib.import_module(runtime.MESSAGE)
    path = name.removeprefix(f"{runtime.MESSAGE}.").split(".")
    message: Any = getattr(module, path[0])
    if len(path) == 1:
        fields = message.DESCRIPTOR.fields_by_name if hasattr(message, "DESCRIPTOR") else message.FIELDS
        wanted = {"MetaNeff": ("input_tensors", "output_tensors", "output_aliases_to")}.get(
            path[0], ("name", "shape", "data_type", "type", "checkpoint_key", "user_input_key")
        )
        return f"({', '.join(field for field in wanted if field in fields)})"
    if path[1] == "SerializeToString":
        if hasattr(message, "DESCRIPTOR"):
            return f"(self) -> {type(message().SerializeToString()).__name__}"
        return str(inspect.signature(message.SerializeToString)).replace("'", "")
    signature = next(symbol["signature"] for symbol in contract()["symbols"] if symbol["name"] == name)
    wanted = signature.strip("()").split(", ")
    return f"({', '.join(value for value in wanted if hasattr(message, value))})"


if __name__ == "__main__":
    runtime.load()
    print("\n".join(installed_differences(contract())))

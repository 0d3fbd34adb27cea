"""PEFT's adapters in the checkpoint of a parallelized model of transformers: their names, there and in PEFT's files."""

from __future__ import annotations

import re

from nxd_infer.layout import RemappedSource, WeightSource

_ADAPTER = re.compile(
    r"\.(?P<kind>(?:lora_[AB]|modules_to_save)(?=\.[^.]+\.)|lora_embedding_[AB])\.(?P<adapter>[^.]+)"  # a parameter
)

_INSERTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")


def plain_name(name: str) -> str:
    """Return the name that a module or a weight has in a model without PEFT's adapters."""
    return _INSERTED.sub("", name).removeprefix("base_model.model.")


def adapter_file(adapter: str) -> str:
    """Return the name of an adapter's configuration in a folder of shards."""
    return f"adapter_config.{adapter}.json"


def adapters_in(source: WeightSource) -> tuple[WeightSource, dict[str, WeightSource]]:
    """Split the weights of a PEFT model into the model's own and each adapter's, under the names of their files.

    Without adapters all are the model's own.
    """
    own: dict[str, str] = {}
    adapters: dict[str, dict[str, str]] = {}
    for name in source.keys():  # noqa: SIM118  (a source is not a mapping)
        found = _ADAPTER.search(name)
        if found is None:
            own[plain_name(name)] = name
        else:
            kept = f".{found['kind']}" if found["kind"].startswith("lora_") else ""
            adapters.setdefault(found["adapter"], {})[f"{name[: found.start()]}{kept}{name[found.end() :]}"] = name
    return RemappedSource(source, own), {key: RemappedSource(source, table) for key, table in adapters.items()}

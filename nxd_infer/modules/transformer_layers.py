"""Which modules of a model are its transformer layers."""

from __future__ import annotations

from torch import nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.modules.stand_in import modules_of_all


def transformer_layers(model: nn.Module, layer_class: type | str | None = None) -> list[nn.Module]:
    """Return the layers of a transformer: the instances of ``layer_class``, a class or the name of one.

    Without a class they are the modules named in ``_no_split_modules`` (Hugging Face), else the members of the
    outermost ``nn.ModuleList`` s. Those of other pipeline ranks are among them. Raises ParallelConfigError if nothing
    is found.
    """
    if isinstance(layer_class, str):
        layers = [module for module in modules_of_all(model) if type(module).__name__ == layer_class]
    elif layer_class is not None:
        layers = [module for module in modules_of_all(model) if isinstance(module, layer_class)]
    else:
        names = set(getattr(model, "_no_split_modules", None) or ())
        layers = [module for module in modules_of_all(model) if type(module).__name__ in names]
        layers = layers or _members_of_lists(model)
    if not layers:
        whose = "" if layer_class is None else f" of the class {layer_class!r}"
        raise ParallelConfigError(
            f'found no transformer layers{whose}, which activation_checkpoint_config="full" and auto_partition need: '
            f'pass pipeline_config={{"transformer_layer_cls": ...}}, one of {class_names(model)}; or the class to '
            "recompute, and pipeline_cuts"
        )
    return layers


def _members_of_lists(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [member for child in module.children() for member in _members_of_lists(child)]


def class_names(model: nn.Module) -> str:
    """Return the classes of a model's modules, for a message."""
    return ", ".join(sorted({type(module).__name__ for module in modules_of_all(model)}))

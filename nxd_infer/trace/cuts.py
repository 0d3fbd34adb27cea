"""Where a traced model is cut into pipeline stages: by the names of modules, as in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from nxd_infer.errors import ParallelConfigError, TraceConfigError
from nxd_infer.modules.transformer_layers import transformer_layers
from nxd_infer.pipeline.partition import auto_partition
from nxd_infer.pipeline.units import find_units
from nxd_infer.trace.request import TraceRequest


def stage_cuts(request: TraceRequest, module: nn.Module) -> list[str]:
    """Return the name of the last module of every stage but the last: the request's, or balanced ones.

    Raises TraceConfigError for cuts that do not fit the model, and for more stages than it has layers.
    """
    stages, cuts = request.pp_degree, request.pipeline_cuts
    try:
        if cuts is None:
            cuts = auto_partition(module, _layers(module), stages)
        find_units(module, cuts)
    except ParallelConfigError as error:
        raise TraceConfigError(f"pp_degree={stages}: {error}") from error
    return cuts


def _layers(module: nn.Module) -> list[nn.Module]:
    try:
        return transformer_layers(module)
    except ParallelConfigError as error:
        raise ParallelConfigError(
            f"{type(module).__name__} has no list of layers (nn.ModuleList) to cut between: name the last module of "
            f"every stage but the last (pipeline_cuts); its modules are "
            f"{', '.join(name for name, _ in module.named_children())}"
        ) from error


def weight_stages(module: nn.Module, cuts: Sequence[str]) -> Callable[[str], int | None]:
    """Return a function from the name of a weight to its stage: that of the module it belongs to. None for one that
    belongs to no stage (a constant, a table of positions)."""
    units = find_units(module, cuts)
    stages = {unit.path: unit.stage for unit in units.units}
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    opened = dict(units.opened)

    def stage_of(name: str) -> int | None:
        path = name.rpartition(".")[0]
        inside = next((stage for unit, stage in stages.items() if path == unit or path.startswith(f"{unit}.")), None)
        if inside is None and name in parameters:
            return opened.get(path)
        return inside

    return stage_of

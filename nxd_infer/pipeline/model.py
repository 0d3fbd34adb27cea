"""NxDPPModel: a model over pipeline stages.

Source: API guide, "Neuron Distributed Pipeline Model".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.comm.launched import require_no_lonely_rank
from nxd_infer.context import current_context
from nxd_infer.layout.params import move_model_to_device
from nxd_infer.modules.nxd_model import NxDModel, require_gradients
from nxd_infer.modules.stand_in import StandIn
from nxd_infer.pipeline.build import keep_stage
from nxd_infer.pipeline.microbatches import named_inputs
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.pipeline import Pipeline, mean_over_data
from nxd_infer.pipeline.stage import Stage
from nxd_infer.util.devices import transport_device
from nxd_infer.util.options import declared, table

__all__ = ["NxDPPModel"]


class NxDPPModel(NxDModel):
    """``module`` over the pipeline ranks of the current context: this rank keeps its stage, under the same names.

    ``initialize_parallel_model`` makes one; use it directly to wrap a module that is there. A module on the meta device
    is filled, the part of this rank only, by ``param_init_fn`` or its ``reset_parameters``. Without pipeline ranks it
    is an NxDModel.

    ``module`` is any module, and is changed in place. The other arguments:

    {options}
    The loss is the mean over the batch, also where microbatches have other numbers of labels that are not -100.
    Dropout draws the same numbers at any number of stages above 1 and with any schedule.

    Raises ParallelConfigError for options that do not fit the module, with those that would.
    """

    stage: Stage
    pipeline: Pipeline

    def __init__(
        self,
        module: nn.Module,
        transformer_layer_cls: Any = None,
        num_microbatches: int = 1,
        output_loss_value_spec: Any = None,
        return_mb_loss: bool = False,
        broadcast_and_average_loss: bool = False,
        pipeline_cuts: list[str] | None = None,
        input_names: list[str] | None = None,
        leaf_module_cls: list[Any] | None = None,
        autowrap_functions: Any = None,
        autowrap_modules: Any = None,
        tracer_cls: Any = None,
        param_init_fn: Callable[..., object] | None = None,
        trace_file_path: str | None = None,
        use_zero1_optimizer: bool = False,
        auto_partition: bool | None = False,
        *,
        use_optimizer_wrapper: bool = False,
        virtual_pipeline_size: int = 1,
        autowrap_obj_methods: Any = None,
        deallocate_pipeline_outputs: bool = False,
        fuse_microbatches: bool = False,
        schedule: str | None = None,
    ):
        require_no_lonely_rank("NxDPPModel")
        given = {name: value for name, value in locals().items() if name in declared(PipelineOptions)}
        options = PipelineOptions({**given, "auto_partition": bool(auto_partition)})
        stage = keep_stage(module, options, current_context().pp, param_init_fn)
        self._of_stage(module, stage, {"pipeline_config": options})

    @classmethod
    def of_stage(cls, module: nn.Module, stage: Stage, nxd_config: Mapping[str, Any]) -> NxDPPModel:
        """Wrap ``module``, which is ``stage.module`` or has been wrapped around it (adapters)."""
        model = cls.__new__(cls)
        model._of_stage(module, stage, nxd_config)
        return model

    def _of_stage(self, module: nn.Module, stage: Stage, nxd_config: Mapping[str, Any]) -> None:
        super().__init__(module, nxd_config)
        options = PipelineOptions(nxd_config["pipeline_config"])
        self.stage = stage
        self.pipeline = Pipeline(stage, options, current_context(), module, self._loss)

    @property
    def options(self) -> PipelineOptions:
        return self.pipeline.options

    @property
    def bubble(self) -> float | None:
        """The share of the last step in which this rank waited for other stages; None before the first step."""
        return self.pipeline.bubble

    # --- running --------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Without other stages, the module's own. Raises ParallelConfigError if this rank has only a part of it."""
        return self.module(*args, **kwargs)

    def run_train(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of a batch over all stages. Every rank of the pipeline calls it with the same batch.

        Returns the loss, detached, on every rank; with ``return_mb_loss`` a list of each microbatch's. Gradients are
        added to ``.grad``. Raises InputMismatchError for inputs that are not in ``input_names`` or do not divide.
        """
        require_gradients()
        return self._run(args, kwargs, train=True)

    def run_eval(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a batch in evaluation mode, without gradients; otherwise as :meth:`run_train`."""
        with self._evaluating():
            return self._run(args, kwargs, train=False)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> Any:
        inputs = named_inputs(self.stage.module, self.options.input_names, args, kwargs)
        loss, several = self.pipeline.run(inputs, train)
        kind = torch.float64 if self.dtype == torch.float64 else torch.float32
        if self.options.return_mb_loss:
            return [one.to(kind) for one in several]
        if self.options.broadcast_and_average_loss:
            loss = mean_over_data(loss, self.pipeline.context)
        return loss.to(kind)

    def move_model_to_device(self) -> None:
        """Move this rank's stages to the device that the ranks train on."""
        move_model_to_device(self.module, transport_device())

    # --- this rank's part -----------------------------------------------------------------------------

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The modules of this rank's stages, under their names in the whole model."""
        return ((n, m) for n, m in self.module.named_modules(*args, **kwargs) if not isinstance(m, StandIn))

    def modules(self) -> Iterator[nn.Module]:
        return (module for _, module in self.named_modules())

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return ((n, m) for n, m in self.module.named_children() if not isinstance(m, StandIn))

    def children(self) -> Iterator[nn.Module]:
        return (module for _, module in self.named_children())

    def local_named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages, under their names in the whole model."""
        return self.module.named_parameters(*args, **kwargs)

    def local_named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """:meth:`named_modules`."""
        return self.named_modules(*args, **kwargs)

    def local_parameters(self, *args: Any, **kwargs: Any) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages."""
        return (parameter for _, parameter in self.local_named_parameters(*args, **kwargs))

    def local_modules(self, *args: Any, **kwargs: Any) -> list[nn.Module]:
        """The modules of this rank's stages."""
        return [module for _, module in self.local_named_modules(*args, **kwargs)]

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The weights of this rank's stages, under their names in the whole model."""
        return self.module.state_dict(*args, **kwargs)


NxDPPModel.__doc__ = inspect.cleandoc(NxDPPModel.__doc__ or "").replace(
    "{options}", f"{table(PipelineOptions, 'option')}\n"
)

"""WeightLayout: how a rank's tensor is made of logical tensors, run by run, and back.

It serves loading, saving, resharding, merging, padding and tracing; nothing else knows how to cut a weight.
"""

from nxd_infer.layout.gqa import GQAPlan, gqa_plan
from nxd_infer.layout.params import ParamLayout, attach_layout, layout_of, restore_attributes, weight_layout
from nxd_infer.layout.plans import AxisPlan
from nxd_infer.layout.runs import AxisLayout, Block, Fill, Run, TensorLayout

__all__ = [
    "AxisLayout",
    "AxisPlan",
    "Block",
    "Fill",
    "GQAPlan",
    "ParamLayout",
    "Run",
    "TensorLayout",
    "attach_layout",
    "gqa_plan",
    "layout_of",
    "restore_attributes",
    "weight_layout",
]

"""Weight layouts: how a rank's tensor is built from logical tensors, run by run, and back.

Loading, saving, resharding, merging, padding and tracing all use this package; no other code shards weights.
"""

from nxd_infer.layout.axis_plan import AxisPlan
from nxd_infer.layout.gqa import GQAPlan, gqa_plan
from nxd_infer.layout.merge import (
    Holding,
    MergedSource,
    duplicates,
    holdings,
    merge_state_dicts,
    owned_blocks,
)
from nxd_infer.layout.params import ParamLayout, attach_layout, layout_of, restore_attributes, weight_layout
from nxd_infer.layout.runs import AxisLayout, Block, Fill, Run, TensorLayout
from nxd_infer.layout.shard import (
    check_weights,
    fill_tensor,
    iter_shards,
    load_weights,
    shard_state_dict,
    shard_tensor,
)
from nxd_infer.layout.sources import DictSource, RemappedSource, SafetensorsSource, WeightSource, as_source

__all__ = [
    "AxisLayout", "AxisPlan", "Block", "DictSource", "Fill", "GQAPlan", "Holding", "MergedSource", "ParamLayout",
    "RemappedSource", "Run", "SafetensorsSource", "TensorLayout", "WeightSource", "as_source", "attach_layout",
    "check_weights", "duplicates", "fill_tensor", "gqa_plan", "holdings", "iter_shards", "layout_of", "load_weights",
    "merge_state_dicts", "owned_blocks", "restore_attributes", "shard_state_dict", "shard_tensor", "weight_layout",
]  # fmt: skip

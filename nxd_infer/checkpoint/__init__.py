"""Checkpoints of training jobs: saving, loading at any degrees, resharding, exporting and comparing them.

::

    api                        save_checkpoint and load_checkpoint: what a job calls
    open                       a stored checkpoint of either format, for the next three, which need no job
    reshard, stages_by_name    rewrite it for other degrees; which pipeline stage a weight belongs to
    export, peft_adapters      its weights as one file or as a Hugging Face directory; PEFT's names in it
    compare                    two of them, tensor by tensor
    storage, folder, remote    storage; the names and numbers of checkpoints, and when one is complete
    contents, random_state     what one rank saves
    save, async_save           writing it, synchronously or asynchronously
    archive                    one checkpoint, open for reading
    load, load_optimizer       what loading changes in a job
    source                     weights of a model in training, or from any form that a caller has
    neuronx/                   the folders of neuronx_distributed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.checkpoint.api import has_checkpoint, load_checkpoint, save_checkpoint, wait_for_save
    from nxd_infer.checkpoint.compare import compare_checkpoints
    from nxd_infer.checkpoint.export import consolidate_checkpoint, export_hugging_face
    from nxd_infer.checkpoint.reshard import reshard_checkpoint

__all__ = [
    "compare_checkpoints", "consolidate_checkpoint", "export_hugging_face", "has_checkpoint", "load_checkpoint",
    "reshard_checkpoint", "save_checkpoint", "wait_for_save",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".api": "has_checkpoint load_checkpoint save_checkpoint wait_for_save",
        ".compare": "compare_checkpoints",
        ".export": "consolidate_checkpoint export_hugging_face",
        ".reshard": "reshard_checkpoint",
    },
)

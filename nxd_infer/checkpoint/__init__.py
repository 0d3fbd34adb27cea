"""Checkpoints of training jobs: saving, loading at any degrees, and extracting weights.

::

    api                        save_checkpoint and load_checkpoint: what users call
    storage, folder            storage; the names and numbers of checkpoints, and when one is complete
    contents, random_state     what one rank saves
    save, async_save           writing it, synchronously or asynchronously
    archive, record            one checkpoint, open for reading; checks a rank's record of its files
    load, load_optimizer       what loading changes in a job
    gather, source             weights of a model in training, or from any form that a caller has
    neuronx/                   the folders of neuronx_distributed
"""

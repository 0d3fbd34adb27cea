"""Checkpoints of training jobs: saving, loading at any degrees, and weights out of them.

::

    api                        save_checkpoint and load_checkpoint: what users call
    storage, folder            where checkpoints lie; when one is whole, its name and its number
    contents, random_state     what one rank saves
    save, async_save           writing it, now or beside the training
    archive, record            one checkpoint, open for reading; what a rank said of its files, checked
    load, load_optimizer       what loading changes of a job
    gather, source             weights out of a model in training, or out of whatever a caller has
    neuronx/                   the folders of neuronx_distributed
"""

"""Check that training a model in parallel equals training it in one process of plain PyTorch.

::

    from nxd_infer.testing import assert_parallel_equivalent

    def test_my_model():
        assert_parallel_equivalent(build_my_model, {"input_ids": ids, "labels": ids}, tp=2, dp=2, zero1=True)

``model_fn()`` is called in this process without parallelism, and once in each of ``tp * pp * dp`` gloo processes. Both
sides train the same steps. Compared are the losses, the gradient norms, the gradients of the first step (every copy of
every element, on every rank) and the weights after the last step.
"""

from nxd_infer.testing.compare import Training, compare_with, train_single
from nxd_infer.testing.equivalence import assert_parallel_equivalent

__all__ = ["Training", "assert_parallel_equivalent", "compare_with", "train_single"]

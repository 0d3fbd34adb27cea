"""``torch_neuronx`` where it is not installed: what the documents of neuronx_distributed import from it."""

from nxd_infer.trace import BucketModelConfig, bucket_model_trace

__all__ = ["BucketModelConfig", "bucket_model_trace"]

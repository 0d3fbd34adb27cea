"""A stand-in for ``torch_neuronx`` if it is not installed: what neuronx_distributed's documents import from it."""

from nxd_infer.trace import BucketModelConfig, bucket_model_trace

__all__ = ["BucketModelConfig", "bucket_model_trace"]

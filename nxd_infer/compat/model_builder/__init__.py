"""The model builders of neuronx_distributed, both generations, over ``parallel_model_trace`` and ``layout/``.

``trace.model_builder`` and ``trace`` have the first generation, the package itself the second. Both return an
:class:`NxDModel`, whose directory ``nxd-infer serve`` takes like any other artifact.
"""

"""Model definitions: one folder per family, one definition for eager, training, tracing and serving.

    from nxd_models import registry

    directory = registry.load_config("model_dir")     # reads config.json, rejects fields that it cannot run
    model = registry.build("model_dir")               # parallel over the current context, no weights read
    source = registry.weights("model_dir")            # streams slices of the safetensors files

A package can add its own family without changing this one: see :mod:`nxd_models.registry`. Nothing here imports
transformers.
"""

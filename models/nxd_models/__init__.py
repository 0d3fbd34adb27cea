"""Model definitions: one file a family, one definition for eager, training, tracing and serving.

    from nxd_models import registry

    spec = registry.load_config("model_dir")          # reads config.json, refuses by field what it cannot run
    model = registry.build("model_dir")               # parallel over the current context, no weights read
    source = registry.weights("model_dir")            # streams slices of the safetensors files

Nothing here imports transformers.
"""

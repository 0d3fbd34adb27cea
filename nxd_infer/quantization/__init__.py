"""Linear layers that keep their weight in 8 bits with scales, and checkpoints of such weights.

Offline, :func:`~nxd_infer.quantization.quantization_utils.quantize_pytorch_model_per_channel_symmetric` makes the
checkpoint: an int8 ``weight`` and a float32 ``scale`` for each linear layer. In the program that trains or traces,
:func:`~nxd_infer.quantization.quantize.convert` makes quantized layers of parallel ones, which load it::

    model = convert(model, get_default_per_channel_custom_qconfig_dict())
"""

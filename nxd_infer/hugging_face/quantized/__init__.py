"""Quantised checkpoints, read as plain ones: dequantised slice by slice, as the library does that wrote them."""

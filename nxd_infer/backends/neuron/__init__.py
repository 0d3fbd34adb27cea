"""The neuron backend: HLO compiled by neuronx-cc, run on the NeuronCores of Inf2 and Trn1. Not yet run on one.

``executable``, ``lower`` and ``runtime`` need torch: a server's process reads the backend's facts without them.
"""

"""A soak: the real server under random traffic, swaps and faults, watched all the time.

``questions`` are requests with known answers, ``clients`` the traffic, ``operators`` what a person or a machine does to
a server meanwhile, ``books`` what everybody saw, ``process_samples`` what the system says; ``run`` puts them together.
"""

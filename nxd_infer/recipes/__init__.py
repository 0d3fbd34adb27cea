"""Training recipes: one YAML file with the keys of NxD Training says what to train, on what, and how.

::

    nxd-infer train recipe.yaml --check
    nxd-infer train recipe.yaml trainer.max_steps=100

``recipe.load`` reads and checks one, ``plan.plan_of`` says what it would take, ``loop.train`` runs it on one rank.
"""

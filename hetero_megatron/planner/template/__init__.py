"""Plans over groups of equal chips, without ranks.

``device_pool`` reduces a cluster to groups of equal chips; ``plan_template`` is a plan over these; ``search_space``
says which plans are allowed; ``placement`` assigns ranks and makes a concrete plan.
"""

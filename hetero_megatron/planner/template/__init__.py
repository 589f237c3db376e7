"""Plans over groups of equal chips: what the search builds before anybody says which rank gets what.

``device_pool`` reduces a cluster to groups of equal chips; ``plan_template`` is a plan over these; ``search_space``
says which are allowed; ``placement`` turns one into ranks and a plan.
"""

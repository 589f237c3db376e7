"""Plan -> Prediction: seconds of a step, action by action, and bytes of every rank.

``step`` is the entry; ``stage_cost`` prices stages and boundaries, ``grad_sync`` the gradient exchanges,
``ring_attention`` context groups. Memory is :mod:`hetero_megatron.plans.memory`'s.
"""

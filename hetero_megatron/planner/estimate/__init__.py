"""Fast scores and lower bounds of plan templates: stage tables, pipeline times, gradient synchronisation.

The search ranks and prunes by these. Only the certificate (a lower bound on every plan) is shown to users.
"""

"""Fast seconds of plan templates, to rank and to bound: tables of stages, pipelines, gradient sums, lower bounds.

Nothing here is reported to a user but the certificate, which bounds every plan from below.
"""

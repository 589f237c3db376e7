"""Seconds and bytes of one operator, layer, link or exchange on known chips; nothing here knows a plan.

Rates (measured, or from data sheets) go in; ``operator_cost`` times operators and layers on one chip, ``layer_cost`` a
stage described by what it is, ``link_model`` messages that share links.
"""

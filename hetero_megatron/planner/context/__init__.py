"""Context x head parallelism for one stage: which ranks form groups, and how many tokens and heads each rank gets.

``problem`` (members, links, one stage of a model) -> ``scheduler`` -> a layout, which ``io`` writes into plans.
"""

"""A heterogeneous cluster on one Linux machine: unlike chips and unlike links, by measurement. No torch.

``launch`` starts the ranks, ``namespaces`` and ``shaping`` make the links, ``cgroups`` limit memory, ``faults`` breaks
things on demand, ``load`` watches for foreign load, ``state`` and ``reaper`` see to it that nothing is left behind.
"""

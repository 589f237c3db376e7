"""A heterogeneous cluster on one Linux machine: emulated chips and links.

``launch`` starts the ranks, ``namespaces`` and ``shaping`` make the links, ``cgroups`` limit memory, ``faults`` injects
faults, ``load`` measures foreign load, ``state`` and ``reaper`` clean up.
"""

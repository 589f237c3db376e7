"""What each rank of a plan needs in memory: from a plan, a model and a dtype alone, by formula. Planning, prediction,
dry runs and refusals use this one set. No torch.

``states``: weights, gradients, optimizer, buckets under way. ``activations``: of one rank, with ``fp8`` for products in
fp8 and ``context_groups`` for stages with context parallelism. ``uniform_stages``: these of stages without ranks.
``divided_moments``: of a stage that divides its weights, what is alive at each moment of a step.
``communicators``: of the communication library. ``of_plan``: all of it for every rank of a plan. ``report``: who does
not fit, the refusal, the table.
"""

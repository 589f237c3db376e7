"""Planning without torch: what a plan costs, how fast it is, and which is best on a mixed cluster.

Data flows down this list; each package imports only from those above it.

    cost/       seconds and bytes of one operator, layer, link or exchange, from measured rates or data sheets
    context/    context x head parallelism of one stage
    simulate/   Plan -> Prediction: every action of a step, and the memory of every rank
    template/   plans over groups of equal chips, without ranks
    estimate/   fast scores and lower bounds of templates, to rank and to rule out
    search/     proposers of templates, the incumbent, local search
    whatif/     other clusters and objectives: replanning, drift, cost
    report/     what the user reads

Memory follows from a plan, a model and a dtype alone: :mod:`hetero_megatron.plans.memory`.

Ten concepts:

    PlanningProblem  model, cluster, sequence length, global batch size, options: what is asked (``problem``)
    DevicePool       the cluster as groups of equal chips in equal nodes, without names (``template.device_pool``)
    PlanTemplate     a plan over these groups: pipelines, stages, layers, micro-batches (``template.plan_template``)
    LinkPrice        what messages over a kind of link cost (``cost.link_model``)
    StageTable       seconds and memory of a stage for every number of layers (``estimate.stage_table``)
    TemplateScore    the estimate of a template's step time, by which templates are ranked (``estimate.template_score``)
    lower bounds     step times that no plan beats: of a template (``estimate.pipeline_score``), of all plans
                     (``estimate.lower_bounds``)
    Prediction       the simulated step of a concrete plan; all seconds that are reported (``simulate.step``)
    Proposer         a way to look for plans; offers templates to the incumbent (``search.incumbent``)
    Incumbent        the best plans so far, the time budget and Ctrl-C (``search.incumbent``, ``problem``)
"""

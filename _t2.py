import sys
from dataclasses import replace
from pathlib import Path
import tempfile
from tests.distributed.training.test_dry_run import config
from hetero_megatron.dry_run.one_rank import run_rank
from hetero_megatron.plans.memory.of_plan import estimate_memory
from tests.support.small_plans import pipe, plan, stage
ctx={"context":[{"ranks": [0, 1], "tokens": [640, 256], "heads": [5, 3]},{"ranks": [3], "tokens": [128], "heads": [8]}]}
for sched in ("1f1b","zero-bubble"):
 for rec in ("none","selective","elementwise","full",{"first":1}):
  base=None
  for off in (None, {"offload":"all"}, {"offload":{"first":2}}, {"offload":"all","ahead":2}):
    a={} if off is None else {"activations":off}
    s0={**stage([0,1,3],[0,3],recompute=rec,**ctx,**a)} if "ctx" in sys.argv else stage([0,1],[0,3],tp=2,recompute=rec,**a)
    last=stage([2],[3,6],recompute=rec,**a)
    p=plan([pipe(4,6,s0,last)],seq_length=1024,schedule=sched)
    with tempfile.TemporaryDirectory() as d:
        run=config("fp32",Path(d),p)
    run = replace(run, spec=replace(run.spec, hidden_size=256, ffn_hidden_size=768))
    est=estimate_memory(run.plan,run.spec,run.dtype)
    row=[]
    for r in (0,2):
        dry=run_rank(run,r)
        row.append((dry.peak,est[r].total,dry.activations,est[r].host))
    if base is None: base=row
    for (p,e,h,eh),(p0,e0,_,_) in zip(row,base):
        print(sched,rec,off,"peak",p,"est",e,"ratio %.3f"%(e/p),"saved",p0-p,"est saved",e0-e, "host",h,eh, h==eh, p0-p==e0-e)

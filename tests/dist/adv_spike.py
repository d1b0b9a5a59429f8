import time
from tests import harness, reference
from tests.training import Case, train_all
t=time.time()
cases=[Case(m,o,dict(stage=s,allgather_overlap=True,reduce_overlap=True,comm_buffer_size_MB=0.002)) for m in ("mlp","gpt","conv","gpt_recompute","gpt_recompute_reentrant") for o in ("Momentum","AdamW") for s in (1,2)]
def main():
    runs=harness.run(train_all,2,cases)
    print(time.time()-t)
    for i,c in enumerate(cases):
        ref=reference.train(c.model,c.optimizer,2,c.steps)
        try:
            for r in range(2):
                assert runs[r][i].losses==[l[r] for l in ref.losses], (runs[r][i].losses, [l[r] for l in ref.losses])
                reference.assert_equal(runs[r][i].params, ref.params, str(c))
                reference.assert_equal(runs[r][i].statistics, ref.statistics[r], str(c))
            print("ok",c, len(runs[0][i].calls), runs[0][i].orders)
        except AssertionError as e:
            print("FAIL",c,str(e)[:600])
    print(time.time()-t)

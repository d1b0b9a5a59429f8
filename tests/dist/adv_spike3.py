import numpy as np
from tests import harness, reference
from tests.models import *
from tests.lanes import wrap
def f(rank,n):
    m=make_model("mlp"); o=make_optimizer("SGD",m)
    m,opt,_=wrap(m,o,n,delay_s=0,stage=2)
    loss_of(m,make_batch("mlp",0,rank)).backward()
    g={k:opt.full_grad(p).numpy() for k,p in m.named_parameters()}
    opt.step()
    return g, {k:p.numpy().copy() for k,p in m.named_parameters()}, [(b.layout.slots, b.layout.shard_numel,[(s.param,s.start_numel,s.numel) for s in b.slices]) for b in opt.buffers]
def main():
    runs=harness.run(f,2)
    m=make_model("mlp"); o=make_optimizer("SGD",m)
    R=reference.Ranks(m,2); R.backward(lambda r: loss_of(m,make_batch("mlp",0,r)))
    for r in range(2): print(runs[r][2])
    for k,p in m.named_parameters(): print(k,p.shape,(p.grad.numpy()!=runs[0][0][k]).sum())
    w0={k:p.numpy().copy() for k,p in m.named_parameters()}
    o.step()
    for k,p in m.named_parameters():
        d=np.nonzero((p.numpy()!=runs[0][1][k]).ravel())[0]
        if len(d):
            i=d[0]; print(k,d,repr(w0[k].ravel()[i]),repr(runs[0][0][k].ravel()[i]),repr(p.numpy().ravel()[i]),repr(runs[0][1][k].ravel()[i]))
            w=w0[k].ravel()[i]; g=runs[0][0][k].ravel()[i]
            np.savez("/tmp/adv/w.npz",w=w0[k],g=runs[0][0][k],a=p.numpy(),b=runs[0][1][k])

import numpy as np, paddle
import paddle.nn.functional as F
from tests import harness
from tests.lanes import wrap
from tests.dist.test_params import _Lists,_noise
from tests.sides import BOTH
OPS={"matmul":lambda x,w: paddle.matmul(x,w),"linear":lambda x,w: F.linear(x,w),"add":lambda x,w: paddle.add(x[:1],w),
"sum":lambda x,w: paddle.sum(w),"norm":lambda x,w: paddle.linalg.norm(w),"copy_":lambda x,w: paddle.zeros([8,8]).copy_(w,True),"set_value":lambda x,w: (lambda e: (e.set_value(w),e)[1])(paddle.zeros([8,8])),
"assign":lambda x,w: paddle.assign(w),"stack":lambda x,w: paddle.stack([w,w]),"concat":lambda x,w: paddle.concat([w,w]),"to_tensor":lambda x,w: paddle.to_tensor(w),"clone":lambda x,w: w.clone(),
"iadd": lambda x,w: x.add_(w), "lerp": lambda x,w: paddle.lerp(paddle.zeros([8,8]),w,paddle.to_tensor(0.5)), "einsum":lambda x,w: paddle.einsum("ab,bc->ac",x,w), "mul": lambda x,w: 2.0*w, "eplus": lambda x,w: paddle.zeros([8,8])+w, "C": lambda x,w: paddle._C_ops.scale(w,1.0,0.0,True),
"np": lambda x,w: paddle.to_tensor(np.array(w)), "detach": lambda x,w: w.detach(), "embedding": lambda x,w: F.embedding(paddle.to_tensor([0]),w), "where": lambda x,w: paddle.where(paddle.ones([8,8],"bool"),w,w), "multiply_": lambda x,w: paddle.ones([8,8]).multiply_(w), "adamw": lambda x,w: paddle._C_ops.add_n([w,w]), "list": lambda x,w: paddle.to_tensor(w.tolist()),"conv": lambda x,w: F.conv2d(paddle.ones([1,8,8,8]),w.unsqueeze(-1).unsqueeze(-1)), "ln": lambda x,w: F.layer_norm(x,[8],w[0],w[1])}
def f(rank,n):
    m=_Lists(); o=paddle.optimizer.SGD(0.1,parameters=m.parameters())
    m,opt,_=wrap(m,o,n,stage=2,**BOTH, delay_s=0.01)
    res={}
    w=list(m.weights._parameters.values())[0]
    for name,op in OPS.items():
        m(_noise(0,rank,[3,8])).square().mean().backward(); opt.step(); opt.clear_grad()
        x=_noise(0,rank,[8,8])
        with paddle.no_grad():
            try: y=op(x,w)
            except Exception as e: y=e
        st=opt.param2bucket["weights.0"][0].status.name
        with paddle.no_grad():
         z=None
         opt._schedule.finish_gathers()
         z=op(_noise(0,rank,[8,8]),w)
        res[name]=(st, "raised "+str(y)[:60] if isinstance(y,Exception) else bool(np.array_equal(y.numpy(),z.numpy())))
    return res
def main():
    for k,v in harness.run(f,2)[0].items(): print(k,v)

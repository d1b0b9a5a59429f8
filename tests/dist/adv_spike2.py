import sys
from tests import harness, reference
from tests.training import Case, train_all
import numpy as np
cases=[Case("mlp","SGD",dict(stage=2),steps=1,delay_s=0),Case("conv","AdamW",dict(stage=2),steps=2,delay_s=0)]
def main():
    runs=harness.run(train_all,2,cases)
    for i,c in enumerate(cases):
        ref=reference.train(c.model,c.optimizer,2,c.steps)
        for r in range(2):
            for n,v in ref.params.items():
                d=np.nonzero((v!=runs[r][i].params[n]).ravel())[0]
                if len(d): print(c.model,r,n,v.shape,len(d),d[:10], np.abs(v-runs[r][i].params[n]).max())
            for n,v in ref.buffers[r].items(): print(n,v,runs[r][i].buffers[n])

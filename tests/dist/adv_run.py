import os; os.environ.update(MKL_DEBUG_CPU_TYPE="5",OMP_NUM_THREADS="1",MKL_NUM_THREADS="1",OPENBLAS_NUM_THREADS="1")
import sys, importlib
m=importlib.import_module("tests.dist."+sys.argv[1]); 
from tests import harness
try: m.main()
finally: harness.close_all()

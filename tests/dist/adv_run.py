import sys, importlib
m=importlib.import_module("tests.dist."+sys.argv[1]); 
from tests import harness
try: m.main()
finally: harness.close_all()

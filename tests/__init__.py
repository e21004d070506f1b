"""The tests."""

import os

# Several test processes share the cores. Threads of a linear algebra library would only wait for
# each other, and NumPy reads their number when it is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

"""Models as JAX functions, traced without allocation.

This package needs the extra ``estimator``.
"""

from importlib.util import find_spec

from tessera.formulation.base.errors import Unavailable
from tessera.formulation.base.release import install_hint

if missing := [name for name in ("jax", "equinox") if find_spec(name) is None]:
    raise Unavailable(
        f"{' and '.join(missing)} cannot be imported; install them with {install_hint('estimator')}"
    )

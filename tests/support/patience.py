"""How long tests wait for what must happen: so long that only what never happens fails."""

from typing import Final

PATIENCE_S: Final = 300.0
"""Of each wait, whatever else the machine is doing. Nothing is asserted of how long it took."""

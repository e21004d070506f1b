"""Look-ahead admission: whose deadlines can be promised, by which schedule (Eqs. 22 to 29)."""

from tessera.solvers.lookahead.admission import ADMISSION, admit

__all__ = ["ADMISSION", "admit"]

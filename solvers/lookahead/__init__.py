"""Look-ahead admission: deadlines that can be promised, with schedules (Eqs. 22 to 29)."""

from tessera.solvers.lookahead.admission import ADMISSION, admit

__all__ = ["ADMISSION", "admit"]

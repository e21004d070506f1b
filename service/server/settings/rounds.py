"""The rounds that the server runs, and what looks ahead between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from tessera.formulation.base.errors import InvalidInput
from tessera.service.server.convert.rounds import read_options
from tessera.service.server.settings.values import PositiveSeconds, Seconds, SpacingSeconds
from tessera.solvers.registry import solver_names
from tessera.solvers.rounds.options import RoundOptions
from tessera.solvers.schedulers.registry import scheduler_of


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """The rhythm and the policy of rounds, the deadlines of calls, and forecasts."""

    period_s: Seconds = 300.0
    """Seconds between periodic rounds of a cluster. Rounds also run after events. With 0, rounds run
    only on request.
    """
    round_spacing_s: SpacingSeconds = 3.0
    """Least seconds between the beginnings of two rounds of a cluster, if events cause the second.
    All events in between share one round. Rounds on request and periodic rounds do not wait.
    """
    policy: str = ""
    """The standing policy of rounds: YAML or JSON with the names of the API's RoundOptions.

    An example is ``{objective: deadline then jct, max_changes: 20}``. Periodic
    rounds follow it, and it fills in what a Schedule call leaves open, in clusters whose policy nobody
    set with ``tessera policy``. If it is empty, the defaults of RoundOptions apply.
    """
    plugins: str = ""
    """Schedulers and objectives of your own that rounds may name, as a comma-separated list of
    MODULE:NAME. The server imports these modules when it starts, and runs their code as its own. A
    request that names any other module is refused. If it is empty, rounds may name no plug-in.
    """
    default_deadline_s: PositiveSeconds = 60.0
    """Deadline of a round for a call that has no deadline."""
    max_deadline_s: PositiveSeconds = 600.0
    """Longest deadline of a round. A call with a longer one gets the best answer found by then."""
    grace_s: Seconds = 10.0
    """Time for which a stopping server waits for calls to finish."""
    forecast_period_s: Seconds = 120.0
    """Time between forecasts of when jobs start and finish. If it is 0, or if there are no periodic
    rounds, no forecasts are made.
    """
    forecast_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of that time for which one forecast may use a core, at the lowest priority."""

    def round_options(self) -> RoundOptions:
        """Return the standing policy.

        Its rounds last for the period unless the policy says otherwise.

        Raises:
            InvalidInput: it is not a policy, or it names an unknown solver or scheduler, or
                parameters that the scheduler does not accept.
        """
        options = read_options("policy", self.policy, self.usual_options())
        if options.solver not in solver_names():
            choices = ", ".join(solver_names())
            raise InvalidInput(
                "policy.solver", f"unknown {options.solver!r}; choose one of {choices}"
            )
        try:
            scheduler_of(options.scheduler, options.scheduler_parameters)
        except InvalidInput as wrong:
            raise InvalidInput(f"policy.{wrong.field}", wrong.problem) from wrong
        return options

    def round_limit_s(self) -> float:
        """Return the time that a periodic round may take."""
        return min(self.period_s or math.inf, self.default_deadline_s)

    def usual_options(self) -> RoundOptions:
        """Return the options that a policy does not set. Rounds last for the period."""
        return RoundOptions(round_s=self.period_s) if self.period_s else RoundOptions()

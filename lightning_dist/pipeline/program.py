"""What a rank does in a step: its line of the schedule, lowered and proven once for each number of micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_dist.core.errors import ConfigurationError
from lightning_dist.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    build_schedule,
    load_schedule,
    lower,
    schedule_row,
    validate,
)
from lightning_dist.pipeline.schedule.schedules import default_virtual_stages


@dataclass
class Programs:
    """The programs of one schedule on `num_ranks` ranks; `source` is a name of the table, a file, or a schedule."""

    source: str | Path | Schedule
    num_ranks: int
    virtual_stages: int | None = None
    owners: tuple[int, ...] = field(init=False)  # stage -> rank
    fixed: int | None = field(init=False, default=None)  # the one number of micro-batches that a given schedule is for
    _given: Schedule | None = field(init=False, default=None)
    _made: dict[tuple[int, bool], list[list[Action]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.source, str) and self.source in SCHEDULES:
            stages = default_virtual_stages(self.source) if self.virtual_stages is None else self.virtual_stages
            build_schedule(self.source, self.num_ranks, 1, stages)  # refuses what the schedule cannot do
            placed = [
                schedule_row(self.source).placement.stages(rank, self.num_ranks, stages)
                for rank in range(self.num_ranks)
            ]
            where = {stage: rank for rank, mine in enumerate(placed) for stage in mine}
            self.owners = tuple(where[stage] for stage in range(len(where)))
            return
        if isinstance(self.source, (str, Path)):
            if not Path(self.source).is_file():
                raise ConfigurationError(
                    f'schedule="{self.source}" is neither a name ({", ".join(SCHEDULES)}) nor a file that exists'
                )
            self._given = load_schedule(self.source)
        else:
            self._given = self.source
        if len(self._given) != self.num_ranks:
            raise ConfigurationError(
                f"the schedule given is for {len(self._given)} ranks, the pipeline has {self.num_ranks}"
            )
        proof = validate(self._given)
        self.owners = tuple(proof.owners[stage] for stage in range(proof.num_stages))
        self.fixed = proof.num_micro_batches
        per_rank = proof.num_stages // self.num_ranks
        if self.virtual_stages not in (None, per_rank):
            raise ConfigurationError(
                f"virtual_stages={self.virtual_stages}, but the schedule given has {proof.num_stages} stages on "
                f"{self.num_ranks} ranks"
            )

    @property
    def name(self) -> str:
        """What to call the schedule."""
        return str(self.source) if isinstance(self.source, (str, Path)) else "a schedule of its own"

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.owners)

    def of(self, num_micro_batches: int, *, training: bool) -> list[list[Action]]:
        """Every rank's actions; without `training` only the forwards, in the same order.

        Raises:
            ConfigurationError: a schedule that was given is for another number of micro-batches.
        """
        key = num_micro_batches, training
        if key not in self._made:
            compute = self._compute_actions(num_micro_batches, training=training)
            if not training:
                compute = [[action for action in row if action.kind is Kind.FORWARD] for row in compute]
            program = lower(compute)
            if training:
                validate(program, num_micro_batches=num_micro_batches)
            self._made[key] = program
        return self._made[key]

    def _compute_actions(self, num_micro_batches: int, *, training: bool) -> Sequence[Sequence[Action]]:
        if self._given is None:
            assert isinstance(self.source, str)
            stages = self.num_stages // self.num_ranks
            return build_schedule(self.source, self.num_ranks, num_micro_batches, stages)
        if num_micro_batches == self.fixed:
            compute_kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
            return [[action for action in row if action.kind in compute_kinds] for row in self._given]
        if training:
            raise ConfigurationError(
                f"the schedule given is for {self.fixed} micro-batches, but the batch makes {num_micro_batches}: every "
                "batch needs that many samples at least (drop_last=True in the dataloader)"
            )
        stages_of = [[s for s, owner in enumerate(self.owners) if owner == rank] for rank in range(self.num_ranks)]
        return [[Action(Kind.FORWARD, s, k) for s in mine for k in range(num_micro_batches)] for mine in stages_of]

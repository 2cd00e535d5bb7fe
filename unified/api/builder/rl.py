"""Reinforcement learning: a job with the usual roles."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import model_validator

from unified.api.builder.builder import DLJobBuilder
from unified.api.builder.dljob import DLJob
from unified.api.builder.roles import ElasticRoleBuilder, EntryPoint, SimpleRoleBuilder
from unified.errors import nearest
from unified.job.enums import DLStreamType, DLType, RLRoleType

_ROLES = [role.value for role in RLRoleType]


class RLJob(DLJob):
    """A job of the roles TRAINER, ACTOR, ROLLOUT, REFERENCE, REWARD and CRITIC. ACTOR is required."""

    thing: ClassVar[str] = "RL job"

    dl_type: DLType = DLType.RL

    @model_validator(mode="after")
    def _roles_are_those_of_rl(self) -> Self:
        if self.stream_type is not DLStreamType.TASK_STREAM:
            raise ValueError("stream_type: an RL job is a task stream; leave as_data_stream() out.")
        for role in self.workloads:
            if role not in _ROLES:
                raise ValueError(
                    f"role {role!r} is unknown to an RL job.{nearest(role, _ROLES)} Roles: {', '.join(_ROLES)}."
                )
        if RLRoleType.ACTOR not in self.workloads:
            raise ValueError("role 'ACTOR' is missing: 'actor' must be configured, with actor(entrypoint).")
        return self


class RLJobBuilder(DLJobBuilder):
    """Builder of an `RLJob`: one method per role, with suitable defaults.

    The job waits only for the trainer, which calls the other roles. `with_collocation_all` leaves the trainer out.
    """

    TRAINER_ROLE = RLRoleType.TRAINER.value
    ACTOR_ROLE = RLRoleType.ACTOR.value
    ROLLOUT_ROLE = RLRoleType.ROLLOUT.value
    REF_ROLE = RLRoleType.REFERENCE.value
    REW_ROLE = RLRoleType.REWARD.value
    CRITIC_ROLE = RLRoleType.CRITIC.value
    ROLES = _ROLES

    def trainer(
        self, module: EntryPoint | None = None, cls: str | None = None, *, entrypoint: EntryPoint | None = None
    ) -> SimpleRoleBuilder[Self]:
        """Add the program that drives the other roles: one worker with 4 cores and 8192 MB. The job waits for it.

        Args:
            module: an entry point, as for `run`, or only its module (also ``entrypoint``).
            cls: the attribute, if `module` is only a module.
        """
        return super().trainer(module, cls, entrypoint=entrypoint).resource(cpu=4, mem=8192)

    def actor(self, entrypoint: EntryPoint, cls: str | None = None) -> ElasticRoleBuilder[Self]:
        """Add the policy that is trained: elastic, required. All roles take the arguments of `run`."""
        return self.role(self.ACTOR_ROLE).train(entrypoint, cls).not_driver()

    def critic(self, entrypoint: EntryPoint, cls: str | None = None) -> ElasticRoleBuilder[Self]:
        """Add the value model that is trained: elastic."""
        return self.role(self.CRITIC_ROLE).train(entrypoint, cls).not_driver()

    def rollout(self, entrypoint: EntryPoint, cls: str | None = None) -> SimpleRoleBuilder[Self]:
        """Add workers that generate."""
        return self.role(self.ROLLOUT_ROLE).run(entrypoint, cls).not_driver()

    def reference(self, entrypoint: EntryPoint, cls: str | None = None) -> SimpleRoleBuilder[Self]:
        """Add workers that hold the reference model."""
        return self.role(self.REF_ROLE).run(entrypoint, cls).not_driver()

    def reward(self, entrypoint: EntryPoint, cls: str | None = None) -> SimpleRoleBuilder[Self]:
        """Add workers that score."""
        return self.role(self.REW_ROLE).run(entrypoint, cls).not_driver()

    def _all_but(self, exclude: tuple[str, ...]) -> set[str]:
        return super()._all_but(exclude) - {self.TRAINER_ROLE}

    def build(self) -> RLJob:
        """Check everything and return the job. The roles must be those of an RL job, with an actor."""
        self._warn_of_misplaced_config()
        return RLJob.model_validate(self.description())

"""Brings the ranks of one model to where they compute together: agrees on the KV blocks, loads beside them.

Rank 0's side; `worker` is the others'. Knows no scheduler and no queue.
"""

from __future__ import annotations

import structlog

from noria.engine.execution.control import LineClosed, Start
from noria.engine.execution.data_channel import ChannelBroken, DataChannel
from noria.engine.execution.executor import RankLost
from noria.engine.execution.ranks import RankExecutor
from noria.engine.execution.rendezvous import Meeting
from noria.engine.loading import Progress, load_model, new_stage
from noria.engine.models.load import LoadedModel
from noria.engine.plan import Plan

log = structlog.get_logger("noria.engine")


def start_ranks(
    plan: Plan, meeting: Meeting, progress: Progress | None = None
) -> tuple[RankExecutor, LoadedModel, Plan]:
    """The plan that comes back has as many KV blocks as every rank has room for. Raises RankLost, and ValueError or
    ModelError for what another try would not mend."""
    log.info("the ranks are here", ranks={hello.rank: hello.place for hello in meeting.hellos})
    plan = plan.with_blocks(min(hello.num_blocks for hello in meeting.hellos))
    executor = RankExecutor(plan.parallel, meeting.lines, meeting.processes, plan.config.lease_seconds)
    try:
        for line in meeting.lines.values():
            line.send(Start(plan.num_blocks))
        channel = DataChannel(plan.parallel, meeting.store, plan.ops.device, meeting.host, plan.config.stuck_after)
        loaded = load_model(plan, progress, channel)
        executor.await_ready(new_stage(plan, loaded.model, channel, lambda message: executor.take(0, message)))
    except (LineClosed, ChannelBroken) as error:
        executor.close()
        executor.check()  # knows better why
        raise RankLost(str(error)) from error
    except BaseException:
        executor.close()
        raise
    return executor, loaded, plan
